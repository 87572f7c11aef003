"""Outputs that the host may have before a pass is over: which they are, and which passes hand them over early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import engine, prompts, tokens
from tests.engine.matrix import DRAFTERS, TREE_DRAFTERS, TREES, drafting, drafting_tree
from tests.graphs.programs import DEVICE, LonePlanner, batch, graph_of, program, run_graph
from unisono.entrypoints.llm import LLM
from unisono.graphs import Buffers, GraphKey, PassShape, PendingOutputs
from unisono.graphs.buckets import Buckets
from unisono.graphs.compiled import written_by
from unisono.graphs.recorder import RecordedOp
from unisono.graphs.segments import storages
from unisono.graphs.tape import Tape
from unisono.types import SamplingParams, StructuredOutputs

CUDA = torch.cuda.is_available()
KINDS = ({}, {"splits": True}, {"compile": True})


def publishing(b: Buffers) -> None:
    b.result.copy_(b.x * b.scale[:, None])
    b.outputs_ready()


@pytest.mark.skipif(CUDA, reason="on a GPU the copy and what follows race: nobody may write there")
@pytest.mark.parametrize("how", KINDS, ids=str)
def test_outputs_keep_their_published_values(how: dict[str, bool]) -> None:
    def run(b: Buffers) -> None:
        publishing(b)
        b.result.zero_()

    graph = graph_of(run, rows=2, first=batch([[9, 9], [9, 9]]), **how)
    for x in ([[1, 2], [3, 4]], [[5, 6], [7, 8]]):
        assert run_graph(graph, x) == x


@pytest.mark.skipif(not CUDA, reason="a CPU runs one thing after the other")
@pytest.mark.parametrize("how", [*KINDS, None], ids=str)
def test_host_reads_outputs_before_the_pass_ends(how: dict[str, bool] | None) -> None:
    def run(b: Buffers) -> None:
        publishing(b)
        large = b.scale.expand(8192, 8192).contiguous()
        for _ in range(20):  # some 20 ms each
            large = large @ large

    launch = launches(run, how)
    torch.cuda.synchronize()
    for i, pending in enumerate([launch([[i, 2]]) for i in range(2)]):
        assert pending.wait()["result"].tolist() == [[i, 2]]
        assert not torch.cuda.current_stream().query(), "the pass was over"


@pytest.mark.parametrize("how", [*KINDS, None], ids=str)
def test_a_later_pass_does_not_change_them(how: dict[str, bool] | None) -> None:
    launch = launches(publishing, how)
    before = launch([[0, -1]])
    for i in range(1, 50):
        after = launch([[i, -1]])
        assert before.wait()["result"].tolist() == [[i - 1, -1]]
        before = after


def launches(
    run: Callable[[Buffers], None], how: dict[str, bool] | None
) -> Callable[[list[list[int]]], PendingOutputs]:
    """Launches of a batch of one row: of a graph of that kind, or None: eagerly, as the planner does it."""
    if how is None:
        planner = LonePlanner(DEVICE, enabled=False)
        planner.capture([Buckets(program(run))])
        return lambda x: planner.run(GraphKey("p", PassShape(1)), batch(x))
    graph = graph_of(run, rows=1, first=batch([[9, 9]]), **how)

    def launch(x: list[list[int]]) -> PendingOutputs:
        graph.buffers.load(batch(x))
        graph.replay()
        return graph.buffers.fetch()

    return launch


LETTERS = SamplingParams(max_tokens=6, structured_outputs=StructuredOutputs(regex="[a-z]{6}"))
CASES = [
    ("none", None),
    *((method, None) for method in DRAFTERS),
    *((method, TREES["binary"]) for method in TREE_DRAFTERS),
]
"""Each method with chains, and those that can with a tree."""


@contextmanager
def opened(
    method: str, tree: dict[str, Any] | None, checkpoints: dict[str, Path], folder: Path, **flags: Any
) -> Iterator[LLM]:
    flags |= {"max_num_seqs": 1, "max_num_batched_tokens": 32}
    if method == "none":
        llm = engine(checkpoints["qwen3"], **flags)
    elif tree is None:
        llm = drafting(method, DRAFTERS[method](checkpoints, folder), 3, **flags)
    else:
        llm = drafting_tree(method, TREE_DRAFTERS[method](checkpoints, folder), tree, **flags)
    with llm:
        yield llm


@pytest.mark.parametrize(("method", "tree"), CASES[1:], ids=str)
def test_outputs_are_published_before_the_drafter_runs(
    method: str, tree: dict[str, Any] | None, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """Prompts and rounds under masks publish before their drafter is told; other rounds do not publish."""
    told: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (told.append(name), real(*given))[1])

    def heard(params: SamplingParams) -> list[str]:
        told.clear()
        tokens(llm, prompts(1, 200, low=40), params)
        return told.copy()

    with opened(method, tree, checkpoints, tmp_path, enforce_eager=True) as llm:
        watch(Buffers, "_record_outputs_ready")
        for name in ("observe_prompt", "observe"):
            watch(llm.engine.worker.drafter, name)
        masked = heard(LETTERS)
        assert set(masked[::2]) == {"_record_outputs_ready"}
        assert set(masked[1::2]) == {"observe_prompt", "observe"}
        free = heard(SamplingParams(max_tokens=6, ignore_eos=True))
        assert set(free) == {"_record_outputs_ready", "observe_prompt", "observe"}
        assert {after for before, after in pairwise(free) if before == "_record_outputs_ready"} == {"observe_prompt"}
        assert free.count("_record_outputs_ready") == free.count("observe_prompt")


@pytest.mark.skipif(CUDA, reason="reads tapes")
@pytest.mark.parametrize(("method", "tree"), CASES, ids=str)
def test_no_op_writes_outputs_after_publication(
    method: str, tree: dict[str, Any] | None, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with opened(method, tree, checkpoints, tmp_path) as llm:
        tokens(llm, prompts(1, 200), LETTERS)
        for graph in llm.engine.runner.planner.graphs():
            assert isinstance(graph, Tape)
            calls = [step for step in graph.parts if isinstance(step, RecordedOp) and not step.view]
            places = [i for i, call in enumerate(calls) if call.op is torch.ops.unisono.outputs_ready.default]
            assert len(places) == (method != "none" and graph.key.program in ("extend", "score", "verify")), graph.key
            for at in places:
                outputs = storages(calls[at].args)
                assert outputs & storages(*(t for call in calls[:at] for t in written_by(call)))
                assert not outputs & storages(*(t for call in calls[at + 1 :] for t in written_by(call)))
