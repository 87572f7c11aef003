"""An fp8 product, the addition of the residual and the norm of the sum, quantised if the next product needs that.

Owns the ``fp8_linear_norm`` op. As in ``kernels/gemm/linear_norm.py``, a kernel of ours adds the residual to its
product; for torch's product the norm adds it. Called by ``layers``.

Shapes: as in ``kernels/gemm/fp8.py``, with H outputs.
"""

from __future__ import annotations

from torch import Tensor

from unisono.kernels.gemm import fp8
from unisono.kernels.gemm.fp8_quantize import Quantised, empty_quantised
from unisono.kernels.library import op
from unisono.kernels.norm.rms_norm import (
    SumNormed,
    launch_add_rms_norm_fp8,
    launch_rms_norm,
    launch_rms_norm_fp8,
    quantised_norm,
    rms_norm,
    with_fp8_cpu,
    with_fp8_meta,
)


def fp8_linear_norm_cuda(
    x8: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, bias: Tensor | None, residual: Tensor,
    norm_weight: Tensor, eps: float, group: int | None, keep: bool,
) -> SumNormed:  # fmt: skip
    rows, dtype = len(residual), residual.dtype
    operands = x8, x_scales, rows, dtype, weight, w_scales, bias
    if fp8.runs_on_torch(rows, dtype, weight, w_scales):
        product = fp8.fp8_product_cuda(*operands, None)
        return launch_add_rms_norm_fp8(product, residual, norm_weight, eps, group, keep)
    total = fp8.fp8_product_cuda(*operands, residual)
    if group is None:
        return total, launch_rms_norm(total, norm_weight, eps), *empty_quantised(total, 0, 0, None)
    return total, *launch_rms_norm_fp8(total, norm_weight, eps, group, keep)


def _fp8_linear_norm_meta(residual: Tensor, group: int | None, keep: bool) -> SumNormed:
    return residual.new_empty(residual.shape), *with_fp8_meta(residual, group, keep)


@op(cuda=fp8_linear_norm_cuda, meta=_fp8_linear_norm_meta)
def fp8_linear_norm_op(
    x8: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, bias: Tensor | None, residual: Tensor,
    norm_weight: Tensor, eps: float, group: int | None, keep: bool,
) -> SumNormed:  # fmt: skip
    total = fp8.fp8_product_op.cpu(x8, x_scales, len(residual), residual.dtype, weight, w_scales, bias, residual)
    return total, *with_fp8_cpu(rms_norm.cpu(total, norm_weight, eps), group, keep)


def fp8_linear_norm(
    x: Quantised,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    group: int | None = None,
    keep: bool = True,
) -> tuple[Tensor, Tensor | Quantised]:
    """Compute ``total = fp8_product(x, weight, w_scales, bias, residual [M, H])`` and its ``rms_norm``.

    norm_weight [H], eps: as in ``rms_norm``. group, keep: as in ``rms_norm_fp8``, which quantises the norm; group None:
    it is not quantised. Returns (total [M, H], normed), with the bits of the ops one after the other.
    """
    total, *normed = fp8_linear_norm_op(x.x8, x.scales, weight, w_scales, bias, residual, norm_weight, eps, group, keep)
    return total, normed[0] if group is None else quantised_norm(normed, total, group, keep)
