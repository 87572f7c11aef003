"""A matrix product, the addition of the residual and the norm of the sum. Owns the ``linear_norm`` op.

There are two launches at any number of rows. The Triton kernel adds the residual to its product; for cuBLASLt's product
the norm adds it. Both round alike and give the same bits. Called by ``layers``.

Shapes: M rows, K inputs, H features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from unisono.kernels.gemm.linear import (
    blas_linear,
    launch_linear,
    linear,
    linear_formula,
    runs_on_blas,
)
from unisono.kernels.library import op
from unisono.kernels.norm.rms_norm import (
    launch_add_rms_norm,
    launch_rms_norm,
    rms_norm,
    rms_norm_formula,
)

Both = tuple[torch.Tensor, torch.Tensor]
"""(the sum [M, H], its norm [M, H])."""


def linear_norm_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> Both:
    if runs_on_blas(x, weight):
        return launch_add_rms_norm(blas_linear(x, weight, bias, None), residual, norm_weight, eps)
    total = launch_linear(x, weight, bias, residual)
    return total, launch_rms_norm(total, norm_weight, eps)


def _in_turn(product: Callable[..., torch.Tensor], norm: Callable[..., torch.Tensor]) -> Callable[..., Both]:
    """Compose :func:`linear_norm` of a product with bias and residual and a norm of its result."""

    def both(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor,
        norm_weight: torch.Tensor, eps: float,
    ) -> Both:  # fmt: skip
        total = product(x, weight, bias, residual)
        return total, norm(total, norm_weight, eps)

    return both


linear_norm_cpu = _in_turn(linear.cpu, rms_norm.cpu)


def _linear_norm_meta(residual: torch.Tensor) -> Both:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


@op(cuda=linear_norm_cuda, meta=_linear_norm_meta, gradient=_in_turn(linear_formula, rms_norm_formula))
def linear_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> Both:
    """Compute ``total = linear(x [M, K], weight [H, K], bias, residual [M, H])`` and ``rms_norm(total, norm_weight,
    eps)``.

    norm_weight [H]: of x's dtype or fp32, as in ``rms_norm``. Returns (total, normed), each [M, H]; the bits are
    those of the two ops one after the other.
    """
    return linear_norm_cpu(x, weight, bias, residual, norm_weight, eps)
