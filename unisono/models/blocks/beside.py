"""A dense feed-forward and experts side by side, with norms of their own around each (Gemma 4).

Shapes: M rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.distributed.gather import Ranks
from unisono.kernels.moe.beside import beside_norms, beside_sum
from unisono.kernels.norm.rms_norm import quantised_norm
from unisono.layers.activations import Activations, InputFormat, common_input_format, plain
from unisono.layers.experts import Mixed
from unisono.layers.formats.base import WHOLE
from unisono.layers.norm import Factor, FusesNorms, RMSNorm, add_normed
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import MLPSpec
from unisono.models.load.build import Builder


@dataclass(frozen=True)
class BesideSpec:
    """A dense feed-forward and experts side by side, each with norms of its own around it (Gemma 4).

    It reads the residual sum, so the layer has no norm before it: ``dense_post_norm(dense(dense_norm(x))) +
    sparse_post_norm(sparse(sparse_norm(x)))``. The router reads ``router_norm(x)``, whose weight is divided by the root
    of the hidden size. Modules: these norms, ``dense`` and ``sparse``.
    """

    dense: MLPSpec
    sparse: ExpertsSpec

    def of(self, ranks: Ranks) -> BesideSpec:
        """Return the spec itself. Raises ConfigError if the experts cannot be divided among the ranks."""
        self.sparse.of(ranks)
        return self

    def build(self, builder: Builder) -> Beside:
        return Beside(self, builder)


class BesideRows(NamedTuple):
    """Norms of the residual sum, [M, H] each: read by the MLP, by the experts and by the router."""

    dense: Activations
    sparse: Activations
    routed: torch.Tensor


class Beside(FusesNorms, nn.Module):
    """See :class:`BesideSpec`. A feed-forward (``models/blocks/layers.py``) whose input is :class:`BesideRows`."""

    def __init__(self, spec: BesideSpec, builder: Builder) -> None:
        super().__init__()
        self.dense, self.sparse = spec.dense.build(builder.at("dense")), spec.sparse.build(builder.at("sparse"))
        self.dense_norm, self.dense_post_norm = builder.norm(), builder.norm()
        self.sparse_norm, self.sparse_post_norm = builder.norm(), builder.norm()
        self.router_norm = builder.norm(factor=builder.hidden_size**-0.5)
        self.router_norm.stored_as = ""
        self.norms = BesideNorms(self.dense_norm, self.sparse_norm, self.router_norm)
        self.set_norm_formats()

    def set_norm_formats(self) -> None:
        """See :meth:`DecoderLayer.set_norm_formats`."""
        self.dense_norm.input_format = common_input_format(self.dense.consumers)
        self.sparse_norm.input_format = common_input_format(self.sparse.stacks[:1])

    def forward(self, x: BesideRows, positions: torch.Tensor | None = None) -> tuple[Activations, Mixed]:
        """x: the result of ``norms`` -> the input of :meth:`output`. positions: see :meth:`Experts.forward`."""
        return self.dense(x.dense), self.sparse(x.sparse, positions, x.routed)

    def output(self, y: tuple[Activations, Mixed]) -> torch.Tensor:
        """The sum of both normed outputs, [M, H]."""
        dense = plain(self.dense_post_norm(self.dense.output(y[0])))
        return add_normed(self.sparse.output(y[1]), dense, self.sparse_post_norm, None)[0]

    def normed_sum(
        self, y: tuple[Activations, Mixed], residual: torch.Tensor, after: RMSNorm, norm: nn.Module | None,
        scale: Factor | None,
    ) -> tuple[torch.Tensor, Activations]:  # fmt: skip
        """``add_normed(self.output(y), …)`` in one launch. Ranks that sum columns gather before the norms."""
        mixed, own = y[1], norm if isinstance(norm, RMSNorm) else None
        input_format = None if own is None else own.input_format
        weight, eps = (None, 0.0) if own is None else (own.weight, own.eps)
        if mixed.shared is not None or self.sparse.stacks[1].rows != WHOLE:
            return add_normed(self.output(y), residual, after, norm, scale)
        total, *normed = beside_sum(
            mixed.y, mixed.weights, self.dense.output(y[0]), residual, self.dense_post_norm.weight,
            self.sparse_post_norm.weight, self.dense_post_norm.eps, after.weight, after.eps,
            None if scale is None else scale.weight, weight, eps, *_options(input_format),
        )  # fmt: skip
        if own is None:
            return total, total if norm is None else norm(total)
        return total, _emitted(normed, total, input_format)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype, [M, H] -> [M, H]: the tests' oracle."""
        dense = self.dense_post_norm.reference(self.dense.reference(self.dense_norm.reference(x)))
        sparse = self.sparse.reference(self.sparse_norm.reference(x), self.router_norm.reference(x))
        return dense + self.sparse_post_norm.reference(sparse)

    def project(
        self, y: tuple[Activations, Mixed], residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Activations]:
        """(residual + the sum, ``norm`` of it); without a norm the sum twice."""
        total = self.output(y) + residual
        return total, total if norm is None else norm(total)


class BesideNorms:
    """The three norms of a :class:`Beside`, in place of the one before other feed-forwards; no module of its own.

    dense, sparse: of the MLP's and the experts' input, emitted in the format of each. router: of the router's.
    """

    def __init__(self, dense: RMSNorm, sparse: RMSNorm, router: RMSNorm) -> None:
        self._norms = dense, sparse, router

    def __call__(self, x: torch.Tensor) -> BesideRows:
        """Norm x [M, H]."""
        dense, sparse, router = self._norms
        return BesideRows(dense(x), sparse(x), plain(router(x)))

    def of_normed(
        self, x: torch.Tensor, residual: torch.Tensor, after: RMSNorm, scale: Factor | None
    ) -> tuple[torch.Tensor, BesideRows]:
        """See :meth:`RMSNorm.of_normed`."""
        dense, sparse, router = self._norms
        if scale is not None:
            total, _ = add_normed(x, residual, after, None, scale)
            return total, self(total)
        made = beside_norms(
            x, residual, after.weight, after.eps, dense.weight, sparse.weight, router.weight, dense.eps,
            *_options(dense.input_format), *_options(sparse.input_format),
        )  # fmt: skip
        rows = BesideRows(
            _emitted(made[1:4], made.total, dense.input_format),
            _emitted(made[4:7], made.total, sparse.input_format),
            made.routed,
        )
        return made.total, rows


def _options(input_format: InputFormat | None) -> tuple[int | None, bool]:
    """(group, keep) of a kernel's norm that is emitted in this format."""
    return (None, True) if input_format is None else (input_format.group, input_format.keep)


def _emitted(normed: Any, like: torch.Tensor, input_format: InputFormat | None) -> Activations:
    """Wrap a kernel's (norm, e4m3 values, scales) of the rows ``like`` [M, H]."""
    if input_format is None:
        plain_rows: torch.Tensor = normed[0]
        return plain_rows
    return quantised_norm(normed, like, input_format.group, input_format.keep)
