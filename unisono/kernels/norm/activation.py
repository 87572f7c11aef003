"""Gates of a gated MLP and of gated attention.

Owns the ops ``silu_mul``, ``gelu_mul`` and ``sigmoid_gate``; called by ``layers`` and ``models``. For consumers with
e4m3 weights the same kernels store the result quantised (``kernels/gemm/fp8_quantize.py``): ``silu_mul_fp8``,
``gelu_mul_fp8``, ``sigmoid_gate_fp8``.

Shapes: M rows, I intermediate features, Hq query heads, D head dimension. An MLP's input holds gate and up side by
side, [M, 2 I].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.fp8_quantize import (
    GROUP,
    INT8_ROWS,
    Quantised,
    element_of,
    empty_quantised,
    handed_on,
    quantised_cpu,
    store_quantised,
)
from unisono.kernels.library import AotCase, op
from unisono.kernels.overlap import follow, overlapped, overlapping

_BLOCK = 1024


class ExpertGate(NamedTuple):
    """Gating function of experts and of dense MLPs: ``silu(gate) * up`` by default.

    limit > 0: gpt-oss's clamped SwiGLU ``(up' + 1) * gate' * sigmoid(alpha * gate')``, with gate' at most ``limit`` and
    up' within ± ``limit``.
    gelu: ``gelu(gate) * up`` with GELU by tanh (``gelu_pytorch_tanh``).
    """

    alpha: float = 1.0
    limit: float = 0.0
    gelu: bool = False

    @property
    def constants(self) -> dict[str, float | bool]:
        """Compile-time arguments of :func:`gated_product`."""
        return {"ALPHA": self.alpha, "LIMIT": self.limit, "GELU": self.gelu}


SILU = ExpertGate()
GELU_TANH = ExpertGate(gelu=True)
GATES = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}
"""Gates by the names of activations in config.json."""

TWICE_ROOT = tl.constexpr(2 * math.sqrt(2 / math.pi))
"""GELU by tanh of x is x · sigmoid(TWICE_ROOT · (x + CUBE · x³)), for tanh(u) = 2 sigmoid(2 u) - 1."""
CUBE = tl.constexpr(TWICE_ROOT.value * 0.044715)
"""The factor of x³ in GELU, times TWICE_ROOT."""


@triton.jit
def gelu_tanh(x):
    """Compute GELU by tanh in fp32. Every sum of a product is a fused one, so all kernels round alike."""
    return x / (1.0 + tl.exp(-x * tl.fma(x * CUBE, x, TWICE_ROOT)))


@triton.jit
def silu_product(gate, up, dtype: tl.constexpr):
    """Compute ``silu(gate) * up`` of fp32 products in ``dtype``: both are rounded first, and SiLU before the
    product.
    """
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@triton.jit
def gelu_product(gate, up, dtype: tl.constexpr):
    """Compute ``gelu(gate) * up`` of fp32 products, rounded like :func:`silu_product`."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gelu_tanh(gate).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def gated_product(gate, up, dtype: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
                  GELU: tl.constexpr = False):  # fmt: skip
    """Apply a :class:`ExpertGate` to fp32 products, in ``dtype``. Both are rounded first."""
    if GELU:
        return gelu_product(gate, up, dtype)
    elif LIMIT > 0:
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return (gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)).to(dtype)
    else:
        return silu_product(gate, up, dtype)


@overlapping(leads=True)
@triton.jit
def _silu_mul_kernel(x, other, out, scales, stride, other_stride, I, M, PADDED,  # noqa: E741
                     BLOCK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
                     GELU: tl.constexpr = False):  # fmt: skip
    """Compute ``silu(x) * other`` of rows in these strides, or GELU's with GELU. COLUMNS: columns that share a scale of
    an e4m3 out; 0: out has x's dtype."""
    follow(OVERLAP, COLUMNS > 0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    inside = cols < I
    if COLUMNS > 0:
        inside = inside & (row < M)
    gate = tl.load(x + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(other + row * other_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        silu = gelu_tanh(gate).to(x.dtype.element_ty).to(tl.float32)
    else:
        silu = (gate / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
    if COLUMNS > 0:
        value = (silu * up).to(x.dtype.element_ty)
        store_quantised(value, out, scales, tl.program_id(0), tl.program_id(1) * BLOCK, I, PADDED, COLUMNS)
    else:
        tl.store(out + row * I + cols, (silu * up).to(out.dtype.element_ty), mask=inside)


def launch_silu_mul(x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    gate, up = x.contiguous().chunk(2, dim=1)
    return launch_gate_rows(gate, up, gelu)


def launch_gate_rows(gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
    """See :func:`gate_rows`."""
    rows, width = gate.shape
    out = gate.new_empty(rows, width)
    _silu_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
        gate, up, out, None, gate.stride(0), up.stride(0), width, None, None, BLOCK=_BLOCK, COLUMNS=0, GELU=gelu,
        **overlapped(gate.device),
    )  # fmt: skip
    return out


def quantising_block(k: int, group: int) -> tuple[int, int, int]:
    """(BLOCK, COLUMNS, warps) of an elementwise kernel that quantises rows of k columns. group 0, INT8_ROWS: by row."""
    if group > 0:
        return _BLOCK, group, 4
    block = triton.next_power_of_2(k)
    return block, block, min(max(block // 512, 1), 16)


def launch_gelu_mul(x: torch.Tensor) -> torch.Tensor:
    return launch_silu_mul(x, gelu=True)


def launch_gelu_mul_fp8(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_silu_mul_fp8(x, group, gelu=True)


def launch_silu_mul_fp8(x: torch.Tensor, group: int, gelu: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`silu_mul_fp8`."""
    gate, up = x.contiguous().chunk(2, dim=1)
    return launch_gate_rows_fp8(gate, up, gelu, group)


def launch_gate_rows_fp8(
    gate: torch.Tensor, up: torch.Tensor, gelu: bool, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`gate_rows_fp8`."""
    rows, width = gate.shape
    x8, scales = empty_quantised(gate, rows, width, group)
    block, columns, warps = quantising_block(width, group)
    _silu_mul_kernel[(len(x8), triton.cdiv(width, block))](
        gate, up, x8, scales, gate.stride(0), up.stride(0), width, rows, len(x8), BLOCK=block, COLUMNS=columns,
        GELU=gelu, num_warps=warps, **overlapped(gate.device),
    )  # fmt: skip
    return x8, scales


def gated_cpu(
    x: torch.Tensor, bias: torch.Tensor | None, alpha: float, limit: float, gelu: bool = False
) -> torch.Tensor:
    """Apply a :class:`ExpertGate` to rounded products x [M, 2 I], gate, then up, and a bias [2 I]."""
    x = x if bias is None else x + bias
    if gelu:
        return gelu_mul.cpu(x)
    if limit == 0:
        return silu_mul.cpu(x)
    gate, up = (half.float().contiguous() for half in x.chunk(2, dim=-1))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (1.0 + torch.exp(-alpha * gate)) * (up + 1.0)).to(x.dtype)


def _silu_mul_formula(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@op(cuda=launch_silu_mul, shape=lambda x: (x.shape[0], x.shape[1] // 2), gradient=_silu_mul_formula)
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(x[:, :I]) * x[:, I:]`` for x [M, 2 I]: [M, I], any float dtype (Shazeer, arXiv 2002.05202).

    SiLU in fp32, rounded to the dtype, then the product, rounded: the order of the unfused model.
    """
    gate, up = x.chunk(2, dim=-1)
    # Not F.silu: its vectorised loop and its tail round differently, so bits would depend on the batch.
    gate32 = gate.float().contiguous()
    return (gate32 / (1.0 + torch.exp(-gate32))).to(x.dtype) * up


@op(cuda=launch_silu_mul_fp8, meta=lambda x, group: empty_quantised(x, x.shape[0], x.shape[1] // 2, group))
def silu_mul_fp8_op(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return quantised_cpu(silu_mul.cpu(x), group)


def silu_mul_fp8(x: torch.Tensor, group: int) -> Quantised:
    """Compute :func:`silu_mul` in e4m3, with the bits of ``quantize(silu_mul(x), group)``, in one launch."""
    return handed_on(silu_mul_fp8_op(x, group), x, group)


def _gelu_mul_formula(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@op(cuda=launch_gelu_mul, shape=lambda x: (x.shape[0], x.shape[1] // 2), gradient=_gelu_mul_formula)
def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute ``gelu(x[:, :I]) * x[:, I:]`` for x [M, 2 I]: [M, I]. GELU by tanh, with the roundings of
    :func:`silu_mul`.
    """
    gate, up = x.chunk(2, dim=-1)
    value = gate.float().contiguous()  # not F.gelu: see silu_mul
    inner = value * (CUBE.value * value * value + TWICE_ROOT.value)
    return (value / (1.0 + torch.exp(-inner))).to(x.dtype) * up


@op(cuda=launch_gelu_mul_fp8, meta=lambda x, group: empty_quantised(x, x.shape[0], x.shape[1] // 2, group))
def gelu_mul_fp8_op(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return quantised_cpu(gelu_mul.cpu(x), group)


def gelu_mul_fp8(x: torch.Tensor, group: int) -> Quantised:
    """Compute :func:`gelu_mul` in e4m3, with the bits of ``quantize(gelu_mul(x), group)``, in one launch."""
    return handed_on(gelu_mul_fp8_op(x, group), x, group)


def _gate_rows_formula(gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
    return (_gelu_mul_formula if gelu else _silu_mul_formula)(torch.cat((gate, up), 1))


@op(cuda=launch_gate_rows, shape=lambda gate: gate.shape, gradient=_gate_rows_formula)
def gate_rows(gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
    """Compute :func:`silu_mul`, or :func:`gelu_mul`, of two tensors [M, I] with rows of any stride: [M, I]."""
    return (gelu_mul if gelu else silu_mul).cpu(torch.cat((gate, up), 1))


@op(
    cuda=launch_gate_rows_fp8,
    meta=lambda gate, group: empty_quantised(gate, gate.shape[0], gate.shape[1], group),
)
def gate_rows_fp8_op(gate: torch.Tensor, up: torch.Tensor, gelu: bool, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return quantised_cpu(gate_rows.cpu(gate, up, gelu), group)


def gate_rows_fp8(gate: torch.Tensor, up: torch.Tensor, gelu: bool, group: int) -> Quantised:
    """Compute :func:`gate_rows` in e4m3, with the bits of ``quantize(gate_rows(gate, up, gelu), group)``."""
    return handed_on(gate_rows_fp8_op(gate, up, gelu, group), gate, group)


@overlapping(leads=True)
@triton.jit
def _sigmoid_gate_kernel(x, qkv, out, scales, stride, HEADS, M, PADDED, D: tl.constexpr,
                         BLOCK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Compute ``sigmoid_gate``. COLUMNS: see :func:`_silu_mul_kernel`."""
    follow(OVERLAP, COLUMNS > 0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, inside = tl.program_id(0).to(tl.int64), cols < HEADS * D
    if COLUMNS > 0:
        inside = inside & (row < M)
    at = (2 * (cols // D) + 1) * D + cols % D
    gate = tl.load(qkv + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * HEADS * D + cols, mask=inside, other=0.0).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
    if COLUMNS > 0:
        y = (value * share).to(x.dtype.element_ty)
        store_quantised(y, out, scales, tl.program_id(0), tl.program_id(1) * BLOCK, HEADS * D, PADDED, COLUMNS)
    else:
        tl.store(out + row * HEADS * D + cols, (value * share).to(out.dtype.element_ty), mask=inside)


def launch_sigmoid_gate(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    x, qkv = x.contiguous(), qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    _sigmoid_gate_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x, qkv, out, None, qkv.stride(0), num_heads, None, None, D=width // num_heads, BLOCK=_BLOCK, COLUMNS=0,
        **overlapped(x.device),
    )  # fmt: skip
    return out


def launch_sigmoid_gate_fp8(
    x: torch.Tensor, qkv: torch.Tensor, num_heads: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sigmoid_gate_fp8`."""
    x, qkv = x.contiguous(), qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rows, width = x.shape
    x8, scales = empty_quantised(x, rows, width, group)
    block, columns, warps = quantising_block(width, group)
    _sigmoid_gate_kernel[(len(x8), triton.cdiv(width, block))](
        x, qkv, x8, scales, qkv.stride(0), num_heads, rows, len(x8), D=width // num_heads, BLOCK=block,
        COLUMNS=columns, num_warps=warps, **overlapped(x.device),
    )  # fmt: skip
    return x8, scales


def _sigmoid_gate_formula(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x * _gates(x, qkv, num_heads).sigmoid()


def _gates(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Select the gates [M, Hq · D] in qkv."""
    return qkv[:, : 2 * x.shape[1]].unflatten(1, (num_heads, 2, -1))[:, :, 1].flatten(1)


@op(cuda=launch_sigmoid_gate, gradient=_sigmoid_gate_formula)
def sigmoid_gate(x: torch.Tensor, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Compute ``x * sigmoid(gate)`` for the output x [M, Hq · D] of attention, in x's dtype.

    qkv [M, …]: rows of any stride that begin with query heads and their gates, alternating: [Hq, 2, D]. The sigmoid is
    computed in fp32 and rounded to the dtype, then the product is rounded.
    """
    gate = _gates(x, qkv, num_heads).float().contiguous()  # not torch.sigmoid: see silu_mul.cpu
    return x * (1.0 / (1.0 + torch.exp(-gate))).to(x.dtype)


@op(
    cuda=launch_sigmoid_gate_fp8,
    meta=lambda x, group: empty_quantised(x, x.shape[0], x.shape[1], group),
)
def sigmoid_gate_fp8_op(
    x: torch.Tensor, qkv: torch.Tensor, num_heads: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantised_cpu(sigmoid_gate.cpu(x, qkv, num_heads), group)


def sigmoid_gate_fp8(x: torch.Tensor, qkv: torch.Tensor, num_heads: int, group: int) -> Quantised:
    """Compute :func:`sigmoid_gate` in e4m3, with the bits of ``quantize(sigmoid_gate(x, qkv, num_heads), group)``."""
    return handed_on(sigmoid_gate_fp8_op(x, qkv, num_heads, group), x, group)


@triton.jit
def relu_squared_product(y, dtype: tl.constexpr):
    """Round fp32 products to ``dtype`` and square those above 0: fp32."""
    y = y.to(dtype).to(tl.float32)
    y = tl.where(y < 0, 0.0, y)
    return y * y


@triton.jit
def _relu_squared_kernel(x, out, total, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Square what is above 0."""
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < total, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, relu_squared_product(value, dtype).to(dtype), mask=at < total)


def launch_relu_squared(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    _relu_squared_kernel[grid](x, out, x.numel(), BLOCK=_BLOCK, **overlapped(x.device))
    return out


def _relu_squared_formula(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) ** 2


@op(cuda=launch_relu_squared, gradient=_relu_squared_formula)
def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Compute ``relu(x)²`` in x's dtype, which is contiguous afterwards."""
    y = x.contiguous().clamp(min=0)
    return y * y


def _aot(dtype: str, width: int | None, group: int) -> list[AotCase]:
    """AotCases of both gating kernels. width: columns of quantised rows; None: not quantised."""
    block, columns, warps = (_BLOCK, 0, 4) if width is None else quantising_block(width, group)
    extra = {} if width is None else {"scales": "*fp32", "M": "i32", "PADDED": "i32"}
    options: dict[str, Any] = {"BLOCK": block, "COLUMNS": columns, "OVERLAP": True}
    options |= dict.fromkeys(("scales", "M", "PADDED")) if width is None else {}
    tensors = {"x": f"*{dtype}", "out": f"*{dtype}" if width is None else element_of(group), **extra}
    gate = {"qkv": f"*{dtype}", "stride": "i32", "HEADS": "i32"}
    halves = {"other": f"*{dtype}", **dict.fromkeys(("stride", "other_stride", "I"), "i32")}
    return [
        *(AotCase(_silu_mul_kernel, tensors | halves, options | {"GELU": g}, num_warps=warps) for g in (False, True)),
        AotCase(_sigmoid_gate_kernel, tensors | gate, options | {"D": 256}, num_warps=warps),
    ]


_PLAIN_BLOCK = {"BLOCK": _BLOCK, "OVERLAP": True}

AOT: list[AotCase] = [
    *(case for dtype in ("bf16", "fp16", "fp32") for case in _aot(dtype, None, 0)),
    *(case for group in (GROUP, 0, INT8_ROWS) for case in _aot("bf16", 12288, group)),
    *_aot("fp16", 512, GROUP),
    *(
        AotCase(_relu_squared_kernel, {"x": f"*{dtype}", "out": f"*{dtype}", "total": "i32"}, _PLAIN_BLOCK)
        for dtype in ("bf16", "fp32")
    ),
]
