"""Kimi Delta Attention (arXiv 2510.26692). Owns the ``kimi_delta`` op; called by ``models``.

It is the gated delta rule with a decay for each channel of a key. So it has the chunks of 16 tokens at absolute
positions and the remembered inputs of ``kernels/recurrent/gated_delta.py``, and a token's bits do not depend on the
division of a text into passes, nor on the other rows.

Shapes: T tokens, R rows, NR state rows, H heads, K / V key / value sizes, RING positions that a row remembers.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, ints, op
from unisono.kernels.overlap import overlapped, overlaps
from unisono.kernels.recurrent.gated_delta import Sizes, StateTile, remember_chunk
from unisono.kernels.recurrent.gated_delta_cpu import CHUNK, recurrence_cpu
from unisono.kernels.recurrent.gated_delta_gluon import SIZE, WARPS, walks
from unisono.kernels.recurrent.kimi_delta_cpu import kimi_delta_rule
from unisono.kernels.recurrent.kimi_delta_gluon import kimi_walk_kernel
from unisono.kernels.recurrent.kimi_delta_prepare import PREPARE_WARPS, kimi_prepare_kernel
from unisono.kernels.recurrent.kimi_delta_triton import _kimi_round_kernel, _kimi_walk_kernel

PROMPT_TILE, ROUND_TILE, STAGES = StateTile(64, 4), StateTile(64, 4, registers=128), 2
"""Blocking of Triton's walk over prompts and over rounds, and chunks of a prompt that it loads at once. They affect
speed only.
"""
_ROWS = 32
"""Maximum rows of a prompt pass for one choice of kernels."""


def launch_kimi_delta(
    qkv: Tensor, gates: Tensor, state: Tensor, kv_ring: Tensor, gates_ring: Tensor, rows: Tensor, since: Tensor,
    first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
    round_tile: StateTile = ROUND_TILE, fast_walk: bool = True,
) -> Tensor:  # fmt: skip
    """Launch :func:`kimi_delta`.

    fast_walk: use the faster walk for prompts in 16 bits on a GPU. It and the tile affect speed only.
    """
    out = _kimi_delta_meta(qkv, state)
    tokens, count, is_round = qkv.shape[0], rows.shape[0], query_start is None
    if tokens == 0 and is_round:
        return out
    sizes, device = Sizes.of(qkv, state, kv_ring), qkv.device
    heads, key_dim, value_dim, width = sizes.value_heads, sizes.key_dim, sizes.value_dim, tokens // count
    places, besides = sizes.chunks(tokens, count, is_round)
    squares = qkv.new_empty((places, heads, 4, CHUNK, CHUNK))
    factors = gates.new_empty((places, heads, 4, CHUNK))
    decayed = qkv.new_empty((places, heads, 3, 1 if qkv.itemsize == 4 else 2, CHUNK, key_dim))
    ends = gates.new_empty((places, heads, key_dim))
    starts, width = (rows, width) if query_start is None else (query_start, 0)
    options = _options(sizes, besides, is_round)
    kimi_prepare_kernel[(places, heads)](
        qkv, gates, kv_ring, gates_ring, squares, factors, decayed, ends, rows, since, first, end, starts, count, width,
        SCALE=key_dim**-0.5, BLOCK_R=max(_ROWS, triton.next_power_of_2(count)), num_warps=PREPARE_WARPS.value,
        **options, **overlapped(device),
    )  # fmt: skip
    inputs = qkv, kv_ring, squares, factors, decayed, ends, state, out, rows, since, first, until, end, starts, tokens
    tile = (round_tile if is_round else PROMPT_TILE).of(value_dim)
    grid = (value_dim // tile.size, heads, count)
    if is_round and besides == 2:
        _kimi_round_kernel[grid](
            *inputs[:-2], width, H=heads, K=key_dim, V=value_dim, RING=sizes.ring, BLOCK_V=tile.size,
            num_warps=tile.warps, maxnreg=tile.registers, **overlapped(device),
        )  # fmt: skip
    elif not is_round and fast_walk and walks(qkv, key_dim):
        launch: dict[str, Any] = {name: value for name, value in options.items() if name != "ROUND"}
        tiles, launch["num_warps"] = value_dim // SIZE.value, WARPS.value
        kimi_walk_kernel[(tiles, heads, 1)](*inputs, count, OTHERS=False, OVERLAP=overlaps(device), **launch)
        if count > 1:
            kimi_walk_kernel[(tiles, heads, count - 1)](*inputs, count, OTHERS=True, **launch, **overlapped(device))
    else:
        _kimi_walk_kernel[grid](
            *inputs, count, width, BLOCK_V=tile.size, STAGES=1 if is_round else STAGES, num_warps=tile.warps,
            **options, **overlapped(device),
        )  # fmt: skip
    if not is_round:
        remember_chunk(qkv, gates, kv_ring, gates_ring, rows, first, until, end, starts)
    return out


def _options(sizes: Sizes, besides: int, is_round: bool) -> dict[str, Any]:
    """Compile-time arguments of both kernels."""
    shape = {"H": sizes.value_heads, "K": sizes.key_dim, "V": sizes.value_dim, "RING": sizes.ring}
    return {**shape, "EXTRA": besides, "ROUND": is_round}


def _kimi_delta_meta(qkv: Tensor, state: Tensor) -> Tensor:
    return qkv.new_empty((qkv.shape[0], state.shape[1] * state.shape[2]))


@op(cuda=launch_kimi_delta, meta=_kimi_delta_meta)
def kimi_delta(
    qkv: Tensor, gates: Tensor, state: Mutated[Tensor], kv_ring: Mutated[Tensor], gates_ring: Mutated[Tensor],
    rows: Tensor, since: Tensor, first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
) -> Tensor:  # fmt: skip
    """Apply Kimi Delta Attention over each row's tokens.

    For each head, with q and k at length 1 (q times K ** -0.5)::

        S <- S diag(exp(g_t));  S <- S + (v_t - S k_t) beta_t k_t^T;  o_t = S q_t

    qkv [T, H K + H K + H V]: queries, keys, values after the convolution. gates [T, H (K + 1)] fp32: g of each channel,
    at most 0, then beta of each head. state [NR, H, V, K] fp32: S after ``since`` tokens. kv_ring [NR, RING, H K + H
    V], gates_ring [NR, RING, H (K + 1)]: inputs of the tokens since then, position p at p % RING. rows … end [R],
    query_start [R + 1] or None in a round: see :class:`unisono.kv.recurrent_pass.RecurrentPass`. K and V are powers of
    two from 16 to 128.

    Returns o [T, H V] in qkv's dtype, zero for padding tokens. The state advances to ``until`` tokens, and the rings
    store the pass's tokens. A prompt pass of T tokens needs 6 H K T elements of qkv's dtype beside them.
    """
    of_pass = rows, since, first, until, end
    return recurrence_cpu(qkv, gates, state, (kv_ring, gates_ring), of_pass, query_start, kimi_delta_rule)


def _cases(dtype: str, sizes: Sizes, width: int, is_round: bool) -> list[AotCase]:
    _, besides = sizes.chunks(width, 1, is_round)
    types = dict.fromkeys(("qkv", "kv_ring", "squares", "decayed"), f"*{dtype}")
    types |= dict.fromkeys(("factors", "ends"), "*fp32")
    options = _options(sizes, besides, is_round) | {"OVERLAP": True}
    prepare = types | dict.fromkeys(("gates", "gates_ring"), "*fp32") | ints("rows since first end query_start", "R W")
    walk = types | {"state": "*fp32", "out": f"*{dtype}"} | ints("rows since first until end query_start", "T R W")
    tile = (ROUND_TILE if is_round else PROMPT_TILE).of(sizes.value_dim)
    own = {"BLOCK_V": tile.size, "STAGES": 1 if is_round else STAGES}
    more = {"SCALE": sizes.key_dim**-0.5, "BLOCK_R": _ROWS}
    cases = [AotCase(kimi_prepare_kernel, prepare, options | more, num_warps=PREPARE_WARPS.value)]
    if is_round and besides == 2:
        walk = {name: kind for name, kind in walk.items() if name not in ("query_start", "T", "R")}
        shape = {name: value for name, value in options.items() if name not in ("EXTRA", "ROUND")}
        block = shape | {"BLOCK_V": tile.size}
        return [*cases, AotCase(_kimi_round_kernel, walk, block, num_warps=tile.warps, maxnreg=tile.registers)]
    cases.append(AotCase(_kimi_walk_kernel, walk, options | own, num_warps=tile.warps))
    if is_round or dtype == "fp32":
        return cases
    walk, fast = (
        {name: value for name, value in each.items() if name not in ("W", "ROUND")} for each in (walk, options)
    )
    return cases + [
        AotCase(kimi_walk_kernel, walk, fast | {"OTHERS": others}, num_warps=WARPS.value) for others in (False, True)
    ]


AOT: list[AotCase] = [
    case
    for dtype, heads, size, width in (
        ("bf16", 32, 128, 4),
        ("bf16", 32, 128, 1),
        ("fp16", 4, 32, 12),
        ("fp32", 4, 32, 2),
    )
    for is_round in (False, True)
    for case in _cases(dtype, Sizes(heads, heads, size, size, CHUNK - 1 + 2 * width), width, is_round)
]
