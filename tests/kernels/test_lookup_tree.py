"""Several continuations of a text, against plain Python over lists; kernel and twin alike."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.lookup_cases import random_texts, slots_of
from tests.kernels.lookup_oracle import drafts_of, paths_of
from unisono.kernels.speculation import lookup_tree
from unisono.kernels.speculation.lookup import lookup_scratch


@pytest.fixture(params=["kernel", "twin"])
def ops(request, device, monkeypatch) -> SimpleNamespace:
    """The op, and ``tensor`` for its arguments. Blocks are small, so that rows take several programs."""
    monkeypatch.setattr(lookup_tree, "BLOCK", 16)
    twin = request.param == "twin"
    device = torch.device("cpu") if twin else device
    return SimpleNamespace(
        lookup_path=lookup_tree.lookup_path if twin else lookup_tree.launch_lookup_path,
        device=device,
        tensor=lambda values: torch.as_tensor(values, dtype=torch.int32).to(device),
    )


def run(ops: SimpleNamespace, rows: list[list[int]], order: list[int], sizes: list[int], k: int, *bounds: int):
    history, length = slots_of(rows, ops)
    scratch = lookup_scratch(len(order) + 1, 1, ops.device)
    drafts = torch.full((len(order), len(sizes), k), 7, dtype=torch.int32, device=ops.device)
    for path, size in enumerate(sizes):
        ops.lookup_path(drafts, path, size, ops.tensor(order), history, length, scratch, *bounds)
        assert scratch.count_nonzero() == 0
    return drafts.tolist()


@pytest.mark.parametrize("trial", range(8))
def test_paths_equal_the_oracle(ops, trial):
    rng = random.Random(trial)
    k = rng.choice([1, 3, 4])
    rows = random_texts(rng, 8, vocab=rng.choice([2, 3, 5]))
    sizes = [k, *(rng.randint(1, k) for _ in range(rng.randint(1, 4)))]
    longest, shortest = rng.choice([(1, 1), (3, 1), (20, 2)])
    order = [*rng.sample(range(8), 6), 8, 8]  # the padding slot, twice
    drafts = run(ops, rows, order, sizes, k, longest, shortest)
    several = 0
    for got, slot in zip(drafts, order, strict=True):
        own = rows[slot] if slot < 8 else []
        assert got == paths_of(own, sizes, k, longest, shortest), (own, sizes)
        assert got[0] == drafts_of(own, [], k, longest, shortest), "path 0 is what a chain drafts"
        several += got[1][0] >= 0
    assert several > 0


@pytest.mark.parametrize(
    ("own", "sizes", "expected"),
    [
        # 3 is followed by 6 4 last, by 5 4 before, and by 6 4 at first.
        ([3, 6, 4, 3, 5, 4, 3, 6, 4, 9, 3], [2, 2, 2], [[6, 4], [5, 4], [-1, -1]]),
        # One token long, a path must differ in one; two long, it may go on from there.
        ([3, 6, 1, 3, 6, 2, 3], [2, 1], [[6, 2], [-1, -1]]),
        ([3, 6, 1, 3, 6, 2, 3], [1, 2, 2], [[6, -1], [6, 2], [6, 1]]),
        # The longer match comes first, though the other is later.
        ([1, 3, 5, 9, 3, 6, 1, 3], [1, 1], [[5, -1], [6, -1]]),
        ([4], [2, 2], [[-1, -1], [-1, -1]]),
        # -1 is where an embedding stands: it makes no match longer.
        ([-1, 3, 5, 9, 3, 6, -1, 3], [1, 1], [[6, -1], [5, -1]]),
    ],
    ids=["distinct", "prefix", "longer", "order", "one-token", "embedding"],
)
def test_ngram_tree_lookup_examples(ops, own, sizes, expected):
    assert run(ops, [own], [0], sizes, 2, 4, 1) == [expected]


def test_the_op_declares_what_it_writes():
    history, length = torch.ones(3, 8).int(), torch.tensor([4, 3, 0]).int()
    given = (torch.zeros(2, 3, 2).int(), 1, 2, torch.tensor([1, 0]).int(), history, length)
    given = (*given, lookup_scratch(2, 1, "cpu"), 4, 1)
    torch.library.opcheck(torch.ops.unisono.lookup_path.default, given, test_utils="test_schema")
