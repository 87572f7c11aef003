"""Ops of the ``unisono`` torch.library namespace: each a Triton kernel with a CPU twin.

``layers`` and everything above call the wrappers below; attention, sampling and round ops are imported
from their own modules. See :mod:`unisono.kernels.library` for how an op is declared.
"""

from unisono.kernels.cache.rotary import rope_and_cache
from unisono.kernels.gemm.linear import configure_exact_blas, linear, prove_exact, rehearse_proof
from unisono.kernels.gemm.linear_norm import linear_norm
from unisono.kernels.norm.activation import sigmoid_gate, silu_mul
from unisono.kernels.norm.rms_norm import rms_norm

__all__ = [
    "configure_exact_blas",
    "linear",
    "linear_norm",
    "prove_exact",
    "rehearse_proof",
    "rms_norm",
    "rope_and_cache",
    "sigmoid_gate",
    "silu_mul",
]
