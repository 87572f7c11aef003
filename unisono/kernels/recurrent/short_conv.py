"""Short causal convolution without gates or SiLU, the whole mixer state of LFM2. Owns the ``short_conv`` op.

Taps are added in order, each fused multiply-add written out, so a token's bits depend on its own inputs alone. The
remembered inputs are those of ``kernels/recurrent/causal_conv.py``, whose device functions this file uses.

Shapes: T tokens, R rows, NR state rows, C channels, J taps, W tokens per row of a round, RING remembered positions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, ints, op
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.recurrent.causal_conv import NEVER, _conv_keep_kernel, _keep, _outer_tile, _round_tile
from unisono.kernels.recurrent.causal_conv_cpu import convolved_cpu

_CHANNELS, _TOKENS = 256, 16
"""Channels and tokens of a program."""


@triton.jit
def _short_round_kernel(
    u, weight, snapshot, ring, out, rows, since, first, until, end, u_stride, C, W, w_channel, w_tap,
    J: tl.constexpr, RING: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_J: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve a row of a round in BLOCK_C channels, then update its remembered inputs; padding yields zeros."""
    follow(OVERLAP)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK_W)
    slot, seen, begin = tl.load(rows + row), tl.load(since + row), tl.load(first + row)
    stop, goal = tl.where(begin < 0, -1, tl.load(end + row)), tl.load(until + row)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (channel < C)[None, :]
    live = (i < stop - begin)[:, None] & inside
    acc = _round_tile(u, weight, snapshot, ring, slot, seen, begin, row * W, i, channel, live, u_stride, C,
                      w_channel, w_tap, J, RING)  # fmt: skip
    at = (row * W + i).to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(i < W)[:, None] & inside)
    _keep(u, snapshot, ring, slot, seen, begin, goal, stop, row * W, channel, u_stride, C, J, RING, BLOCK_W, BLOCK_J)


@triton.jit(do_not_specialize=["T", "R"])
def _short_prompt_kernel(
    u, weight, snapshot, ring, out, rows, since, first, query_start, u_stride, C, T, R, w_channel, w_tap,
    J: tl.constexpr, RING: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve a tile of a prompt pass; padding yields zeros."""
    follow(OVERLAP)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel, r = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    inside = channel < C
    ends = tl.load(query_start + r + 1, mask=r < R, other=NEVER)
    acc = _outer_tile(
        u, weight, snapshot, ring, rows, since, first, query_start, t, channel, inside, ends, u_stride, C, T, R,
        w_channel, w_tap, J, RING,
    )  # fmt: skip
    at = t.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(t < T)[:, None] & inside[None, :])


def launch_short_conv(
    u: Tensor, weight: Tensor, snapshot: Tensor, ring: Tensor, rows: Tensor, since: Tensor, first: Tensor,
    until: Tensor, end: Tensor, query_start: Tensor | None,
) -> Tensor:  # fmt: skip
    """See :func:`short_conv`."""
    u = u if u.stride(1) == 1 else u.contiguous()
    out = u.new_empty(u.shape)
    (tokens, channels), rows_, taps = u.shape, rows.shape[0], weight.shape[-1]
    if tokens == 0 and query_start is None:
        return out
    options: dict[str, Any] = {"J": taps, "RING": ring.shape[1], "BLOCK_C": _CHANNELS, "num_warps": 4}
    blocks, taps_block = triton.cdiv(channels, _CHANNELS), triton.next_power_of_2(taps - 1)
    inputs, strides = (u, weight, snapshot, ring, out, rows, since, first), (weight.stride(0), weight.stride(2))
    if query_start is None:
        width = tokens // rows_
        _short_round_kernel[(rows_, blocks)](
            *inputs, until, end, u.stride(0), channels, width, *strides, BLOCK_W=triton.next_power_of_2(width),
            BLOCK_J=taps_block, **options, **overlapped(u.device),
        )  # fmt: skip
        return out
    if tokens:
        _short_prompt_kernel[(triton.cdiv(tokens, _TOKENS), blocks)](
            *inputs, query_start, u.stride(0), channels, tokens, rows_, *strides, BLOCK_T=_TOKENS,
            BLOCK_R=triton.next_power_of_2(rows_), **options, **overlapped(u.device),
        )  # fmt: skip
    _conv_keep_kernel[(rows_, blocks)](
        u, snapshot, ring, rows, since, first, until, end, query_start, u.stride(0), channels,
        BLOCK_N=triton.next_power_of_2(ring.shape[1]), BLOCK_J=taps_block, **options, **overlapped(u.device),
    )  # fmt: skip
    return out


@op(cuda=launch_short_conv, shape=lambda u: u.shape)
def short_conv(
    u: Tensor, weight: Tensor, snapshot: Mutated[Tensor], ring: Mutated[Tensor], rows: Tensor, since: Tensor,
    first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute a depthwise causal convolution over each row's tokens: [T, C] in u's dtype, zeros for padding.

    u [T, C]: inputs of the pass's tokens. weight [C, 1, J]: the last tap is the token's own. snapshot [NR, J - 1, C],
    ring [NR, RING, C]: inputs before ``since`` tokens and since then; both are updated. rows … end [R], query_start
    [R + 1] or None in a round: see :class:`unisono.kv.recurrent_pass.RecurrentPass`. Inputs before position 0 are
    zero. Taps are added in order in fp32, with one rounding at the end.
    """
    token, acc = convolved_cpu(u, weight, snapshot, ring, (rows, since, first, until, end), query_start)
    return torch.zeros_like(u).index_copy_(0, token, acc.to(u.dtype))


def _cases(taps: int, width: int) -> list[AotCase]:
    types = dict.fromkeys(("u", "weight", "snapshot", "ring", "out"), "*bf16")
    block: dict[str, Any] = {"J": taps, "RING": taps - 1 + width, "BLOCK_C": _CHANNELS, "OVERLAP": True, "w_channel": 1}
    rounds = types | ints("rows since first until end", "u_stride C W w_tap")
    prompts = types | ints("rows since first query_start", "u_stride C T R w_tap")
    taps_block = triton.next_power_of_2(taps - 1)
    return [
        AotCase(_short_round_kernel, rounds, block | {"BLOCK_W": width, "BLOCK_J": taps_block}),
        AotCase(_short_prompt_kernel, prompts, block | {"BLOCK_T": _TOKENS, "BLOCK_R": 32}),
    ]


AOT = [*_cases(3, 1), *_cases(3, 4)]
