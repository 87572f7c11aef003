"""Draft trees: several paths of one request in a round, with forked page tables, and the choice of the best path.

A round may try P *paths* for each request: P rows of drafts that share the request's slot and its committed KV. Path 0
uses the request's own page-table row. Each other path has a row of its own after all slots' rows, whose last pages are
private to it. Row r · P + l of a pass is path l of the round's row r.

Owns the ops ``fork_paths`` (page-table rows, and the positions to copy to a path's private pages), ``copy_span``
(copies positions from one page-table row to another, in all layers) and ``best_path``. The engine calls them inside a
round. Only ``fork_paths`` writes page tables, and only the rows of paths. With several page tables, ``fork_paths`` is
called for each of them and returns the same for all.

A path writes positions from length - 2 at the earliest (a draft model may compute that one again) to length + k - 1.
The ``span_pages`` pages that hold them are private. ::

    page table   [ 7 | 9 | 4 | 12 ]      the request's own: path 0
                 [ 7 | 9 | a |  b ]      path 1: shares the first pages, a and b are its own
                           └ its committed positions are copied

Shapes: R rows, P paths, M = R · P, W width (1 + k), S slots, MP pages per row, L layers of keys and of values
(or other state), NP pages, H KV heads, PAGE page size, D head dim. Slot fields share a stride.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, ints, one_stride, op
from unisono.types import FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
REACH = tl.constexpr(2)
"""Number of positions before ``length`` that a path may rewrite."""

COLUMNS_PER_STEP = 256
SPAN_BLOCK = 16


class Fork(NamedTuple):
    """Rows of a round as paths, all [M] int32.

    slots: the path's slot. tables: the page-table row it reads and writes.
    sources, first, last: positions first … last - 1 are to be copied from page-table row ``sources`` to ``tables``:
    none for path 0 and for inactive rows.
    """

    slots: Tensor
    tables: Tensor
    sources: Tensor
    first: Tensor
    last: Tensor


class Best(NamedTuple):
    """Path of each row with the most accepted drafts. All int32.

    rows [R]: indices into M. tables [R]. sampled [R, W], drafts [R, W - 1]: those of the path. drafted [R]: number of
    tokens that all paths draft, a shared prefix counted once.
    """

    rows: Tensor
    tables: Tensor
    sampled: Tensor
    drafts: Tensor
    drafted: Tensor


def span_pages(drafts: int, page_size: int) -> int:
    """Maximum number of pages that a path with this number of drafts writes."""
    return (drafts + REACH.value - 2) // page_size + 2


@triton.jit
def _fork_kernel(
    page_table, slots, length, status, owners, tables, sources, first, last,
    stride, max_pages, first_row, first_page, P, pages, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    path = m % P
    slot = tl.load(slots + m // P)
    tokens = tl.load(length + slot * stride)
    virtual = slot * (P - 1) + path - 1
    table = tl.where(path > 0, first_row + virtual, slot)
    forked = (path > 0) & (tl.load(status + slot * stride) == RUNNING)
    tail = tl.maximum(tokens - REACH, 0) // PAGE
    tl.store(owners + m, slot)
    tl.store(tables + m, table)
    tl.store(sources + m, slot)
    tl.store(first + m, tl.where(forked, tail * PAGE, 0))
    tl.store(last + m, tl.where(forked, tokens, 0))
    if forked:
        ours = page_table + table.to(tl.int64) * max_pages
        theirs = page_table + slot.to(tl.int64) * max_pages
        for start in range(0, tail, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(ours + column, tl.load(theirs + column, mask=column < tail), mask=column < tail)
        g = tl.arange(0, BLOCK_G)
        tl.store(ours + tail + g, first_page + virtual * pages + g, mask=(g < pages) & (tail + g < max_pages))


@triton.jit
def _copy_span_kernel(
    kv, page_table, sources, tables, first, last, layer_stride, page_stride, max_pages, H, D,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    source, table = tl.load(sources + m), tl.load(tables + m)
    end = tl.load(last + m)
    if source != table:
        layer = kv + tl.program_id(1).to(tl.int64) * layer_stride
        d = tl.arange(0, BLOCK_D)[None, :]
        for start in range(tl.load(first + m), end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < end
            from_page = tl.load(page_table + source.to(tl.int64) * max_pages + at // PAGE, mask=inside, other=0)
            to_page = tl.load(page_table + table.to(tl.int64) * max_pages + at // PAGE, mask=inside, other=0)
            both = inside[:, None] & (d < D)
            for head in range(H):
                line = (head * PAGE + at % PAGE)[:, None] * D + d
                value = tl.load(layer + from_page.to(tl.int64)[:, None] * page_stride + line, mask=both)
                tl.store(layer + to_page.to(tl.int64)[:, None] * page_stride + line, value, mask=both)


@triton.jit
def _best_path_kernel(
    sampled, drafts, tables, rows, best_tables, best_sampled, best_drafts, drafted, P, W,
    BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    path, j = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_W)
    m = (r * P + path)[:, None]
    inside = (path < P)[:, None] & (j < W - 1)[None, :]
    target = tl.load(sampled + m * W + j[None, :], mask=inside, other=-1)
    draft = tl.load(drafts + m * (W - 1) + j[None, :], mask=inside, other=-1)
    right = inside & (target == draft)
    accepted = tl.min(tl.where(right, BLOCK_W, j[None, :]), axis=1)
    best = tl.max(tl.where(path < P, accepted * BLOCK_P + (BLOCK_P - 1 - path), -1))
    row = r * P + BLOCK_P - 1 - best % BLOCK_P
    tl.store(rows + r, row)
    tl.store(best_tables + r, tl.load(tables + row))
    tl.store(best_sampled + r * W + j, tl.load(sampled + row * W + j, mask=j < W), mask=j < W)
    k = W - 1
    tl.store(best_drafts + r * k + j, tl.load(drafts + row * k + j, mask=j < k), mask=j < k)

    alike = (path[None, :] < path[:, None]) & (path < P)[:, None]  # equal so far to an earlier path
    count = tl.zeros((BLOCK_P,), tl.int32)
    for step in range(k):
        token = tl.load(drafts + (r * P + path) * k + step, mask=path < P, other=-1)
        alike = alike & (token[None, :] == token[:, None])
        new = tl.max(alike.to(tl.int32), axis=1) == 0
        count += ((token >= 0) & new).to(tl.int32)
    tl.store(drafted + r, tl.sum(count))


def _fork_meta(slots: Tensor, paths: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    owners, tables, sources, first, last = (slots.new_empty(slots.shape[0] * paths) for _ in range(5))
    return owners, tables, sources, first, last


def launch_fork_paths(
    page_table: Tensor, slots: Tensor, length: Tensor, status: Tensor, paths: int, pages: int, first_page: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Triton implementation of :func:`fork_paths`."""
    out = _fork_meta(slots, paths)
    _fork_kernel[(slots.shape[0] * paths,)](
        page_table, slots, length, status, *out,
        one_stride(length, status), page_table.stride(0), length.shape[0], first_page, paths, pages,
        PAGE=page_size, BLOCK=COLUMNS_PER_STEP, BLOCK_G=triton.next_power_of_2(pages),
    )  # fmt: skip
    return out


def launch_copy_span(
    kv: Tensor, page_table: Tensor, sources: Tensor, tables: Tensor, first: Tensor, last: Tensor
) -> None:
    """Triton implementation of :func:`copy_span`."""
    layers, _, heads, page_size, dim = kv.shape
    _copy_span_kernel[(sources.shape[0], layers)](
        kv, page_table, sources, tables, first, last, kv.stride(0), kv.stride(1), page_table.stride(0), heads, dim,
        PAGE=page_size, BLOCK=SPAN_BLOCK, BLOCK_D=triton.next_power_of_2(dim),
    )  # fmt: skip


def _best_meta(sampled: Tensor, paths: int) -> Best:
    rows, width = sampled.shape[0] // paths, sampled.shape[1]
    best, at, drafted = (sampled.new_empty(rows) for _ in range(3))
    return Best(best, at, sampled.new_empty(rows, width), sampled.new_empty(rows, width - 1), drafted)


def launch_best_path(sampled: Tensor, drafts: Tensor, tables: Tensor, paths: int) -> Best:
    """Triton implementation of :func:`best_path`."""
    out, width = _best_meta(sampled, paths), sampled.shape[1]
    _best_path_kernel[(sampled.shape[0] // paths,)](
        sampled.contiguous(), drafts.contiguous(), tables, *out, paths, width,
        BLOCK_P=triton.next_power_of_2(paths), BLOCK_W=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out


@op(cuda=launch_fork_paths, meta=_fork_meta)
def fork_paths(
    page_table: Mutated[Tensor], slots: Tensor, length: Tensor, status: Tensor, paths: int, pages: int, first_page: int,
    page_size: int,
) -> Fork:  # fmt: skip
    """Fill the page-table row of each path of the requests in ``slots [R]``, and return the positions to copy to it.

    length, status [S]: slot fields; page_table [S + S · (paths - 1), MP]: row S + s · (paths - 1) + l - 1 is path l's
    of slot s, l ≥ 1; all int32. Such a row gets the pages of its slot up to the one with position length - 2, then
    ``pages`` private ones, allocated from page ``first_page`` on, ``pages`` per path in the order of rows. Paths of
    inactive slots, including the padding slot, do not change.
    """
    owners = slots.repeat_interleave(paths)
    path = torch.arange(paths, dtype=torch.int32).repeat(slots.shape[0])
    virtual = owners * (paths - 1) + path - 1
    tables = (length.shape[0] + virtual).where(path > 0, owners)
    tokens = length[owners.long()]
    forked = (path > 0) & (status[owners.long()] == RUNNING.value)
    tail = (tokens - REACH.value).clamp_min(0) // page_size
    for m in forked.nonzero()[:, 0].tolist():
        table, column, page = page_table[tables[m]], int(tail[m]), first_page + int(virtual[m]) * pages
        table[:column] = page_table[owners[m], :column]
        own = table[column : column + pages]
        own.copy_(torch.arange(page, page + pages, dtype=torch.int32)[: len(own)])
    return Fork(owners, tables, owners.clone(), (tail * page_size).where(forked, 0), tokens.where(forked, 0))


@op(cuda=launch_copy_span)
def copy_span(
    kv: Mutated[Tensor], page_table: Tensor, sources: Tensor, tables: Tensor, first: Tensor, last: Tensor
) -> None:
    """Copy positions first[m] … last[m] - 1 of paged state from one page-table row to another, in all layers.

    kv [L, NP, H, PAGE, D], pages contiguous, of any L, H and D; page_table [rows, MP]; sources, tables, first, last
    [M]; all of these int32. If sources[m] is tables[m], nothing is copied. No page that is written may be read or
    written twice.
    """
    page_size = kv.shape[3]
    counts = (last - first).clamp_min(0).masked_fill(sources == tables, 0).long()
    row = torch.arange(len(counts)).repeat_interleave(counts)
    at = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row] + first[row]
    source, target = (page_table[t[row].long(), at // page_size].long() for t in (sources, tables))
    kv[:, target, :, at % page_size] = kv[:, source, :, at % page_size]


@op(cuda=launch_best_path, meta=_best_meta)
def best_path(sampled: Tensor, drafts: Tensor, tables: Tensor, paths: int) -> Best:
    """Find the path of each row whose drafts equal its sampled tokens for the longest prefix; ties go to the lowest
    path.

    sampled [R · paths, W], drafts [R · paths, W - 1], tables [R · paths]; all int32.
    """
    accepted = (sampled[:, :-1] == drafts).int().cumprod(1).sum(1).view(-1, paths)
    rows = (accepted.argmax(1) + torch.arange(len(accepted)) * paths).int()
    best = rows.long()
    same = (drafts.view(-1, paths, 1, drafts.shape[1]) == drafts.view(-1, 1, paths, drafts.shape[1])).cumprod(-1)
    before = torch.ones(paths, paths).tril(-1).bool()[:, :, None]  # for each path, the paths before it
    new = ~(same.bool() & before).any(2) & (drafts.view(-1, paths, drafts.shape[1]) >= 0)
    return Best(rows, tables[best], sampled[best], drafts[best], new.sum((1, 2)).int())


AOT: list[AotCase] = [
    AotCase(
        _fork_kernel,
        ints(
            "page_table slots length status owners tables sources first last",
            "stride max_pages first_row first_page P pages",
        ),
        {"PAGE": 16, "BLOCK": COLUMNS_PER_STEP, "BLOCK_G": 2},
    ),
    *(
        AotCase(
            _copy_span_kernel,
            {"kv": f"*{dtype}", "layer_stride": "i64"}
            | ints("page_table sources tables first last", "page_stride max_pages H D"),
            {"PAGE": 16, "BLOCK": SPAN_BLOCK, "BLOCK_D": dim},
        )
        for dtype, dim in (("bf16", 128), ("fp16", 64), ("fp32", 64))
    ),
    AotCase(
        _best_path_kernel,
        ints("sampled drafts tables rows best_tables best_sampled best_drafts drafted", "P W"),
        {"BLOCK_P": 8, "BLOCK_W": 4},
        num_warps=1,
    ),
]
