"""Short causal convolution of a Mamba2 layer with bias and SiLU, and its steps. Owns the ``mamba_conv`` op.

Taps are added in order, each fused multiply-add written out, then the bias, so a token's bits depend on its own inputs
alone. The remembered inputs are those of ``kernels/recurrent/causal_conv.py``, whose device functions this file uses.

Shapes: T tokens, R rows, NR state rows, C channels, J taps, H heads, W tokens per row of a round, RING remembered
positions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, ints, op
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.recurrent.causal_conv import (
    NEVER,
    _conv_keep_kernel,
    _keep,
    _outer_tile,
    _round_tile,
    _silu,
    _softplus,
)
from unisono.kernels.recurrent.causal_conv_cpu import convolved_cpu, softplus_cpu

_CHANNELS, _TOKENS = 256, 16
"""Channels and tokens of a program."""


@triton.jit
def _steps(dt, a_log, dt_bias, gates, token, inside, dt_stride, low, high, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Compute the log of the decay and the step of tokens [N], of all heads."""
    head = tl.arange(0, BLOCK_H)
    mask = inside[:, None] & (head < H)[None, :]
    at = token.to(tl.int64)[:, None]
    x = tl.load(dt + at * dt_stride + head[None, :], mask=mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=head < H, other=0.0)[None, :]
    step = tl.minimum(tl.maximum(_softplus(x), low), high)
    rate = -tl.exp(tl.load(a_log + head, mask=head < H, other=0.0))
    out = gates + at * (2 * H) + head[None, :]
    tl.store(out, rate[None, :] * step, mask=mask)
    tl.store(out + H, step, mask=mask)


@triton.jit
def _finished(acc, bias, channel, inside):
    """Add the bias, if there is one, and apply SiLU. acc [N, channels]."""
    if bias is not None:
        acc = acc + tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    return _silu(acc)


@triton.jit
def _mamba_round_kernel(
    u, weight, bias, dt, a_log, dt_bias, snapshot, ring, out, gates, rows, since, first, until, end, u_stride,
    dt_stride, C, W, w_channel, w_tap, low, high, J: tl.constexpr, RING: tl.constexpr, H: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_J: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve a row of a round in BLOCK_C channels and update its remembered inputs; the last program of a row
    computes the steps."""
    follow(OVERLAP)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK_W)
    if tl.program_id(1) * BLOCK_C >= C:
        _steps(dt, a_log, dt_bias, gates, row * W + i, i < W, dt_stride, low, high, H, BLOCK_H)
    else:
        slot, seen, begin = tl.load(rows + row), tl.load(since + row), tl.load(first + row)
        stop, goal = tl.where(begin < 0, -1, tl.load(end + row)), tl.load(until + row)
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = (channel < C)[None, :]
        real = (i < stop - begin)[:, None]
        live = real & inside
        acc = _round_tile(u, weight, snapshot, ring, slot, seen, begin, row * W, i, channel, live, u_stride, C,
                          w_channel, w_tap, J, RING)  # fmt: skip
        y = tl.where(real, _finished(acc, bias, channel, channel < C), 0.0)
        token = (row * W + i).to(tl.int64)[:, None] * C + channel[None, :]
        tl.store(out + token, y.to(out.dtype.element_ty), mask=(i < W)[:, None] & inside)
        _keep(u, snapshot, ring, slot, seen, begin, goal, stop, row * W, channel, u_stride, C,
              J, RING, BLOCK_W, BLOCK_J)  # fmt: skip


@triton.jit(do_not_specialize=["T", "R"])
def _mamba_prompt_kernel(
    u, weight, bias, dt, a_log, dt_bias, snapshot, ring, out, gates, rows, since, first, query_start, u_stride,
    dt_stride, C, T, R, w_channel, w_tap, low, high, J: tl.constexpr, RING: tl.constexpr, H: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve a tile of a prompt pass; padding yields zeros. The last program of a tile computes the steps."""
    follow(OVERLAP)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    if tl.program_id(1) * BLOCK_C >= C:
        _steps(dt, a_log, dt_bias, gates, t, t < T, dt_stride, low, high, H, BLOCK_H)
    else:
        channel, r = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
        inside = channel < C
        ends = tl.load(query_start + r + 1, mask=r < R, other=NEVER)
        acc = _outer_tile(
            u, weight, snapshot, ring, rows, since, first, query_start, t, channel, inside, ends, u_stride, C, T, R,
            w_channel, w_tap, J, RING,
        )  # fmt: skip
        y = tl.where((t < tl.load(query_start + R))[:, None], _finished(acc, bias, channel, inside), 0.0)
        at = t.to(tl.int64)[:, None] * C + channel[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=(t < T)[:, None] & inside[None, :])


def launch_mamba_conv(
    u: Tensor, weight: Tensor, bias: Tensor | None, dt: Tensor, a_log: Tensor, dt_bias: Tensor, low: float,
    high: float, snapshot: Tensor, ring: Tensor, rows: Tensor, since: Tensor, first: Tensor, until: Tensor,
    end: Tensor, query_start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`mamba_conv`."""
    u = u if u.stride(1) == 1 else u.contiguous()
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    out, gates = _mamba_conv_meta(u, dt)
    (tokens, channels), rows_, taps, heads = u.shape, rows.shape[0], weight.shape[-1], a_log.shape[0]
    if tokens == 0 and query_start is None:
        return out, gates
    options: dict[str, Any] = {"J": taps, "RING": ring.shape[1], "BLOCK_C": _CHANNELS, "num_warps": 4}
    blocks, taps_block = triton.cdiv(channels, _CHANNELS), triton.next_power_of_2(taps - 1)
    inputs = u, weight, bias, dt, a_log, dt_bias, snapshot, ring, out, gates, rows, since, first
    sizes = weight.stride(0), weight.stride(2), low, high
    of_heads = {"H": heads, "BLOCK_H": triton.next_power_of_2(heads)}
    if query_start is None:
        width = tokens // rows_
        _mamba_round_kernel[(rows_, blocks + 1)](
            *inputs, until, end, u.stride(0), dt.stride(0), channels, width, *sizes, **of_heads,
            BLOCK_W=triton.next_power_of_2(width), BLOCK_J=taps_block, **options, **overlapped(u.device),
        )  # fmt: skip
        return out, gates
    if tokens:
        _mamba_prompt_kernel[(triton.cdiv(tokens, _TOKENS), blocks + 1)](
            *inputs, query_start, u.stride(0), dt.stride(0), channels, tokens, rows_, *sizes, **of_heads,
            BLOCK_T=_TOKENS, BLOCK_R=triton.next_power_of_2(rows_), **options, **overlapped(u.device),
        )  # fmt: skip
    _conv_keep_kernel[(rows_, blocks)](
        u, snapshot, ring, rows, since, first, until, end, query_start, u.stride(0), channels,
        BLOCK_N=triton.next_power_of_2(ring.shape[1]), BLOCK_J=taps_block, **options, **overlapped(u.device),
    )  # fmt: skip
    return out, gates


def _mamba_conv_meta(u: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty((u.shape[0], 2, dt.shape[1]), dtype=torch.float32)


@op(cuda=launch_mamba_conv, meta=_mamba_conv_meta)
def mamba_conv(
    u: Tensor, weight: Tensor, bias: Tensor | None, dt: Tensor, a_log: Tensor, dt_bias: Tensor, low: float,
    high: float, snapshot: Mutated[Tensor], ring: Mutated[Tensor], rows: Tensor, since: Tensor, first: Tensor,
    until: Tensor, end: Tensor, query_start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute SiLU of a depthwise causal convolution over each row's tokens, and the steps of each head.

    u [T, C]: raw inputs of the pass's tokens, rows of any stride. weight [C, 1, J]: the last tap is the token's own.
    bias [C] or None. dt [T, H]: raw steps, rows of any stride. a_log, dt_bias [H] fp32. low, high: limits of a step.
    snapshot [NR, J - 1, C], ring [NR, RING, C]: raw inputs before ``since`` tokens and since then; both are updated.
    rows … end [R], query_start [R + 1] or None in a round: see :class:`unisono.kv.recurrent_pass.RecurrentPass`.

    Returns (SiLU(conv + bias) [T, C] in u's dtype, zero for padding tokens; gates [T, 2, H] fp32: the log of the decay
    ``-exp(a_log) * step``, then ``step = softplus(dt + dt_bias)`` within its limits). Inputs before position 0 are
    zero. Taps are added in order in fp32, with one rounding at the end.
    """
    token, acc = convolved_cpu(u, weight, snapshot, ring, (rows, since, first, until, end), query_start)
    acc = acc if bias is None else acc + bias.float()
    out = torch.zeros_like(u).index_copy_(0, token, (acc / (1.0 + torch.exp(-acc))).to(u.dtype))
    step = softplus_cpu(dt.float().contiguous() + dt_bias).clamp(low, high)
    return out, torch.stack((-torch.exp(a_log) * step, step), dim=1)


def _cases(dtype: str, heads: int, width: int, biased: bool) -> list[AotCase]:
    types = dict.fromkeys(("u", "weight", "bias", "dt", "snapshot", "ring", "out"), f"*{dtype}")
    types |= dict.fromkeys(("a_log", "dt_bias", "gates"), "*fp32") | dict.fromkeys(("low", "high"), "fp32")
    block: dict[str, Any] = {"J": 4, "RING": 2 + width, "BLOCK_C": _CHANNELS, "OVERLAP": True, "w_channel": 1}
    block |= {"H": heads, "BLOCK_H": triton.next_power_of_2(heads)}
    if not biased:
        block |= {"bias": None}
        del types["bias"]
    rounds = types | ints("rows since first until end", "u_stride dt_stride C W w_tap")
    prompts = types | ints("rows since first query_start", "u_stride dt_stride C T R w_tap")
    return [
        AotCase(_mamba_round_kernel, rounds, block | {"BLOCK_W": triton.next_power_of_2(width), "BLOCK_J": 4}),
        AotCase(_mamba_prompt_kernel, prompts, block | {"BLOCK_T": _TOKENS, "BLOCK_R": 32}),
    ]


AOT = [*_cases("bf16", 64, 4, True), *_cases("bf16", 128, 1, True), *_cases("fp32", 8, 2, False)]
