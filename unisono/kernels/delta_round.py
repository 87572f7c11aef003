"""A Gated DeltaNet layer's part of a round between its projections. Owns the ``delta_round`` op; called by ``models``.

The op is causal convolution, gated delta rule and gated norm one after the other, four launches. For few rows these
wait for one another longer than they compute, so there are two kernels that do the same. :func:`_delta_round_kernel`
holds its part of the state in registers from before its inputs are there. It computes the convolution where it needs
it, and what of a chunk does not depend on the state in every program anew. :func:`_norm_keep_kernel` is the gated norm;
the convolution's inputs are remembered there, when nobody reads the old ones any more. Where
:func:`prove_delta_round` found the bits of the four launches in them on the present GPU they serve rounds of up to
FEW_ROWS rows.

Shapes: as in ``kernels/gated_delta.py`` and ``kernels/causal_conv.py``; R rows of W tokens, T = R W.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.causal_conv import _CHANNELS, _earlier, _keep, launch_causal_conv
from unisono.kernels.causal_conv_cpu import causal_conv_cpu
from unisono.kernels.fp8_quantize import GROUP, empty_quantised, quantised_cpu
from unisono.kernels.gated_delta import Sizes, launch_gated_delta
from unisono.kernels.gated_delta_cpu import CHUNK as CHUNK_TOKENS
from unisono.kernels.gated_delta_cpu import gated_delta_cpu
from unisono.kernels.gated_delta_triton import (
    CHUNK,
    GUARDED,
    _blank,
    _outputs,
    _put,
    _reads,
    _split,
    _squares,
    _times,
)
from unisono.kernels.gated_norm import _HEADS, gated_heads, gated_norm_cpu, launch_gated_norm, launch_gated_norm_fp8
from unisono.kernels.library import AotCase, define, ints, register
from unisono.kernels.overlap import follow, overlapped

FEW_ROWS = 4
"""Up to this number of rows the two kernels serve: above it what programs compute anew counts for more. A guess from
registers and programs (benchmarks/kernel_fusions.py times 1 to 16 rows and several tiles)."""

BLOCK_V, WARPS = 32, 4
"""Rows of a head's state in a program, and its warps."""

_proven: dict[tuple[Sizes, int, torch.dtype], bool] = {}
"""(sizes, taps, dtype) -> whether :func:`prove_delta_round` saw the same bits."""


class Convolution(NamedTuple):
    """The convolution's weights, as ``causal_conv`` takes them, and what rows keep of its inputs."""

    weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    snapshot: Tensor
    ring: Tensor


class Kept(NamedTuple):
    """What rows keep of the rule, as ``gated_delta`` takes it."""

    state: Tensor
    kv_ring: Tensor
    gates_ring: Tensor


class Norm(NamedTuple):
    """The gated norm: z [T, Hv V], weight [V], eps, and the group that its result is quantised by; None: it is not."""

    z: Tensor
    weight: Tensor
    eps: float
    group: int | None = None


# ---- one program: a tile of a head's state, a row -----------------------------------------------------


@triton.jit
def _alone(x):
    """x, which the compiler may not fuse into a sum: unfused launches store it and read it back."""
    if GUARDED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def _convolved(u, weight, snapshot, ring, slot, since, begin, first, stop, position, channel, u_stride, C,
               J: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """SiLU of the convolution of the pass's tokens at ``position`` [CHUNK], zero elsewhere: [CHUNK, channels]."""
    live = (position >= first) & (position < stop)
    zero = tl.zeros([CHUNK, channel.shape[0]], tl.float32)
    acc = zero
    for j in tl.static_range(J):
        at = position - (J - 1) + j
        old = at < first
        token = (begin + at - first).to(tl.int64)[:, None] * u_stride + channel[None, :]
        x = tl.load(u + token, mask=(live & (at >= first))[:, None], other=0.0)
        if j < J - 1:
            earlier = _earlier(snapshot, ring, slot, since, at, channel, (live & old)[:, None], C, J, RING)
            x = tl.where(old[:, None], earlier, x)
        w = tl.load(weight + channel * J + j).to(tl.float32)
        acc = tl.fma(x.to(tl.float32), zero + w[None, :], acc)
    return (acc / (1.0 + tl.exp(-acc))).to(u.dtype.element_ty)


@triton.jit
def _new_gates(ba, a_log, dt_bias, token, live, h, ba_stride, HV: tl.constexpr):
    """The log of the decay and beta of head h for tokens [CHUNK]: ``causal_conv._gates``."""
    at = token.to(tl.int64) * ba_stride + h
    b = tl.load(ba + at, mask=live, other=0.0).to(tl.float32)
    a = tl.load(ba + at + HV, mask=live, other=0.0).to(tl.float32)
    x = a + tl.load(dt_bias + h)
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    ratio = tl.where(total == 1.0, 1.0, small / tl.where(total == 1.0, 1.0, total - 1.0))
    rest = tl.where(total == 1.0, small, tl.log(total))
    softplus = tl.fma(rest, ratio, tl.maximum(x, 0.0))
    rate = -tl.exp(tl.load(a_log + h))
    return _alone(rate * softplus), _alone(1.0 / (1.0 + tl.exp(-b)))


@triton.jit
def _prepared(u, ba, weight, a_log, dt_bias, snapshot, ring, kv_ring, gates_ring, slot, since, begin, first, stop,
              position, h, dv, u_stride, ba_stride, keeps,
              HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
              CONV_RING: tl.constexpr, RING: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """Keys, queries and values of a chunk, and what of it does not depend on the state; remembers the new ones.

    keeps: whether this program is the head's first.
    """
    C: tl.constexpr = 2 * HK * K + HV * V
    KV: tl.constexpr = HK * K + HV * V
    G: tl.constexpr = HV // HK
    dtype: tl.constexpr = u.dtype.element_ty
    i, d = tl.arange(0, CHUNK), tl.arange(0, K)
    hk = h // G
    of_q, of_k, of_v = hk * K + d, HK * K + hk * K + d, 2 * HK * K + h * V + dv
    live = (position >= first) & (position < stop)
    q = _convolved(u, weight, snapshot, ring, slot, since, begin, first, stop, position, of_q, u_stride,
                   C, J, CONV_RING)  # fmt: skip
    k = _convolved(u, weight, snapshot, ring, slot, since, begin, first, stop, position, of_k, u_stride,
                   C, J, CONV_RING)  # fmt: skip
    v = _convolved(u, weight, snapshot, ring, slot, since, begin, first, stop, position, of_v, u_stride,
                   C, J, CONV_RING)  # fmt: skip
    place = slot.to(tl.int64) * RING + position % RING
    old = ((position < first) & (position < stop))[:, None]
    kept_k = kv_ring + place[:, None] * KV + hk * K + d[None, :]
    k = tl.where(old, tl.load(kept_k, mask=old, other=0.0), k)
    kept_v = kv_ring + place[:, None] * KV + HK * K + h * V + dv[None, :]
    v = tl.where(old, tl.load(kept_v, mask=old, other=0.0), v)
    g, beta = _new_gates(ba, a_log, dt_bias, begin + position - first, live, h, ba_stride, HV)
    kept_g, was = gates_ring + place * (2 * HV) + h, (position < first) & (position < stop)
    g = tl.where(was, tl.load(kept_g, mask=was, other=0.0), tl.where(live, g, 0.0))
    beta = tl.where(was, tl.load(kept_g + HV, mask=was, other=0.0), tl.where(live, beta, 0.0))
    tl.store(kept_k, k, mask=live[:, None] & (keeps & (h % G == 0)))
    tl.store(kept_g, g, mask=live & keeps)
    tl.store(kept_g + HV, beta, mask=live & keeps)

    sums, sums_row = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for s in tl.static_range(CHUNK):
        term = tl.sum(tl.where(i == s, g, 0.0), 0)
        sums += tl.where(i >= s, term, 0.0)
        sums_row += tl.where(i >= s, term, 0.0)
    zero = tl.zeros([CHUNK, CHUNK], tl.float32)
    kk = tl.dot(k, tl.trans(k), zero, input_precision="ieee")
    qk = tl.dot(q, tl.trans(k), zero, input_precision="ieee")
    qq = tl.dot(q, tl.trans(q), zero, input_precision="ieee")
    T, P, w_k, w_q, w_s, whole = _squares(kk, qk, qq, sums, sums_row, beta, SCALE)
    T, P = tl.trans(T * beta[None, :]), tl.trans(P)
    T_high, T_low, P_high, P_low = T, T, P, P
    if dtype != tl.float32:
        T_high, T_low = _split(T, dtype)
        P_high, P_low = _split(P, dtype)
    return k, q, v, T_high, T_low, P_high, P_low, _alone(w_k), _alone(w_q), _alone(w_s), whole


@triton.jit
def _delta_round_kernel(
    u, ba, weight, a_log, dt_bias, snapshot, ring, state, kv_ring, gates_ring, out, rows, since, first, until, end,
    u_stride, ba_stride, W,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CONV_RING: tl.constexpr,
    RING: tl.constexpr, SCALE: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of V, value head, row): ``gated_delta_triton._round_kernel`` and the two kernels before it.

    The state is read early (:data:`unisono.kernels.overlap.READ_EARLY`): the kernel before writes inputs.
    """
    h, row = tl.program_id(1), tl.program_id(2)
    KV: tl.constexpr = HK * K + HV * V
    dv, d, i = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, K), tl.arange(0, CHUNK)
    out += h * V + dv[None, :]
    v_ring = kv_ring + HK * K + h * V
    begin, at = row * W, tl.load(first + row)
    if at < 0:
        follow(OVERLAP)
        _blank(out, begin, begin + W, HV * V, BLOCK_V)
    else:
        slot, start, goal, stop = tl.load(rows + row), tl.load(since + row), tl.load(until + row), tl.load(end + row)
        limit, position = at + W, start + i
        home = state + (slot.to(tl.int64) * HV + h) * (V * K) + dv[:, None] * K + d[None, :]
        S = tl.load(home)
        zero = tl.zeros([BLOCK_V, CHUNK], tl.float32)
        keeps = tl.program_id(0) == 0
        follow(OVERLAP)
        k, q, v, T_high, T_low, P_high, P_low, w_k, w_q, w_s, whole = _prepared(
            u, ba, weight, a_log, dt_bias, snapshot, ring, kv_ring, gates_ring, slot, start, begin, at, stop, position,
            h, dv, u_stride, ba_stride, keeps, HK, HV, K, V, J, CONV_RING, RING, SCALE,
        )  # fmt: skip
        k_high, k_low, q_high, q_low = _reads(S, k, q, zero, zero, zero, zero)
        o, taken = _outputs(
            k_high, k_low, q_high, q_low, v, T_high, T_low, P_high, P_low, w_k[None, :], w_q[None, :], w_s[None, :]
        )
        _put(out, v_ring, o, v, position, begin, at, stop, limit, slot, dv, HV * V, KV, RING, True)
        if (limit > start + CHUNK) | (goal > start):
            after = position + CHUNK
            S = _times(taken, k, S * whole)
            if goal > start:
                tl.store(home, S)
            k, q, v, T_high, T_low, P_high, P_low, w_k, w_q, w_s, whole = _prepared(
                u, ba, weight, a_log, dt_bias, snapshot, ring, kv_ring, gates_ring, slot, start, begin, at, stop, after,
                h, dv, u_stride, ba_stride, keeps, HK, HV, K, V, J, CONV_RING, RING, SCALE,
            )  # fmt: skip
            if limit > start + CHUNK:
                k_high, k_low, q_high, q_low = _reads(S, k, q, zero, zero, zero, zero)
                o, taken = _outputs(
                    k_high, k_low, q_high, q_low, v, T_high, T_low, P_high, P_low,
                    w_k[None, :], w_q[None, :], w_s[None, :],
                )  # fmt: skip
                _put(out, v_ring, o, v, after, begin, at, stop, limit, slot, dv, HV * V, KV, RING, True)


@triton.jit
def _norm_keep_kernel(
    o, z, weight, out, scales, u, snapshot, ring, rows, since, first, until, end, eps, z_stride, u_stride, HEADS, M,
    PADDED, C, W, V: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, J: tl.constexpr, RING: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs (token, part): those of the gated norm, then, of a row's first token, those that remember its inputs."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.cdiv(HEADS, BLOCK)
    if part < parts:
        gated_heads(o, z, weight, out, scales, eps, token, part, z_stride, HEADS, M, PADDED, V, BLOCK, COLUMNS)
    else:
        row = tl.program_id(0) // W
        if (tl.program_id(0) % W == 0) & (tl.program_id(0) < M):
            channel = (part - parts) * BLOCK_C + tl.arange(0, BLOCK_C)
            begin = tl.load(first + row)
            stop = tl.where(begin < 0, -1, tl.load(end + row))
            _keep(u, snapshot, ring, tl.load(rows + row), tl.load(since + row), begin, tl.load(until + row), stop,
                  row * W, channel, u_stride, C, J, RING, BLOCK_N, BLOCK_J)  # fmt: skip


# ---- the op ---------------------------------------------------------------------------------------------


def launch_delta_round(
    u: Tensor, ba: Tensor, conv: Convolution, kept: Kept, norm: Norm, *where: Tensor
) -> list[Tensor]:
    """The two kernels of :func:`delta_round`, for rounds that :func:`suits`; where: rows … end."""
    sizes = Sizes.of(u, kept.state, kept.kv_ring)
    (tokens, channels), count, taps = u.shape, where[0].shape[0], conv.weight.shape[-1]
    width, heads, size = tokens // count, sizes.value_heads, sizes.value_dim
    o = u.new_empty(tokens, heads * size)
    block = min(BLOCK_V, size)
    _delta_round_kernel[(size // block, heads, count)](
        u, ba, conv.weight, conv.a_log, conv.dt_bias, conv.snapshot, conv.ring, *kept, o, *where, u.stride(0),
        ba.stride(0), width, **sizes.constexprs, J=taps, CONV_RING=conv.ring.shape[1], SCALE=sizes.key_dim**-0.5,
        BLOCK_V=block, num_warps=WARPS, **overlapped(u.device),
    )  # fmt: skip
    results = _outputs_of(o, norm.group)
    padded = tokens if norm.group is None else results[1].shape[0]
    made = (results[0], None) if norm.group is None else (results[1], results[2])
    blocks = triton.cdiv(heads, _HEADS) + triton.cdiv(channels, _CHANNELS)
    _norm_keep_kernel[(padded, blocks)](
        o, norm.z, norm.weight, *made, u, conv.snapshot, conv.ring, *where, norm.eps, norm.z.stride(0), u.stride(0),
        heads, tokens, padded, channels, width, V=size, BLOCK=_HEADS, COLUMNS=norm.group or 0, J=taps,
        RING=conv.ring.shape[1], BLOCK_C=_CHANNELS, BLOCK_N=triton.next_power_of_2(width),
        BLOCK_J=triton.next_power_of_2(taps - 1), num_warps=4, **overlapped(u.device),
    )  # fmt: skip
    return results


def _outputs_of(o: Tensor, group: int | None) -> list[Tensor]:
    """[rows, their e4m3 values, scales] for the norm of o; what is not made is empty."""
    plain = torch.empty_like(o) if group is None else o.new_empty(0)
    return [plain, *empty_quantised(o, o.shape[0], o.shape[1], group)]


def launch_one_by_one(u: Tensor, ba: Tensor, conv: Convolution, kept: Kept, norm: Norm, *where: Tensor) -> list[Tensor]:
    """The four launches that :func:`delta_round` stands for."""
    rows, since, first, until, end = where
    tail = rows, since, first, until, end, None
    qkv, gates = launch_causal_conv(u, conv.weight, ba, conv.a_log, conv.dt_bias, conv.snapshot, conv.ring, *tail)
    o = launch_gated_delta(qkv, gates, kept.state, kept.kv_ring, kept.gates_ring, *tail)
    if norm.group is None:
        return [launch_gated_norm(o, norm.z, norm.weight, norm.eps), *empty_quantised(o, 0, 0, None)]
    return [o.new_empty(0), *launch_gated_norm_fp8(o, norm.z, norm.weight, norm.eps, norm.group)]


def suits(u: Tensor, kept: Kept, rows: int) -> bool:
    """Whether the two kernels can serve a round: few rows, of which none has more than two chunks, and contiguous."""
    sizes = Sizes.of(u, kept.state, kept.kv_ring)
    tokens = u.shape[0]
    return tokens > 0 and rows <= FEW_ROWS and u.stride(1) == 1 and sizes.chunks(tokens, rows, True)[1] == 2


def _cuda(
    u: Tensor, z: Tensor, ba: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, eps: float,
    group: int | None, snapshot: Tensor, ring: Tensor, state: Tensor, kv_ring: Tensor, gates_ring: Tensor,
    *where: Tensor,
) -> list[Tensor]:  # fmt: skip
    conv, kept = Convolution(weight, a_log, dt_bias, snapshot, ring), Kept(state, kv_ring, gates_ring)
    key = Sizes.of(u, state, kv_ring), weight.shape[-1], u.dtype
    two = _proven.get(key, False) and suits(u, kept, len(where[0]))
    run = launch_delta_round if two else launch_one_by_one
    return run(u, ba, conv, kept, Norm(z, norm_weight, eps, group), *where)


def _cpu(
    u: Tensor, z: Tensor, ba: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, eps: float,
    group: int | None, snapshot: Tensor, ring: Tensor, state: Tensor, kv_ring: Tensor, gates_ring: Tensor,
    *where: Tensor,
) -> list[Tensor]:  # fmt: skip
    rows, since, first, until, end = where
    tail = rows, since, first, until, end, None
    qkv, gates = causal_conv_cpu(u, weight, ba, a_log, dt_bias, snapshot, ring, *tail)
    o = gated_delta_cpu(qkv, gates, state, kv_ring, gates_ring, *tail)
    normed = gated_norm_cpu(o, z, norm_weight, eps)
    return [normed if group is None else normed.new_empty(0), *quantised_cpu(normed, group)]


def _meta(u: Tensor, z: Tensor, ba: Tensor, *given: Any) -> list[Tensor]:
    return _outputs_of(z.new_empty(z.shape), given[5])


define(
    "delta_round(Tensor u, Tensor z, Tensor ba, Tensor weight, Tensor a_log, Tensor dt_bias, Tensor norm_weight,"
    " float eps, int? group, Tensor(a!) snapshot, Tensor(b!) ring, Tensor(c!) state, Tensor(d!) kv_ring,"
    " Tensor(e!) gates_ring, Tensor rows, Tensor since, Tensor first, Tensor until, Tensor end) -> Tensor[]"
)
register("delta_round", cuda=_cuda, cpu=_cpu, meta=_meta)


def delta_round(u: Tensor, ba: Tensor, conv: Convolution, kept: Kept, norm: Norm, *where: Tensor) -> list[Tensor]:
    """``gated_norm(gated_delta(*causal_conv(u, …)), z, …)`` of a round, with the same bits.

    where: rows, since, first, until, end [R]. Returns [the norm [T, Hv V], its e4m3 values, their scales]: with a group
    the last two, as ``gated_norm_fp8`` makes them, without one the first; the others are empty.
    """
    weights = conv.weight, conv.a_log, conv.dt_bias, norm.weight, norm.eps, norm.group
    return torch.ops.unisono.delta_round(u, norm.z, ba, *weights, conv.snapshot, conv.ring, *kept, *where)


# ---- the proof ------------------------------------------------------------------------------------------


def prove_delta_round(conv: Convolution, kept: Kept, eps: float, widths: tuple[int, ...] = (1, 2, 4)) -> bool:
    """Compare the two kernels with the four launches on random rows, once in a process for such sizes.

    conv, kept: of any layer of these sizes, which are not changed. The result decides which ones serve. True, and
    without effect, on a CPU. Synchronises; for the engine's start.
    """
    channels, device = conv.weight.shape[0], conv.weight.device
    if device.type != "cuda":
        return True
    sizes = Sizes.of(conv.weight.new_empty(0, channels), kept.state, kept.kv_ring)
    key = sizes, conv.weight.shape[-1], conv.weight.dtype
    if key not in _proven:
        most = (sizes.ring - CHUNK_TOKENS + 1) // 2
        _proven[key] = all(_same_bits(conv, kept, eps, width) for width in widths if width <= most)
    return _proven[key]


def rehearse_delta_round(conv: Convolution, kept: Kept, eps: float) -> None:
    """Launch what :func:`prove_delta_round` will launch and ignore the result: this compiles the kernels ahead."""
    if conv.weight.device.type == "cuda":
        for width in (1, 2, 4):
            _same_bits(conv, kept, eps, width)


def _same_bits(conv: Convolution, kept: Kept, eps: float, width: int) -> bool:
    """Rows that begin anywhere in a chunk, one of them padding; plain and quantised."""
    channels, device, dtype = conv.weight.shape[0], conv.weight.device, conv.weight.dtype
    generator = torch.Generator(device).manual_seed(width)
    first = [0, 5, 30 if width > 1 else 31, 32, 47, -1]
    since = [0, 0, 16, 16, 32, 0]
    committed = torch.tensor(first, dtype=torch.int32)
    until = torch.where(committed < 0, 0, committed - committed % CHUNK_TOKENS)
    end = torch.tensor([n + width - (n == 5 and width > 1) if n >= 0 else 0 for n in first])
    given = torch.arange(len(first)), torch.tensor(since), committed, until, end
    where = [t.to(device, torch.int32) for t in given]

    def random(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(like)

    rows, tokens, heads, size = len(first), len(first) * width, kept.state.shape[1], kept.state.shape[2]
    u, z, ba = random(tokens, channels + heads * (size + 2)).split([channels, heads * size, 2 * heads], 1)
    norm = z, random(size, like=torch.float32), eps
    shapes = [(rows, *t.shape[1:]) for t in (conv.snapshot, conv.ring, *kept)]
    memory = [random(*shape, like=t.dtype) for shape, t in zip(shapes, (*conv[3:], *kept), strict=True)]
    memory[-1] = -memory[-1].abs()  # decays
    groups = (None, GROUP) if heads * size % GROUP == 0 and _HEADS * size % GROUP == 0 else (None,)
    for group in groups:
        results = []
        for run in (launch_one_by_one, launch_delta_round):
            own = [t.clone() for t in memory]
            made = run(u, ba, Convolution(*conv[:3], *own[:2]), Kept(*own[2:]), Norm(*norm, group), *where)
            results.append([t.view(torch.uint8) for t in (*made, *own)])
        if not all(map(torch.equal, *results)):
            return False
    return True


def _cases(dtype: str, sizes: Sizes, width: int, group: int) -> list[AotCase]:
    """Both kernels for rounds of ``width`` tokens."""
    fp32 = dict.fromkeys(("a_log", "dt_bias", "state", "gates_ring"), "*fp32")
    of = dict.fromkeys(("u", "ba", "weight", "snapshot", "ring", "kv_ring", "out"), f"*{dtype}")
    conv_ring = 2 + width
    rule: dict[str, Any] = {
        **sizes.constexprs, "J": 4, "CONV_RING": conv_ring, "SCALE": sizes.key_dim**-0.5,
        "BLOCK_V": min(BLOCK_V, sizes.value_dim), "OVERLAP": True,
    }  # fmt: skip
    numbers = ints("rows since first until end", "u_stride ba_stride W")
    norm = dict.fromkeys(("o", "z", "u", "snapshot", "ring"), f"*{dtype}") | {"weight": "*fp32", "eps": "fp32"}
    norm |= {"out": "*fp8e4nv", "scales": "*fp32"} if group else {"out": f"*{dtype}"}
    norm |= ints("rows since first until end", "z_stride u_stride HEADS M PADDED C W")
    keep: dict[str, Any] = {
        "V": sizes.value_dim, "BLOCK": _HEADS, "COLUMNS": group, "J": 4, "RING": conv_ring, "BLOCK_C": _CHANNELS,
        "BLOCK_N": triton.next_power_of_2(width), "BLOCK_J": 4, "OVERLAP": True,
        **({} if group else {"scales": None}),
    }  # fmt: skip
    return [
        AotCase(_delta_round_kernel, of | fp32 | numbers, rule, num_warps=WARPS),
        AotCase(_norm_keep_kernel, norm, keep),
    ]


AOT = [
    case
    for dtype, heads, size, width, group in (
        ("bf16", (16, 32), 128, 1, 0), ("bf16", (16, 32), 128, 4, GROUP), ("bf16", (16, 48), 128, 4, GROUP),
        ("fp16", (4, 8), 32, 4, 0), ("fp32", (4, 8), 32, 2, 0),
    )
    for case in _cases(dtype, Sizes(*heads, size, size, CHUNK_TOKENS - 1 + 2 * width), width, group)
]  # fmt: skip
