"""Gathers over memory that GPUs of one host read and write directly: one kernel, no library call, no host.

Each rank has a buffer that the others can write to. A program of the grid takes the same chunks of the rows on every
rank. It writes its rank's chunk into the buffers of all others, raises a flag there, waits for theirs, and reads what
they wrote into its own buffer. Every program has flags, a turn counter and places of its own, two of these, so that
programs never wait for each other: a place is written again two turns later, and by then the flag of the turn
between says that it was read. Turns are counted on the device, so that a captured gather can be replayed.

Every chunk is moved, none is added, so bits cannot change. Words are int32. Shapes: M rows of W words on each of N
ranks -> [M, N · W].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.library import AotCase
from unisono.kernels.overlap import follow, overlapped

PROGRAMS = 64
"""Programs at most: few enough that all of them run at once beside others."""

PLACE = 4096
"""Words of a place. Small gathers use the beginning only."""

SMALL = 1024
"""Words of a chunk up to PROGRAMS of them, so that a small gather is spread over many programs."""

LOOKS = 4096
"""Looks at a flag between two looks at whether the ranks have given up, which is a word of the host's memory."""

_ALIGNED = 64
"""Words between two flags of different programs, so that they share no cache line."""


def buffer_words(ranks: int) -> int:
    """int32 words of a rank's buffer: the flags, then the places."""
    return PROGRAMS * _ALIGNED + 2 * PROGRAMS * ranks * PLACE


@triton.jit
def _word(addresses, index):
    """The address at this place of a table, as a pointer to int32."""
    return tl.multiple_of(tl.load(addresses + index).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _gather_kernel(x, out, addresses, turns, total, W,
                   RANK: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS_: tl.constexpr,
                   PLACE_: tl.constexpr, ALIGNED: tl.constexpr, LOOKS_: tl.constexpr,
                   OVERLAP: tl.constexpr):  # fmt: skip
    """addresses [N + 1] int64: of every rank's buffer, and of the word that is not 0 once the ranks have given up."""
    follow(OVERLAP)
    program = tl.program_id(0)
    own, given_up = _word(addresses, RANK), _word(addresses, RANKS)
    turn = tl.load(turns + program)
    words = tl.arange(0, CHUNK)
    for chunk in range(program, tl.cdiv(total, CHUNK), tl.num_programs(0)):
        turn += 1
        place = PROGRAMS_ * ALIGNED + (((turn & 1) * PROGRAMS_ + program) * RANKS) * PLACE_
        at = chunk * CHUNK + words
        inside = at < total
        value = tl.load(x + at, mask=inside, other=0)
        to = (at // W).to(tl.int64) * (RANKS * W) + at % W
        tl.store(out + to + RANK * W, value, mask=inside)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                tl.store(_word(addresses, peer) + place + RANK * PLACE_ + words, value, mask=inside)
        tl.debug_barrier()  # everything is written before one thread raises the flags
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                flag = _word(addresses, peer) + program * ALIGNED + RANK
                tl.atomic_xchg(flag, turn, sem="release", scope="sys")
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                mine = own + program * ALIGNED + peer
                looks = 0
                seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
                while seen - turn < 0:  # a peer may be a turn ahead, and turns may overflow
                    looks += 1
                    seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
                    if looks % LOOKS_ == 0:  # noqa: SIM102
                        if tl.load(given_up, volatile=True) != 0:
                            seen = turn
        tl.debug_barrier()
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                said = tl.load(own + place + peer * PLACE_ + words, mask=inside, other=0, cache_modifier=".cg")
                tl.store(out + to + peer * W, said, mask=inside)
    tl.store(turns + program, turn)


def launch_gather(x: torch.Tensor, addresses: torch.Tensor, turns: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """x [M, W] int32, contiguous -> [M, N · W]. turns [PROGRAMS] int32: counters of this rank, 0 at first."""
    rows, width = x.shape
    out = x.new_empty(rows, ranks * width)
    total = x.numel()
    chunk = SMALL if total <= PROGRAMS * SMALL else PLACE
    grid = (min(PROGRAMS, triton.cdiv(total, chunk)),)
    _gather_kernel[grid](
        x, out, addresses, turns, total, width,
        RANK=rank, RANKS=ranks, CHUNK=chunk, PROGRAMS_=PROGRAMS, PLACE_=PLACE, ALIGNED=_ALIGNED, LOOKS_=LOOKS,
        num_warps=8, **overlapped(x.device),
    )  # fmt: skip
    return out


AOT: list[AotCase] = [
    AotCase(
        _gather_kernel,
        {"x": "*i32", "out": "*i32", "addresses": "*i64", "turns": "*i32", "total": "i32", "W": "i32"},
        {
            "RANK": rank, "RANKS": ranks, "CHUNK": chunk, "PROGRAMS_": PROGRAMS, "PLACE_": PLACE,
            "ALIGNED": _ALIGNED, "LOOKS_": LOOKS, "OVERLAP": True,
        },
        num_warps=8,
    )
    for rank, ranks in ((0, 2), (1, 2), (5, 8))
    for chunk in (SMALL, PLACE)
]  # fmt: skip
