"""Edited logits against transformers' processors in float64, the kernel against its twin, width against steps."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from unisono.kernels.sampling import edits
from unisono.sampling.edits import pack_edits, row_words
from unisono.types import SamplingParams

VOCAB, MAX_TOKENS = 300, 64
WORDS = ((7,), (3, 9), (1, 2, 3, 4), (5, 5, 8))
EVERYTHING = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "logit_bias": {5: 3.5, 9: -100.0, 299: 0.25, 11: 100.0},
    "allowed_token_ids": (*range(0, VOCAB, 3), 5, 7, 299),
    "min_tokens": 6,
}


@dataclass(frozen=True)
class Row:
    """One request: its prompt, its output so far, what it asks for, and the drafts of a round."""

    prompt: list[int]
    output: list[int]
    params: dict
    words: tuple = ()
    stops: tuple = (2, 290)
    drafts: tuple = ()
    status: int = 0


def rows() -> list[Row]:
    random = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:  # few different ones, so that they repeat and words complete
        return torch.randint(0, 12, (count,), generator=random).tolist()

    asked = [{name: value} for name, value in EVERYTHING.items()] + [{}, EVERYTHING, EVERYTHING]
    words = [()] * len(EVERYTHING) + [WORDS, WORDS, ()]
    pairs = enumerate(zip(asked, words, strict=True))
    whole = [Row(ids(4 + i), ids(7 * i % 10), params, w) for i, (params, w) in pairs]
    ends = [Row([1, 2], [3], {}, WORDS), Row([9], [1, 2, 3], {}, WORDS), Row([1, 2, 3], [], {}, WORDS)]
    silent = [Row([1], [2], {}), Row([1], [2], EVERYTHING, WORDS, status=4)]
    return [replace(row, drafts=(3, 9, int(i % 5), -1)) for i, row in enumerate(whole + ends + silent)]


def arguments(batch: list[Row], device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """The op's slot arguments (edits … table), one slot for each row; the fields in one arena."""
    words = row_words(VOCAB)
    arena = torch.full((len(batch), 3 + 16), -1, dtype=torch.int32)
    history = torch.zeros(len(batch), MAX_TOKENS, dtype=torch.int32)
    table = torch.zeros(len(batch), words, dtype=torch.int32)
    for slot, row in enumerate(batch):
        packed = pack_edits(SamplingParams(max_tokens=None, **row.params), row.words, len(row.prompt), VOCAB)
        seen = row.prompt + row.output
        arena[slot, :3] = torch.tensor([packed is not None, len(seen), row.status])
        arena[slot, 3 : 3 + len(row.stops)] = torch.tensor(row.stops)
        history[slot, : len(seen)] = torch.tensor(seen)
        if packed is not None:
            table[slot] = torch.from_numpy(packed)
    arena, history, table = arena.to(device), history.to(device), table.to(device)
    return arena[:, 0], arena[:, 1], arena[:, 2], arena[:, 3:], history, table


def asks(batch: list[Row]) -> torch.Tensor:
    return torch.tensor([bool(row.params or row.words) and row.status == 0 for row in batch])


def reference(logits: torch.Tensor, row: Row, drafts: tuple[int, ...] = ()) -> torch.Tensor:
    """One row [VOCAB] in float64, in vLLM's order: masks, bias, stops, penalties."""
    p = SamplingParams(max_tokens=None, **row.params)
    prompt, output = row.prompt, row.output + [d for d in drafts if d >= 0]
    scores = logits.double()[None].clone()
    if p.allowed_token_ids is not None:
        outside = torch.ones(VOCAB, dtype=torch.bool)
        outside[list(p.allowed_token_ids)] = False
        scores[:, outside] = -torch.inf
    chain = LogitsProcessorList()
    if row.words:
        # vLLM matches words in the output only. One token before: transformers skips words as long as the text.
        bad = NoBadWordsLogitsProcessor([list(word) for word in row.words])
        scores = bad(torch.tensor([[VOCAB, *output]]), scores)
    if p.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in p.logit_bias.items()}))
    chain.append(MinNewTokensLengthLogitsProcessor(len(prompt), p.min_tokens, list(row.stops), device="cpu"))
    chain.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    scores = chain(torch.tensor([prompt + output]), scores)[0]
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=VOCAB).double()
    return scores - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)


def both(logits, slots, width, drafts, batch, device, **options):
    kernel = edits.launch_edit_logits(
        logits.to(device), slots.to(device), width, drafts.to(device), *arguments(batch, device), **options
    )
    here = {name: value.cpu() if torch.is_tensor(value) else value for name, value in options.items()}
    return kernel.cpu(), edits.edit_logits.cpu(logits, slots, width, drafts, *arguments(batch), **here)


@pytest.mark.parametrize("width", [1, 3])
def test_edits_match_transformers_processors(width, dtype, device):
    """Position j of a round has seen the drafts before it."""
    batch = rows()
    logits = (torch.randn(len(batch) * width, VOCAB) * 4).to(dtype)
    slots = torch.randperm(len(batch), dtype=torch.int32)
    drafts = torch.tensor([batch[slot].drafts[: width - 1] for slot in slots], dtype=torch.int32).view(len(batch), -1)
    kernel, twin = both(logits, slots, width, drafts, batch, device)
    for r, slot in enumerate(slots.tolist()):
        if asks(batch)[slot]:
            for j in range(width):
                n = r * width + j
                expected = reference(logits[n], batch[slot], batch[slot].drafts[:j])
                for name, edited in (("kernel", kernel), ("twin", twin)):
                    torch.testing.assert_close(
                        edited[n].double(), expected, rtol=3e-7, atol=3e-6, msg=lambda m, w=(name, slot, j): f"{w} {m}"
                    )


def test_rows_at_places_are_edited_as_gathered_rows(device):
    """Rows of a round whose rows differ: each has its row of the logits somewhere, or none."""
    batch, width = rows(), 3
    count = len(batch) * width
    logits, places = torch.randn(count // 2, VOCAB), torch.randint(0, count // 2, (count,), dtype=torch.int32)
    slots = torch.arange(len(batch), dtype=torch.int32)
    drafts = torch.tensor([row.drafts[: width - 1] for row in batch], dtype=torch.int32)
    gathered = both(logits[places.long()], slots, width, drafts, batch, device)
    places[::4] = -1
    edited = asks(batch).repeat_interleave(width) & (places >= 0)
    at_places = both(logits, slots, width, drafts, batch, device, places=places.to(device))
    for expected, got in zip(gathered, at_places, strict=True):
        assert torch.equal(got[edited], expected[edited])


def test_width_is_sequential_application(device):
    batch = rows()
    width, count = 5, len(batch)
    logits = torch.randn(count * width, VOCAB)
    slots = torch.arange(count, dtype=torch.int32)
    drafts = torch.tensor([row.drafts for row in batch], dtype=torch.int32)
    wide, twin = both(logits, slots, width, drafts, batch, device)
    for j in range(width):
        grown = [replace(row, output=row.output + [d for d in row.drafts[:j] if d >= 0]) for row in batch]
        one = logits.view(count, width, -1)[:, j].contiguous()
        step, step_twin = both(one, slots, 1, drafts[:, :0], grown, device)
        keep = asks(batch) & (torch.tensor([-1 not in row.drafts[:j] for row in batch]))
        assert torch.equal(wide.view(count, width, -1)[keep, j], step[keep])
        assert torch.equal(twin.view(count, width, -1)[keep, j], step_twin[keep])


def test_a_part_of_the_vocabulary_and_an_offset(device):
    """A drafter that knows every third token sees the edits of those, two drafts in."""
    batch, ids = rows(), torch.arange(0, VOCAB, 3, dtype=torch.int32)
    slots = torch.arange(len(batch), dtype=torch.int32)
    drafts = torch.tensor([row.drafts for row in batch], dtype=torch.int32)
    logits = torch.randn(len(batch), VOCAB)
    keep = asks(batch)
    whole = both(logits, slots, 1, drafts, batch, device, offset=2)
    part = both(logits[:, ::3].contiguous(), slots, 1, drafts, batch, device, offset=2, ids=ids.to(device))
    for full, few in zip(whole, part, strict=True):
        assert torch.equal(full[keep][:, ::3], few[keep])


@pytest.mark.parametrize("block", [128, 4096])
def test_the_parts_of_ranks(device, block, monkeypatch):
    """Each has the edits of its own tokens, masks too, whatever is edited on the others."""
    monkeypatch.setattr(edits, "EDIT_BLOCK", block)
    batch, size = rows(), VOCAB // 2
    slots = torch.arange(len(batch), dtype=torch.int32)
    drafts = torch.tensor([row.drafts for row in batch], dtype=torch.int32)
    logits, keep = torch.randn(len(batch), VOCAB), asks(batch)
    mask = torch.randint(-(2**31), 2**31, (len(batch), -(-VOCAB // 32)), dtype=torch.int32)
    whole = both(logits, slots, 1, drafts, batch, device, offset=2, mask=mask.to(device))
    for first in (0, size):
        own = logits[:, first : first + size].contiguous()
        part = both(own, slots, 1, drafts, batch, device, offset=2, mask=mask.to(device), first=first)
        for full, few in zip(whole, part, strict=True):
            assert torch.equal(full[keep][:, first : first + size], few[keep])


def test_a_long_history_is_counted_in_chunks(device, monkeypatch):
    monkeypatch.setattr(edits, "HISTORY_CHUNK", 16)
    monkeypatch.setattr(edits, "EDIT_BLOCK", 128)
    row = Row([5, 7, 200] * 9, [5, 130, 130] * 8, EVERYTHING | {"allowed_token_ids": None}, WORDS)
    logits = torch.randn(1, VOCAB)
    no_drafts = torch.empty((1, 0), dtype=torch.int32)
    for edited in both(logits, torch.zeros(1, dtype=torch.int32), 1, no_drafts, [row], device):
        torch.testing.assert_close(edited[0].double(), reference(logits[0], row), rtol=3e-7, atol=3e-6)


def test_a_row_depends_on_no_other(device, assert_rows_exact):
    batch = [row for row, asked in zip(rows(), asks(rows()), strict=True) if asked]
    fields = arguments(batch, device)
    assert_rows_exact(
        lambda logits, slots, drafts: edits.launch_edit_logits(logits, slots, 1, drafts, *fields, 3),
        torch.randn(len(batch), VOCAB, device=device),
        torch.arange(len(batch), dtype=torch.int32, device=device),
        torch.tensor([row.drafts for row in batch], dtype=torch.int32, device=device),
    )


def test_rows_without_edits_are_not_written(device):
    batch = rows()
    slots = torch.arange(len(batch), dtype=torch.int32)
    no_drafts = torch.empty((len(batch), 0), dtype=torch.int32)
    for edited in both(torch.randn(len(batch), VOCAB), slots, 1, no_drafts, batch, device):
        assert edited[~asks(batch)].isnan().all()  # as allocated: the fixture poisons
        assert not edited[asks(batch)].isnan().any()


def test_a_request_without_edits_has_no_table_row():
    assert pack_edits(SamplingParams(), (), 5, VOCAB) is None
    assert np.count_nonzero(pack_edits(SamplingParams(min_tokens=1), (), 5, VOCAB)[:8]) == 3  # repetition 1.0 too


@pytest.mark.parametrize("ids", [None, torch.arange(1, VOCAB, 2, dtype=torch.int32)], ids=["all ids", "some ids"])
def test_a_mask_forbids_at_its_own_position_only(ids, device):
    """Beside every other edit: what it forbids is -inf, what it allows has the bits that it has without a mask."""
    batch, width = rows(), 3
    tokens = torch.arange(VOCAB) if ids is None else ids.long()
    logits = torch.randn(len(batch) * width, len(tokens))
    slots = torch.randperm(len(batch), dtype=torch.int32)
    drafts = torch.tensor([batch[slot].drafts[: width - 1] for slot in slots], dtype=torch.int32)
    allowed = torch.rand(len(logits), VOCAB) < 0.5
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view(np.int32)
    mask = torch.from_numpy(packed.copy())
    options = {"ids": None if ids is None else ids.to(device)}
    free = both(logits, slots, width, drafts, batch, device, **options)
    masked = both(logits, slots, width, drafts, batch, device, mask=mask.to(device), **options)
    asked = asks(batch)[slots.long()].repeat_interleave(width)
    for without, edited in zip(free, masked, strict=True):
        expected = without.masked_fill(~allowed[:, tokens], -torch.inf)
        assert torch.equal(edited[asked], expected[asked])
        assert edited[~asked].isnan().all()
