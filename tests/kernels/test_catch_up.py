"""Entries of rounds and prompt passes, and the row scatter, against a plain Python oracle: kernel and twin alike."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from unisono.kernels.speculation import catch_up as ops

PAGE, MAX_PAGES, SLOTS = 4, 8, 7


@pytest.fixture(params=["kernel", "twin"])
def case(request: pytest.FixtureRequest, device: torch.device) -> SimpleNamespace:
    """The ops, ``tensor`` for their arguments, and a page table of SLOTS slots with the padding slot behind."""
    launched = ("launch_catch_up", "launch_catch_up_extend", "launch_keep_rows")
    names = launched if request.param == "kernel" else ("catch_up", "catch_up_extend", "keep_rows")
    device = device if request.param == "kernel" else torch.device("cpu")
    table = torch.randperm(SLOTS * MAX_PAGES).add(1).view(SLOTS, MAX_PAGES)
    table = torch.cat((table, torch.zeros(1, MAX_PAGES, dtype=torch.int64)))
    return SimpleNamespace(
        **dict(zip(("round", "extend", "keep"), (getattr(ops, name) for name in names), strict=True)),
        device=device,
        table=table.tolist(),
        page_table=table.to(device, torch.int32),
        tensor=lambda values: torch.as_tensor(values, dtype=torch.int32).to(device),
    )


def entry(pages: list[int], token: int, at: int, spare: int) -> tuple[int, int, int, int]:
    """(token, position, KV slot, page that ends right before) of an entry; ``at`` -1 is padding."""
    if at < 0:
        return 0, -1, spare % PAGE, -1
    return token, at, pages[at // PAGE] * PAGE + at % PAGE, pages[at // PAGE - 1] if at % PAGE == 0 else -1


@pytest.mark.parametrize("width", [2, 4, 6])
def test_a_rounds_entries_are_its_committed_tokens(case, width):
    rng = random.Random(width)
    slots = [3, 0, SLOTS, 6, 2, 5, SLOTS, 1]
    counts = [0 if slot == SLOTS else rng.randint(0, width) for slot in slots]
    before = [rng.randint(1, 20) for _ in range(SLOTS + 1)]
    after = list(before)
    for slot, count in zip(slots, counts, strict=True):
        after[slot] += count
    sampled = [[rng.randrange(99) for _ in range(width)] for _ in slots]
    result = [[count, 0, *row] for count, row in zip(counts, sampled, strict=True)]
    arena = case.tensor([[n, -5] for n in after])  # a strided field
    got = case.round(
        case.tensor(slots), case.tensor(result), case.tensor(sampled), arena[:, 0], case.page_table, PAGE
    )  # fmt: skip

    rows = list(zip(slots, counts, strict=True))
    want = [
        entry(case.table[slot], sampled[r][j], before[slot] + j if j < count else -1, j)
        for r, (slot, count) in enumerate(rows)
        for j in range(width)
    ]
    fields = (got.token_ids, got.positions, got.slot_mapping, got.pages)
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == want
    assert got.kv_len.tolist() == [after[slot] if count else 0 for slot, count in rows]
    assert got.last.tolist() == [r * width + max(count - 1, 0) for r, count in enumerate(counts)]
    assert got.owners.tolist() == [slot if count else -1 for slot, count in rows]


@pytest.mark.parametrize("tokens", [24, 40, 300])
def test_a_prompt_pass_makes_the_next_tokens_entries(case, tokens):
    """From the start, behind cached pages (at an edge), amid a page, empty, at an edge again; padding behind."""
    starts, lengths, slots = [0, 8, 5, 12, 4, 0, 0], [6, 5, 3, 0, 9, 1, 0], [2, 4, 0, 6, 1, 5, SLOTS]
    count = len(slots)
    edges = torch.tensor([0, *lengths]).cumsum(0).tolist()
    owned = [(slot, start + i) for slot, start, n in zip(slots, starts, lengths, strict=True) for i in range(n)]
    padding = [(SLOTS, -1)] * (tokens - len(owned))
    given = [(7 * i) % 50 for i in range(tokens)]
    following = [(11 * i + 3) % 50 for i in range(tokens)]
    got = case.extend(
        case.tensor(slots), case.tensor(edges), case.tensor(starts), case.tensor(given), case.tensor(following),
        case.tensor([p for _, p in owned + padding]), case.page_table, PAGE,
    )  # fmt: skip

    leads = [n > 0 and start > 0 and start % PAGE == 0 for start, n in zip(starts, lengths, strict=True)]
    assert leads == [False, True, False, False, True, False, False]
    leading = [
        entry(case.table[slot], given[edge] if lead else 0, start if lead else -1, r)
        for r, (slot, edge, start, lead) in enumerate(zip(slots, edges, starts, leads, strict=False))
    ]
    own = [
        entry(case.table[slot], following[t], at + 1 if at >= 0 else -1, t)
        for t, (slot, at) in enumerate(owned + padding)
    ]
    fields = (got.token_ids, got.positions, got.slot_mapping)
    assert list(zip(*(f.tolist() for f in fields), strict=True)) == [e[:3] for e in leading + own]
    assert got.sources.tolist() == [max(e[3], 0) for e in leading]
    assert got.pages.tolist() == [e[3] for e in own]
    assert got.slots.tolist() == slots * 2
    assert got.query_start.tolist() == [*range(count), *(count + edge for edge in edges)]
    ends = [start + n + 1 if n else 0 for start, n in zip(starts, lengths, strict=True)]
    assert got.kv_len.tolist() == [start + 1 if lead else 0 for start, lead in zip(starts, leads, strict=True)] + ends
    assert got.last.tolist() == [count + max(edge - 1, 0) for edge in edges[1:]]
    assert got.owners.tolist() == [slot if n else -1 for slot, n in zip(slots, lengths, strict=True)]


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.int32), (90, torch.float32), (2500, torch.float16)])
def test_rows_are_kept_or_skipped(case, size, dtype):
    out = torch.randint(0, 50, (9, size)).to(case.device, dtype)
    source = torch.randint(50, 99, (6, size)).to(case.device, dtype)
    want = out.clone()
    for i, row in enumerate([4, -1, 0, 8, -1, 3]):
        if row >= 0:
            want[row] = source[i]
    case.keep(out, case.tensor([4, -1, 0, 8, -1, 3]), source)
    assert torch.equal(out, want)


def test_ops_trace_by_shape():
    slots, edges, ids = torch.tensor([1, 0]).int(), torch.tensor([0, 3, 4]).int(), torch.arange(6).int()
    table, length = torch.ones(3, 9).int(), torch.tensor([5, 6, 0]).int()
    given = (slots, torch.tensor([[1, 0, 4, -1], [2, 0, 5, 6]]).int(), torch.ones(2, 2).int(), length, table, PAGE)
    torch.library.opcheck(torch.ops.unisono.catch_up.default, given)
    positions = torch.tensor([0, 1, 2, 7, -1, -1]).int()
    given = (slots, edges, torch.tensor([0, 7]).int(), ids, ids, positions, table, PAGE)
    torch.library.opcheck(torch.ops.unisono.catch_up_extend.default, given)
    given = (torch.zeros(5, 3), torch.tensor([2, -1]).int(), torch.ones(2, 3))
    torch.library.opcheck(torch.ops.unisono.keep_rows.default, given)
