"""Graphs that an idle engine captures because they were left for later, and passes that requests wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.graphs.programs import CPU, LonePlanner, answer, batch, double, program, shapes
from unisono.engine.worker.runner import Runner
from unisono.graphs import Features, GraphKey, PassShape, Reason, Replay
from unisono.graphs.buckets import Buckets
from unisono.graphs.cost import PassCost
from unisono.graphs.planner import Planner

COST = PassCost.linear(fixed_ms=0.0, row_ms=1.0, eager_ms=20.0, capture_ms=5.0)
"""The host needs as long for an eager pass as the device for 20 rows."""


def planned(*rows: int, **how: Any) -> Planner:
    planner = LonePlanner(CPU)
    planner.capture([Buckets(program(double), shapes(*rows), cost=COST, **how)])
    return planner


def captured(planner: Planner) -> list[int]:
    return [graph.key.shape.rows for graph in planner.graphs()]


def test_deferred_graphs_are_captured_when_idle() -> None:
    planner = planned(4, 8, deferred=True, passes=1000.0)
    assert captured(planner) == []
    assert answer(planner, 3) is Reason.NOT_CAPTURED
    assert [planner.capture_missing() for _ in range(3)] == [1, 1, 0]
    assert captured(planner) == [4, 8]
    assert planner.idle_captures == 2


def test_sizes_in_kept_ms_are_captured_even_if_unprofitable() -> None:
    planner = planned(8, 24, 28, 32, 40, passes=1000.0, kept_ms=(26.0, 33.0))
    assert captured(planner) == [8], "above 20 rows an eager pass takes no longer than a graph"
    assert [planner.capture_missing() for _ in range(3)] == [1, 1, 0]
    assert captured(planner) == [8, 28, 32]


def test_common_sizes_are_captured_at_start_and_rare_ones_when_idle() -> None:
    planner = planned(8, 24, 28, 40, passes=1000.0, common=frozenset({24}), when_idle=frozenset({40}))
    assert captured(planner) == [8, 24], "above 20 rows an eager pass takes no longer than a graph"
    assert [planner.capture_missing() for _ in range(2)] == [1, 0]
    assert captured(planner) == [8, 24, 40]


def test_dropped_graphs_are_not_captured_when_idle() -> None:
    planner = planned(4, 8, deferred=True, passes=1000.0)
    planner.budget = 0
    assert planner.capture_missing() == 0
    assert answer(planner, 3) is Reason.OVER_BUDGET
    assert planner.capture_missing() == 0


def test_a_pass_that_requests_wait_for_replays_a_graph_that_is_a_little_longer() -> None:
    """An eager pass of 28 rows takes 28 ms on the device; outputs of the pass before it wait 20 ms for its launch."""
    planner = planned(32, 40, kept_ms=(30.0, 50.0), passes=1e-6)
    while planner.capture_missing():
        pass
    key = GraphKey("p", PassShape(28))
    assert answer(planner, 28) is Reason.UNPROFITABLE
    waited = planner.plan(key, waited=True)
    assert isinstance(waited, Replay)
    assert waited.graph.key.shape.rows == 32
    assert answer(planner, 26) is Reason.UNPROFITABLE
    assert not isinstance(planner.plan(GraphKey("p", PassShape(26)), waited=True), Replay), "32 rows take 6 ms more"
    planner.run(key, batch([[1, 2]] * 28), waited=True)
    planner.run(key, batch([[1, 2]] * 28))
    assert planner.passes == {("p", "tape", ""): 1, ("p", "eager", "UNPROFITABLE"): 1}


@pytest.mark.parametrize(
    ("tokens", "decodes", "filled"), [(31, 0, 24), (33, 0, 32), (20, 0, 20), (30, 4, 28), (9, 0, 9)]
)
def test_a_pass_is_cut_short_to_fill_a_graph(tokens: int, decodes: int, filled: int) -> None:
    """But by a quarter at most."""
    planner = LonePlanner(CPU)
    planner.capture(
        [
            Buckets(program(double, "extend"), shapes(12, 24, 32), cost=COST, kept_ms=(0.0, 50.0), passes=1e-6),
            Buckets(program(double, "mixed"), (PassShape(32, 5),), cost=COST, kept_ms=(0.0, 50.0), passes=1e-6),
        ]
    )
    while planner.capture_missing():
        pass
    runner: Any = SimpleNamespace(
        planner=planner,
        features=Features(),
        mixed_key=lambda tokens, decodes: GraphKey("mixed", PassShape(tokens + decodes, 1 + decodes)),
    )
    assert Runner.tokens_filling_graph(runner, tokens, decodes) == filled


def test_prompt_pass_tokens_fill_the_graph() -> None:
    """Up to 20 rows a graph saves time; a mixed pass has all rows of its room, whoever decodes in it."""
    planner = LonePlanner(CPU)
    programs = Buckets(program(double, "extend"), shapes(12, 18), cost=COST, passes=1000.0)
    planner.capture([programs, Buckets(program(double, "mixed"), (PassShape(16, 5),), cost=COST, passes=1000.0)])
    runner: Any = SimpleNamespace(
        config=SimpleNamespace(device=SimpleNamespace(type="cuda")),
        features=Features(),
        planner=planner,
        mixed_key=lambda tokens, decodes: GraphKey("mixed", PassShape(tokens + decodes, 1 + decodes)),
    )
    taken = [
        Runner.launched_ms(runner, SimpleNamespace(tokens=tokens, decodes=[0] * decodes, decode_rows=4 * (decodes > 0)))
        for tokens, decodes in ((10, 0), (13, 0), (25, 0), (9, 1), (14, 2))
    ]
    assert taken == [12.0, 18.0, 25.0, 16.0, 16.0]


def test_passes_are_not_shortened_if_all_replay() -> None:
    """On a CPU, where every pass replays a graph."""
    planner = LonePlanner(CPU)
    planner.capture([Buckets(program(double), shapes(8, 16), cost=PassCost.linear(1.0, 1.0))])
    assert captured(planner) == [8, 16]
    assert planner.full_graph_rows(GraphKey("p", PassShape(12))) == 0
