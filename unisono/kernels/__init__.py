"""Ops of the ``unisono`` torch.library namespace: each a Triton kernel with a CPU twin.

``layers`` and rooms above it call the functions below; attention, sampling and round ops are imported from their own
modules. :mod:`unisono.kernels.library` declares ops.
"""

from unisono.kernels import sources

sources.install()  # before kernels are defined

from unisono.kernels.cache.rotary import rope_and_cache  # noqa: E402
from unisono.kernels.gemm.linear import configure_exact_blas, exact_blas, linear  # noqa: E402
from unisono.kernels.gemm.linear_norm import linear_norm  # noqa: E402
from unisono.kernels.norm.activation import sigmoid_gate, silu_mul  # noqa: E402
from unisono.kernels.norm.rms_norm import rms_norm  # noqa: E402

__all__ = [
    "configure_exact_blas",
    "exact_blas",
    "linear",
    "linear_norm",
    "rms_norm",
    "rope_and_cache",
    "sigmoid_gate",
    "silu_mul",
]
