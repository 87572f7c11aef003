"""The merge of a cut tile's splits by a kernel of its own, for wide heads in passes of few tiles.

The program that completes a tile's count could merge its splits, but a tile of four tokens of Gemma 4's full layers has
33 splits of 64 KiB at 8,200 keys, which one multiprocessor reads in 20 µs. Here each row has a program for every
COLUMNS columns. The formula and the order are those of ``triton_kernels._merge_kept``, hence the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.attention.cpu import SPLIT
from unisono.kernels.attention.split import merge, nothing, values
from unisono.kernels.attention.triton_kernels import _store
from unisono.kernels.gemm.fp8_quantize import GROUP
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import follow, overlapped, overlapping

WIDE = 256
"""Smallest size of heads whose splits are merged by a separate kernel."""

MOST_TILES = 66
"""Most tiles × KV heads of such a pass: with more, most tiles are walked whole, and a launch for the others is lost.
At 128 of them a layer takes 1 to 13 µs longer with it, at 64 and less 0 to 37 µs less (H200).
"""

AT_ONCE = 8
"""Splits that are read together."""

LISTED = 128
"""Items of the work list that are searched together."""


def merges_separately(heads: tuple[int, int, int], tiles: int, window: int, first: int, plain: bool) -> bool:
    """Return True if a pass whose tiles may be cut merges splits in a kernel of its own; only speed depends on it.

    heads: query heads, KV heads, head size. tiles: number of whole tiles. plain: attention without sinks or ``until``.
    """
    _, kv_heads, dim = heads
    return plain and window >= 0 and first == 0 and dim >= WIDE and dim % GROUP == 0 and tiles * kv_heads <= MOST_TILES


@triton.jit
def _tile_of(work_ptr, total, token, LISTED: tl.constexpr):
    """Find the first piece of a token's tile in the work list: length, first token, splits left out, partial (-1 for a
    whole tile). Volatile, as in ``triton_kernels._work_item``.
    """
    found = total
    for base in range(0, total, LISTED):
        item = base + tl.arange(0, LISTED)
        begins = tl.load(work_ptr + item * 8 + 2, mask=item < total, other=0, volatile=True)
        ends = tl.load(work_ptr + item * 8 + 3, mask=item < total, other=0, volatile=True)
        found = tl.minimum(found, tl.min(tl.where((begins <= token) & (token < ends), item, total)))
    entry, there = work_ptr + found * 8, found < total
    length = tl.load(entry + 1, mask=there, other=0, volatile=True)
    first = tl.load(entry + 2, mask=there, other=0, volatile=True)
    skipped = tl.load(entry + 4, mask=there, other=0, volatile=True)
    return length, first, skipped, tl.load(entry + 6, mask=there, other=-1, volatile=True)


@overlapping(reads_early=True, leads=True)
@triton.jit
def merge_kernel(
    positions_ptr, work_ptr, count_ptr, state_ptr, acc_ptr, out_ptr, scales_ptr, q_ptr, tokens, padded, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr, LISTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the splits of cut tiles from the workspace and write their outputs: a program for each token, query head
    and COLUMNS of its GROUPS · COLUMNS columns.

    window: positions a token sees, or None. scales_ptr, tokens, padded: None unless outputs are e4m3. The work list and
    positions are read before the kernel ahead has ended, as in ``attention_kernel``.
    """
    place = tl.program_id(0) + tl.arange(0, 1)  # of the program's columns in the outputs
    index, group = place // GROUPS, place % GROUPS
    token = tl.program_id(0) // (GROUPS * HEADS)
    total = tl.load(count_ptr, volatile=True)
    length, first, skipped, partial = _tile_of(work_ptr, total, token, LISTED)
    position = tl.load(positions_ptr + token + tl.arange(0, 1), volatile=True)
    follow(OVERLAP, True)
    if partial >= 0:
        begin = skipped
        if window is not None:
            begin = tl.maximum(begin, tl.max(position - window + 1) // SPLIT)
        row = index + ((partial - skipped).to(tl.int64) * TOKENS - first) * HEADS  # of split 0
        m, z, acc = nothing(1, COLUMNS)
        for start in range(begin, tl.cdiv(length, SPLIT), AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                wanted = (start + i) * SPLIT + tl.arange(0, 1) < length
                at = row + (start + i) * (TOKENS * HEADS)
                offset, mask = values(at * GROUPS + group, wanted, COLUMNS, COLUMNS)
                m1 = tl.load(state_ptr + at * 2, mask=wanted, other=float("-inf"), cache_modifier=".cg")
                z1 = tl.load(state_ptr + at * 2 + 1, mask=wanted, other=0.0, cache_modifier=".cg")
                acc1 = tl.load(acc_ptr + offset, mask=mask, other=0.0, cache_modifier=".cg")
                m, z, acc = merge(m, z, acc, m1, z1, acc1)
        outs = out_ptr, None, scales_ptr, q_ptr, tokens, padded
        _store(outs, place, position, place >= 0, m, z, acc, HEADS * GROUPS, COLUMNS, COLUMNS, 0)


def launch_merge(
    out: torch.Tensor,
    scales: torch.Tensor | None,
    q: torch.Tensor,
    positions: torch.Tensor,
    work: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
    acc: torch.Tensor,
    window: int,
) -> None:
    """Merge what a pass has left in state [partials, tile tokens, Hq, 2] and acc [partials, tile tokens, Hq, D] into
    out [T', Hq · D]. q [T, Hq, D] gives sizes and the dtype of outputs before e4m3, which have ``scales``.
    """
    (tokens, heads, dim), tile_tokens = q.shape, state.shape[1]
    rows = (None, None) if scales is None else (tokens, len(out))
    merge_kernel[(tokens * heads * (dim // GROUP),)](
        positions, work, count, state, acc, out, scales, q, *rows, window or None,
        HEADS=heads, GROUPS=dim // GROUP, COLUMNS=GROUP, TOKENS=tile_tokens, SPLIT=SPLIT, AT_ONCE=AT_ONCE,
        LISTED=LISTED, num_warps=1, **overlapped(q.device),
    )  # fmt: skip


def _case(heads: int, dim: int, tile_tokens: int, window: bool, quantised: bool) -> AotCase:
    pointers = "positions_ptr", "work_ptr", "count_ptr"
    signature = dict.fromkeys(pointers, "*i32") | {"state_ptr": "*fp32", "acc_ptr": "*fp32", "q_ptr": "*bf16"}
    signature["out_ptr"] = "*fp8e4nv" if quantised else "*bf16"
    optional = {"window": (window, "i32"), "scales_ptr": (quantised, "*fp32")}
    optional |= dict.fromkeys(("tokens", "padded"), (quantised, "i32"))
    signature |= {name: kind for name, (there, kind) in optional.items() if there}
    constants: dict[str, object] = {name: None for name, (there, _) in optional.items() if not there}
    constants |= {"HEADS": heads, "GROUPS": dim // GROUP, "COLUMNS": GROUP, "TOKENS": tile_tokens, "SPLIT": SPLIT}
    constants |= {"AT_ONCE": AT_ONCE, "LISTED": LISTED, "OVERLAP": True}
    return AotCase(merge_kernel, signature, constants, num_warps=1)


AOT = [
    _case(16, 256, 1, window=True, quantised=False),  # Gemma 4
    _case(16, 512, 4, window=False, quantised=True),
]
