"""Looking up what followed, and remembering outputs, against plain Python over lists; kernel and twin alike."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.lookup_cases import random_texts, slots_of
from tests.kernels.lookup_oracle import drafts_of
from unisono.kernels.speculation import lookup
from unisono.types import FinishReason

RUNNING, STOP, LENGTH, FREE = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH, FinishReason.FREE


@pytest.fixture(params=["kernel", "twin"])
def ops(request, device, monkeypatch) -> SimpleNamespace:
    """The two ops, and ``tensor`` for their arguments. Blocks are small, so that rows take several programs."""
    monkeypatch.setattr(lookup, "BLOCK", 16)
    if request.param == "twin":
        device, found = torch.device("cpu"), (lookup.lookup, lookup.remember)
    else:
        found = (lookup.launch_lookup, lookup.launch_remember)
    return SimpleNamespace(
        lookup=found[0],
        remember=found[1],
        device=device,
        tensor=lambda values: torch.as_tensor(values, dtype=torch.int32).to(device),
    )


@pytest.mark.parametrize("trial", range(3))
@pytest.mark.parametrize(("longest", "shortest"), [(4, 1), (3, 3), (1, 1), (50, 2)])
def test_the_longest_latest_match_is_continued(ops, trial, longest, shortest):
    rng = random.Random(trial * 100 + longest)
    k, rows = rng.choice([1, 2, 3, 5, 8]), random_texts(rng, 8, vocab=rng.choice([2, 3, 9]))
    history, length = slots_of(rows, ops)
    order = [*rng.sample(range(8), 6), 8, 8]  # the padding slot, twice
    scratch = lookup.lookup_scratch(len(order) + 2, 1, ops.device)
    drafts = ops.tensor([[7] * k] * len(order))
    for _ in range(2):  # the scratch is as it was
        ops.lookup(drafts, ops.tensor(order), history, length, scratch, longest, shortest, float(k), 0.0)
        assert scratch.count_nonzero() == 0
        for got, slot in zip(drafts.tolist(), order, strict=True):
            own = rows[slot] if slot < 8 else []
            assert got == drafts_of(own, [], k, longest, shortest), (own, longest, shortest)


@pytest.mark.parametrize(
    ("own", "longest", "expected"),
    [
        ([5, 1, 2, 3, 9, 1, 2], 4, [3, 9, 1]),
        ([1, 2, 3, 9, 9, 1, 2, 4, 9, 9, 1, 2], 2, [4, 9, 9]),
        ([8, 1, 2, 3, 9, 9, 7, 1, 2, 4, 9, 8, 1, 2], 3, [3, 9, 9]),
        ([6, 5, 5], 4, [5, 5, 5]),
        ([6, 1, 2, 1, 2, 1], 4, [2, 1, 2]),
        ([4, 5, 6], 4, [-1, -1, -1]),
        ([4], 4, [-1, -1, -1]),
        ([], 4, [-1, -1, -1]),
        # -1 is where an embedding stands: it equals no other, and nothing is copied across it.
        ([-1, 1, 3, -1, 1], 4, [3, -1, -1]),
        ([-1, 1, 3, 9, 1, 4, -1, 1], 4, [4, -1, -1]),
        ([5, -1, -1, -1], 4, [-1, -1, -1]),
    ],
    ids=["once", "latest", "longest", "period-1", "period-2", "new", "one-token", "empty", "across", "alike", "behind"],
)
def test_ngram_lookup_examples(ops, own, longest, expected):
    history, length = slots_of([own], ops)
    drafts = ops.tensor([[7] * 3])
    scratch = lookup.lookup_scratch(1, 1, ops.device)
    ops.lookup(drafts, ops.tensor([0]), history, length, scratch, longest, 1, 3.0, 0.0)
    assert drafts.tolist() == [expected]


@pytest.mark.parametrize("trial", range(8))
def test_the_vote_equals_the_oracle(ops, trial):
    rng = random.Random(trial)
    vocab, k, size = rng.choice([2, 3, 5]), rng.choice([1, 3, 4, 7]), rng.choice([2, 16, 31, 50])
    rows = random_texts(rng, 6, vocab)
    ring = [rng.choice([*range(vocab), *range(vocab), -1]) for _ in range(size)]
    head = rng.randrange(size)
    history, length = slots_of(rows, ops)
    order = [5, 2, 6, 0, 1, 3, 4, 6]
    voters, longest, shortest = rng.choice([1, 4, 16]), rng.choice([3, 20]), rng.choice([1, 2])
    factor, share = rng.choice([0.5, 1.0, 1.5, 8.0]), rng.choice([0.0, 0.1, 0.5, 0.9])
    scratch = lookup.lookup_scratch(8, voters, ops.device)
    drafts = ops.tensor([[7] * k] * 8)
    ops.lookup(
        drafts, ops.tensor(order), history, length, scratch, longest, shortest, factor, share,
        ops.tensor(ring), ops.tensor([head]),
    )  # fmt: skip
    assert scratch.count_nonzero() == 0
    for got, slot in zip(drafts.tolist(), order, strict=True):
        own = rows[slot] if slot < 6 else []
        aged = ring[head:] + ring[:head]
        assert got == drafts_of(own, aged, k, longest, shortest, voters, factor, share)


@pytest.mark.parametrize(
    ("ring", "own", "factor", "share", "expected"),
    [
        # 3 is followed by 4 twice and, later, by 5 once: two votes of three win over the latest match.
        ([3, 4, 6, -1, 3, 4, 6, -1, 3, 5, 7, -1], [1, 3], 9.0, 0.0, [4, 6, -1]),
        # The path (2, 3) -> 5 has one voter; (3) alone would have three. The longest match of the path judges it.
        ([3, 4, 6, -1, 3, 4, 6, -1, 2, 3, 5, 7, -1], [2, 3], 9.0, 0.0, [5, 7, -1]),
        # No more drafts than factor × matched tokens.
        ([3, 4, 6, 8, -1], [1, 3], 1.0, 0.0, [4, -1, -1]),
        ([1, 3, 4, 6, 8, -1], [1, 3], 1.0, 0.0, [4, 6, -1]),
        ([3, 4, 6, 8, -1], [1, 3], 2.5, 0.0, [4, 6, -1]),
        # After 4 the votes split: half is enough for a share of 0.5, not of 0.6.
        ([3, 4, 6, -1, 3, 4, 7, -1], [1, 3], 9.0, 0.6, [4, -1, -1]),
        ([3, 4, 6, -1, 3, 4, 7, -1], [1, 3], 9.0, 0.5, [4, 7, -1]),
        # An output ends where it ended; the next one in the ring does not follow it.
        ([1, 3, -1, 8, 8, -1], [1, 3], 9.0, 0.0, [-1, -1, -1]),
    ],
    ids=["majority", "most-specific", "factor-1", "factor-1-of-2", "factor-2.5", "split", "half", "end"],
)  # fmt: skip
def test_shared_ngram_vote_examples(ops, ring, own, factor, share, expected):
    history, length = slots_of([own], ops)
    drafts = ops.tensor([[7] * 3])
    scratch = lookup.lookup_scratch(1, 16, ops.device)
    ops.lookup(
        drafts, ops.tensor([0]), history, length, scratch, 4, 1, factor, share, ops.tensor(ring), ops.tensor([0])
    )
    assert drafts.tolist() == [expected]


def test_a_row_is_drafted_alike_in_any_batch(ops):
    rows = random_texts(random.Random(5), 7, vocab=3)
    history, length = slots_of(rows, ops)
    ring, head = ops.tensor([*range(3)] * 20), ops.tensor([11])

    def drafts(order: list[int]) -> list[list[int]]:
        out = ops.tensor([[7] * 4] * len(order))
        scratch = lookup.lookup_scratch(8, 16, ops.device)
        ops.lookup(out, ops.tensor(order), history, length, scratch, 6, 1, 2.0, 0.1, ring, head)
        return out.tolist()

    alone = [drafts([slot])[0] for slot in range(7)]
    assert drafts([*range(7)]) == alone
    assert drafts([7, 3, 1, 7]) == [[-1] * 4, alone[3], alone[1], [-1] * 4]


@pytest.mark.parametrize("size", [5, 16, 64])
def test_ended_outputs_are_remembered(ops, size):
    """Rounds of requests that run, end and were over before: only what ends is written, in order, END behind it."""
    rng = random.Random(size)
    written = [-1] * size
    ring, head = ops.tensor(written), ops.tensor([0])
    for _ in range(7):
        rows = random_texts(rng, 5, vocab=50)
        history, length = slots_of(rows, ops)
        prompt = [rng.randrange(len(text)) for text in rows] + [0]
        order = [3, 0, 5, 4, 1, 5]
        result = []
        for slot in order:
            count, status = rng.choice([(2, RUNNING), (1, STOP), (3, LENGTH), (0, STOP), (0, LENGTH)])
            result.append([0, FREE, -1] if slot == 5 else [count, status, -1])
            if slot < 5 and count and status != RUNNING:
                written += [*rows[slot][prompt[slot] :], -1]
        ops.remember(ring, head, ops.tensor(order), ops.tensor(result), history, length, ops.tensor(prompt))
        at = int(head)
        assert ring.tolist()[at:] + ring.tolist()[:at] == written[-size:]
    assert len(written) > 2 * size


def test_an_output_larger_than_the_ring_leaves_its_end(ops):
    history, length = slots_of([[*range(30)]], ops)
    ring, head = ops.tensor([-1] * 8), ops.tensor([3])
    ops.remember(
        ring, head, ops.tensor([1, 0]), ops.tensor([[0, FREE, -1], [1, STOP, 29]]), history, length, ops.tensor([2, 0])
    )
    assert ring.tolist()[3:] + ring.tolist()[:3] == [*range(23, 30), -1]
    assert int(head) == 3


def test_ops_declare_what_they_write():
    history, length = torch.ones(3, 8).int(), torch.tensor([4, 3, 0]).int()
    slots, ring, head = torch.tensor([1, 0]).int(), torch.full((16,), -1).int(), torch.zeros(1).int()
    result = torch.tensor([[1, 1, 5], [1, 0, 5]]).int()
    given = (torch.zeros(2, 3).int(), slots, history, length, lookup.lookup_scratch(2, 4, "cpu"), 4, 1, 1.0, 0.1)
    torch.library.opcheck(torch.ops.unisono.lookup.default, (*given, ring, head), test_utils="test_schema")
    torch.library.opcheck(torch.ops.unisono.lookup.default, given, test_utils="test_schema")
    given = (ring, head, slots, result, history, length, torch.ones(3).int())
    torch.library.opcheck(torch.ops.unisono.remember.default, given, test_utils="test_schema")
