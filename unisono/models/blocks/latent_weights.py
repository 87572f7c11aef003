"""The product that expands latents, split per head as the absorbed form of latent attention multiplies with it.

A checkpoint stores one weight [Hq · (D + V), L], each head's key rows before its value rows: plain, in fp8, or as
integers of 4 or 8 bits. Quantised weights are converted to the model's dtype while they are loaded: the value is
computed in fp32 and rounded once, as the products of those formats do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import nn

from unisono.kernels.gemm.int4 import unpack_cpu
from unisono.kernels.gemm.int8_weights import int8_decode
from unisono.layers.formats.base import PLAIN, PartOf, StoredTensor, WeightTarget
from unisono.layers.formats.fp8 import ONLINE_FP8, BlockFp8, RowFp8
from unisono.layers.formats.int4 import Int4
from unisono.layers.formats.int8 import GPTQ8, PackedInt8
from unisono.models.load.build import Builder
from unisono.types import CheckpointError


class UpProjections(nn.Module):
    """keys [Hq, L, D] and values [Hq, V, L] of this rank's heads, in the activations' dtype.

    A fixed scale of fp8 activations is read and not used: the absorbed form has no such activations.
    sizes: (heads of all ranks, D, V, L). Raises CheckpointError for a weight format that is not converted.
    """

    def __init__(self, sizes: tuple[int, int, int, int], builder: Builder) -> None:
        super().__init__()
        self.sizes, (heads, keys, values, latent) = sizes, sizes
        first, end = builder.ranks.part(heads)
        self.first = first
        self.keys, self.values = (
            nn.Parameter(torch.empty(end - first, *of_head, dtype=builder.dtype, device=builder.device), False)
            for of_head in ((latent, keys), (values, latent))
        )
        if builder.ranks.count > 1:
            for parameter in (self.keys, self.values):
                shape = (heads, *parameter.shape[1:])
                parameter.part_of = PartOf(shape, 0, ((first, end),))  # type: ignore[attr-defined]
        format, self.tensors = builder.format_here, PLAIN.tensors(builder.dtype)
        self.integers = format if isinstance(format, (Int4, GPTQ8, PackedInt8)) else None
        self.unused = format.fixed_kind if isinstance(format, RowFp8) else None
        if self.integers or isinstance(format, (BlockFp8, RowFp8)):
            self.tensors = format.tensors(builder.dtype)
        elif format not in (PLAIN, ONLINE_FP8):
            raise CheckpointError(
                f"{builder.path} is stored in format {format.name!r}: plain weights, integers without int8 activations "
                "or activation order, and fp8 are supported there."
            )
        self._read, self._lock = dict[str, torch.Tensor](), threading.Lock()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """This rank's rows of the checkpoint's weight."""
        _, keys, values, _ = self.sizes
        return ((self.first * (keys + values), (self.first + len(self.keys)) * (keys + values)),)

    def places(self) -> Iterator[tuple[str, WeightTarget]]:
        """Yield (name, target) of the weight and of its scales, and forget tensors of an unfinished read."""
        self._read = {}
        heads, keys, values, latent = self.sizes
        rows = heads * (keys + values)
        for kind, stored in self.tensors.items():
            shape, *also = stored.stored_shapes(rows, latent)
            part = None
            if len(self.keys) < heads and (self.integers or kind == "weight"):
                part = stored.part(self.runs)
            yield kind, _UpTarget(self.keys, shape, stored.accepts, part, kind=kind, also=tuple(also), of=self)

    def check_complete(self) -> None:
        """Raise CheckpointError if some of the tensors were read and others not: the parameters are the old ones."""
        if self._read:
            missing = sorted(self.tensors.keys() - self._read.keys())
            raise CheckpointError(
                f"a kv_b was written without its {', '.join(missing)}: push its weight and its scales together."
            )

    def take(self, kind: str, stored: torch.Tensor) -> None:
        """Keep one tensor as read; with the last one fill the parameters. May be called from several threads."""
        with self._lock:
            self._read[kind] = stored
            if len(self._read) < len(self.tensors):
                return
            found, self._read = self._read, {}
        weight = self._dequantised(found)
        _, keys, values, latent = self.sizes
        of_keys, of_values = weight.view(-1, keys + values, latent).split((keys, values), dim=1)
        self.keys.copy_(of_keys.mT)
        self.values.copy_(of_values)

    def _dequantised(self, read: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's rows of the weight from the tensors as read, in fp32 or the model's dtype."""
        if self.integers is None:
            weight = read.pop("weight")
            if self.unused:
                del read[self.unused]
            for kind, scales in read.items():
                weight = weight.float() * self._of_elements(scales.float().to(weight.device), self.tensors[kind])
            return weight
        parameters, dtypes = SimpleNamespace(), {kind: stored.dtype for kind, stored in self.tensors.items()}
        for kind, tensor in read.items():
            made = self.integers.read(kind, tensor)
            for name, value in {kind: made}.items() if isinstance(made, torch.Tensor) else made.items():
                setattr(parameters, name, value.to(dtypes[name]))
        decode = unpack_cpu if isinstance(self.integers, Int4) else int8_decode
        return decode(*self.integers.operands(parameters), self.keys.dtype)

    def _of_elements(self, scales: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
        """Scales of this rank's elements, from those of the whole weight: broadcast to [rows, L]."""
        heads, keys, values, latent = self.sizes
        (first, end), rows = self.runs[0], heads * (keys + values)
        if stored.inputs == 0:  # one for each output, or one for all
            return scales.reshape(-1, 1).expand(rows if scales.numel() == 1 else -1, 1)[first:end]
        by_row = scales.repeat_interleave(stored.outputs, 0)[first:end]
        return by_row.repeat_interleave(stored.inputs, 1)[:, :latent]


@dataclass(frozen=True)
class _UpTarget(WeightTarget):
    """Target of one tensor of :class:`UpProjections`."""

    of: UpProjections = field(kw_only=True)

    def fill(self, stored: torch.Tensor) -> None:
        self.of.take(self.kind, stored)
