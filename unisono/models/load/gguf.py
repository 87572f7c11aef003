"""Tensors of a GGUF file under transformers' names, dequantised while they are read, or as blocks.

Values are those of ggml's definition in fp32; the loader rounds them once, to the model's dtype. A row of blocks is
decoded by itself, so a rank's rows cost only their bytes. Blocks that stay packed are read by the formats of
``layers/formats/gguf.py``.

Shapes of the decoders: uint8 [blocks, bytes of a block] -> fp32 [blocks, elements of a block].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from unisono.config.gguf.header import GGUFHeader, GGUFTensor, read_gguf
from unisono.config.gguf.model import ROPE_FACTORS, architecture, checkpoint_name
from unisono.config.gguf.packed import packed_types, type_of
from unisono.layers.formats.gguf import INTEGERS, bits, half, nibbles
from unisono.models.load.tensor_files import TensorInfo
from unisono.types import CheckpointError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    return nibbles(raw[:, 4:]).float() * half(raw, 0) + half(raw, 2)


def _q5_1(raw: torch.Tensor) -> torch.Tensor:
    return (nibbles(raw[:, 8:]) | bits(raw[:, 4:8]) << 4).float() * half(raw, 0) + half(raw, 2)


def _crumbs(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 64] -> [blocks, 256] of two bits: a half of 32 bytes has four runs of 32 elements."""
    return torch.cat([(half >> shift) & 3 for half in raw.split(32, 1) for shift in (0, 2, 4, 6)], 1)


def _q2_k(raw: torch.Tensor) -> torch.Tensor:
    scales, numbers = raw[:, :16], _crumbs(raw[:, 16:80]).float().view(-1, 16, 16)
    scale, least = half(raw, 80) * (scales & 15).float(), half(raw, 82) * (scales >> 4).float()
    return (scale[..., None] * numbers - least[..., None]).flatten(1)


def _q3_k(raw: torch.Tensor) -> torch.Tensor:
    packed, numbers = raw[:, 96:108], _crumbs(raw[:, 32:96])
    high = torch.cat([(raw[:, :32] >> bit) & 1 for bit in range(8)], 1)
    low = nibbles(packed[:, :8])
    top = torch.cat([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], 1)
    scale = half(raw, 108) * ((low | top << 4).float() - 32)
    return (scale[..., None] * (numbers.float() - 4 + 4 * high.float()).view(-1, 16, 16)).flatten(1)


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Six-bit scales and minima of eight runs of 32 elements, from 12 bytes [blocks, 12]: each fp32 [blocks, 8]."""
    first, second, rest = raw.split(4, 1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6) << 4), 1)
    least = torch.cat((second & 63, rest >> 4 | (second >> 6) << 4), 1)
    return scales.float(), least.float()


def _k_runs(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 128] -> [blocks, 8, 32]: 32 bytes hold two runs, low halves first."""
    return torch.stack([part for bytes_ in raw.split(32, 1) for part in (bytes_ & 15, bytes_ >> 4)], 1)


def _k_values(raw: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
    """Runs [blocks, 8, 32] with the scales at the beginning of their blocks."""
    scales, least = _k_scales(raw[:, 4:16])
    scales, least = half(raw, 0) * scales, half(raw, 2) * least
    return (scales[..., None] * runs.float() - least[..., None]).flatten(1)


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    return _k_values(raw, _k_runs(raw[:, 16:]))


def _q5_k(raw: torch.Tensor) -> torch.Tensor:
    high = torch.stack([(raw[:, 16:48] >> bit) & 1 for bit in range(8)], 1)
    return _k_values(raw, _k_runs(raw[:, 48:]) | high << 4)


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    low = torch.cat([nibbles(half) for half in raw[:, :128].split(64, 1)], 1)
    numbers = (low | _crumbs(raw[:, 128:192]) << 4).float() - 32
    scales = half(raw, 208) * raw[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[..., None] * numbers.view(-1, 16, 16)).flatten(1)


DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{kind: blocks.values for kind, blocks in INTEGERS.items()},
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""By type name."""


@dataclass(frozen=True)
class Decoded:
    """A tensor, or one expert's part of it, that is decoded when it is called.

    heads: number of heads whose rows alternate between their halves; 0: rows are in order. packed: it stays blocks.
    """

    file: Path
    tensor: GGUFTensor
    heads: int = 0
    packed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the file's tensor, or of its blocks: [rows, bytes of a row]."""
        *rows, last = self.tensor.shape
        kind = self.tensor.type
        return (*rows, last // kind.size * kind.nbytes) if self.packed else self.tensor.shape

    def __call__(self) -> torch.Tensor:
        """The tensor in its shape, fp32, fp16 or bf16, or uint8 blocks. Raises CheckpointError if it cannot be read."""
        kind, shape = self.tensor.type, self.shape
        try:
            raw = torch.from_numpy(np.memmap(self.file, np.uint8, "c", self.tensor.start, (self.tensor.nbytes,)))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file}: tensor {self.tensor.name} cannot be read: {error}.") from None
        if self.packed:
            values = raw
        elif kind.name in PLAIN:
            values = _aligned(raw).view(PLAIN[kind.name])
        else:
            values = DECODERS[kind.name](raw.view(-1, kind.nbytes))
        values = values.view(shape)
        if not self.heads:
            return values
        halves = values.unflatten(0, (self.heads, -1, 2))  # rows i and i + half of a head lie side by side
        return halves.transpose(1, 2).reshape(shape)


def _aligned(raw: torch.Tensor) -> torch.Tensor:
    """The bytes where a number may begin: an alignment of one byte is allowed in a file."""
    return raw if raw.data_ptr() % 4 == 0 else raw.clone()


def read_tensors(file: Path, packed: bool = False) -> dict[str, TensorInfo]:
    """Every weight of a GGUF file, by transformers' name. Raises CheckpointError.

    packed: matrices of :func:`packed_types` are blocks, uint8 [rows, bytes of a row].
    """
    header = read_gguf(file)
    rotated, kept = architecture(header).rotated_pairs, packed_types(header) if packed else {}
    found: dict[str, TensorInfo] = {}
    for tensor in header.tensors.values():
        if tensor.name == ROPE_FACTORS:  # read with the metadata
            continue
        heads = _heads(header, tensor.name) if rotated else 0
        name, parts = checkpoint_name(tensor.name), [tensor]
        if "*" in name:
            parts = _experts(tensor)
        stays = type_of(kept, name.removesuffix(".weight")) is not None
        for number, part in enumerate(parts):
            own, decoded = name.replace("*", str(number)), Decoded(file, part, heads, stays)
            dtype = "U8" if stays else tensor.type.name if tensor.type.name in PLAIN else "F32"
            found[own] = TensorInfo(
                file, own, dtype, decoded.shape, part.start, decoded=decoded, readable=stays and not heads
            )
    return found


def _heads(header: GGUFHeader, name: str) -> int:
    """Number of heads in a query or key projection; 0 for other tensors."""
    part, metadata = name.split(".")[2:3], header.metadata
    if part not in (["attn_q"], ["attn_k"]):
        return 0
    count = metadata[f"{header.architecture}.attention.head_count"]
    if part == ["attn_k"]:
        count = metadata.get(f"{header.architecture}.attention.head_count_kv", count)
    return int(count[0] if isinstance(count, list) else count)


def _experts(tensor: GGUFTensor) -> list[GGUFTensor]:
    """The matrix of each expert in a tensor of all."""
    count, *shape = tensor.shape
    size = tensor.nbytes // max(count, 1)
    return [replace(tensor, shape=tuple(shape), start=tensor.start + e * size) for e in range(count)]
