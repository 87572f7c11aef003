"""A worker does what its commands say: a second one that executes the same bytes has the same state and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.engine.helpers import draw_drafts, engine, mixed_params, prompts, tokens
from tests.graphs.programs import CPU, LonePlanner, batch, program
from unisono.config import Hardware, resolve
from unisono.engine.worker.build import Build
from unisono.engine.worker.commands import Capture, Launch, Release, ResetSlots, WriteSlot, decode, encode
from unisono.engine.worker.worker import Worker
from unisono.graphs import Buffers, Features, GraphKey, Hidden, Logits, PassShape
from unisono.graphs.buckets import Buckets
from unisono.graphs.graph_set import GraphSet
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SamplingParams, SpeculativeConfig, StructuredOutputs

TREE = {"speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0)]"}
SPECS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"num_speculative_tokens": 3},
    "standalone": {"num_speculative_tokens": 3},
    "eagle3": {"num_speculative_tokens": 3},
    "tree of ngram": TREE,
    "tree of eagle3": TREE,
}
DRAFTED = [name for name in SPECS if name != "none"]

Executed = tuple[bytes, dict[str, np.ndarray] | None]
"""A command, and what the outputs of a launched pass were."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Executed]]:
    """Commands executed by workers during the test. New memory holds fixed values, shown by rows without requests."""
    stream: list[Executed] = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    real = Worker.execute

    def execute(self: Worker, command: Any) -> Any:
        data = encode(command)
        pending = real(self, command)
        stream.append((data, None if pending is None else pending.wait()))
        return pending

    monkeypatch.setattr(Worker, "execute", execute)
    yield stream
    torch.use_deterministic_algorithms(False)


def tensors(owner: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that an object of the package holds, directly or in what it holds."""
    if isinstance(owner, torch.Tensor):
        yield name, owner
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, (list, tuple)):
        for i, item in enumerate(owner):
            yield from tensors(item, f"{name}.{i}", seen)
    elif isinstance(owner, dict) or type(owner).__module__.startswith("unisono"):
        items = owner.items() if isinstance(owner, dict) else vars(owner).items() if hasattr(owner, "__dict__") else ()
        for key, item in items:
            yield from tensors(item, f"{name}.{key}", seen)


def state(worker: Worker) -> dict[str, torch.Tensor]:
    """The device state of a worker, weights and buffers of graphs included; not what passes leave in between."""
    buffers = [graph.buffers for graph in worker.graphs]
    parts = {"slots": worker.slots, "store": worker.store, "drafter": worker.drafter, "buffers": buffers}
    return dict(tensors(parts, "", set()))


def built_like(llm: Any) -> Worker:
    """A second worker for the engine's settings."""
    asked = llm.engine.config.requested
    checkpoint = Checkpoint.open(asked.model)
    config = resolve(asked, Hardware.detect(asked.device), checkpoint)
    return Build(config, checkpoint, lambda stage, share: None).worker


QUICK = ("eagle3", "tree of eagle3")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in SPECS])
@torch.inference_mode()
def test_another_worker_replays_the_stream(
    name: str, checkpoints_of: Any, executed: list[Executed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, prefix hits, preemption, rounds of every number of drafts, masks, an idle capture."""
    method = name.removeprefix("tree of ")
    target, draft = checkpoints_of("standalone" if method == "none" else method)
    given = {"method": method, **SPECS[name]} | ({"model": str(draft)} if draft and name != "none" else {})
    spec = SpeculativeConfig.parse(given) if name in DRAFTED else None
    draw_drafts(monkeypatch)
    batch_, params = prompts(6, 250, low=6, high=40, seed=4), mixed_params(6, max_tokens=24)
    params[2] = SamplingParams(
        temperature=0, max_tokens=24, seed=1, structured_outputs=StructuredOutputs(regex="[ab]{2,9}")
    )
    params[4] = replace(params[4], repetition_penalty=1.3, prompt_logprobs=1, logprobs=2)
    params[5] = replace(params[5], return_hidden_states=True)
    flags: dict[str, Any] = {"max_model_len": 80, "num_pages": 10, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    with engine(target, speculative=spec, adaptive=True, **flags) as llm:
        for _ in range(2):
            tokens(llm, batch_, params)
        while llm.engine.has_work():
            llm.engine.step()
        llm.engine.capture_missing()
        tokens(llm, batch_[:2], params[:2])
        other, stream = built_like(llm), executed.copy()
        for data, outputs in stream:
            pending = other.execute(decode(data))
            again = None if pending is None else pending.wait()
            assert (again is None) == (outputs is None)
            for field in outputs or ():
                assert np.array_equal(outputs[field], again[field]), (decode(data), field)
        kinds = {type(decode(data)) for data, _ in stream}
        assert {Launch, Capture, WriteSlot} <= kinds
        launched = {decode(data).key.program for data, _ in stream if isinstance(decode(data), Launch)}
        assert {"extend", "score", "round", "verify"} <= launched
        assert ("draft" in launched) == (name in DRAFTED)
        assert llm.engine.scheduler.preemptions > 0
        assert [graph.key for graph in other.graphs] == [graph.key for graph in llm.engine.worker.graphs]
        mine, others = state(llm.engine.worker), state(other)
        assert mine.keys() == others.keys()
        assert len(mine) > 20
        for path, tensor in mine.items():
            assert tensor.numpy().tobytes() == others[path].numpy().tobytes(), path
        other.close()


def test_replayed_commands_capture_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner drops, releases and captures by times and sizes that the other set does not have."""
    stream: list[bytes] = []
    passes = program(lambda b: b.result.copy_(b.x.float() * b.scale[:, None]))
    planner = LonePlanner(CPU, budget=1300)

    def send(command: Any) -> Any:
        stream.append(encode(command))
        return planner.graph_set.execute(command)

    planner._send = send
    monkeypatch.setattr(planner, "_timed", lambda buckets, shape: (0.5 * shape.rows, 0.001 * shape.rows))
    shapes = tuple(PassShape(rows) for rows in (1, 2, 4, 8, 16, 32, 64))
    planner.capture([Buckets(passes, shapes, edges=frozenset((8, 32)), passes=1e9, measured=True)])
    planner.budget = None
    hidden = GraphKey("p", PassShape(2), Features(Hidden.FULL))
    planner.run(hidden, batch([[1, 2]]))
    planner.capture_missing()
    assert {type(decode(data)) for data in stream} == {Launch, Capture, Release}
    other = GraphSet(CPU, {"p": passes})
    for data in stream:
        other.execute(decode(data))
    assert [graph.key for graph in other] == [graph.key for graph in planner.graph_set]
    assert {graph.key.shape.rows for graph in other} >= {1, 8, 64}
    assert all(graph.key.shape.rows != 32 for graph in other), "captured, and released as over budget"


def test_commands_survive_their_bytes() -> None:
    key = GraphKey("verify", PassShape(3, 4), Features(Hidden.AUX, (1, 5), Logits.SELECTED, masks=True))
    values = np.arange(6, dtype=np.int32).reshape(1, 2, 3)
    launch = decode(encode(Launch(key, None, {"slots": [1, 2], "mask": values, "one": np.int64(5), "no": ()})))
    assert isinstance(launch, Launch)
    assert (launch.key, launch.graph) == (key, None)
    assert launch.batch["slots"] == [1, 2]
    assert launch.batch["mask"].dtype == np.int32
    assert np.array_equal(launch.batch["mask"], values)
    assert launch.batch["one"] == 5
    slot = decode(encode(WriteSlot(3, values[0, 0], values[0, 1], values[0, 0][:0], None)))
    assert isinstance(slot, WriteSlot)
    assert (slot.slot, slot.history.tolist(), slot.pages.tolist(), slot.edits) == (3, [3, 4, 5], [], None)
    for command in (Capture(key, True), Release(key), ResetSlots(), replace_graph(key)):
        assert decode(encode(command)) == command
    with pytest.raises(NotImplementedError, match="Tensor"):
        encode(Launch(key, key, {"x": torch.zeros(1)}))
    with pytest.raises(msgspec.DecodeError):
        decode(b"\x93")


def replace_graph(key: GraphKey) -> Launch:
    return Launch(key, replace(key, shape=PassShape(4, 4)), {})


def test_a_failed_capture_leaves_the_set_as_it_was() -> None:
    def run(b: Buffers) -> None:
        raise torch.OutOfMemoryError("no room")

    graphs = GraphSet(CPU, {"p": program(run)})
    with pytest.raises(torch.OutOfMemoryError):
        graphs.execute(Capture(GraphKey("p", PassShape(1))))
    assert len(graphs) == 0
    graphs.execute(Release(GraphKey("p", PassShape(1))))  # what the planner sends then
    assert len(graphs) == 0
