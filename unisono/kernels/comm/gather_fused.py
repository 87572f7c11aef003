"""Gathers between GPUs of one host, fused with the norm after them or the SiLU before them.

A round of a model on several GPUs has four gathers per layer, and each is a launch that waits for the one before it.
Two of them precede the residual's sum and a norm, and one follows SiLU: these kernels do both at once. Words travel as
in ``kernels/comm/gather.py``, with the same buffers and turns. Bits are those of the separate kernels: the norm reads
the gathered row again, with the layout of ``kernels/norm/rms_norm.py``.

Shapes: M rows, H features, N ranks, W int32 words of a rank's part of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from unisono.kernels.comm.gather import LOOKS, PLACE, PROGRAMS, exchange, next_turn, place_of, receive, send
from unisono.kernels.gemm.fp8_quantize import GROUP, empty_quantised
from unisono.kernels.library import AotCase
from unisono.kernels.norm.activation import launch_silu_mul, silu_product
from unisono.kernels.norm.rms_norm import SumNormed, columns_of, launch_add_rms_norm, row_warps, store_norm
from unisono.kernels.overlap import follow, overlapped

SILU_CHUNK = 512
"""Maximum words of a SiLU program."""


class PeerBuffers(NamedTuple):
    """Peer memory of a rank: see ``kernels/comm/gather.py``. rank: this one, of ``ranks``."""

    addresses: torch.Tensor
    turns: torch.Tensor
    rank: int
    ranks: int


@triton.jit
def _gather_norm_kernel(x, heard, parts, residual, weight, total, out, x8, scales, addresses, turns, eps, H, W, M,
                        PADDED, SUMMED: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
                        KEEP: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
                        PROGRAMS_: tl.constexpr, PLACE_: tl.constexpr, LOOKS_: tl.constexpr,
                        OVERLAP: tl.constexpr):  # fmt: skip
    """Gather one row per program, then norm it. x, heard: words of this rank's part, and of all parts; parts: heard, by
    elements.

    SUMMED: a part is a whole row of a sum's terms, and terms are added in the order of ranks; else parts are columns.
    """
    follow(OVERLAP)
    number = tl.program_id(0)
    words = tl.arange(0, CHUNK)
    if number < M:
        to = heard + number.to(tl.int64) * (RANKS * W)
        for part in tl.static_range(PARTS):
            column, program = part * CHUNK + words, number * PARTS + part
            inside = column < W
            turn = next_turn(tl.load(turns + program))
            value = tl.load(x + number.to(tl.int64) * W + column, mask=inside, other=0)
            place = place_of(turn, program, RANKS, PROGRAMS_, PLACE_)
            send(addresses, place, words, value, inside, turn, RANK, RANKS, PLACE_)
            tl.store(to + RANK * W + column, value, mask=inside)
        for part in tl.static_range(PARTS):
            column, program = part * CHUNK + words, number * PARTS + part
            inside = column < W
            turn = next_turn(tl.load(turns + program))
            place = place_of(turn, program, RANKS, PROGRAMS_, PLACE_)
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    said = receive(addresses, place, words, inside, turn, peer, RANK, RANKS, PLACE_, LOOKS_)
                    tl.store(to + peer * W + column, said, mask=inside)
        tl.debug_barrier()  # every thread has read the turns and written its words
        for part in tl.static_range(PARTS):
            tl.store(turns + number * PARTS + part, next_turn(tl.load(turns + number * PARTS + part)))
    cols = tl.arange(0, BLOCK_H)
    there = cols < H
    if GROUP > 0:
        there = there & (number < M)
    row = number.to(tl.int64) * H
    if SUMMED:
        value = tl.load(parts + row * RANKS + cols, mask=there, other=0.0).to(tl.float32)
        for peer in tl.static_range(1, RANKS):
            value += tl.load(parts + row * RANKS + peer * H + cols, mask=there, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    else:
        value = tl.load(parts + row + cols, mask=there, other=0.0).to(tl.float32)
    r = tl.load(residual + row + cols, mask=there, other=0.0).to(tl.float32)
    rounded = (value + r).to(total.dtype.element_ty)
    tl.store(total + row + cols, rounded, mask=there)
    w = tl.load(weight + cols, mask=there, other=0.0)
    store_norm(rounded.to(tl.float32), w, out, x8, scales, cols, there, eps, H, PADDED, KEEP, GROUP)


def norm_parts(rows: int, words: int) -> int:
    """Places that a row of so many words needs; 0 if ``rows`` of them need more than there are."""
    parts = triton.cdiv(words, PLACE)
    return parts if rows * parts <= PROGRAMS else 0


def launch_gather_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool,
    summed: bool, peers: PeerBuffers,
) -> SumNormed:  # fmt: skip
    """Gather x and compute (sum, norm, x8, scales) of ``add_rms_norm_fp8``, for rows that :func:`norm_parts` allows.

    x [M, H / N]: this rank's columns; summed: [M, H], one of the N terms that are added in the order of ranks.
    """
    (rows, width), words = residual.shape, x.view(torch.int32)
    total, residual = torch.empty_like(residual, memory_format=torch.contiguous_format), residual.contiguous()
    parts = x.new_empty(rows, peers.ranks * width) if summed else total
    block, chunk = triton.next_power_of_2(width), min(PLACE, max(32, triton.next_power_of_2(words.shape[1])))
    out = torch.empty_like(total) if keep else x.new_empty(0)
    x8, scales = empty_quantised(x, rows, width, group)
    quantised = (None, None) if group is None else (x8, scales)
    _gather_norm_kernel[(rows if group is None else len(x8),)](
        words, parts.view(torch.int32), parts, residual, weight, total, out, *quantised, peers.addresses, peers.turns,
        eps, width, words.shape[1], rows, None if group is None else scales.shape[1],
        SUMMED=summed, PARTS=norm_parts(rows, words.shape[1]), CHUNK=chunk, BLOCK_H=block, KEEP=keep,
        GROUP=columns_of(group, block), RANK=peers.rank, RANKS=peers.ranks, PROGRAMS_=PROGRAMS, PLACE_=PLACE,
        LOOKS_=LOOKS, num_warps=row_warps(block), **overlapped(x.device),
    )  # fmt: skip
    return total, out, x8, scales


@triton.jit
def _element(words, HIGH: tl.constexpr, dtype: tl.constexpr):
    """Convert the lower or higher half of each word to fp32; in an fp32 row the whole word."""
    if dtype == tl.float32:
        return words.to(tl.float32, bitcast=True)
    else:
        half = (words >> 16) if HIGH else words
        return half.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _silu_words(gate, up, HIGH: tl.constexpr, dtype: tl.constexpr):
    """Compute ``silu(gate) * up`` of one half of each word: the bits of that half, in an int32."""
    made = silu_product(_element(gate, HIGH, dtype), _element(up, HIGH, dtype), dtype)
    if dtype == tl.float32:
        return made.to(tl.int32, bitcast=True)
    else:
        return made.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _silu_gather_kernel(x, out, like, addresses, turns, W, RANK: tl.constexpr, RANKS: tl.constexpr,
                        CHUNK: tl.constexpr, PROGRAMS_: tl.constexpr, PLACE_: tl.constexpr, LOOKS_: tl.constexpr,
                        OVERLAP: tl.constexpr):  # fmt: skip
    """Compute SiLU, then gather. x [M, 2 W]: words of gate, then of up. like: a pointer of the rows' dtype."""
    follow(OVERLAP)
    dtype: tl.constexpr = like.dtype.element_ty
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    program = tl.program_id(0) * tl.num_programs(1) + part
    turn = next_turn(tl.load(turns + program))
    place = place_of(turn, program, RANKS, PROGRAMS_, PLACE_)
    words = tl.arange(0, CHUNK)
    column = part * CHUNK + words
    inside = column < W
    gate = tl.load(x + row * 2 * W + column, mask=inside, other=0)
    up = tl.load(x + row * 2 * W + W + column, mask=inside, other=0)
    value = _silu_words(gate, up, False, dtype)
    if dtype != tl.float32:
        value = value | (_silu_words(gate, up, True, dtype) << 16)
    to = out + row * (RANKS * W) + column
    exchange(addresses, place, to, W, words, value, inside, turn, RANK, RANKS, PLACE_, LOOKS_)
    tl.store(turns + program, turn)


def silu_parts(rows: int, words: int) -> int:
    """Programs per row; 0 if ``rows`` of so many words need more programs than there are."""
    parts = triton.cdiv(words, SILU_CHUNK)
    return parts if rows * parts <= PROGRAMS else 0


def launch_silu_gather(x: torch.Tensor, peers: PeerBuffers) -> torch.Tensor:
    """Compute ``silu(gate) * up`` and gather it: [M, N · n]. x [M, 2 n], contiguous: this rank's gate, then up.

    M must be such that :func:`silu_parts` is not 0.
    """
    words = x.view(torch.int32)
    rows, width = words.shape[0], words.shape[1] // 2
    out = x.new_empty(rows, peers.ranks * x.shape[1] // 2)
    chunk = min(SILU_CHUNK, max(32, triton.next_power_of_2(width)))
    _silu_gather_kernel[(rows, silu_parts(rows, width))](
        words, out.view(torch.int32), x, peers.addresses, peers.turns, width,
        RANK=peers.rank, RANKS=peers.ranks, CHUNK=chunk, PROGRAMS_=PROGRAMS, PLACE_=PLACE, LOOKS_=LOOKS,
        num_warps=max(1, min(4, chunk // 128)), **overlapped(x.device),
    )  # fmt: skip
    return out


def ordered_sum(gathered: torch.Tensor, ranks: int) -> torch.Tensor:
    """Add the N terms of gathered [M, N · H] in fp32, one after the other, and round once: [M, H]."""
    first, *others = gathered.unflatten(1, (ranks, -1)).float().unbind(1)
    for term in others:
        first = first + term
    return first.to(gathered.dtype)


TRIALS = ((1, 4096), (5, 1280), (64, 4096))
"""Rows and features of the comparisons in :func:`has_bits_of_parts`."""


def has_bits_of_parts(
    peers: PeerBuffers,
    device: torch.device,
    trials: Sequence[tuple[int, int]] = TRIALS,
    dtype: torch.dtype = torch.bfloat16,
) -> bool:
    """Compare both fused kernels with the separate kernels on this device; True if the bits are equal.

    Every rank calls it with the same ``trials`` and generates all ranks' parts itself, so that nothing else is
    gathered. Synchronises; for the engine's start.
    """
    right = True
    for turn, (rows, width) in enumerate(trials):
        generator = torch.Generator().manual_seed(turn)

        def drawn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        residual, weight = drawn(rows, width), drawn(width)
        for summed in (False, True):
            parts = [drawn(rows, width if summed else width // peers.ranks) for _ in range(peers.ranks)]
            whole = torch.cat(parts, 1)
            if whole.shape[1] != width and not summed:
                continue  # the features are not divisible by the number of ranks
            if summed:
                whole = ordered_sum(whole, peers.ranks)
            arguments = parts[peers.rank], residual, weight, 1e-6, None, True, summed, peers
            found = launch_gather_add_rms_norm(*arguments)[:2]
            expected = launch_add_rms_norm(whole, residual, weight, 1e-6)
            right &= all(map(torch.equal, found, expected))
        parts = [drawn(rows, 2 * width) for _ in range(peers.ranks)]
        gated = torch.cat([launch_silu_mul(part) for part in parts], 1)
        right &= torch.equal(launch_silu_gather(parts[peers.rank], peers), gated)
    return right


def _aot_norm(rank: int, ranks: int, dtype: str, weight: str, block: int, group: int | None, summed: bool) -> AotCase:
    words = block * (2 if dtype != "fp32" else 4) // 4 // (1 if summed else ranks)
    quantised = {} if group is None else {"x8": "*fp8e4nv", "scales": "*fp32", "PADDED": "i32"}
    signature = {name: f"*{dtype}" for name in ("parts", "residual", "total", "out")} | quantised
    signature |= {"x": "*i32", "heard": "*i32", "weight": f"*{weight}", "addresses": "*i64", "turns": "*i32"}
    constants = {} if quantised else dict.fromkeys(("x8", "scales", "PADDED"))
    return AotCase(
        _gather_norm_kernel,
        signature | {"eps": "fp32", "H": "i32", "W": "i32", "M": "i32"},
        {
            **constants, "SUMMED": summed, "PARTS": triton.cdiv(words, PLACE), "CHUNK": min(words, PLACE),
            "BLOCK_H": block, "KEEP": group is None, "GROUP": columns_of(group, block), "RANK": rank, "RANKS": ranks,
            "PROGRAMS_": PROGRAMS, "PLACE_": PLACE, "LOOKS_": LOOKS, "OVERLAP": True,
        },
        num_warps=row_warps(block),
    )  # fmt: skip


AOT: list[AotCase] = [
    _aot_norm(0, 2, "bf16", "bf16", 4096, None, False),
    _aot_norm(1, 2, "bf16", "bf16", 4096, None, True),
    _aot_norm(3, 4, "bf16", "fp32", 8192, GROUP, False),
    _aot_norm(1, 2, "bf16", "bf16", 4096, GROUP, True),
    *(
        AotCase(
            _silu_gather_kernel,
            {"x": "*i32", "out": "*i32", "like": f"*{dtype}", "addresses": "*i64", "turns": "*i32", "W": "i32"},
            {
                "RANK": 1, "RANKS": ranks, "CHUNK": SILU_CHUNK, "PROGRAMS_": PROGRAMS, "PLACE_": PLACE,
                "LOOKS_": LOOKS, "OVERLAP": True,
            },
            num_warps=4,
        )
        for dtype, ranks in (("bf16", 2), ("fp16", 4), ("fp32", 2))
    ),
]  # fmt: skip
