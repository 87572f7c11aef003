"""Short causal convolution of a recurrent layer, and its gates. Owns the ``causal_conv`` op; called by ``models``.

Every result is computed elementwise: taps in order, each fused multiply-add written out. So a token's bits depend on
its own inputs alone. In a round one program computes all tokens of a row and channel, and then writes the row's
remembered inputs. In a prompt pass programs take tiles of tokens, and a second launch writes the remembered inputs.

Shapes: T tokens, R rows, NR state rows, C channels, J taps, Hv value heads, W tokens per row of a round, RING
positions whose raw inputs a row remembers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, ints, op
from unisono.kernels.overlap import follow, overlapped, overlapping
from unisono.kernels.recurrent.causal_conv_cpu import convolved_cpu, gates_cpu

NEVER, LOG2_E = tl.constexpr(2**31 - 1), tl.constexpr(math.log2(math.e))
_CHANNELS, _TOKENS = 256, 16
"""Channels and tokens of a program."""
_PROMPTS = {"num_warps": 4, "maxnreg": 80}
"""Maximum registers: tiles with the start of a row spill, so that more of the others, which need half as many, run at
once."""


@triton.jit
def _earlier(snapshot, ring, slot, since, at, channel, mask, C, J: tl.constexpr, RING: tl.constexpr):
    """Load raw inputs [N, channels] of positions ``at`` before the pass, from the ring or the snapshot."""
    slot = slot.to(tl.int64)
    kept = snapshot + (slot * (J - 1) + at - since + (J - 1))[:, None] * C + channel[None, :]
    latest = ring + (slot * RING + at % RING)[:, None] * C + channel[None, :]
    before = (at < since)[:, None]
    old = tl.load(kept, mask=mask & before, other=0.0)
    return tl.where(before, old, tl.load(latest, mask=mask & (at >= since)[:, None], other=0.0))


@triton.jit
def _softplus(x):
    """Compute log(1 + exp(x)), with Higham's correction of the sum's rounding error."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    ratio = tl.where(total == 1.0, 1.0, small / tl.where(total == 1.0, 1.0, total - 1.0))
    rest = tl.where(total == 1.0, small, tl.log(total))
    return tl.fma(rest, ratio, tl.maximum(x, 0.0))


@triton.jit
def _gates(ba, a_log, dt_bias, gates, token, inside, ba_stride, HV: tl.constexpr, BLOCK_H: tl.constexpr):
    """Compute the log of the decay and beta of tokens [N], of all heads."""
    head = tl.arange(0, BLOCK_H)
    mask = inside[:, None] & (head < HV)[None, :]
    at = token.to(tl.int64)[:, None] * ba_stride + head[None, :]
    b = tl.load(ba + at, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(ba + at + HV, mask=mask, other=0.0).to(tl.float32)
    x = a + tl.load(dt_bias + head, mask=head < HV, other=0.0)[None, :]
    softplus = _softplus(x)
    rate = -tl.exp(tl.load(a_log + head, mask=head < HV, other=0.0))
    out = gates + token.to(tl.int64)[:, None] * (2 * HV) + head[None, :]
    tl.store(out, rate[None, :] * softplus, mask=mask)
    tl.store(out + HV, 1.0 / (1.0 + tl.exp(-b)), mask=mask)


@triton.jit
def _channel_gates(f, b, a_log, dt_bias, gates, token, inside, column, f_stride, b_stride, HV: tl.constexpr,
                   K: tl.constexpr):  # fmt: skip
    """Compute these columns of the gates of tokens [N]: the log of each channel's decay, HV * K, then beta, HV."""
    decays = column < HV * K
    head = tl.where(decays, column // K, column - HV * K)
    at = token.to(tl.int64)[:, None]
    mask = inside[:, None] & (column < HV * (K + 1))[None, :]
    x = tl.load(f + at * f_stride + column[None, :], mask=mask & decays[None, :], other=0.0).to(tl.float32)
    x += tl.load(dt_bias + column, mask=decays, other=0.0)[None, :]
    rate = -tl.exp(tl.load(a_log + head, mask=decays, other=0.0))
    beta = tl.load(b + at * b_stride + head[None, :], mask=mask & (column >= HV * K)[None, :], other=0.0)
    beta = 1.0 / (1.0 + tl.exp(-beta.to(tl.float32)))
    y = tl.where(decays[None, :], rate[None, :] * _softplus(x), beta)
    tl.store(gates + at * (HV * (K + 1)) + column[None, :], y, mask=mask)


@triton.jit
def _silu(x):
    """Compute x · sigmoid(x); the sigmoid is the square of rsqrt(1 + exp(-x)): half the instructions of a division."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return x * root * root


@triton.jit
def _keep(u, snapshot, ring, slot, since, first, until, end, begin, channel, u_stride, C,
          J: tl.constexpr, RING: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr):  # fmt: skip
    """Update a row's snapshot and remembered inputs. All reads come before all writes."""
    inside = (channel < C)[None, :]
    place = tl.arange(0, BLOCK_J)
    at = until - (J - 1) + place
    moved = ((place < J - 1) & (until > since))[:, None] & inside
    new = (at >= first)[:, None]
    token = (begin + at - first).to(tl.int64)[:, None] * u_stride + channel[None, :]
    fresh = tl.load(u + token, mask=moved & new, other=0.0)
    earlier = _earlier(snapshot, ring, slot, since, at, channel, moved & (at < first)[:, None], C, J, RING)
    taps = tl.where(new, fresh, earlier)

    count = end - first
    step = tl.maximum(count - RING, 0) + tl.arange(0, BLOCK_N)
    latest = (step < count)[:, None] & inside
    token = (begin + step).to(tl.int64)[:, None] * u_stride + channel[None, :]
    inputs = tl.load(u + token, mask=latest, other=0.0)
    tl.debug_barrier()
    slot = slot.to(tl.int64)
    tl.store(snapshot + (slot * (J - 1) + place)[:, None] * C + channel[None, :], taps, mask=moved)
    tl.store(ring + (slot * RING + (first + step) % RING)[:, None] * C + channel[None, :], inputs, mask=latest)


@triton.jit
def _round_tile(u, weight, snapshot, ring, slot, since, first, begin, i, channel, live, u_stride, C, w_channel, w_tap,
                J: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """Convolve tokens i of a round's row. begin: its first token in the pass; live [tokens, channels]: mask."""
    acc = tl.zeros([i.shape[0], channel.shape[0]], tl.float32)
    for j in tl.static_range(J):
        step = i - (J - 1) + j
        old = (step < 0)[:, None]
        token = (begin + step).to(tl.int64)[:, None] * u_stride + channel[None, :]
        x = tl.load(u + token, mask=live & (step >= 0)[:, None], other=0.0)
        if j < J - 1:
            x = tl.where(old, _earlier(snapshot, ring, slot, since, first + step, channel, live & old, C, J, RING), x)
        w = tl.load(weight + channel * w_channel + j * w_tap, mask=channel < C, other=0.0).to(tl.float32)
        acc = tl.fma(x.to(tl.float32), tl.zeros_like(acc) + w[None, :], acc)
    return acc


@overlapping(reads_early=True)
@triton.jit
def _conv_round_kernel(
    u, weight, ba, b, a_log, dt_bias, snapshot, ring, out, gates, rows, since, first, until, end, u_stride, ba_stride,
    b_stride, C, W, w_channel, w_tap, J: tl.constexpr, RING: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_J: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve a round. The row's positions were written before the kernel ahead, and are read before that has
    ended.

    The last programs of a row compute the gates. K: 0, or the channels of a head that each have a decay: ba then has
    these inputs, and b those of beta.
    """
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK_W)
    slot, seen, begin = tl.load(rows + row), tl.load(since + row), tl.load(first + row)
    stop, goal = tl.where(begin < 0, -1, tl.load(end + row)), tl.load(until + row)
    follow(OVERLAP)
    part = tl.program_id(1) - tl.cdiv(C, BLOCK_C)
    if part >= 0:
        if K > 0:
            column = part * BLOCK_C + tl.arange(0, BLOCK_C)
            _channel_gates(ba, b, a_log, dt_bias, gates, row * W + i, i < W, column, ba_stride, b_stride, HV, K)
        else:
            _gates(ba, a_log, dt_bias, gates, row * W + i, i < W, ba_stride, HV, BLOCK_H)
    else:
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = (channel < C)[None, :]
        live = (i < stop - begin)[:, None] & inside
        acc = _round_tile(u, weight, snapshot, ring, slot, seen, begin, row * W, i, channel, live, u_stride, C,
                          w_channel, w_tap, J, RING)  # fmt: skip
        y = _silu(acc)
        token = (row * W + i).to(tl.int64)[:, None] * C + channel[None, :]
        tl.store(out + token, y.to(out.dtype.element_ty), mask=(i < W)[:, None] & inside)
        _keep(u, snapshot, ring, slot, seen, begin, goal, stop, row * W, channel, u_stride, C,
              J, RING, BLOCK_W, BLOCK_J)  # fmt: skip


@triton.jit
def _four(first, stride, inside):
    """Load four rows of a number per channel, in fp32, the first at ``first``: tokens' inputs, or taps."""
    return (
        tl.load(first, mask=inside, other=0.0).to(tl.float32),
        tl.load(first + stride, mask=inside, other=0.0).to(tl.float32),
        tl.load(first + 2 * stride, mask=inside, other=0.0).to(tl.float32),
        tl.load(first + 3 * stride, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def _store_four(out, stride, inside, a, b, c, x, w):
    """Convolve four tokens with four taps w. x: their inputs; a, b, c: inputs of the three tokens before them."""
    _store_one(out, inside, a, b, c, x[0], w)
    _store_one(out + stride, inside, b, c, x[0], x[1], w)
    _store_one(out + 2 * stride, inside, c, x[0], x[1], x[2], w)
    _store_one(out + 3 * stride, inside, x[0], x[1], x[2], x[3], w)


@triton.jit
def _store_one(out, inside, a, b, c, d, w):
    """Convolve the token with input d, after tokens with inputs a, b, c."""
    acc = tl.fma(d, w[3], tl.fma(c, w[2], tl.fma(b, w[1], tl.fma(a, w[0], tl.zeros_like(a)))))
    tl.store(out, _silu(acc).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _inner_tile(u, weight, out, begin, channel, inside, u_stride, C, w_channel, w_tap, BLOCK_T: tl.constexpr):
    """Store the convolution with four taps of a tile of tokens that all have their earlier inputs in the pass.

    A thread has all tokens of its channels, so it loads each input once, four tokens in advance.
    """
    w = _four(weight + channel * w_channel, w_tap, inside)
    first = u + begin.to(tl.int64) * u_stride + channel
    out += begin.to(tl.int64) * C + channel
    x = _four(first, u_stride, inside)
    a = tl.load(first - 3 * u_stride, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first - 2 * u_stride, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(first - u_stride, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(0, BLOCK_T, 4):
        ahead = x
        if i + 4 < BLOCK_T:
            ahead = _four(first + (i + 4) * u_stride, u_stride, inside)
        _store_four(out + i * C, C, inside, a, b, c, x, w)
        a, b, c = x[1], x[2], x[3]
        x = ahead


@triton.jit
def _outer_tile(u, weight, snapshot, ring, rows, since, first, query_start, t, channel, inside, ends, u_stride, C,
                T, R, w_channel, w_tap, J: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """Convolve any tile of tokens; padding yields zeros. ends [rows]: end of each row in the pass."""
    row = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
    real = (t < T) & (row < R)
    at = t - tl.load(query_start + row, mask=real, other=0)
    near = real & (at < J - 1)
    begin = tl.load(first + row, mask=near, other=0)
    slot, seen = tl.load(rows + row, mask=near, other=0), tl.load(since + row, mask=near, other=0)
    some = tl.max(near.to(tl.int32), axis=0) > 0
    acc = tl.zeros([t.shape[0], channel.shape[0]], tl.float32)
    for j in tl.static_range(J):
        step = at - (J - 1) + j
        token = (t - (J - 1) + j).to(tl.int64)[:, None] * u_stride + channel[None, :]
        x = tl.load(u + token, mask=(real & (step >= 0))[:, None] & inside[None, :], other=0.0)
        if j < J - 1:  # noqa: SIM102  one condition is the compiler's, the other the device's
            if some:
                old = (near & (step < 0))[:, None] & inside[None, :]
                x = tl.where(old, _earlier(snapshot, ring, slot, seen, begin + step, channel, old, C, J, RING), x)
        w = tl.load(weight + channel * w_channel + j * w_tap, mask=inside, other=0.0).to(tl.float32)
        acc = tl.fma(x.to(tl.float32), tl.zeros_like(acc) + w[None, :], acc)
    return acc


@triton.jit(do_not_specialize=["T", "R"])
def _conv_prompt_kernel(
    u, weight, ba, b, a_log, dt_bias, snapshot, ring, out, gates, rows, since, first, query_start, u_stride, ba_stride,
    b_stride, C, T, R, w_channel, w_tap, J: tl.constexpr, RING: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve a tile of a prompt pass; its last programs compute the gates, as in :func:`_conv_round_kernel`."""
    follow(OVERLAP)
    begin = tl.program_id(0) * BLOCK_T
    t = begin + tl.arange(0, BLOCK_T)
    part = tl.program_id(1) - tl.cdiv(C, BLOCK_C)
    if part >= 0:
        if K > 0:
            column = part * BLOCK_C + tl.arange(0, BLOCK_C)
            _channel_gates(ba, b, a_log, dt_bias, gates, t, t < T, column, ba_stride, b_stride, HV, K)
        else:
            _gates(ba, a_log, dt_bias, gates, t, t < T, ba_stride, HV, BLOCK_H)
    else:
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = channel < C
        r = tl.arange(0, BLOCK_R)
        starts = tl.load(query_start + r, mask=r < R, other=NEVER)
        ends = tl.load(query_start + r + 1, mask=r < R, other=NEVER)
        whole = (starts + (J - 1) <= begin) & (begin + BLOCK_T <= ends) & (r < R)
        if (J == 4) & (tl.max(whole.to(tl.int32), axis=0) > 0):
            _inner_tile(u, weight, out, begin, channel, inside, u_stride, C, w_channel, w_tap, BLOCK_T)
        else:
            acc = _outer_tile(u, weight, snapshot, ring, rows, since, first, query_start, t, channel, inside, ends,
                              u_stride, C, T, R, w_channel, w_tap, J, RING)  # fmt: skip
            token = t.to(tl.int64)[:, None] * C + channel[None, :]
            tl.store(out + token, _silu(acc).to(out.dtype.element_ty), mask=(t < T)[:, None] & inside[None, :])


@triton.jit
def _conv_keep_kernel(
    u, snapshot, ring, rows, since, first, until, end, query_start, u_stride, C,
    J: tl.constexpr, RING: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0)
    begin = tl.load(first + row)
    if begin >= 0:
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        _keep(u, snapshot, ring, tl.load(rows + row), tl.load(since + row), begin, tl.load(until + row),
              tl.load(end + row), tl.load(query_start + row), channel, u_stride, C,
              J, RING, BLOCK_N, BLOCK_J)  # fmt: skip


def launch_causal_conv(
    u: Tensor, weight: Tensor, ba: Tensor, a_log: Tensor, dt_bias: Tensor, snapshot: Tensor, ring: Tensor,
    rows: Tensor, since: Tensor, first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`causal_conv`."""
    gates = u.new_empty((u.shape[0], 2, ba.shape[1] // 2), dtype=torch.float32)
    kept, where = (snapshot, ring), (rows, since, first, until, end)
    return launch_conv(u, weight, (ba, None, a_log, dt_bias, gates), kept, where, query_start), gates


def launch_conv(
    u: Tensor, weight: Tensor, of_gates: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
    kept: tuple[Tensor, Tensor], where: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], query_start: Tensor | None,
) -> Tensor:  # fmt: skip
    """Convolve and fill the gates; see :func:`causal_conv` for arguments, and for the result.

    of_gates: (ba, None, a_log, dt_bias, gates), or with a decay for each channel (f [T, Hv K], b [T, Hv], a_log,
    dt_bias [Hv K], gates [T, Hv (K + 1)]). kept: (snapshot, ring). where: (rows … end).
    """
    u = u if u.stride(1) == 1 else u.contiguous()
    (ba, b, a_log, dt_bias, gates), (snapshot, ring), (rows, since, first, until, end) = of_gates, kept, where
    out = u.new_empty(u.shape)
    tokens, channels, heads, rows_ = u.shape[0], u.shape[1], a_log.shape[0], rows.shape[0]
    if tokens == 0 and query_start is None:
        return out
    taps, positions, w_strides = weight.shape[-1], ring.shape[1], (weight.stride(0), weight.stride(2))
    options: dict[str, Any] = {"J": taps, "RING": positions, "BLOCK_C": _CHANNELS}
    heads_block, taps_block = triton.next_power_of_2(heads), triton.next_power_of_2(taps - 1)
    inputs = u, weight, ba, b, a_log, dt_bias, snapshot, ring, out, gates, rows, since, first
    strides = u.stride(0), ba.stride(0), 0 if b is None else b.stride(0), channels
    of_heads = {"HV": heads, "K": 0 if b is None else dt_bias.shape[0] // heads, "BLOCK_H": heads_block}
    blocks = triton.cdiv(channels, _CHANNELS)
    more = 1 if b is None else triton.cdiv(gates.shape[1], _CHANNELS)
    if query_start is None:
        width = tokens // rows_
        _conv_round_kernel[(rows_, blocks + more)](
            *inputs, until, end, *strides, width, *w_strides, **of_heads, BLOCK_W=triton.next_power_of_2(width),
            BLOCK_J=taps_block, **options, num_warps=4, **overlapped(u.device),
        )  # fmt: skip
        return out
    if tokens:
        _conv_prompt_kernel[(triton.cdiv(tokens, _TOKENS), blocks + more)](
            *inputs, query_start, *strides, tokens, rows_, *w_strides, **of_heads, BLOCK_T=_TOKENS,
            BLOCK_R=triton.next_power_of_2(rows_), **options, **_PROMPTS, **overlapped(u.device),
        )  # fmt: skip
    _conv_keep_kernel[(rows_, blocks)](
        u, snapshot, ring, rows, since, first, until, end, query_start, u.stride(0), channels,
        BLOCK_N=triton.next_power_of_2(positions), BLOCK_J=taps_block, **options, num_warps=4, **overlapped(u.device),
    )  # fmt: skip
    return out


def _causal_conv_meta(u: Tensor, ba: Tensor) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty((u.shape[0], 2, ba.shape[1] // 2), dtype=torch.float32)


@op(cuda=launch_causal_conv, meta=_causal_conv_meta)
def causal_conv(
    u: Tensor, weight: Tensor, ba: Tensor, a_log: Tensor, dt_bias: Tensor, snapshot: Mutated[Tensor],
    ring: Mutated[Tensor], rows: Tensor, since: Tensor, first: Tensor, until: Tensor, end: Tensor,
    query_start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute SiLU of a depthwise causal convolution over each row's tokens, and the gates of each value head.

    u [T, C]: raw inputs of the pass's tokens, rows of any stride. weight [C, 1, J]: the last tap is the token's own;
    fastest if a tap's channels are adjacent in memory.
    ba [T, 2 Hv]: b, then a. a_log, dt_bias [Hv] fp32. snapshot [NR, J - 1, C], ring [NR, RING, C]: raw inputs
    before ``since`` tokens and since then, of which at least the last J - 1 are remembered; both are updated.
    rows … end [R], query_start [R + 1] or None in a round: see :class:`unisono.kv.recurrent_pass.RecurrentPass`.

    Returns (SiLU(conv) [T, C] in u's dtype, gates [T, 2, Hv] fp32: the log of the decay
    ``-exp(a_log) * softplus(a + dt_bias)``, then ``beta = sigmoid(b)``). Padding tokens are zero in the first one.
    Inputs before position 0 are zero. Taps are added in order in fp32, with one rounding at the end.
    """
    token, acc = convolved_cpu(u, weight, snapshot, ring, (rows, since, first, until, end), query_start)
    out = torch.zeros_like(u).index_copy_(0, token, (acc / (1.0 + torch.exp(-acc))).to(u.dtype))
    return out, gates_cpu(ba, a_log, dt_bias)


def conv_cases(dtype: str, heads: int, width: int, key_dim: int = 0) -> list[AotCase]:
    """AotCases of prompt passes and of rounds of ``width`` tokens per row. key_dim: channels with a decay each."""
    types = dict.fromkeys(("u", "weight", "ba", "snapshot", "ring", "out"), f"*{dtype}")
    types |= dict.fromkeys(("a_log", "dt_bias", "gates"), "*fp32") | ({"b": f"*{dtype}"} if key_dim else {})
    block: dict[str, Any] = {"J": 4, "RING": 2 + width, "BLOCK_C": _CHANNELS, "OVERLAP": True}
    both = block | {"HV": heads, "K": key_dim, "BLOCK_H": triton.next_power_of_2(heads), "w_channel": 1}
    both |= {} if key_dim else {"b": None}
    strides = "u_stride ba_stride b_stride C"
    rounds = types | ints("rows since first until end", f"{strides} W w_tap")
    prompts = types | ints("rows since first query_start", f"{strides} T R w_tap")
    keep = {name: types[name] for name in ("u", "snapshot", "ring")}
    keep |= ints("rows since first until end query_start", "u_stride C")
    return [
        AotCase(_conv_round_kernel, rounds, both | {"BLOCK_W": triton.next_power_of_2(width), "BLOCK_J": 4}),
        AotCase(_conv_prompt_kernel, prompts, both | {"BLOCK_T": _TOKENS, "BLOCK_R": 32}, **_PROMPTS),
        AotCase(_conv_keep_kernel, keep, block | {"BLOCK_N": triton.next_power_of_2(2 + width), "BLOCK_J": 4}),
    ]


AOT = [
    case
    for dtype, heads, width in (("bf16", 32, 1), ("bf16", 32, 4), ("bf16", 48, 8), ("fp16", 8, 4), ("fp32", 8, 2))
    for case in conv_cases(dtype, heads, width)
]
