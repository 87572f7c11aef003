"""GGUF's Q4_0, Q5_0 and Q8_0 as integers of 4 or 8 bits with a scale for 32 inputs (``--quantization gguf``).

A block of these types is an fp16 scale and 32 integers. ``(q - zero) * scale`` is exact in fp32, so a weight rounded to
the activations' dtype has the bits of one that was dequantised while loading. ``config/gguf/packed.py`` says which
matrices of a file stay packed.

Shapes: N outputs, K inputs of a projection. Blocks: uint8 [blocks, bytes of a block].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.config.gguf.header import TYPES
from unisono.config.gguf.packed import type_of
from unisono.layers.formats.base import PLAIN, StoredTensor, TensorLayout, WeightFormat
from unisono.layers.formats.int4 import PackedInt4, packed_pairs
from unisono.layers.formats.int8 import PackedInt8

GROUP = 32
NBYTES = {each.name: each.nbytes for each in TYPES.values() if each.size == GROUP}
"""Bytes of a block by type."""


def half(raw: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at a byte of each block, fp32 [blocks, 1]."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, 2 n]: all low halves, then all high ones."""
    return torch.cat((raw & 15, raw >> 4), 1)


def bits(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, 8 n] of bits, a byte's lowest first."""
    return ((raw[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1).flatten(1)


@dataclass(frozen=True)
class IntegerBlocks:
    """A type of blocks with a scale at their beginning. numbers: blocks -> uint8 [blocks, 32]; middle: that of zero."""

    numbers: Callable[[torch.Tensor], torch.Tensor]
    middle: int

    def values(self, raw: torch.Tensor) -> torch.Tensor:
        """Blocks -> their values, fp32 [blocks, 32]."""
        return (self.numbers(raw).float() - self.middle) * half(raw, 0)


INTEGERS = {
    "Q4_0": IntegerBlocks(lambda raw: nibbles(raw[:, 2:]), 8),
    "Q5_0": IntegerBlocks(lambda raw: (nibbles(raw[:, 6:]) | bits(raw[:, 2:6]) << 4) + 112, 128),
    "Q8_0": IntegerBlocks(lambda raw: raw[:, 2:] ^ 128, 128),
}
"""By type. The zeros of 8 and 128 are those of symmetric formats of 4 and 8 bits."""


def _tensors(kind: str, each: int) -> dict[str, StoredTensor]:
    """Weight and scales, both made of the blocks. each: numbers in a byte of the weight."""
    rows = TensorLayout(lambda outputs, inputs: ((outputs, inputs // GROUP * NBYTES[kind]),), dim=0)
    return {
        "weight": StoredTensor(torch.uint8, ("U8",), inputs=each, layout=rows),
        "weight_scale": StoredTensor(torch.float32, (), inputs=GROUP),
    }


def _unpacked(kind: str, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of blocks [N, bytes] -> (numbers uint8 [N, K], scales fp32 [N, K / 32])."""
    raw = stored.reshape(-1, NBYTES[kind])
    return INTEGERS[kind].numbers(raw).view(len(stored), -1), half(raw, 0).view(len(stored), -1)


@dataclass(frozen=True)
class GGUFInt4(PackedInt4):
    """Q4_0."""

    group: int = GROUP
    name: str = "GGUF, Q4_0"

    weight_kind = "weight"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        return _tensors("Q4_0", 2)

    def read(self, kind: str, stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
        numbers, scales = _unpacked("Q4_0", stored)
        return {"weight": packed_pairs(numbers), "weight_scale": scales}


@dataclass(frozen=True)
class GGUFInt8(PackedInt8):
    """Q8_0, and Q5_0 in 8 bits."""

    group: int = GROUP
    packed: bool = False
    name: str = "GGUF, Q8_0"
    type: str = "Q8_0"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        return _tensors(self.type, 1)

    def read(self, kind: str, stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
        numbers, scales = _unpacked(self.type, stored)
        return {"weight": numbers, "weight_scale": scales}


FORMATS: Mapping[str, WeightFormat] = {
    "Q4_0": GGUFInt4(), "Q5_0": GGUFInt8(name="GGUF, Q5_0", type="Q5_0"), "Q8_0": GGUFInt8(),
}  # fmt: skip
"""By type."""


def read(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module, from :func:`unisono.config.gguf.packed.packed_config`."""
    types: dict[str, str] = config["types"]

    def choose(module: str) -> WeightFormat:
        kind = type_of(types, module)
        return PLAIN if kind is None else FORMATS[kind]

    return choose
