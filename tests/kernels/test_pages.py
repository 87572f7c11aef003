"""Growth of page tables, and slot mappings of a second page table: those that the fused kernels would give."""

import random
from types import SimpleNamespace

import pytest
import torch

from unisono.kernels.cache import pages
from unisono.kernels.speculation import catch_up, draft_inputs, rounds
from unisono.types import FinishReason

PAGE, MAX_PAGES, SLOTS = 4, 6, 9  # and the padding slot after them


@pytest.fixture(params=["kernel", "twin"])
def ops(request, device) -> SimpleNamespace:
    names = ("grow_pages", "group_slot_mapping")
    prefix = "launch_" if request.param == "kernel" else ""
    device = device if request.param == "kernel" else torch.device("cpu")
    return SimpleNamespace(
        **{name: getattr(pages, prefix + name) for name in names},
        device=device,
        tensor=lambda values: torch.as_tensor(values, dtype=torch.int32).to(device),
    )


@pytest.fixture
def two_tables(ops) -> list[torch.Tensor]:
    """Page tables of two groups: the slots' rows, the padding slot's, and as many rows of tree paths."""
    return [
        ops.tensor(torch.randperm(2 * (SLOTS + 1) * MAX_PAGES).add(1).view(2 * (SLOTS + 1), MAX_PAGES))
        for _ in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("growth", [1, 3])
def test_tables_grow(ops, growth):
    table, rng = ops.tensor(torch.arange(60).view(10, 6)), random.Random(growth)
    slots = [7, 2, 9, 0]
    columns = [[rng.choice([-1, j, j + 3]) for j in range(growth)] for _ in slots]
    new = [[100 + 10 * r + g for g in range(growth)] for r in range(len(slots))]
    want = table.tolist()
    for slot, places, added in zip(slots, columns, new, strict=True):
        for column, page in zip(places, added, strict=True):
            if column >= 0:
                want[slot][column] = page
    for _ in range(2):
        ops.grow_pages(table, ops.tensor(slots), ops.tensor(columns), ops.tensor(new))
        assert table.tolist() == want


def fields(ops) -> torch.Tensor:
    """Slot fields [S, 4]: length, max_length, status, last token; some near their maximum, some not running."""
    lengths = [1, 2, 4, 5, 8, 9, 13, 7, 12, 0]
    room = [1, 2, 3, 9, 1, 2, 9, 3, 9, 0]
    status = [FinishReason.RUNNING] * 7 + [FinishReason.STOP, FinishReason.RUNNING, FinishReason.FREE]
    return ops.tensor([[n, n + r, s, 3] for n, r, s in zip(lengths, room, status, strict=True)])


ORDER = [3, 0, 9, 1, 7, 4, 2, 9, 5, 6, 8]


@pytest.mark.parametrize("paths", [False, True], ids=["own rows", "paths"])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_rounds_of_a_second_table(ops, two_tables, width, paths):
    slots, slot = ops.tensor(ORDER), fields(ops)
    tables = slots + (SLOTS + 1) if paths else slots
    drafts = ops.tensor(torch.ones(len(ORDER), width - 1))
    first, second = (
        rounds.round_inputs(
            slots, drafts, slot[:, 0], slot[:, 1], slot[:, 2], slot[:, 3], table, PAGE, tables if paths else None
        )
        for table in two_tables
    )
    assert torch.equal(ops.group_slot_mapping(two_tables[1], tables, first[1], first[2], None, PAGE), second[2])
    assert not torch.equal(first[2], second[2])


@pytest.mark.parametrize(("first", "width"), [(-2, 2), (0, 1), (2, 1), (-5, 6)])
def test_draft_passes_of_a_second_table(ops, two_tables, first, width):
    slots, slot = ops.tensor(ORDER), fields(ops)
    drafts, history = ops.tensor(torch.ones(len(ORDER), 3)), ops.tensor(torch.ones(SLOTS + 1, MAX_PAGES * PAGE))
    ours, theirs = (
        draft_inputs.draft_inputs(
            slots, drafts, history, slot[:, 0], slot[:, 1], slot[:, 2], table, PAGE, 50, first, width
        )
        for table in two_tables
    )
    assert torch.equal(ops.group_slot_mapping(two_tables[1], slots, ours[1], ours[2], None, PAGE), theirs[2])
    assert not torch.equal(ours[2], theirs[2])


def test_extend_passes_of_a_second_table(ops, two_tables):
    """Empty rows, tokens of no row, rows that begin at 0, at a page's edge and inside a page."""
    slots, start = ops.tensor([2, 5, 0, 8, 9, 9]), ops.tensor([0, 8, 5, 3, 0, 0])
    query_start, tokens = ops.tensor([0, 7, 12, 12, 15, 15, 15]), 150  # more than one program's
    ids, history = ops.tensor(torch.ones(tokens)), ops.tensor(torch.ones(SLOTS + 1, MAX_PAGES * PAGE))
    for table in two_tables:
        table[SLOTS] = 0
    extends = [rounds.extend_inputs(slots, query_start, start, table, PAGE, tokens) for table in two_tables]
    (positions, mapping, _), (_, want, _) = extends
    assert torch.equal(ops.group_slot_mapping(two_tables[1], slots, positions, mapping, query_start, PAGE), want)
    assert not torch.equal(mapping, want)

    draft, other = (
        draft_inputs.draft_extend_inputs(slots, query_start, start, history, table, PAGE, 50, tokens)
        for table in two_tables
    )
    assert torch.equal(ops.group_slot_mapping(two_tables[1], slots, draft[1], draft[2], draft[4], PAGE), other[2])

    entries, other = (
        catch_up.catch_up_extend(slots, query_start, start, ids, ids, positions, table, PAGE) for table in two_tables
    )
    assert torch.equal(
        ops.group_slot_mapping(
            two_tables[1], entries.slots, entries.positions, entries.slot_mapping, entries.query_start, PAGE
        ),
        other.slot_mapping,
    )
    assert not torch.equal(entries.slot_mapping, other.slot_mapping)


def test_catch_up_of_a_second_table(ops, two_tables):
    slots, slot, width = ops.tensor(ORDER), fields(ops), 4
    sampled = ops.tensor(torch.ones(len(ORDER), width))
    counts = [min(count, slot[s, 0].item()) for s, count in zip(ORDER, [0, 1, 0, 2, 4, 3, 4, 0, 1, 2, 4], strict=True)]
    result = torch.cat((ops.tensor(counts)[:, None], ops.tensor(torch.zeros(len(ORDER), 1)), sampled), 1)
    entries, other = (catch_up.catch_up(slots, result, sampled, slot[:, 0], table, PAGE) for table in two_tables)
    got = ops.group_slot_mapping(two_tables[1], slots, entries.positions, entries.slot_mapping, None, PAGE)
    assert torch.equal(got, other.slot_mapping)
    assert not torch.equal(got, entries.slot_mapping)


def test_ops_declare_what_they_write():
    table, slots = torch.arange(1, 25).int().view(4, 6), torch.tensor([1, 0]).int()
    given = (table, slots, torch.tensor([[1, -1], [0, 2]]).int(), torch.tensor([[9, 9], [9, 9]]).int())
    torch.library.opcheck(torch.ops.unisono.grow_pages.default, given, test_utils="test_schema")
    positions, mapping = torch.tensor([0, 1, 6, -1]).int(), torch.tensor([20, 21, 30, 1]).int()
    for query_start in (None, torch.tensor([0, 2, 4]).int()):
        torch.library.opcheck(
            torch.ops.unisono.group_slot_mapping.default, (table, slots, positions, mapping, query_start, PAGE)
        )
