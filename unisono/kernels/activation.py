"""The gates of a gated MLP and of gated attention. Owns the ops ``silu_mul`` and ``sigmoid_gate``; called by ``layers``
and ``models``.

Shapes: M rows, I intermediate features, Hq query heads, D head dimension. An MLP's input holds gate and up side by
side, [M, 2 I].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase, define, differentiable, register
from unisono.kernels.overlap import follow, overlapped

_BLOCK = 1024


@triton.jit
def silu_product(gate, up, dtype: tl.constexpr):
    """``silu(gate) * up`` of fp32 products, in ``dtype``: both are rounded first, and SiLU before it is multiplied."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@triton.jit
def _silu_mul_kernel(x, out, I, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # noqa: E741
    follow(OVERLAP)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    inside = cols < I
    gate = tl.load(x + row * 2 * I + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * I + I + cols, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * I + cols, (silu * up).to(out.dtype.element_ty), mask=inside)


def launch_silu_mul(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    rows, width = x.shape
    out = x.new_empty(rows, width // 2)
    grid = (rows, triton.cdiv(width // 2, _BLOCK))
    _silu_mul_kernel[grid](x, out, width // 2, BLOCK=_BLOCK, **overlapped(x.device))
    return out


def silu_mul_cpu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    # Not F.silu: its vectorised loop and its tail round differently, so bits would depend on the batch.
    gate32 = gate.float().contiguous()
    return (gate32 / (1.0 + torch.exp(-gate32))).to(x.dtype) * up


def _silu_mul_meta(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _silu_mul_formula(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


define("silu_mul(Tensor x) -> Tensor")
register("silu_mul", cuda=launch_silu_mul, cpu=silu_mul_cpu, meta=_silu_mul_meta)
differentiable("silu_mul", _silu_mul_formula)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(x[:, :I]) * x[:, I:]`` for x [M, 2 I] -> [M, I], any float dtype (Shazeer, arXiv 2002.05202).

    SiLU in fp32, rounded to the dtype, then the product, rounded: the order of the unfused model.
    """
    return torch.ops.unisono.silu_mul(x)


@triton.jit
def _sigmoid_gate_kernel(x, qkv, out, stride, HEADS, D: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, inside = tl.program_id(0).to(tl.int64), cols < HEADS * D
    at = (2 * (cols // D) + 1) * D + cols % D
    gate = tl.load(qkv + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * HEADS * D + cols, mask=inside, other=0.0).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * HEADS * D + cols, (value * share).to(out.dtype.element_ty), mask=inside)


def launch_sigmoid_gate(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    x, qkv = x.contiguous(), qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    _sigmoid_gate_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x, qkv, out, qkv.stride(0), num_heads, D=width // num_heads, BLOCK=_BLOCK, **overlapped(x.device)
    )
    return out


def sigmoid_gate_cpu(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    gate = _gates(x, qkv, num_heads).float().contiguous()  # not torch.sigmoid: see silu_mul_cpu
    return x * (1.0 / (1.0 + torch.exp(-gate))).to(x.dtype)


def _sigmoid_gate_formula(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x * _gates(x, qkv, num_heads).sigmoid()


def _gates(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The gates [M, Hq · D] in qkv."""
    return qkv[:, : 2 * x.shape[1]].unflatten(1, (num_heads, 2, -1))[:, :, 1].flatten(1)


define("sigmoid_gate(Tensor x, Tensor qkv, int num_heads) -> Tensor")
register(
    "sigmoid_gate", cuda=launch_sigmoid_gate, cpu=sigmoid_gate_cpu, meta=lambda x, qkv, num_heads: torch.empty_like(x)
)
differentiable("sigmoid_gate", _sigmoid_gate_formula)


def sigmoid_gate(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``x * sigmoid(gate)`` for the output x [M, Hq · D] of attention, in x's dtype.

    qkv [M, …]: rows of any stride that begin with each query head and its gate by turns, [Hq, 2, D]. The sigmoid is
    computed in fp32 and rounded to the dtype, then the product is rounded.
    """
    return torch.ops.unisono.sigmoid_gate(x, qkv, num_heads)


AOT: list[AotCase] = [
    case
    for dtype in ("bf16", "fp16", "fp32")
    for case in (
        AotCase(
            _silu_mul_kernel, {"x": f"*{dtype}", "out": f"*{dtype}", "I": "i32"}, {"BLOCK": _BLOCK, "OVERLAP": True}
        ),
        AotCase(
            _sigmoid_gate_kernel,
            {"x": f"*{dtype}", "qkv": f"*{dtype}", "out": f"*{dtype}", "stride": "i32", "HEADS": "i32"},
            {"D": 256, "BLOCK": _BLOCK, "OVERLAP": True},
        ),
    )
]
