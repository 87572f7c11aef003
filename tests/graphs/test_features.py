"""Features that bring inputs of their own: which graph serves which pass, and that no such input is lost or made up."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch

from tests.graphs.programs import CPU, LonePlanner
from unisono.graphs import (
    Buffers,
    BufferSchema,
    Eager,
    Features,
    Field,
    GraphKey,
    Hidden,
    PassShape,
    Program,
    ProgramError,
    Reason,
    Replay,
)
from unisono.graphs.buckets import Buckets
from unisono.graphs.cost import PassCost
from unisono.graphs.planner import Planner

MASKED = Features(masks=True)
SCHEMA = BufferSchema(
    (
        Field("x", torch.int32, ("rows",), pad=-1),
        Field("mask", torch.int32, ("rows",), pad=7, feature=MASKED),
        Field("result", torch.int32, ("rows",), output=True),
    )
)


def run(b: Buffers) -> None:
    """x, or where a pass has a mask x & mask."""
    mask = b.find("mask")
    b.result.copy_(b.x if mask is None else b.x & mask)


def planned(*variants: tuple[Features, tuple[int, ...]], **how: Any) -> Planner:
    planner = LonePlanner(CPU)
    planner.capture([Buckets(Program("p", SCHEMA, run), tuple(map(PassShape, rows)), n, **how) for n, rows in variants])
    return planner


def launch(planner: Planner, x: list[int], mask: list[int] | None = None) -> list[int]:
    batch = {"x": x} if mask is None else {"x": x, "mask": mask}
    key = GraphKey("p", PassShape(len(x)), Features() if mask is None else MASKED)
    return planner.run(key, batch).wait()["result"][: len(x)].tolist()


def served(planner: Planner, rows: int, features: Features) -> tuple[int, Features] | Reason:
    answer = planner.plan(GraphKey("p", PassShape(rows), features))
    if isinstance(answer, Eager):
        return answer.reason
    return answer.graph.key.shape.rows, answer.graph.key.features


def test_masked_features_cover_unmasked_ones() -> None:
    hidden = [Features(Hidden.NULL), Features(Hidden.LAST), Features(Hidden.FULL)]
    for (poorer, richer), ours, theirs in product(pairwise(hidden), (False, True), (False, True)):
        a = Features(richer.hidden, masks=ours)
        assert a.covers(Features(poorer.hidden, masks=theirs)) == (ours or not theirs)
        assert not Features(poorer.hidden, masks=True).covers(Features(richer.hidden, masks=theirs))
    aux = Features(Hidden.AUX, (1, 2), masks=True)
    assert aux.covers(Features(Hidden.AUX, (2,)))
    assert not Features(Hidden.AUX, (1, 2)).covers(aux)


def test_all_logits_cover_selected_logits_but_not_conversely() -> None:
    whole, parts = Features(whole_logits=True), Features()
    assert whole.covers(parts)
    assert not parts.covers(whole)
    assert (parts | whole) == (whole | parts) == whole
    assert (whole.label, parts.label) == ("NULL+whole_logits", "NULL")
    planner = planned((whole, (4,)))
    assert served(planner, 2, parts) == (4, whole)
    assert served(planned((parts, (4,))), 2, whole) is Reason.NOT_CAPTURED


def test_graphs_that_others_cover_are_captured_last() -> None:
    """Whatever their size, so that a budget drops none of those that serve all passes for one of them."""
    whole, parts = Features(whole_logits=True), Features()
    plain = [Buckets(Program("p", SCHEMA, run), (PassShape(2), PassShape(64)), parts, spare=True)]
    planner = LonePlanner(CPU)
    planner.capture([Buckets(Program("p", SCHEMA, run), (PassShape(1), PassShape(64)), whole), *plain])
    captured = [graph.key for graph in planner.graph_set]
    assert [(key.shape.rows, key.features) for key in captured] == [(64, whole), (1, whole), (64, parts), (2, parts)]


def test_a_graph_with_masks_serves_a_pass_without_and_allows_all() -> None:
    planner = planned((MASKED, (4,)))
    assert served(planner, 2, Features()) == (4, MASKED)
    assert launch(planner, [5, 6], mask=[1, 2]) == [1, 2]
    assert launch(planner, [5, 6]) == [5, 6], "padded, with no bit of the batch before"
    assert planner.passes == {("p", "tape", ""): 2}


def test_graph_without_masks_does_not_serve_masked_passes() -> None:
    planner = planned((Features(), (4,)))
    assert served(planner, 2, MASKED) is Reason.NOT_CAPTURED
    assert launch(planner, [5, 6], mask=[1, 2]) == [1, 2]
    assert planner.passes == {("p", "eager", "NOT_CAPTURED"): 1}
    assert planner.capture_missing() == 1
    assert served(planner, 2, MASKED) == (4, MASKED)
    assert served(planner, 2, Features()) == (4, Features())


def test_a_pass_takes_the_graph_of_its_own_needs_before_a_smaller_one_of_more() -> None:
    planner = planned((Features(), (8,)), (MASKED, (2, 4)))
    assert served(planner, 2, Features()) == (8, Features())
    assert served(planner, 3, MASKED) == (4, MASKED)
    assert served(planner, 5, MASKED) is Reason.ABOVE_BUCKETS, "not the one of 8 rows"


@pytest.mark.parametrize("rows", [(4,), ()], ids=["replayed", "eager"])
def test_batch_fields_must_match_features(rows: tuple[int, ...]) -> None:
    planner = planned((Features(), rows), (MASKED, rows))
    with pytest.raises(ProgramError, match="missing \\['mask'\\]"):
        planner.run(GraphKey("p", PassShape(1), MASKED), {"x": [1]})
    with pytest.raises(ProgramError, match="unknown \\['mask'\\]"):
        planner.run(GraphKey("p", PassShape(1)), {"x": [1], "mask": [1]})


COST = PassCost.linear(fixed_ms=1.0, row_ms=1.0, capture_ms=1.0)


def test_on_demand_graph_is_captured_before_its_first_pass() -> None:
    """Nothing at start; then what serves the first pass that wants it, once, before that pass."""
    planner = planned((MASKED, (2, 4)), cost=COST, passes=1e6, on_demand=True)
    assert not list(planner.graphs())
    (row,) = planner.report()
    assert (row["kind"], row["features"], row["reason"]) == ("lazy", "NULL+masks", "")
    for _ in range(2):
        assert launch(planner, [5, 6, 7], mask=[1, 2, 3]) == [1, 2, 3]
    assert [graph.key for graph in planner.graphs()] == [GraphKey("p", PassShape(4), MASKED)]
    assert planner.passes == {("p", "tape", ""): 2}
    assert planner.capture_seconds > 0
    assert launch(planner, [5], mask=[4]) == [4]
    assert {graph.key.shape.rows for graph in planner.graphs()} == {2, 4}, "each its own"
    assert launch(planner, [1] * 5, mask=[1] * 5) == [1] * 5
    assert planner.passes["p", "eager", "ABOVE_BUCKETS"] == 1


def test_sizes_on_demand_are_those_worth_it() -> None:
    planner = planned((MASKED, (1, 2, 4, 8)), cost=COST, passes=3, on_demand=True)
    launch(planner, [5], mask=[1])
    (graph,) = planner.graphs()
    assert graph.key.shape.rows > 1
    launch(planner, [5] * 8, mask=[1] * 8)
    assert planner.passes == {("p", "tape", ""): 2}, "the larger one as well"


def test_on_demand_is_not_off() -> None:
    planner = planned((MASKED, (2,)), cost=COST, passes=1e6, on_demand=True, mode="off")
    assert launch(planner, [5], mask=[1]) == [1]
    assert planner.passes == {("p", "eager", "DISABLED"): 1}
    (row,) = planner.report()
    assert row["kind"] == "eager"


def test_the_programs_needs_are_a_replay_apart() -> None:
    planner = planned((Features(), (2,)), (MASKED, (2,)))
    answers = [planner.plan(GraphKey("p", PassShape(1), features)) for features in (Features(), MASKED)]
    assert all(isinstance(answer, Replay) for answer in answers)
    assert {row["features"] for row in planner.report()} == {"NULL", "NULL+masks"}
