"""Adapters of linear layers: low-rank products (LoRA) added to the outputs of the rows that have one.

A :class:`LinearAdapter` belongs to a ``Linear`` and has room for a fixed number of adapters, so addresses in graphs
stay valid. :class:`AdapterRows` sets the adapter of each row once per pass. A layer without adapters, and a pass in
which no row has one, are computed as if there were none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from unisono.kernels import silu_mul
from unisono.kernels.lora.adapters import (
    MAX_PROJECTIONS,
    SMALL_RANK,
    AdapterPlan,
    expand,
    expand_silu,
    padded_rank,
    shrink,
)
from unisono.kernels.lora.adapters_linear import adapted_linear, exact_adapted
from unisono.types import ConfigError


class AdapterRows:
    """Adapter of each row in the current pass; shared by all layers of a model."""

    def __init__(self) -> None:
        self._plans: Mapping[int, AdapterPlan] = {}

    def plan(self, rows: int) -> AdapterPlan | None:
        """Plan for a product with this number of rows; None in a pass without adapters."""
        return self._plans[rows] if self._plans else None

    @contextmanager
    def seeing(self, plans: Mapping[int, AdapterPlan]) -> Iterator[None]:
        """Within the block, layers add adapters. plans: by number of rows, since some products of a pass have fewer
        rows."""
        self._plans = plans
        try:
            yield
        finally:
            self._plans = {}


@dataclass(frozen=True)
class LowRank:
    """The part of an adapter product not yet added: h, see ``shrink``; b, projections: the layer's."""

    h: torch.Tensor
    b: torch.Tensor
    projections: tuple[int, ...]
    plan: AdapterPlan

    def added(self, y: torch.Tensor) -> torch.Tensor:
        """Add it to ``y [M, N]`` in place."""
        return expand(y, self.h, self.b, self.projections, self.plan)

    def silu(self, y: torch.Tensor) -> torch.Tensor:
        """``silu_mul(added(y))``: in one launch, except for large ranks."""
        if self.b.shape[2] > SMALL_RANK:
            return silu_mul(self.added(y))
        return expand_silu(y, self.h, self.b, self.plan)


class LinearAdapter:
    """The adapters of one linear layer.

    a [L, P · R, K], b [L, N, R]: weights of each adapter, in the layer's dtype; R is the padded rank, and missing parts
    are zero. projections: outputs of each of the P projections. With several ranks, K are all inputs and N the outputs
    of this rank, so that no sum is split.
    """

    def __init__(
        self, rows: AdapterRows, adapters: int, rank: int, inputs: int, projections: Sequence[int],
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        if len(projections) > MAX_PROJECTIONS:
            raise ConfigError(f"a layer of {len(projections)} projections cannot have adapters; {MAX_PROJECTIONS} can.")
        self.rank, self.projections, self._rows = padded_rank(rank), tuple(projections), rows
        sizes = (adapters, len(projections) * self.rank, inputs), (adapters, sum(projections), self.rank)
        self.a, self.b = (torch.zeros(size, dtype=dtype, device=device) for size in sizes)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.a.nbytes + self.b.nbytes

    def plan(self, rows: int) -> AdapterPlan | None:
        """See :meth:`AdapterRows.plan`."""
        return self._rows.plan(rows)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: AdapterPlan
    ) -> torch.Tensor | None:
        """Product with a plain weight and the adapters in one launch; None if the pass does not allow it."""
        return adapted_linear(x, weight, bias, self.a, self.b, self.projections, plan)

    def prove(self, weight: torch.Tensor) -> bool:
        """See :data:`unisono.kernels.lora.adapters_linear.exact_adapted`."""
        return exact_adapted.prove(weight, self.a, self.b, self.projections)

    def shrunk(self, x: torch.Tensor, plan: AdapterPlan) -> LowRank:
        """First half of the adapters. x [M, K]: the layer's input, unquantised, contiguous."""
        return LowRank(shrink(x, self.a, self.rank, plan), self.b, self.projections, plan)

    def write(self, adapter: int, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """Write one adapter. parts: A [r, K] and B [outputs, r] of each projection; None: it has none."""
        a, b = self.a[adapter].view(len(self.projections), self.rank, -1), self.b[adapter].split(self.projections)
        for number, part in enumerate(parts):
            a[number].zero_()
            b[number].zero_()
            if part is not None:
                rank = part[0].shape[0]
                a[number, :rank].copy_(part[0], non_blocking=True)
                b[number][:, :rank].copy_(part[1], non_blocking=True)
