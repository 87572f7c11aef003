"""Tensors of a GGUF file under transformers' names, dequantised while they are read.

Values are those of ggml's definition in fp32; the loader rounds them once, to the model's dtype. A row of blocks is
decoded by itself, so a rank's rows cost only their bytes.

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
from unisono.models.load.tensor_files import TensorInfo
from unisono.types import CheckpointError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""


def _half(raw: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at a byte of each block, fp32 [blocks, 1]."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, 2 n]: all low halves, then all high ones."""
    return torch.cat((raw & 15, raw >> 4), 1)


def _bits(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, 8 n] of bits, a byte's lowest first."""
    return ((raw[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1).flatten(1)


def _q4_0(raw: torch.Tensor) -> torch.Tensor:
    return (_nibbles(raw[:, 2:]).float() - 8) * _half(raw, 0)


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    return _nibbles(raw[:, 4:]).float() * _half(raw, 0) + _half(raw, 2)


def _q5_0(raw: torch.Tensor) -> torch.Tensor:
    return ((_nibbles(raw[:, 6:]) | _bits(raw[:, 2:6]) << 4).float() - 16) * _half(raw, 0)


def _q5_1(raw: torch.Tensor) -> torch.Tensor:
    return (_nibbles(raw[:, 8:]) | _bits(raw[:, 4:8]) << 4).float() * _half(raw, 0) + _half(raw, 2)


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return raw[:, 2:].contiguous().view(torch.int8).float() * _half(raw, 0)


def _crumbs(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 64] -> [blocks, 256] of two bits: a half of 32 bytes has four runs of 32 elements."""
    return torch.cat([(half >> shift) & 3 for half in raw.split(32, 1) for shift in (0, 2, 4, 6)], 1)


def _q2_k(raw: torch.Tensor) -> torch.Tensor:
    scales, numbers = raw[:, :16], _crumbs(raw[:, 16:80]).float().view(-1, 16, 16)
    scale, least = _half(raw, 80) * (scales & 15).float(), _half(raw, 82) * (scales >> 4).float()
    return (scale[..., None] * numbers - least[..., None]).flatten(1)


def _q3_k(raw: torch.Tensor) -> torch.Tensor:
    packed, numbers = raw[:, 96:108], _crumbs(raw[:, 32:96])
    high = torch.cat([(raw[:, :32] >> bit) & 1 for bit in range(8)], 1)
    low = _nibbles(packed[:, :8])
    top = torch.cat([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], 1)
    scale = _half(raw, 108) * ((low | top << 4).float() - 32)
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
    scales, least = _half(raw, 0) * scales, _half(raw, 2) * least
    return (scales[..., None] * runs.float() - least[..., None]).flatten(1)


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    return _k_values(raw, _k_runs(raw[:, 16:]))


def _q5_k(raw: torch.Tensor) -> torch.Tensor:
    high = torch.stack([(raw[:, 16:48] >> bit) & 1 for bit in range(8)], 1)
    return _k_values(raw, _k_runs(raw[:, 48:]) | high << 4)


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    low = torch.cat([_nibbles(half) for half in raw[:, :128].split(64, 1)], 1)
    numbers = (low | _crumbs(raw[:, 128:192]) << 4).float() - 32
    scales = _half(raw, 208) * raw[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[..., None] * numbers.view(-1, 16, 16)).flatten(1)


DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
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

    heads: number of heads whose rows alternate between their halves; 0: rows are in order.
    """

    file: Path
    tensor: GGUFTensor
    heads: int = 0

    def __call__(self) -> torch.Tensor:
        """The tensor in the shape of the file, fp32, fp16 or bf16. Raises CheckpointError if it cannot be read."""
        kind, shape = self.tensor.type, self.tensor.shape
        try:
            raw = torch.from_numpy(np.memmap(self.file, np.uint8, "c", self.tensor.start, (self.tensor.nbytes,)))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file}: tensor {self.tensor.name} cannot be read: {error}.") from None
        if kind.name in PLAIN:
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


def read_tensors(file: Path) -> dict[str, TensorInfo]:
    """Every weight of a GGUF file, by transformers' name. Raises CheckpointError."""
    header = read_gguf(file)
    rotated = architecture(header).rotated_pairs
    found: dict[str, TensorInfo] = {}
    for tensor in header.tensors.values():
        if tensor.name == ROPE_FACTORS:  # read with the metadata
            continue
        heads = _heads(header, tensor.name) if rotated else 0
        name, parts = checkpoint_name(tensor.name), [tensor]
        if "*" in name:
            parts = _experts(tensor)
        for number, part in enumerate(parts):
            own = name.replace("*", str(number))
            dtype = tensor.type.name if tensor.type.name in PLAIN else "F32"
            found[own] = TensorInfo(file, own, dtype, part.shape, part.start, decoded=Decoded(file, part, heads))
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
