"""Programs that vary with their needs: fields of their own, graphs captured when idle, richer graphs for others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.graphs.programs import CPU, SCHEMA, LonePlanner
from unisono.graphs import (
    Buffers,
    BufferSchema,
    Eager,
    Features,
    Field,
    GraphKey,
    Logits,
    PassShape,
    Program,
    ProgramError,
    Reason,
    selected_rows,
)
from unisono.graphs.buckets import Buckets
from unisono.graphs.planner import Planner

EMBEDS, BOTH = Features(embeddings=True), Features(embeddings=True, returned=True)


VARYING = BufferSchema(
    (
        *SCHEMA.fields,
        Field("shift", torch.float32, ("rows",), feature=EMBEDS),
        Field("twice", torch.float32, ("rows", 2), output=True, feature=Features(returned=True)),
    )
)


def run(b: Buffers) -> None:
    """``result = x · scale``, plus ``shift`` where embeddings are needed; ``twice`` of it where it is returned."""
    result = b.x.float() * b.scale[:, None]
    if (shift := b.find("shift")) is not None:
        result = result + shift[:, None]
    b.result.copy_(result)
    if (twice := b.find("twice")) is not None:
        twice.copy_(2 * result)


def planned(*rows: int, **how: Any) -> Planner:
    planner = LonePlanner(CPU)
    planner.capture([Buckets(Program("p", VARYING, run), tuple(map(PassShape, rows)), **how)])
    return planner


def batch(rows: int, features: Features = Features()) -> dict[str, Any]:  # noqa: B008
    shift = {"shift": [10.0] * rows} if features.embeddings else {}
    return {"x": [[1, 2]] * rows, "scale": [1.0] * rows, **shift}


def outputs(planner: Planner, rows: int, features: Features = Features()) -> dict[str, Any]:  # noqa: B008
    given = planner.run(GraphKey("p", PassShape(rows), features), batch(rows, features)).wait()
    return {name: value[:rows].tolist() for name, value in given.items()}


@pytest.mark.parametrize("warm", [False, True], ids=["eager", "replayed"])
def test_a_pass_has_the_fields_of_its_needs(warm: bool) -> None:
    planner = planned(2, 4)
    for features in (EMBEDS, BOTH):
        outputs(planner, 3, features)
    while warm and planner.capture_missing():
        pass
    planner.reset_counts()
    assert outputs(planner, 3) == {"result": [[1, 2]] * 3}
    assert outputs(planner, 3, EMBEDS) == {"result": [[11, 12]] * 3}
    assert outputs(planner, 3, BOTH) == {"result": [[11, 12]] * 3, "twice": [[22, 24]] * 3}
    lazy = {("p", "tape", ""): 3} if warm else {("p", "tape", ""): 1, ("p", "eager", "NOT_CAPTURED"): 2}
    assert planner.passes == lazy


def test_graph_with_more_features_serves_if_no_exact_graph_exists() -> None:
    """Inputs that the pass has not are padding, though the graph's last pass brought some; never the reverse."""
    planner = planned()
    key = GraphKey("p", PassShape(4), BOTH)
    planner._add(planner._buckets(key), key)
    for _ in range(3):  # host copies of the inputs take turns
        assert outputs(planner, 4, BOTH)["result"] == [[11, 12]] * 4
    for _ in range(3):
        assert outputs(planner, 3)["result"] == [[1, 2]] * 3
    assert outputs(planner, 3, EMBEDS)["result"] == [[11, 12]] * 3
    assert planner.passes == {("p", "tape", ""): 7}
    assert planner.plan(GraphKey("p", PassShape(3), replace(BOTH, logits=Logits.ALL))) == Eager(Reason.NOT_CAPTURED)


def test_a_graph_of_its_own_needs_goes_first() -> None:
    planner = planned(4)
    key = GraphKey("p", PassShape(2), BOTH)
    planner._add(planner._buckets(key), key)
    answer = planner.plan(GraphKey("p", PassShape(2)))
    assert not isinstance(answer, Eager)
    assert answer.graph.key == GraphKey("p", PassShape(4))


@pytest.mark.parametrize("features", [Features(), EMBEDS])
def test_batch_fields_must_match_features(features: Features) -> None:
    planner = planned(2)
    other = EMBEDS if features == Features() else Features()
    for _ in range(2):  # eagerly, and replayed
        with pytest.raises(ProgramError, match="shift"):
            planner.run(GraphKey("p", PassShape(2), features), batch(2, other))
        outputs(planner, 2, EMBEDS)
        planner.capture_missing()


def test_selected_rows_fit_a_larger_pass() -> None:
    sizes = [selected_rows(n) for n in range(1, 500)]
    assert sizes == sorted(sizes)
    assert sizes[:16] == list(range(1, 17))
    assert (selected_rows(64), selected_rows(65), selected_rows(400)) == (16, 17, 100)


def test_scored_rows_are_some_or_all() -> None:
    """A batch that scores some tokens fits the buffers of a pass that could score all; without scores it has none."""
    some, every = Features(logits=Logits.SELECTED), Features(logits=Logits.ALL)
    schema = BufferSchema((Field("scored", torch.int32, ("scored", 2), feature=some),))
    assert Buffers(schema.of(some), PassShape(100), CPU).scored.shape == (25, 2)
    buffers = Buffers(schema.of(every), PassShape(100), CPU)
    assert buffers.scored.shape == (100, 2)
    buffers.load({"scored": [[1, 2]] * 25}, some)
    assert buffers.scored.sum(0).tolist() == [25, 50]
    assert Buffers(schema.of(EMBEDS), PassShape(100), CPU).find("scored") is None


def test_large_buffers_of_eager_passes_are_not_kept() -> None:
    planner = LonePlanner(CPU, enabled=False)
    wide = BufferSchema((Field("x", torch.int32, ("rows", 1 << 20)),))
    planner.capture([Buckets(Program("wide", wide, lambda b: None))])
    for rows in (1, 2):
        planner.run(GraphKey("wide", PassShape(rows)), {"x": ()})
    assert [key.shape.rows for key in planner.graph_set._eager_buffers] == [1]


MASKED, EVERY = Features(masks=True), Features(logits=Logits.ALL)
ANY = BufferSchema((*VARYING.fields, Field("mask", torch.float32, ("rows",), pad=1, feature=MASKED)))


def on_demand(scoring: bool) -> Planner:
    """Passes under masks are captured by the first that wants one, plain ones at start; ``scoring``: for all logits."""
    planner, program = LonePlanner(CPU), Program("p", ANY, run)
    some = [Buckets(program, (PassShape(2), PassShape(4))), Buckets(program, (PassShape(4),), MASKED, on_demand=True)]
    every = [
        Buckets(program, (PassShape(4),), EVERY),
        Buckets(program, (PassShape(4),), replace(EVERY, masks=True), on_demand=True),
    ]
    planner.capture(every if scoring else some)
    return planner


def launch(planner: Planner, features: Features, rows: int = 3) -> None:
    mask = {"mask": [1.0] * rows} if features.masks else {}
    planner.run(GraphKey("p", PassShape(rows), features), batch(rows, features) | mask)


def captured(planner: Planner) -> set[Features]:
    return {graph.key.features for graph in planner.graphs()} - {Features(), EVERY}


@pytest.mark.parametrize("logits", [Logits.LAST, Logits.SELECTED])
def test_needs_beside_those_on_demand_are_on_demand_too(logits: Logits) -> None:
    planner, features = on_demand(scoring=bool(logits)), replace(BOTH, masks=True, logits=logits)
    launch(planner, features)
    assert captured(planner) == {features}
    assert planner.passes == {("p", "tape", ""): 1}
    assert {row["features"] for row in planner.report() if row["kind"] == "lazy"} >= {features.label}
    launch(planner, BOTH)
    assert planner.passes == {("p", "tape", ""): 2}, "which also serves passes without masks"


def test_graph_with_more_features_serves_pass_with_fewer() -> None:
    """No graphs for some logits beside those for all."""
    planner = on_demand(scoring=True)
    launch(planner, Features(logits=Logits.SELECTED))
    assert captured(planner) == set()
    launch(planner, replace(MASKED, logits=Logits.SELECTED))
    assert captured(planner) == {replace(EVERY, masks=True)}
    assert planner.passes == {("p", "tape", ""): 2}


def test_unplanned_variants_are_reported_as_eager() -> None:
    planner = planned(4)
    outputs(planner, 3, EMBEDS)
    (row,) = (row for row in planner.report() if row["kind"] == "eager")
    assert (row["features"], row["rows"], row["reason"]) == ("NULL+embeddings", "1-4", Reason.NOT_CAPTURED.value)
    planner.capture_missing()
    assert all(row["kind"] == "tape" for row in planner.report())
