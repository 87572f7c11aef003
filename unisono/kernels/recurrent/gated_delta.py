"""Gated delta rule. Owns the ``gated_delta`` op; called by ``models``.

Tokens are computed in chunks of 16 at absolute positions; every pass recomputes the open chunk from its remembered
inputs. So a token's bits do not depend on the division of a text into passes, nor on the other rows. A prompt pass has
three launches: the state-independent part of chunks, the walk over each row's chunks (on a GPU in 16 bits the kernel of
``gated_delta_gluon``, which is faster than Triton's), and storing the open chunk's inputs. A round has two launches,
which also store its tokens' inputs.

Shapes: T tokens, R rows, NR state rows, Hk / Hv key / value heads, K / V head sizes, RING positions that a row
remembers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, ints, op
from unisono.kernels.overlap import overlapped, overlaps
from unisono.kernels.recurrent.gated_delta_cpu import CHUNK, gated_delta_rule, recurrence_cpu
from unisono.kernels.recurrent.gated_delta_gluon import SIZE, WARPS, walk_kernel, walks
from unisono.kernels.recurrent.gated_delta_triton import (
    _prepare_kernel,
    _remember_chunk_kernel,
    _round_kernel,
    _walk_kernel,
)

_ELEMENTS, _ROWS = 512, 32
"""Keys and values of a program that stores them. Maximum rows of a prompt pass for one choice of kernels."""


class StateTile(NamedTuple):
    """Blocking of the state: its rows in a program, warps, maximum registers per thread."""

    size: int
    warps: int
    registers: int | None = None

    def of(self, value_dim: int) -> StateTile:
        """Choose the tile for heads of this size."""
        size = min(self.size, value_dim)
        return self._replace(size=size, warps=max(1, self.warps * size // self.size))


PROMPT_TILE, ROUND_TILE = StateTile(SIZE.value, 1), StateTile(64, 4, registers=128)
"""Blocking of both walks over prompts, and the fastest for rounds of those measured on an H200. They affect speed
only.
"""


class Sizes(NamedTuple):
    """Compile-time sizes of the kernels."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    ring: int

    @staticmethod
    def of(qkv: Tensor, state: Tensor, kv_ring: Tensor) -> Sizes:
        value_heads, value_dim, key_dim = state.shape[1:]
        return Sizes((qkv.shape[1] - kv_ring.shape[2]) // key_dim, value_heads, key_dim, value_dim, kv_ring.shape[1])

    @property
    def constexprs(self) -> dict[str, int]:
        return {
            "HK": self.key_heads, "HV": self.value_heads, "K": self.key_dim, "V": self.value_dim, "RING": self.ring,
        }  # fmt: skip

    def chunks(self, tokens: int, rows: int, is_round: bool) -> tuple[int, int]:
        """(places for chunks of a pass, additional places per row).

        A row extends back to its snapshot: ring - width tokens, of a ring of 15 + 2 width. The chunks of a round's row
        begin at row * besides. In a prompt pass those of a row whose tokens begin at t begin at
        t // 16 + row * besides: rows of any lengths have separate places.
        """
        back = (self.ring + CHUNK - 1) // 2
        if is_round:
            besides = triton.cdiv(back + tokens // rows, CHUNK)
            return rows * besides, besides
        besides = triton.cdiv(back + CHUNK - 1, CHUNK)
        return tokens // CHUNK + rows * besides + 1, besides


def launch_gated_delta(
    qkv: Tensor, gates: Tensor, state: Tensor, kv_ring: Tensor, gates_ring: Tensor, rows: Tensor, since: Tensor,
    first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
    round_tile: StateTile = ROUND_TILE, fast_walk: bool = True, skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launch :func:`gated_delta`, or Mamba2 with ``skip``.

    fast_walk: use the faster walk for prompts in 16 bits on a GPU (speed only).
    """
    out = _gated_delta_meta(qkv, state)
    tokens, count, is_round = qkv.shape[0], rows.shape[0], query_start is None
    if tokens == 0 and is_round:
        return out
    sizes, device = Sizes.of(qkv, state, kv_ring), qkv.device
    places, besides = sizes.chunks(tokens, count, is_round)
    heads, width = sizes.value_heads, tokens // count if is_round else 0
    squares = qkv.new_empty((places, heads, 4, CHUNK, CHUNK))
    factors = gates.new_empty((places, heads, 4, CHUNK))
    starts = rows if query_start is None else query_start
    options: dict[str, Any] = {**sizes.constexprs, "EXTRA": besides, "ROUND": is_round, "DELTA": skip is None}
    _prepare_kernel[(places, heads)](
        qkv, gates, kv_ring, gates_ring, squares, factors, rows, since, first, end, starts, count, width,
        SCALE=sizes.key_dim**-0.5, BLOCK_R=max(_ROWS, triton.next_power_of_2(count)), num_warps=1, **options,
        **overlapped(device),
    )  # fmt: skip
    within, where = (qkv, kv_ring, squares, factors), (state, out, rows, since, first, until, end)
    tile = (round_tile if is_round else PROMPT_TILE).of(sizes.value_dim)
    grid = (sizes.value_dim // tile.size, heads, count)
    if is_round and besides == 2:
        _round_kernel[grid](
            *within, skip, *where, width, BLOCK_V=tile.size, num_warps=tile.warps, maxnreg=tile.registers,
            DELTA=skip is None, **sizes.constexprs, **overlapped(device),
        )  # fmt: skip
    elif not is_round and fast_walk and walks(qkv, sizes.key_dim):
        launch: dict[str, Any] = {**sizes.constexprs, "EXTRA": besides, "DELTA": skip is None}
        launch["num_warps"] = WARPS.value
        beside, inputs = overlaps(device), (*within, skip, *where, starts, tokens, count)
        walk_kernel[(*grid[:2], 1)](*inputs, OTHERS=False, OVERLAP=beside, **launch)
        if count > 1:
            walk_kernel[(*grid[:2], count - 1)](*inputs, OTHERS=True, **launch, **overlapped(device))
    else:
        _walk_kernel[grid](
            *within, skip, *where, starts, tokens, count, width, BLOCK_V=tile.size, num_warps=tile.warps, **options,
            **overlapped(device),
        )  # fmt: skip
    if not is_round:
        remember_chunk(qkv, gates, kv_ring, gates_ring, rows, first, until, end, starts)
    return out


def remember_chunk(
    qkv: Tensor, gates: Tensor, kv_ring: Tensor, gates_ring: Tensor, rows: Tensor, first: Tensor, until: Tensor,
    end: Tensor, query_start: Tensor,
) -> None:  # fmt: skip
    """Store the inputs of a prompt pass's open chunk in the rings, if the pass has tokens: keys, values and gates."""
    (tokens, width), (_, ring, kv) = qkv.shape, kv_ring.shape
    if tokens:
        of_gates = gates[0].numel()
        _remember_chunk_kernel[(len(rows), triton.cdiv(kv, _ELEMENTS) + triton.cdiv(of_gates, _ELEMENTS))](
            qkv, gates, kv_ring, gates_ring, rows, first, until, end, query_start,
            QUERIES=width - kv, KV=kv, GATES=of_gates, RING=ring, BLOCK=_ELEMENTS, num_warps=4,
            **overlapped(qkv.device),
        )  # fmt: skip


def _gated_delta_meta(qkv: Tensor, state: Tensor) -> Tensor:
    return qkv.new_empty((qkv.shape[0], state.shape[1] * state.shape[2]))


@op(cuda=launch_gated_delta, meta=_gated_delta_meta)
def gated_delta(
    qkv: Tensor, gates: Tensor, state: Mutated[Tensor], kv_ring: Mutated[Tensor], gates_ring: Mutated[Tensor],
    rows: Tensor, since: Tensor, first: Tensor, until: Tensor, end: Tensor, query_start: Tensor | None,
) -> Tensor:  # fmt: skip
    """Apply the gated delta rule over each row's tokens (Yang, Kautz and Hatamizadeh, arXiv 2412.06464).

    For each value head, with its key head's q and k at length 1 (q times K ** -0.5)::

        S <- S exp(g_t);  S <- S + (v_t - S k_t) beta_t k_t^T;  o_t = S q_t

    qkv [T, Hk K + Hk K + Hv V]: queries, keys, values after the convolution. gates [T, 2, Hv] fp32: g, then beta.
    state [NR, Hv, V, K] fp32: S after ``since`` tokens. kv_ring [NR, RING, Hk K + Hv V], gates_ring [NR, RING, 2, Hv]:
    inputs of the tokens since then, position p at p % RING. rows … end [R], query_start [R + 1] or None in a round:
    see :class:`unisono.kv.recurrent_pass.RecurrentPass`. Value heads h r … h r + r - 1 share key head h, with
    r = Hv / Hk. K and V are powers of two from 16 to 128.

    Returns o [T, Hv V] in qkv's dtype, zero for padding tokens. The state advances to ``until`` tokens, and the rings
    store the pass's tokens.
    """
    of_pass = rows, since, first, until, end
    return recurrence_cpu(qkv, gates, state, (kv_ring, gates_ring), of_pass, query_start, gated_delta_rule)


def delta_cases(dtype: str, sizes: Sizes, width: int, is_round: bool, delta: bool = True) -> list[AotCase]:
    """AotCases of prompt passes, or of rounds of ``width`` tokens per row. delta: False: of Mamba2."""
    _, besides = sizes.chunks(width, 1, is_round)
    types = dict.fromkeys(("qkv", "kv_ring", "squares", "out"), f"*{dtype}")
    types |= dict.fromkeys(("gates", "gates_ring", "factors", "state"), "*fp32")

    def signature(tensors: str, pointers: str, numbers: str) -> dict[str, str]:
        return {name: types[name] for name in tensors.split()} | ints(pointers, numbers)

    overlap: dict[str, Any] = {"OVERLAP": True}
    options = {**sizes.constexprs, **overlap, "EXTRA": besides, "ROUND": is_round}
    prepare = signature("qkv gates kv_ring gates_ring squares factors", "rows since first end query_start", "R W")
    scale = {"SCALE": sizes.key_dim**-0.5, "BLOCK_R": _ROWS}
    cases = [AotCase(_prepare_kernel, prepare, options | scale | {"DELTA": delta}, num_warps=1)]
    walk = signature("qkv kv_ring squares factors state out", "rows since first until end", "W")
    rule: dict[str, Any] = {"DELTA": delta, **({"skip": None} if delta else {})}
    skip = {} if delta else {"skip": "*fp32"}
    tile = (ROUND_TILE if is_round else PROMPT_TILE).of(sizes.value_dim)
    block = {"BLOCK_V": tile.size}
    if is_round and besides == 2:
        block |= {**sizes.constexprs, **overlap, **rule}
        return [*cases, AotCase(_round_kernel, walk | skip, block, num_warps=tile.warps, maxnreg=tile.registers)]
    walk |= ints("query_start", "T R")
    cases.append(AotCase(_walk_kernel, walk | skip, options | block | rule, num_warps=tile.warps))
    if is_round:
        return cases
    if dtype != "fp32":
        walk = {name: kind for name, kind in (walk | skip).items() if name != "W"}
        fast = {**sizes.constexprs, **overlap, **rule, "EXTRA": besides}
        cases += [
            AotCase(walk_kernel, walk, fast | {"OTHERS": others}, num_warps=WARPS.value) for others in (False, True)
        ]
    remember = signature("qkv gates kv_ring gates_ring", "rows first until end query_start", "")
    queries, heads = sizes.key_heads * sizes.key_dim, sizes.value_heads
    shape = {"QUERIES": queries, "KV": queries + heads * sizes.value_dim, "GATES": 2 * heads, "RING": sizes.ring}
    return [*cases, AotCase(_remember_chunk_kernel, remember, shape | overlap | {"BLOCK": _ELEMENTS})]


AOT = [
    case
    for dtype, heads, size, width in (
        ("bf16", (16, 32), 128, 4), ("bf16", (16, 48), 128, 4), ("bf16", (16, 16), 128, 1), ("bf16", (4, 8), 32, 12),
        ("fp16", (4, 8), 32, 4), ("fp32", (4, 8), 32, 2),
    )
    for is_round in (False, True)
    for case in delta_cases(dtype, Sizes(*heads, size, size, CHUNK - 1 + 2 * width), width, is_round)
]  # fmt: skip
