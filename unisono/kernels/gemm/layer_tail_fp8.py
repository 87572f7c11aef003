"""``kernels/gemm/layer_tail.py`` for e4m3 weights with scales by block. Owns the ``layer_tail_fp8`` op.

What the mixer, a norm or SiLU makes is quantised in the same launch. Bits are those of ``fp8_linear``,
``fp8_linear_norm`` and ``silu_mul_fp8``.

Shapes: as in ``kernels/gemm/layer_tail.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from unisono.kernels.gemm.fp8 import fp8_product_cpu, launch_fp8_product
from unisono.kernels.gemm.fp8_gluon import EACH, STEP, WIDE
from unisono.kernels.gemm.fp8_quantize import (
    E4M3,
    GROUP,
    Quantised,
    empty_quantised,
    launch_quantize,
    padded_rows,
    quantised_cpu,
)
from unisono.kernels.gemm.layer_tail import (
    Blocks,
    Made,
    Tail,
    Tiles,
    constants,
    empty,
    fits,
    given,
    proved,
    rehearsed,
)
from unisono.kernels.gemm.layer_tail_fp8_gluon import COLUMNS, layer_tail_fp8_kernel
from unisono.kernels.gemm.layer_tail_gluon import REGISTERS, WARPS
from unisono.kernels.gemm.persistent import counters, processors
from unisono.kernels.hopper import boxes
from unisono.kernels.library import AotCase, define, ints, register
from unisono.kernels.norm.activation import launch_silu_mul_fp8, silu_mul_cpu
from unisono.kernels.norm.rms_norm import launch_rms_norm, launch_rms_norm_fp8, rms_norm_cpu
from unisono.kernels.overlap import overlapped


@dataclass(frozen=True)
class Fp8Tail(Tail):
    """Weights in e4m3. scales: fp32 [N / 128, K / 128] of each product. dtype: of activations.

    keep: the norm that is projected is made as plain rows, too. Without a following product it always is.
    """

    scales: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    dtype: torch.dtype = field(default=torch.bfloat16, kw_only=True)
    keep: bool = field(default=True, kw_only=True)

    @property
    def keeps(self) -> bool:
        return self.next_norm is not None and (self.keep or self.following is None)

    @property
    def shape(self) -> tuple[object, ...]:
        return (*super().shape, self.dtype, self.keep)


def launch_layer_tail_fp8(
    x: torch.Tensor, x_scales: torch.Tensor | None, residual: torch.Tensor, tail: Fp8Tail, blocks: Blocks | None = None
) -> Made:
    """See :func:`layer_tail_fp8`; of what :func:`suits`. x_scales: x is in e4m3. blocks: speed only."""
    mixed, residual = x.contiguous(), residual.contiguous()
    x, rows, (h, q, i, f) = residual, residual.shape[0], tail.sizes
    blocks, programs = blocks or Blocks.of(rows, EACH), processors(x.device)
    total, act = x.new_empty(rows, h), x.new_empty(rows, i)
    out, n2, product = empty(residual, tail)
    quantised = [empty_quantised(x, rows, width, GROUP) for width in (q, h, i, h)]
    if x_scales is not None:
        quantised[0] = mixed, x_scales
    tiles, last = Tiles.of(h, i, f, programs), 3 if f else 1
    layer_tail_fp8_kernel[(programs,)](
        *(boxes(quantised[n][0], blocks.rows) for n in (0, 1, 2, last)), *tiles.boxes(tail),
        x if x_scales is not None else mixed, residual, *tail.scales[:3], tail.scales[-1], tail.o_norm,
        tail.o_norm if tail.next_norm is None else tail.next_norm, total if tail.bias is None else tail.bias,
        total, act, out, n2, product, *(part for each in quantised for part in each), counters(x.device), tail.eps,
        tail.next_eps, rows, q, h, i, f, padded_rows(rows), HAS_BIAS=tail.bias is not None,
        NORMED=tail.next_norm is not None, KEEP=tail.keeps, FOLLOWED=f > 0, QUANTISED=x_scales is not None,
        **_constants(blocks, tiles, h), num_warps=WARPS, maxnreg=REGISTERS, **overlapped(x.device),
    )  # fmt: skip
    return out, n2, product


def _constants(blocks: Blocks, tiles: Tiles, h: int) -> dict[str, Any]:
    return constants(blocks, tiles, h) | {"STEP": STEP, "WIDE": WIDE, "COLUMNS": COLUMNS}


def layer_tail_fp8_cpu(x: torch.Tensor, x_scales: torch.Tensor | None, residual: torch.Tensor, t: Fp8Tail) -> Made:
    (rows, _), dtype, nothing = residual.shape, residual.dtype, residual.new_empty(0)

    def product(
        x: torch.Tensor, at: int, bias: torch.Tensor | None, added: torch.Tensor | None, scales: Any = None
    ) -> torch.Tensor:
        x8, x_scales = quantised_cpu(x, GROUP) if scales is None else (x, scales)
        return fp8_product_cpu(x8, x_scales, rows, dtype, t.products[at], t.scales[at], bias, added)

    total = product(x, 0, None, residual, x_scales)
    act = silu_mul_cpu(product(rms_norm_cpu(total, t.o_norm, t.eps), 1, None, None))
    out = product(act, 2, None, total)
    normed = nothing if t.next_norm is None else rms_norm_cpu(out, t.next_norm, t.next_eps)
    after = nothing if t.following is None else product(normed, 3, t.bias, None)
    return out, normed if t.keeps else nothing, after


def _apart(x: torch.Tensor, residual: torch.Tensor, t: Fp8Tail) -> Made:
    """:func:`layer_tail_fp8` by the separate kernels."""
    rows, nothing = len(x), x.new_empty(0)

    def product(
        pair: tuple[torch.Tensor, torch.Tensor], at: int, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return launch_fp8_product(*pair, t.products[at], t.scales[at], bias, residual, rows, x.dtype)

    total = product(launch_quantize(x, GROUP), 0, None, residual)
    act = product(launch_rms_norm_fp8(total, t.o_norm, t.eps, GROUP, False)[1:], 1, None, None)
    out = product(launch_silu_mul_fp8(act, GROUP), 2, None, total)
    if t.next_norm is None or t.following is None:
        return out, nothing if t.next_norm is None else launch_rms_norm(out, t.next_norm, t.next_eps), nothing
    normed, *pair = launch_rms_norm_fp8(out, t.next_norm, t.next_eps, GROUP, t.keep)
    return out, normed, product((pair[0], pair[1]), 3, t.bias, None)


def _tail(
    like: torch.Tensor, products: list[torch.Tensor], scales: list[torch.Tensor], norms: list[torch.Tensor],
    eps: list[float], bias: torch.Tensor | None, keep: bool,
) -> Fp8Tail:  # fmt: skip
    """From the op's arguments. like: has the activations' dtype."""
    t = Tail.of(products, norms, eps, bias)
    return Fp8Tail(**vars(t), scales=tuple(scales), dtype=like.dtype, keep=keep)


define(
    "layer_tail_fp8(Tensor x, Tensor? x_scales, Tensor residual, Tensor[] products, Tensor[] scales, Tensor[] norms,"
    " float[] eps, Tensor? bias, bool keep) -> (Tensor, Tensor, Tensor)"
)
register(
    "layer_tail_fp8",
    cuda=lambda x, scales, residual, *given: launch_layer_tail_fp8(x, scales, residual, _tail(residual, *given)),
    cpu=lambda x, scales, residual, *given: layer_tail_fp8_cpu(x, scales, residual, _tail(residual, *given)),
    meta=lambda x, scales, residual, *given: empty(residual, _tail(residual, *given)),
)


def layer_tail_fp8(x: torch.Tensor | Quantised, residual: torch.Tensor, tail: Fp8Tail) -> Made:
    """``layer_tail`` for e4m3 weights; x [M, Q]: plain rows, or quantised already."""
    pair = (x.x8, x.scales) if isinstance(x, Quantised) else (x, None)
    eps = [tail.eps, tail.next_eps]
    return torch.ops.unisono.layer_tail_fp8(
        *pair, residual, tail.products, list(tail.scales), tail.norms, eps, tail.bias, tail.keep
    )


def suits(tail: Fp8Tail) -> bool:
    """Whether the kernel can compute it on its device; see ``layer_tail.suits``."""
    e4m3 = all(w.dtype is E4M3 for w in tail.products) and tail.dtype in (torch.bfloat16, torch.float16)
    whole = triton.next_power_of_2(tail.o.shape[0]) >= GROUP
    return tail.o.device.type == "cpu" or (e4m3 and whole and fits(tail))


@torch.no_grad()
def prove(tail: Fp8Tail) -> bool:
    """See ``layer_tail.prove``."""
    return proved(tail, suits, _same_bits)


def _same_bits(tail: Fp8Tail, rows: int) -> bool:
    x, residual = given(tail, rows, tail.dtype)
    expected, pair = _apart(x, residual, tail), launch_quantize(x, GROUP)
    made = launch_layer_tail_fp8(x, None, residual, tail), launch_layer_tail_fp8(*pair, residual, tail)
    return all(torch.equal(mine, theirs) for each in made for mine, theirs in zip(each, expected, strict=True))


def rehearse(tail: Fp8Tail) -> None:
    """See ``layer_tail.rehearse``."""
    rehearsed(tail, suits, _same_bits)


def _case(
    dtype: str, norm: str, rows: int, h: int, q: int, i: int, f: int, keep: bool = False
) -> AotCase:  # fmt: skip
    """With a bias where the dtype is fp16."""
    blocks, tiles = Blocks.of(rows, EACH), Tiles.of(h, i, f, 132)
    signature = {
        **tiles.box_types("fp8e4nv", blocks.rows),
        **dict.fromkeys(("mixed", "residual", "next_bias", "total", "act", "out", "n2", "product"), f"*{dtype}"),
        **dict.fromkeys(("o_scales", "gate_up_scales", "down_scales", "next_scales"), "*fp32"),
        **dict.fromkeys(("x8", "n1", "act8", "n28"), "*fp8e4nv"), "counters": "*i64",
        **dict.fromkeys(("x8_scales", "n1_scales", "act8_scales", "n28_scales"), "*fp32"),
        **dict.fromkeys(("o_norm", "next_norm"), f"*{norm}"), "eps": "fp32", "next_eps": "fp32",
        **ints("", "M Q H I F PADDED"),
    }  # fmt: skip
    options = {"HAS_BIAS": dtype == "fp16", "NORMED": True, "KEEP": keep, "FOLLOWED": f > 0, "OVERLAP": True}
    options["QUANTISED"] = keep
    return AotCase(
        layer_tail_fp8_kernel, signature, _constants(blocks, tiles, h) | options, num_warps=WARPS, maxnreg=REGISTERS
    )


AOT: list[AotCase] = [
    _case("bf16", "bf16", 8, 4096, 4096, 12288, 6144),
    _case("bf16", "fp32", 16, 4096, 4096, 12288, 0, keep=True),
    _case("fp16", "fp16", 32, 2560, 4096, 9728, 6144),
]
