"""Branch points, and the budget of their snapshots."""

from __future__ import annotations

import pytest

from unisono.kv.branch_points import LEAST_GAIN, BranchPoints
from unisono.kv.prefix_tree import Node
from unisono.kv.snapshots import SnapshotPool

END = 7


@pytest.mark.parametrize(
    ("length", "first_end", "cached", "most", "points"),
    [
        (144, None, 0, 2, (128,)),
        (150, None, 0, 2, (128,)),
        (143, None, 0, 2, ()),  # 112 tokens are not worth a pass
        (127, None, 0, 2, ()),
        (1000, None, 0, 2, (944,)),
        (1000, 500, 0, 2, (496, 944)),
        (1000, 500, 0, 1, (496,)),
        (1000, 500, 0, 0, ()),
        (1000, 900, 0, 2, (896,)),  # 944 would save 48 tokens more
        (1000, 40, 0, 2, (944,)),
        (1000, 500, 480, 2, (944,)),
        (1000, 500, 900, 2, ()),
    ],
)
def test_branch_points_of_a_prompt(
    length: int, first_end: int | None, cached: int, most: int, points: tuple[int, ...]
) -> None:
    tokens = [1] * length
    if first_end is not None:
        tokens[first_end - 1] = END
    assert BranchPoints(most, frozenset({END})).of(tokens, cached) == points
    assert all(at % 16 == 0 and at - cached >= LEAST_GAIN for at in points)


def node() -> Node:
    return Node(0, (), None)


def held(pool: SnapshotPool, guess: bool = False) -> Node:
    one = node()
    pool.attach(one, pool.take(), guess=guess)
    return one


def test_guesses_keep_a_quarter_of_a_full_pool() -> None:
    """They use free ids; then the oldest guess goes first, but only while guesses hold more than their share."""
    pool = SnapshotPool(8)
    guesses = [held(pool, guess=True) for _ in range(8)]
    kept = [held(pool) for _ in range(6)]
    assert [one.snapshot >= 0 for one in guesses] == [False] * 6 + [True] * 2
    newest = held(pool)
    assert [one.snapshot >= 0 for one in kept] == [False] + [True] * 5, "then the least recently used"
    assert newest.snapshot >= 0
    assert all(one.snapshot >= 0 for one in guesses[6:])


def test_a_guess_with_a_hit_counts_as_used() -> None:
    pool = SnapshotPool(4)
    first, second = held(pool, guess=True), held(pool, guess=True)
    pool.touch(first)
    others = [held(pool) for _ in range(2)]
    held(pool)
    assert first.snapshot < 0, "least recently used"
    assert second.snapshot >= 0, "one guess is within the share"
    pool.forget(second)
    pool.forget(others[0])
    assert len(pool.free) == 2
    assert pool.has_spare
