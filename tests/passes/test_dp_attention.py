"""Local tokens of an attention-DP rank in a pass."""

from __future__ import annotations

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.context import ForwardContext
from unisono.attention.dp_attention import local_inputs
from unisono.kv.specs import PAGE_SIZE

PAGES = 10
TABLE = torch.tensor([[12, 15, 0], [3, 0, 0], [0, 0, 0]], dtype=torch.int32)  # of rank 1, of rank 0, padding


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def slot(page: int, offset: int) -> int:
    return page * PAGE_SIZE + offset


def test_a_prompt_pass() -> None:
    """Rows of two ranks, an empty row, and a token after all rows."""
    mapping = ints(slot(12, 15), slot(15, 0), slot(3, 4), slot(0, 9))
    inputs = AttentionInputs(
        ints(0, 1, 2), ints(15, 16, 4, -1), mapping, ints(17, 5, 0), TABLE, None, ints(0, 2, 3, 3)
    )  # fmt: skip
    own, owner = local_inputs(inputs, 1, PAGES)
    assert owner.tolist()[:3] == [1, 1, 0]
    assert own.positions.tolist() == [15, 16, -1, -1]
    assert own.slot_mapping.tolist() == [slot(2, 15), slot(5, 0), 4, 9]
    assert own.kv_len.tolist() == [17, 0, 0]
    assert own.page_table.tolist() == [[2, 5, 0], [0, 0, 0], [0, 0, 0]]
    other, same = local_inputs(inputs, 0, PAGES)
    assert torch.equal(owner, same)
    assert other.positions.tolist() == [-1, -1, 4, -1]
    assert other.slot_mapping.tolist() == [15, 0, slot(3, 4), 9]
    assert other.page_table.tolist() == [[0, 0, 0], [3, 0, 0], [0, 0, 0]]


def test_page_ids_of_an_earlier_request_on_another_rank() -> None:
    """A slot keeps the ids beyond its pages; as local ids they lie before or after the rank's pages."""
    table = torch.tensor([[3, 12, 29], [25, 3, 12]], dtype=torch.int32)
    inputs = AttentionInputs(ints(0, 1), ints(4, 5), ints(slot(3, 4), slot(25, 5)), ints(5, 6), table, 1)
    assert local_inputs(inputs, 0, PAGES)[0].page_table.tolist() == [[3, 0, 0], [0, 0, 0]]
    assert local_inputs(inputs, 2, PAGES)[0].page_table.tolist() == [[0, 0, 0], [5, 0, 0]]


def test_a_mixed_pass() -> None:
    """Requests that decode come first, as a round of width 1; the prompt's rows follow."""
    decoding = AttentionInputs(ints(1, 0), ints(4, 20), ints(slot(3, 4), slot(15, 4)), ints(5, 21), TABLE, 1)
    prompt = AttentionInputs(ints(0), ints(0, 1), ints(slot(12, 0), slot(12, 1)), ints(2), TABLE, None, ints(0, 2))
    own, token_ranks = local_inputs(AttentionInputs.joined(decoding, prompt), 1, PAGES)
    assert token_ranks.tolist() == [0, 1, 1, 1]
    single, rest = own.parts()
    assert single.positions.tolist() == [-1, 20]
    assert single.page_table[single.slots.long()].tolist() == [[0, 0, 0], [2, 5, 0]]
    assert rest.positions.tolist() == [0, 1]
    assert rest.page_table[rest.slots.long()].tolist() == [[2, 5, 0]]


def test_a_round_and_the_last_tokens() -> None:
    mapping = ints(slot(15, 0), slot(15, 1), slot(3, 4), slot(3, 5))
    inputs = AttentionInputs(ints(0, 1), ints(16, 17, 4, 5), mapping, ints(18, 6), TABLE, 2)
    context = ForwardContext.of(inputs, inputs.last_tokens(ints(1, 3)))
    own, owner = context.local_tokens(0, PAGES)
    assert owner.tolist() == [1, 0]
    assert own.positions.tolist() == [-1, -1, 4, 5]
    assert own.queries.positions.tolist() == [-1, 5]
    assert context.local_tokens(0, PAGES)[0] is own
    whole, every = context.all_tokens.local_tokens(0, PAGES)
    assert every.tolist() == [1, 1, 0, 0]
    assert whole.last_tokens is None
