"""Choice of captured sizes: the cheapest set, and why."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from unisono.graphs.cost import PassCost, candidates, choose


def expected_ms(sizes: tuple[int, ...], limit: int, cost: PassCost, passes: float) -> float:
    """Cost of a set of sizes, written out: captures, and each pass by its smallest graph or eagerly."""
    weight = passes / sum(1 / n for n in range(1, limit + 1))
    total = sum(cost.capture(size) for size in sizes)
    for n in range(1, limit + 1):
        graph = next((size for size in sizes if size >= n), None)
        ways = [cost.eager(n)] + ([cost.replay(graph)] if graph else [])
        total += weight / n * min(ways)
    return total


@pytest.mark.parametrize("case", range(40))
def test_chosen_sizes_equal_brute_force_optimum(case: int) -> None:
    rng = random.Random(case)
    sizes = tuple(sorted(rng.sample(range(1, 60), rng.randrange(1, 8))))
    eager = rng.choice([math.inf, rng.uniform(1, 40)])
    cost = PassCost.linear(rng.uniform(0, 10), rng.uniform(0, 1), eager, rng.uniform(0, 50), rng.randrange(1 << 22))
    passes = 10 ** rng.uniform(-1, 4)
    every = [s for n in range(len(sizes) + 1) for s in itertools.combinations(sizes, n)]
    best = min(expected_ms(s, sizes[-1], cost, passes) for s in every)
    chosen = choose(sizes, cost, passes)
    assert expected_ms(chosen, sizes[-1], cost, passes) == pytest.approx(best) or (best == math.inf and chosen)


def test_passes_that_may_not_run_eagerly_all_find_a_graph() -> None:
    for limit in (1, 3, 16, 100, 256, 1000):
        chosen = choose(candidates(limit), PassCost.linear(5, 0.1), passes=1e-3)
        assert chosen == (limit,), "one graph for all, where few passes are expected"


def test_more_passes_pay_for_more_graphs_and_dearer_memory_for_fewer() -> None:
    sizes, cost = candidates(8192, 16), PassCost.linear(3.3, 0.0235, 25.0, 100.0, 8 << 20)
    few, many = choose(sizes, cost, 1e3), choose(sizes, cost, 1e5)
    assert len(few) < len(many)
    dear = PassCost.linear(3.3, 0.0235, 25.0, 100.0, 80 << 20)
    assert len(choose(sizes, dear, 1e5)) < len(many)


def test_sizes_bound_by_the_device_are_not_captured() -> None:
    """An 8B model's passes on an H200: from about 1000 tokens on the host launches faster than the device works."""
    cost = PassCost.linear(fixed_ms=3.3, row_ms=0.0235, eager_ms=25.0)
    chosen = choose(candidates(8192, 16), cost, passes=1e6)
    assert cost.replay(max(chosen)) <= cost.eager_ms
    assert choose(candidates(8192, 16), PassCost.linear(30.0, 0.02, eager_ms=25.0), passes=1e6) == ()


def test_pass_cost_interpolates_measurements() -> None:
    cost = PassCost.measured({16: 5.0, 1016: 25.0, 64: 5.5}, eager_ms=30.0)
    assert [cost.replay(n) for n in (16, 64, 1016, 1968)] == pytest.approx([5.0, 5.5, 25.0, 44.5])
    assert cost.eager(16) == 30.0
    assert PassCost.measured({16: 5.0, 32: 4.0}).replay(100) == 5, "noise: more rows never cost less"
    assert [PassCost.measured({1: 5.0}).replay(n) for n in (1, 2, 9)] == [5, 5, 5], "of one request at a time"


def test_one_row_behind_a_tile_costs_the_next_tile() -> None:
    """Measured on an H200: batch 16 takes 5.5 ms, and 18 rows 6.4; sizes chosen by a straight line were 18 and 72."""
    cost = PassCost.measured({1: 4.7, 16: 5.5, 32: 6.4, 64: 7.6, 128: 9.5, 256: 13.0}, flat=64)
    assert [cost.replay(n) for n in (16, 17, 31, 32, 33, 64)] == pytest.approx([5.5, 6.4, 6.4, 6.4, 7.6, 7.6])
    assert 4.7 < cost.replay(4) < cost.replay(8) < 5.5, "within the first tile a line"
    assert 7.6 < cost.replay(80) < 9.5, "behind the last, too"
    chosen = choose(candidates(256), cost, passes=5e5)
    assert {16, 32, 64} <= set(chosen)
    assert not {18, 20, 36, 40, 44, 48, 52, 56, 60} & set(chosen)


def test_existing_graphs_add_no_capture_cost() -> None:
    cost = PassCost.linear(1.0, 0.1, capture_ms=20.0)
    few = choose((1, 2, 4, 8, 16), cost, passes=30)
    assert few == (16,)
    assert choose((1, 2, 4, 8, 16), cost, passes=30, there=(4, 16)) == (4, 16)


def test_candidates_end_at_the_limit() -> None:
    for limit in (1, 3, 16, 37, 100, 256, 8192):
        for least in (1, 16):
            sizes = candidates(limit, least)
            assert sizes[-1] == limit
            assert list(sizes) == sorted(set(sizes))
            assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))
            assert all(b <= 1.126 * a for a, b in itertools.pairwise(sizes) if a >= 8 * least)
