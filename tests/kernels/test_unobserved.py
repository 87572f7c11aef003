"""What is kept while a drafter pauses, against plain Python: kernel and twin alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unisono.kernels.speculation import unobserved as ops

SLOTS, WIDTH, TOKENS = 6, 4, 40
NAMES = ("mark_observed", "stash", "take_unobserved")


@pytest.fixture(params=["kernel", "twin"])
def case(request: pytest.FixtureRequest, device: torch.device) -> SimpleNamespace:
    """The ops, ``tensor`` for their arguments, and histories in which the token at p of slot s is 100 s + p."""
    kernel = request.param == "kernel"
    device = device if kernel else torch.device("cpu")
    functions = {name: getattr(ops, f"launch_{name}" if kernel else name) for name in NAMES}
    history = torch.arange(SLOTS)[:, None] * 100 + torch.arange(TOKENS)
    return SimpleNamespace(
        **functions,
        history=history.to(device, torch.int32),
        tensor=lambda values, dtype=torch.int32: torch.as_tensor(values, dtype=dtype).to(device),
    )


def strided(case: SimpleNamespace, values: list[int]) -> torch.Tensor:
    """A slot field as the arena holds it."""
    return case.tensor([[n, -5] for n in values])[:, 0]


def test_mark_observed(case):
    observed = case.tensor([1, 2, 3, 4, 5, 6])
    case.mark_observed(observed, case.tensor([4, 0]), strided(case, [10, 11, 12, 13, 14, 15]))
    assert observed.tolist() == [10, 2, 3, 4, 14, 6]


@pytest.mark.parametrize(("size", "dtype"), [(3, torch.float32), (1500, torch.float16)])
def test_stash(case, size, dtype):
    """The hidden state of the token at p goes to row p % W; a row that committed nothing keeps nothing."""
    ring = torch.zeros(SLOTS, WIDTH, size, dtype=dtype).to(case.history.device)
    source = torch.randint(1, 99, (4, size)).to(ring)
    length = strided(case, [9, 5, 7, 20, 1, 3])
    result = case.tensor([[1, 0, 7], [0, 1, -1], [1, 0, 8], [1, 0, 9]])
    case.stash(ring, case.tensor([3, 1, 0, 4]), result, length, source)
    want = torch.zeros_like(ring)
    want[3, 19 % WIDTH], want[0, 8 % WIDTH], want[4, 0] = source[0], source[2], source[3]
    assert torch.equal(ring, want)


@pytest.mark.parametrize("lag", [0, 2])
def test_take_pending(case, lag):
    """Slots with some pending, more than the width, none, and the padding slot twice."""
    observed, length = [5, 7, 9, 2, 4, 0], [8, 20, 9, 3, 4, 0]
    slots = [1, 0, 5, 3, 2, 5]
    moving = case.tensor(observed)
    result, sampled, rows = case.take_unobserved(
        moving, case.tensor(slots), strided(case, length), case.history, WIDTH, lag
    )
    for r, slot in enumerate(slots):
        count = min(length[slot] - observed[slot], WIDTH)
        tokens = [100 * slot + observed[slot] + j - lag for j in range(count)]
        assert result[r].tolist() == [count, 0, *tokens, *[-1] * (WIDTH - count)]
        assert sampled[r].tolist() == tokens + [0] * (WIDTH - count)
        given = rows.view(-1, WIDTH)[r].tolist()
        assert given[:count] == [slot * WIDTH + (observed[slot] + j) % WIDTH for j in range(count)]
        assert all(slot * WIDTH <= row < (slot + 1) * WIDTH for row in given)
    assert moving.tolist() == [8, 11, 9, 3, 4, 0]


def test_embedding_positions_are_read_as_token_0(case):
    """A history has -1 there: no draft model has a row for it, and -1 in a result means that nothing follows."""
    history = case.history.clone()
    history[1, :7] = -1
    observed, length = case.tensor([0, 7, 0]), strided(case, [0, 11, 0])
    result, sampled, _ = case.take_unobserved(observed, case.tensor([1]), length, history, WIDTH, 2)
    assert result.tolist() == [[4, 0, 0, 0, 107, 108]]
    assert sampled.tolist() == [[0, 0, 107, 108]]


def test_stashed_states_are_taken_in_order():
    """Three rounds of width 1, then the ring's rows are those of the pending tokens, in order."""
    observed, length = torch.tensor([6, 0]).int(), torch.tensor([6, 0]).int()
    ring, slots = torch.zeros(2, WIDTH, 1), torch.tensor([0]).int()
    for value in (1.0, 2.0, 3.0):
        length[0] += 1
        ops.stash(ring, slots, torch.tensor([[1, 0, 5]]).int(), length, torch.tensor([[value]]))
    _, _, rows = ops.take_unobserved(observed, slots, length, torch.zeros(2, 40).int(), WIDTH, 0)
    assert ring.flatten(0, 1)[rows.long()][:3, 0].tolist() == [1.0, 2.0, 3.0]


def test_ops_trace_by_shape():
    slots, length = torch.tensor([1, 0]).int(), torch.tensor([5, 6, 0]).int()
    observed = torch.tensor([4, 3, 0]).int()
    torch.library.opcheck(torch.ops.unisono.mark_observed.default, (observed.clone(), slots, length))
    given = (torch.zeros(3, 4, 2), slots, torch.ones(2, 3).int(), length, torch.ones(2, 2))
    torch.library.opcheck(torch.ops.unisono.stash.default, given)
    given = (observed, slots, length, torch.ones(3, 9).int(), 4, 1)
    torch.library.opcheck(torch.ops.unisono.take_unobserved.default, given)
