"""Inputs of a draft model's passes against a plain Python oracle, kernel and twin alike."""

import random
from types import SimpleNamespace

import pytest
import torch

from unisono.kernels.speculation import draft_inputs
from unisono.types import FinishReason

PAGE, MAX_PAGES, SLOTS, MAX_TOKENS, VOCAB = 4, 6, 10, 24, 50


@pytest.fixture(params=["kernel", "twin"])
def ops(request, device) -> SimpleNamespace:
    """The two ops, and ``tensor`` for their arguments."""
    if request.param == "twin":
        device, found = torch.device("cpu"), (draft_inputs.draft_inputs, draft_inputs.draft_extend_inputs)
    else:
        found = (draft_inputs.launch_draft_inputs, draft_inputs.launch_draft_extend_inputs)
    return SimpleNamespace(
        draft_inputs=found[0],
        draft_extend_inputs=found[1],
        tensor=lambda values: torch.as_tensor(values, dtype=torch.int32).to(device),
    )


def tables(rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """History and page table of SLOTS slots and the padding slot; some tokens are outside VOCAB, on either side."""
    history = [[rng.randrange(-3, VOCAB + 5) for _ in range(MAX_TOKENS)] for _ in range(SLOTS + 1)]
    table = [[rng.randrange(1, 50) for _ in range(MAX_PAGES)] for _ in range(SLOTS + 1)]
    return history, table


def known(token: int) -> int:
    return token if 0 <= token < VOCAB else 0


def kv_slot(table: list[list[int]], slot: int, position: int) -> int:
    return table[slot][position // PAGE] * PAGE + position % PAGE


@pytest.mark.parametrize("apart", [False, True], ids=["own rows", "given rows"])
@pytest.mark.parametrize(("first", "width"), [(-2, 2), (0, 1), (1, 1), (2, 1), (-2, 5), (-5, 3)])
def test_draft_inputs_equal_the_oracle(ops, first, width, apart):
    """Each row writes to its slot's pages, or to those of the page-table row that it is given."""
    rng = random.Random(first * 10 + width)
    history, table = tables(rng)
    lengths = [1, 2, 3, 4, 5, 8, 9, 12, 13, 7, 0]
    limits = [n + rng.choice([1, 2, 3, 9]) for n in lengths]
    status = [FinishReason.RUNNING] * 8 + [FinishReason.STOP, FinishReason.ABORT, FinishReason.FREE]
    fields = ops.tensor([[n, 7, e, s] for n, e, s in zip(lengths, limits, status, strict=True)])
    order = [3, 0, 9, 10, 7, 1, 2, 8, 4, 5, 6, 10]
    rows = order[::-1] if apart else order
    drafts = [[rng.randrange(-1, VOCAB + 5) for _ in range(3)] for _ in order]
    token_ids, positions, slot_mapping, kv_len = ops.draft_inputs(
        ops.tensor(order), ops.tensor(drafts), ops.tensor(history), fields[:, 0], fields[:, 2], fields[:, 3],
        ops.tensor(table), PAGE, VOCAB, first, width, ops.tensor(rows) if apart else None,
    )  # fmt: skip
    for row, slot in enumerate(order):
        active = status[slot] == FinishReason.RUNNING
        end = lengths[slot] + first + width
        assert kv_len[row] == (max(min(end, limits[slot]), 0) if active else 0)
        for j in range(width):
            at = row * width + j
            position = lengths[slot] + first + j
            got = (int(token_ids[at]), int(positions[at]), int(slot_mapping[at]))
            if not active or position < 0:
                assert got == (0, -1, j % PAGE)
                continue
            before = position < lengths[slot]
            token = history[slot][position] if before else drafts[row][position - lengths[slot]]
            inside = position < limits[slot]
            place = kv_slot(table, rows[row], position) if inside else j % PAGE
            assert got == (known(token), position if inside else limits[slot] - 1, place)


@pytest.mark.parametrize("num_tokens", [11, 12, 200])
def test_draft_extend_inputs_equal_the_oracle(ops, num_tokens):
    """Rows that begin at 0, on a page, within one; two unused rows, and padding tokens behind."""
    counts, starts, order = [4, 3, 1, 3, 0, 0], [0, 4, 13, 7, 0, 0], [2, 4, 0, 1, SLOTS, SLOTS]
    history, table = tables(random.Random(num_tokens))
    query_start = torch.tensor([0, *counts]).cumsum(0)
    token_ids, positions, slot_mapping, kv_len, draft_start = ops.draft_extend_inputs(
        ops.tensor(order), ops.tensor(query_start), ops.tensor(starts), ops.tensor(history), ops.tensor(table), PAGE,
        VOCAB, num_tokens,
    )  # fmt: skip
    expected = []
    for slot, start, count in zip(order, starts, counts, strict=True):
        for position in range(start - 1, start + count):
            padding = (0, -1, len(expected) % PAGE)
            token = (known(history[slot][position]), position, kv_slot(table, slot, max(position, 0)))
            expected.append(token if position >= 0 else padding)
    expected += [(0, -1, t % PAGE) for t in range(len(expected), num_tokens + len(order))]
    assert list(zip(token_ids.tolist(), positions.tolist(), slot_mapping.tolist(), strict=True)) == expected
    assert kv_len.tolist() == [s + n for s, n in zip(starts, counts, strict=True)]
    assert draft_start.tolist() == [int(query_start[r]) + r for r in range(len(order) + 1)]


def test_fields_of_different_arenas_are_refused():
    one, other = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32)
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="one arena"):
        draft_inputs.launch_draft_inputs(
            slots, one[:1], one, one[:, 0], one[:, 1], other[:, 0], one, PAGE, VOCAB, 0, 1
        )  # fmt: skip


def test_ops_declare_what_they_write():
    fields = torch.tensor([[5, 9, 0], [3, 9, 0], [0, 0, 4]]).int()
    slots, drafts, table = torch.tensor([1, 0]).int(), torch.zeros(2, 2).int(), torch.ones(3, 9).int()
    history = torch.arange(60).int().view(3, 20)
    given = (slots, drafts, history, fields[:, 0], fields[:, 1], fields[:, 2], table, PAGE, VOCAB, -2, 2)
    torch.library.opcheck(torch.ops.unisono.draft_inputs.default, given)
    given = (slots, torch.tensor([0, 3, 5]).int(), slots, history, table, PAGE, VOCAB, 8)
    torch.library.opcheck(torch.ops.unisono.draft_extend_inputs.default, given)
