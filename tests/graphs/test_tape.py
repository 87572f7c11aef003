"""The tape keeps a graph's promises on a CPU: fixed storages, frozen scalars, no host reads."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import unisono.kernels.attention.paged
import unisono.kernels.norm.rms_norm  # noqa: F401  (both register ops)
from tests.graphs.programs import LonePlanner
from tests.ops import Ops
from unisono.graphs import (
    Buffers,
    BufferSchema,
    CaptureError,
    Eager,
    Features,
    Field,
    GraphKey,
    Hidden,
    Logits,
    PassShape,
    Program,
    ProgramError,
    Reason,
    Replay,
)
from unisono.graphs.buckets import Buckets
from unisono.graphs.recorder import Outlined, Recorder
from unisono.graphs.tape import Tape

CPU = torch.device("cpu")
SCHEMA = BufferSchema(
    (
        Field("x", torch.int32, ("rows", 2), pad=-1),
        Field("scale", torch.float32, ("rows",)),
        Field("result", torch.float32, ("rows", 2), output=True),
    )
)


def double(b: Buffers) -> None:
    b.result.copy_(b.x.float() * b.scale[:, None])


def tape(run, rows: int = 4) -> Tape:
    program = Program("p", SCHEMA, run)
    return Tape(program, GraphKey("p", PassShape(rows)), Buffers(SCHEMA, PassShape(rows), CPU))


def test_a_replay_calls_kernels_without_the_dispatcher() -> None:
    """The dispatcher takes longer than a small op. Outside inference mode it is needed: a gradient may be wanted."""

    def run(b: Buffers) -> None:
        b.result.copy_(torch.ops.unisono.rms_norm(b.x.float(), torch.ones(2), 0.0))

    graph = tape(run)
    graph.buffers.load({"x": [[3, 3], [2, 0], [0, 1], [5, 5]], "scale": [0.0] * 4})
    for inference, dispatched in ((True, 0), (False, 1)):
        with torch.inference_mode(inference), Ops() as ops:
            graph.replay()
        assert ops.ours["rms_norm"] == dispatched
        assert graph.buffers.fetch().wait()["result"].tolist()[0] == [1, 1]


def test_replay_reads_current_buffer_values() -> None:
    graph = tape(double)
    for factor in (2.0, 3.0):
        graph.buffers.load({"x": [[1, 2], [3, 4]], "scale": [factor, factor]})
        graph.replay()
        result = graph.buffers.fetch().wait()["result"]
        assert result[:2].tolist() == [[factor, 2 * factor], [3 * factor, 4 * factor]]
        assert result[2:].tolist() == [[0, 0]] * 2, "rows that the batch does not fill are padding"


def test_a_python_number_is_frozen() -> None:
    """As in a CUDA graph: what Python computed at capture stays."""
    factor = {"value": 2.0}
    graph = tape(lambda b: b.result.copy_(b.x.float() * factor["value"]))
    factor["value"] = 5.0
    graph.buffers.load({"x": [[1, 1]], "scale": [1]})
    graph.replay()
    assert graph.buffers.fetch().wait()["result"][0].tolist() == [2.0, 2.0]


def test_a_rebound_input_is_not_seen() -> None:
    outside = {"t": torch.ones(2)}
    graph = tape(lambda b: b.result.copy_(b.x.float() + outside["t"]))
    outside["t"] = torch.full((2,), 100.0)
    graph.buffers.load({"x": [[1, 1]], "scale": [1]})
    graph.replay()
    assert graph.buffers.fetch().wait()["result"][0].tolist() == [2.0, 2.0]


def test_state_written_in_place_is_seen_by_the_next_replay() -> None:
    state = torch.zeros(2)

    def run(b: Buffers) -> None:
        state.add_(1)
        b.result.copy_(state.expand(4, 2))

    graph = tape(run)
    state.zero_()
    for expected in (1.0, 2.0):
        graph.replay()
        assert graph.buffers.fetch().wait()["result"][0, 0] == expected


@pytest.mark.parametrize(
    "sync",
    [
        lambda b: b.result.fill_(b.x.sum().item()),
        lambda b: b.result.fill_(float(b.x[0, 0])),
        lambda b: b.result.zero_() if b.x.any() else None,
        lambda b: b.x.nonzero(),
        lambda b: b.x[b.x > 0],
        lambda b: torch.equal(b.x, b.x),
        lambda b: b.result.add_(torch.tensor([1.0, 2.0])),
        lambda b: b.result.fill_(b.x.tolist()[0][0]),
        lambda b: b.result.fill_(b.x.numpy()[0, 0]),
        lambda b: b.result.fill_(np.asarray(b.x)[0, 0]),
        lambda b: b.result.add_(torch.from_numpy(np.ones(2, dtype=np.float32))),
    ],
    ids=["item", "float", "bool", "nonzero", "mask", "equal", "constant", "tolist", "numpy", "asarray", "from_numpy"],
)
def test_host_reads_are_refused_at_capture(sync) -> None:
    with pytest.raises(CaptureError, match="cannot be captured"):
        tape(sync)


def test_buffers_refuse_fields_outside_the_schema() -> None:
    buffers = Buffers(SCHEMA, PassShape(2), CPU)
    with pytest.raises(ProgramError, match=r"unknown \['y'\], missing \['scale'\]"):
        buffers.load({"x": [[1, 2]], "y": [0]})
    with pytest.raises(ProgramError, match=r"'x' has shape \(3, 2\), its buffer \(2, 2\)"):
        buffers.load({"x": [[1, 2]] * 3, "scale": [1]})
    with pytest.raises(AttributeError, match="no field 'z'"):
        _ = buffers.z
    with pytest.raises(ProgramError, match="four-byte"):
        BufferSchema((Field("wide", torch.int64, ("rows",)),))


def test_pending_outputs_survive_the_next_replay() -> None:
    graph = tape(double)
    graph.buffers.load({"x": [[1, 1]], "scale": [1]})
    graph.replay()
    first = graph.buffers.fetch()
    graph.buffers.load({"x": [[9, 9]], "scale": [1]})
    graph.replay()
    assert first.wait()["result"][0, 0] == 1


def test_planner_replays_the_smallest_covering_graph_and_counts_reasons() -> None:
    planner = LonePlanner(CPU)
    other = Program("q", SCHEMA, double)
    planner.capture(
        [
            Buckets(Program("p", SCHEMA, double), (PassShape(2), PassShape(8))),
            Buckets(other),
        ]
    )
    answer = planner.plan(GraphKey("p", PassShape(3)))
    assert isinstance(answer, Replay)
    assert answer.graph.key.shape == PassShape(8)
    assert planner.plan(GraphKey("p", PassShape(9))) == Eager(Reason.ABOVE_BUCKETS)
    assert planner.plan(GraphKey("p", PassShape(2), Features(Hidden.FULL))) == Eager(Reason.NOT_CAPTURED)
    assert planner.plan(GraphKey("q", PassShape(1))) == Eager(Reason.NOT_CAPTURED)
    batch = {"x": [[1, 2]] * 9, "scale": [1.0] * 9}
    assert planner.run(GraphKey("p", PassShape(9)), batch).wait()["result"].shape == (9, 2)
    planner.run(GraphKey("p", PassShape(1)), {"x": [[1, 2]], "scale": [1]})
    assert planner.passes == {("p", "eager", "ABOVE_BUCKETS"): 1, ("p", "tape", ""): 1}
    assert (planner.filled_rows, planner.padded_rows) == ({"p": 1}, {"p": 1})
    off = LonePlanner(CPU, enabled=False)
    off.capture([Buckets(other, (PassShape(2),))])
    assert off.plan(GraphKey("q", PassShape(1))) == Eager(Reason.DISABLED)


def test_needs_cover() -> None:
    null, last, full = Features(), Features(Hidden.LAST), Features(Hidden.FULL)
    aux = Features(Hidden.AUX, (1, 2))
    assert full.covers(last)
    assert full.covers(null)
    assert aux.covers(Features(Hidden.AUX, (2,)))
    assert aux.covers(null)
    assert not last.covers(full)
    assert not null.covers(last)
    assert not aux.covers(full)
    assert not full.covers(aux)


@pytest.mark.parametrize(
    ("richer", "poorer"),
    [
        (Features(logits=Logits.SELECTED), Features()),
        (Features(logits=Logits.ALL), Features(logits=Logits.SELECTED)),
        (Features(embeddings=True), Features()),
        (Features(returned=True), Features()),
        (Features(masks=True), Features()),
        (Features(Hidden.FULL, returned=True), Features(Hidden.LAST)),
        (Features(Hidden.AUX, (1, 2), Logits.ALL, True, True, True), Features(Hidden.AUX, (2,), Logits.SELECTED, True)),
        (Features(Hidden.FULL), Features()),
    ],
)
def test_graph_with_more_features_serves_fewer_but_not_conversely(richer: Features, poorer: Features) -> None:
    shape = PassShape(4)
    assert GraphKey("p", shape, richer).covers(GraphKey("p", shape, poorer))
    assert not GraphKey("p", shape, poorer).covers(GraphKey("p", shape, richer))
    assert richer.covers(richer)
    assert richer.label != poorer.label


def test_needs_of_different_kinds_cover_neither() -> None:
    flags = [Features(embeddings=True), Features(returned=True), Features(masks=True)]
    some = (*flags, Features(logits=Logits.SELECTED), Features(Hidden.FULL))
    for one, other in itertools.permutations(some, 2):
        assert not one.covers(other)


@torch.inference_mode()
def test_ops_that_may_alias_are_recorded_if_they_copy() -> None:
    """In inference mode ``reshape``, ``contiguous`` and ``to`` reach the tape whole; their schemas say alias."""

    def run(b: Buffers) -> None:
        columns = torch.stack((b.x[:, 1].contiguous(), b.x.t().reshape(-1)[: b.shape.rows]), 1)
        b.result.copy_(columns.to(torch.float32))

    graph = tape(run)
    graph.buffers.load({"x": [[1, 2], [3, 4]], "scale": ()})
    graph.replay()
    assert graph.buffers.fetch().wait()["result"][:2].tolist() == [[2, 1], [4, 3]]


@pytest.mark.parametrize("outlined", [True, False])
def test_kernels_may_compute_nothing_while_they_are_recorded(outlined: bool) -> None:
    """But what makes a plan does run, for the host may read it in a break."""

    def run(b: Buffers) -> None:
        rows = torch.zeros(4, dtype=torch.int32)
        plan = torch.ops.unisono.attention_plan(rows, rows + 1, None, 4, 1, 1, 0, 1)
        b.scale.copy_(plan[1].expand(4))
        b.result.copy_(torch.ops.unisono.rms_norm(b.x.float(), torch.ones(2), 0.0))

    buffers = Buffers(SCHEMA, PassShape(4), CPU)
    with Outlined() if outlined else nullcontext():
        steps = Recorder(splits=False).record(run, buffers)
    assert buffers.result.any() != outlined
    assert buffers.scale.tolist() == [4.0] * 4
    for step in steps:
        step.replay()
    assert buffers.result.all()
    assert tape(run).buffers.result.all(), "a capture replays once"


def test_a_shape_function_that_is_wrong_is_named() -> None:
    library = torch.library.Library("unisono", "FRAGMENT")
    library.define("narrow(Tensor x) -> Tensor")
    library.impl("narrow", lambda x: x[:, :1].clone(), "CPU")
    torch.library.register_fake("unisono::narrow", torch.empty_like, lib=library)
    with pytest.raises(CaptureError, match=r"unisono.narrow.default makes torch.float32 \[4, 1\], .* \[4, 2\]"):
        tape(lambda b: b.result.copy_(torch.ops.unisono.narrow(b.x.float())))
