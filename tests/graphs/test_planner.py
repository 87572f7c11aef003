"""The planner: what it captures, drops and catches up on, and what it says of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.graphs.programs import CPU, LonePlanner, answer, batch, double, poison, program, shapes
from unisono.graphs import (
    Buffers,
    Eager,
    Features,
    GraphKey,
    Hidden,
    PassShape,
    PendingOutputs,
    Reason,
    Replay,
    eager_break,
)
from unisono.graphs import graph_set as graph_set_module
from unisono.graphs.buckets import Buckets
from unisono.graphs.cost import PassCost
from unisono.graphs.planner import Planner
from unisono.graphs.tape import Tape


def planned(*rows: int, planner: Planner | None = None, **how: Any) -> Planner:
    planner = planner or LonePlanner(CPU)
    planner.capture([Buckets(program(double), shapes(*rows), **how)])
    return planner


def clocked(monkeypatch: pytest.MonkeyPatch, device_ms: Callable[[int], float] = lambda rows: 15.0) -> Planner:
    """A planner for which every eager pass takes the host 10 ms to launch, and the device ``device_ms(rows)``."""
    planner = LonePlanner(CPU)
    monkeypatch.setattr(planner, "_timed", lambda buckets, shape: (10.0, device_ms(shape.rows)))
    return planner


def launch(planner: Planner, rows: int) -> PendingOutputs:
    return planner.run(GraphKey("p", PassShape(rows)), batch([[1, 2]] * rows))


@pytest.mark.parametrize("edge", [2, 4, 8])
def test_the_edges_of_buckets(edge: int) -> None:
    planner = planned(2, 4, 8)
    above = {2: 4, 4: 8, 8: Reason.ABOVE_BUCKETS}[edge]
    assert [answer(planner, n) for n in (edge - 1, edge, edge + 1)] == [edge, edge, above]
    for n in (edge - 1, edge, edge + 1):
        assert launch(planner, n).wait()["result"][:n].tolist() == [[1, 2]] * n


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Captures above so many rows run out of memory."""

    def limit(rows: int) -> None:
        class Limited(Tape):
            def __init__(self, program: Any, key: GraphKey, *rest: Any, **options: Any) -> None:
                if key.shape.rows > rows:
                    raise torch.OutOfMemoryError("no room")
                super().__init__(program, key, *rest, **options)

        monkeypatch.setattr(graph_set_module, "Tape", Limited)

    return limit


def test_out_of_memory_drops_buckets_with_a_warning(
    no_room: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    no_room(4)
    with caplog.at_level(logging.WARNING):
        planner = planned(2, 4, 8, 16)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "No graph of 16 rows for p",
        "No graph of 8 rows for p",
    ]
    assert "lower --gpu-memory-utilization" in caplog.records[0].getMessage()
    assert [answer(planner, n) for n in (4, 5, 16, 17)] == [4, Reason.NO_MEMORY, Reason.NO_MEMORY, Reason.ABOVE_BUCKETS]
    assert launch(planner, 7).wait()["result"].tolist() == [[1, 2]] * 7
    assert planner.passes == {("p", "eager", "NO_MEMORY"): 1}
    (row,) = [r for r in planner.report() if r["kind"] == "eager"]
    assert (row["rows"], row["reason"]) == ("5-16", Reason.NO_MEMORY.value)
    assert planner.capture_missing() == 0, "what did not fit once is not tried again"


def test_the_budget_holds_and_leaves_room_for_others() -> None:
    cost = planned(8).graph_bytes
    assert cost > 0
    planner = LonePlanner(CPU, budget=int(1.6 * cost))
    planner.capture([Buckets(program(double, "big"), shapes(8), share=0.5), Buckets(program(double), shapes(2, 8, 16))])
    assert planner.plan(GraphKey("big", PassShape(3))) == Eager(Reason.OVER_BUDGET), "above its share"
    assert [answer(planner, n) for n in (1, 3, 9)] == [2, 8, Reason.OVER_BUDGET]
    assert 0 < planner.graph_bytes <= 1.6 * cost
    assert planner.costs()["bytes"] == planner.graph_bytes


def test_graphs_of_other_programs_count_against_budget_not_share() -> None:
    large, small = planned(16).graph_bytes, planned(1).graph_bytes
    planner = LonePlanner(CPU, budget=large + 2 * small)
    planner.capture([Buckets(program(double, "rounds"), shapes(16)), Buckets(program(double), shapes(1), share=0.5)])
    assert answer(planner, 1) == 1, "a small graph fits what is left, though more than half of the budget is taken"


COST = PassCost.linear(fixed_ms=1.0, row_ms=1.0, eager_ms=10.0, capture_ms=5.0)
"""Eager passes take 10 ms up to 9 rows, and then as long as a replay."""


def test_a_graph_that_would_waste_more_than_it_saves_is_not_used() -> None:
    planner = planned(2, 16, cost=COST)
    assert [answer(planner, n) for n in (1, 2, 3, 15, 16)] == [2, 2, Reason.UNPROFITABLE, Reason.UNPROFITABLE, 16]
    planner = planned(2, 8, cost=COST)
    assert [answer(planner, n) for n in (3, 8, 9, 16)] == [8, 8, Reason.UNPROFITABLE, Reason.UNPROFITABLE]
    always = planned(2, 16, cost=PassCost.linear(1.0, 1.0, math.inf))
    assert [answer(always, n) for n in (3, 15, 16, 17)] == [16, 16, 16, Reason.ABOVE_BUCKETS]


def test_the_cost_model_chooses_among_the_shapes() -> None:
    few, many = planned(1, 2, 4, 8, cost=COST, passes=3), planned(1, 2, 4, 8, cost=COST, passes=1e6)
    assert {g.key.shape.rows for g in many.graphs()} == {1, 2, 4, 8}
    assert len(list(few.graphs())) < 4


def test_pass_costs_are_measured_at_tile_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of 2, 4 and 16 rows are tried; that of 16 takes longer than launching the pass eagerly."""
    device = {1: 1.0, 2: 1.1, 4: 3.0, 8: 6.0, 16: 20.0, 32: 40.0}

    class Timed(Tape):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.replay_ms = device[self.key.shape.rows]

    planner, edges = clocked(monkeypatch, device.__getitem__), frozenset((2, 4, 16))
    monkeypatch.setattr(graph_set_module, "Tape", Timed)
    tried = Buckets(program(double), shapes(1, 2, 4, 8, 16, 32), edges=edges, flat=4, measured=True)
    planner.capture([replace(tried, passes=1e-6)])
    assert {g.key.shape.rows for g in planner.graphs()} == {1, 2, 4}
    assert planner.costs()["p_launch_ms"] == 10.0
    answers = [answer(planner, n) for n in (1, 2, 3, 4, 5, 12, 32)]
    assert answers[:4] == [1, 2, 4, 4]
    assert answers[4:] == [Reason.ABOVE_BUCKETS, Reason.UNPROFITABLE, Reason.UNPROFITABLE]
    planner.capture([replace(tried, passes=1e9)])
    assert {g.key.shape.rows for g in planner.graphs()} == {1, 2, 4, 8}, "the 8 for the many that will come"
    planner = clocked(monkeypatch, device.__getitem__)
    planner.capture([replace(tried, shapes=shapes(1), passes=1e-6)])
    assert answer(planner, 1) == 1, "one size is all there is where one request runs at a time"


def test_known_costs_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graphs and answers as after the measurements, without one."""
    first = clocked(monkeypatch)
    tried = Buckets(program(double), shapes(1, 4, 64), passes=1e9, measured=True)
    first.capture([tried])
    assert list(first.measured) == [tried.label]
    again = LonePlanner(CPU, known=first.measured)
    monkeypatch.setattr(Planner, "_measure", lambda self, buckets: pytest.fail("measured"))
    again.capture([tried])
    assert {g.key for g in again.graphs()} == {g.key for g in first.graphs()}
    assert again.measured == first.measured
    other = replace(tried, shapes=shapes(1, 4))
    assert other.label not in first.measured, "other shapes are measured"


def test_a_pool_is_not_used_after_its_last_graph_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: torch frees a pool with its last graph, and refuses a capture into it (CachingHostAllocator, 2.11)."""
    alive: dict[int, int] = {}
    handles = iter(range(100))

    class Pooled(Tape):
        replay_ms = 30.0

        def __init__(self, program: Any, key: GraphKey, buffers: Buffers, pool: int, *rest: Any) -> None:
            if alive.get(pool) == 0:
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
            super().__init__(program, key, buffers, *rest)
            self.pool, self.replay_ms = pool, float(key.shape.rows)
            alive[pool] = alive.get(pool, 0) + 1

        def close(self) -> None:
            alive[self.pool] -= 1

    monkeypatch.setattr(graph_set_module, "CudaGraph", Pooled)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    planner = clocked(monkeypatch)
    planner.graph_set._pool = torch.cuda.graph_pool_handle()
    tried = Buckets(program(double), shapes(1, 4, 64), passes=1e9, measured=True)
    planner.capture([tried])
    assert list(alive.values()) == [0, 2], "the graph of 64 rows was tried first, and closed"
    assert [answer(planner, n) for n in (1, 4)] == [1, 4]
    own = sum(graph.cost_bytes for graph in planner.graphs())
    assert planner.graph_bytes == own, "its pool is gone"
    planner.capture([replace(tried, program=program(double, "q"))])
    assert planner.graph_bytes > sum(graph.cost_bytes for graph in planner.graphs()), "a pool that lives keeps it"


def test_a_graph_that_is_only_tried_may_not_fit(
    no_room: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(8)
    planner = clocked(monkeypatch)
    planner.capture([Buckets(program(double), shapes(1, 4, 64), passes=1e9, measured=True)])
    assert answer(planner, 64) is not Reason.NO_MEMORY, "nothing is lost without it"
    assert answer(planner, 4) == 4


def test_every_pass_counts_no_memory_if_smallest_graph_does_not_fit(
    no_room: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(3)
    planner = clocked(monkeypatch)
    plain = Buckets(program(double), shapes(4, 16, 64), passes=1e9, edges=frozenset((16,)), measured=True)
    planner.capture([plain, replace(plain, features=Features(masks=True))])
    for features in (Features(), Features(masks=True), Features(returned=True)):  # the last is seen at run time only
        said = [planner.plan(GraphKey("p", PassShape(n), features)) for n in (1, 4, 9, 16, 40, 64)]
        assert said == [Eager(Reason.NO_MEMORY)] * 6


def test_larger_graph_serves_if_the_smallest_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was captured first, and the budget is spent: it serves, and is not told as dropped."""
    planner = clocked(monkeypatch)
    tried = Buckets(program(double), shapes(4, 64), passes=1e9, edges=frozenset((64,)), measured=True)
    planner.capture([tried])
    planner.budget = next(g.cost_bytes for g in planner.graphs() if g.key.shape.rows == 64)
    planner.graph_set.close()
    with caplog.at_level("INFO"):
        planner.capture([tried])
    assert [answer(planner, n) for n in (1, 4, 40, 64)] == [64] * 4
    assert "4 rows for p" in caplog.text
    assert "64 rows" not in caplog.text


def test_launches_that_hide_the_largest_pass_have_it_tried_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model on a GPU: every eager pass takes the host 10 ms, the device 1 ms of them."""

    class Timed(Tape):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.replay_ms = 1.0

    def measured(device_ms: float) -> Planner:
        planner = clocked(monkeypatch, lambda rows: device_ms)
        monkeypatch.setattr(graph_set_module, "Tape", Timed)
        planner.capture([Buckets(program(double), shapes(1, 64), passes=1.0, measured=True)])
        return planner

    assert [answer(measured(10.5), n) for n in (1, 2, 64)] == [1, 64, 64]
    assert answer(measured(40.0), 64) is Reason.UNPROFITABLE, "its own time is seen, and a graph saves none of it"


def test_missing_graphs_are_captured_when_idle_once_profitable() -> None:
    planner = planned(1, 2, 4, 8, cost=COST, passes=1e-6)
    assert not list(planner.graphs())
    assert answer(planner, 3) is Reason.NOT_CAPTURED
    assert planner.capture_missing() == 0, "nobody asked for it"
    for _ in range(3):  # each would have saved 10 - 5 ms; the capture costs 2 · 5 + 5
        assert planner.capture_missing() == 0
        launch(planner, 3)
    assert planner.capture_missing() == 1
    assert planner.capture_missing() == 0
    assert [answer(planner, n) for n in (2, 3, 4, 5)] == [4, 4, 4, Reason.ABOVE_BUCKETS]
    assert launch(planner, 3).wait()["result"][:3].tolist() == [[1, 2]] * 3
    assert planner.passes == {("p", "eager", "NOT_CAPTURED"): 3, ("p", "tape", ""): 1}
    assert planner.idle_captures == 1


def test_dropped_graphs_are_not_retried_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = PassCost.linear(fixed_ms=0.0, row_ms=1.0, eager_ms=5.0, capture_ms=0.0)
    planner = planned(16, cost=cost)
    planner.budget = planner.graph_bytes
    planner.capture([Buckets(program(double), shapes(4, 16), cost=cost)])  # 16 is there, 4 would pass the budget
    for _ in range(20):  # 16 rows take longer than none; 4 rows would by now have saved what capturing them takes
        launch(planner, 3)
    assert planner.passes["p", "eager", "UNPROFITABLE"] == 20
    captures: list[GraphKey] = []
    monkeypatch.setattr(planner.graph_set, "_capture", lambda key, splits: captures.append(key))
    assert planner.capture_missing() == 0
    assert captures == []


def test_failed_idle_capture_changes_the_eager_reason() -> None:
    planner = planned(1, 8, cost=PassCost.linear(fixed_ms=0.0, row_ms=1.0, eager_ms=9.0, capture_ms=0.0), passes=1e-6)
    planner.budget = 0
    for _ in range(20):
        launch(planner, 3)
    assert answer(planner, 3) is Reason.NOT_CAPTURED
    assert planner.capture_missing() == 0
    assert answer(planner, 3) is Reason.OVER_BUDGET


def test_needs_that_no_graph_covers_are_captured_when_idle() -> None:
    planner = planned(2, 4)
    key = GraphKey("p", PassShape(2), Features(Hidden.FULL))
    assert planner.plan(key) == Eager(Reason.NOT_CAPTURED)
    planner.run(key, batch([[1, 2]]))
    assert planner.capture_missing() == 1
    assert isinstance(planner.plan(key), Replay)
    assert answer(planner, 2) == 2


def test_graphs_can_be_switched_off_at_any_time() -> None:
    planner = planned(2)
    launch(planner, 1)
    planner.enabled = False
    assert answer(planner, 1) is Reason.DISABLED
    launch(planner, 1)
    planner.enabled = True
    launch(planner, 1)
    assert planner.passes == {("p", "tape", ""): 2, ("p", "eager", "DISABLED"): 1}


def test_modes() -> None:
    def run(b: Buffers) -> None:
        b.result.copy_(eager_break(optional=True)(torch.relu)(b.x.float()))

    planner = LonePlanner(CPU)
    plan = [Buckets(program(run, mode), shapes(2), mode=mode) for mode in ("full", "segmented", "off")]
    planner.capture(plan)
    for mode in ("full", "segmented", "off"):
        planner.run(GraphKey(mode, PassShape(1)), batch([[1, 2]]))
    assert planner.passes == {
        ("full", "tape", ""): 1,
        ("segmented", "tape-segmented", ""): 1,
        ("off", "eager", "DISABLED"): 1,
    }


def test_the_report() -> None:
    planner = planned(2, 4, 8, cost=PassCost.linear(1, 1, 4.5))
    rows = planner.report()
    assert {r["rows"] for r in rows if r["kind"] == "tape"} == {2, 4, 8}
    for row in rows[:3]:
        assert row["bytes"] > 0
        assert row["ms"] > 0
        assert row["capture_ms"] >= row["ms"]
    planner = planned(2, 4, 8, cost=COST, passes=1e-6)
    (row,) = planner.report()
    assert (row["program"], row["rows"], row["kind"]) == ("p", "1-8", "eager")
    assert (row["reason"], row["advice"]) == (Reason.NOT_CAPTURED.value, Reason.NOT_CAPTURED.advice)


def test_every_reason_has_advice() -> None:
    assert all(reason.value and reason.advice for reason in Reason)
    assert len({reason.value for reason in Reason}) == len(Reason)


# ---- who owns what ----------------------------------------------------------------------------------


def test_uncopied_outputs_are_overwritten_by_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """PendingOutputs owns its copy: without it an older pass would show the newer one's outputs."""
    planner = planned(2)

    def two() -> tuple[Any, Any]:
        first = planner.run(GraphKey("p", PassShape(1)), batch([[1, 2]]))
        second = planner.run(GraphKey("p", PassShape(1)), batch([[3, 4]]))
        return first.wait()["result"][0].tolist(), second.wait()["result"][0].tolist()

    assert two() == ([1, 2], [3, 4])
    shared = lambda self: PendingOutputs(self._places, self._output, None, None)  # noqa: E731
    monkeypatch.setattr(Buffers, "fetch", shared)
    assert two() == ([3, 4], [3, 4])


def test_poison_reveals_reads_of_stale_intermediates() -> None:
    """Graphs share a pool, so another replay leaves garbage in every intermediate. This one reads one all the same."""
    kept: dict[str, torch.Tensor] = {}

    def leaves(b: Buffers) -> None:
        kept["x"] = b.x.float()
        b.result.copy_(kept["x"])

    def reads(b: Buffers) -> None:
        b.result.copy_(kept["x"])

    planner = LonePlanner(CPU)
    planner.capture([Buckets(program(leaves, "leaves"), shapes(2))])
    leaving = next(planner.graphs())
    planner.capture([Buckets(program(leaves, "leaves"), shapes(2)), Buckets(program(reads, "reads"), shapes(2))])
    one = batch([[1, 2]])
    assert poison(leaving) == 1
    assert planner.run(GraphKey("leaves", PassShape(1)), one).wait()["result"][0].tolist() == [1, 2], "it computes anew"
    assert planner.run(GraphKey("reads", PassShape(1)), one).wait()["result"][0].tolist() == [1, 2], "a bug that hides"
    for graph in planner.graphs():
        poison(graph)
    assert not np.isfinite(planner.run(GraphKey("reads", PassShape(1)), one).wait()["result"]).any(), (
        "until it does not"
    )
