"""Gathers over peer memory of one host's GPUs: one kernel, no library call, no host.

Each rank has a buffer that the others write to. A program of the grid sends a chunk of a row to all other ranks, and
reads the chunks of their same programs. Each word travels with the number of the exchange (its *turn*) in one store of
8 bytes, so that a reader sees both or neither. There are no flags to wait for and no fences; the price is twice the
bytes (the low-latency protocol of NCCL does the same). Every program has a counter of turns and its own places in the
buffer, two per rank. A place is written again two turns later. Its words have been read then: the turn between has
ended here, so the other rank had begun it, and a rank begins a turn after it has read the one before. Turns are counted
on the device, so that a captured gather can be replayed.

Words are moved, never added, so bits cannot change. Words are int32. Shapes: M rows of W words on each of N
ranks -> [M, N · W].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase
from unisono.kernels.overlap import follow, overlapped

PROGRAMS = 1024
"""Maximum number of programs; larger gathers take several turns."""

PLACE = 1024
"""Words of a place. Narrow rows use the beginning only."""

LOOKS = 4096
"""Reads of late words between two reads of the give-up word, which is in the host's memory."""


def buffer_words(ranks: int) -> int:
    """Size of a rank's buffer in int64 words: two places per program and rank."""
    return 2 * PROGRAMS * ranks * PLACE


@triton.jit
def _address(addresses, index, dtype: tl.constexpr):
    """Read entry ``index`` of a table of addresses as a pointer."""
    return tl.multiple_of(tl.load(addresses + index).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _late(seen, inside, turn):
    """Count the words of another turn."""
    return tl.sum((inside & ((seen >> 32).to(tl.int32) != turn)).to(tl.int32))


@triton.jit
def next_turn(turn):
    """Number of the next turn. It may overflow, and is never 0, the value of unwritten words."""
    return tl.where(turn == -1, 2, turn + 1)


@triton.jit
def send(addresses, place, words, value, inside, turn, RANK: tl.constexpr, RANKS: tl.constexpr, PLACE_: tl.constexpr):
    """Write ``value`` int32 to the ``place`` of every other rank, each word with the number of the turn."""
    sent = (turn.to(tl.int64) << 32) | (value.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(_address(addresses, peer, tl.int64) + place + RANK * PLACE_ + words, sent, mask=inside)


@triton.jit
def receive(addresses, place, words, inside, turn, peer: tl.constexpr,
            RANK: tl.constexpr, RANKS: tl.constexpr, PLACE_: tl.constexpr, LOOKS_: tl.constexpr):  # fmt: skip
    """Wait for the int32 words of ``peer`` at this rank's ``place`` in this turn. Undefined if the ranks have given
    up.
    """
    own, given_up = _address(addresses, RANK, tl.int64), _address(addresses, RANKS, tl.int32)
    mine = own + place + peer * PLACE_ + words
    seen = tl.load(mine, mask=inside, other=0, volatile=True)
    looks = 0
    while _late(seen, inside, turn) > 0:
        looks += 1
        seen = tl.load(mine, mask=inside, other=0, volatile=True)
        if looks % LOOKS_ == 0:  # noqa: SIM102 - `and` would read the host's memory at every look
            if tl.load(given_up, volatile=True) != 0:
                seen = (seen & 0xFFFFFFFF) | (turn.to(tl.int64) << 32)
    return seen.to(tl.int32)


@triton.jit
def place_of(turn, program, RANKS: tl.constexpr, PROGRAMS_: tl.constexpr, PLACE_: tl.constexpr):
    """Start of the words of a program's turn in a rank's buffer."""
    return ((turn & 1) * PROGRAMS_ + program).to(tl.int64) * (RANKS * PLACE_)


@triton.jit
def exchange(addresses, place, to, W, words, value, inside, turn,
             RANK: tl.constexpr, RANKS: tl.constexpr, PLACE_: tl.constexpr, LOOKS_: tl.constexpr):  # fmt: skip
    """Send this rank's words and write those of all ranks, each rank's W words after those of the one before it."""
    send(addresses, place, words, value, inside, turn, RANK, RANKS, PLACE_)
    tl.store(to + RANK * W, value, mask=inside)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            heard = receive(addresses, place, words, inside, turn, peer, RANK, RANKS, PLACE_, LOOKS_)
            tl.store(to + peer * W, heard, mask=inside)


@triton.jit
def _gather_kernel(x, out, addresses, turns, M, W,
                   RANK: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS_: tl.constexpr,
                   PLACE_: tl.constexpr, LOOKS_: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Gather rows. addresses [N + 1] int64: every rank's buffer, and the give-up word, not 0 once the ranks have given
    up.
    """
    follow(OVERLAP)
    part = tl.program_id(1)
    program = tl.program_id(0) * tl.num_programs(1) + part
    turn = tl.load(turns + program)
    words = tl.arange(0, CHUNK)
    column = part * CHUNK + words
    inside = column < W
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        turn = next_turn(turn)
        place = place_of(turn, program, RANKS, PROGRAMS_, PLACE_)
        value = tl.load(x + row * W + column, mask=inside, other=0)
        to = out + row * (RANKS * W) + column
        exchange(addresses, place, to, W, words, value, inside, turn, RANK, RANKS, PLACE_, LOOKS_)
    tl.store(turns + program, turn)


def launch_gather(
    x: torch.Tensor, addresses: torch.Tensor, turns: torch.Tensor, rank: int, ranks: int, widest: int = PLACE
) -> torch.Tensor:
    """Gather x [M, W] int32, contiguous: [M, N · W]. turns [PROGRAMS] int32: counters of this rank, initially 0.

    widest: maximum words of a chunk, the same on every rank, up to PLACE.
    """
    rows, width = x.shape
    out = x.new_empty(rows, ranks * width)
    chunk = min(widest, max(32, triton.next_power_of_2(width)))
    parts = triton.cdiv(width, chunk)
    grid = (min(rows, PROGRAMS // parts), parts)
    _gather_kernel[grid](
        x, out, addresses, turns, rows, width,
        RANK=rank, RANKS=ranks, CHUNK=chunk, PROGRAMS_=PROGRAMS, PLACE_=PLACE, LOOKS_=LOOKS,
        num_warps=max(1, min(8, chunk // 128)), **overlapped(x.device),
    )  # fmt: skip
    return out


AOT: list[AotCase] = [
    AotCase(
        _gather_kernel,
        {"x": "*i32", "out": "*i32", "addresses": "*i64", "turns": "*i32", "M": "i32", "W": "i32"},
        {
            "RANK": rank, "RANKS": ranks, "CHUNK": chunk, "PROGRAMS_": PROGRAMS, "PLACE_": PLACE, "LOOKS_": LOOKS,
            "OVERLAP": True,
        },
        num_warps=warps,
    )
    for rank, ranks in ((0, 2), (1, 2), (5, 8))
    for chunk, warps in ((32, 1), (512, 4), (PLACE, 8))
]  # fmt: skip
