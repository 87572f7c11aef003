"""Outputs that the host may have before a pass is over: which they are, and which passes hand them over early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import engine, prompts, tokens
from tests.engine.test_speculation import DRAFTERS, drafting
from tests.graphs.programs import DEVICE, batch, graph_of, program, run_graph
from unisono.graphs.compiled import written_by
from unisono.graphs.planner import Buckets, Planner
from unisono.graphs.recorder import Call
from unisono.graphs.segments import storages
from unisono.graphs.tape import Tape
from unisono.program import Buffers, Key, Pending, Shape
from unisono.types import SamplingParams, StructuredOutputs

CUDA = torch.cuda.is_available()
KINDS = ({}, {"splits": True}, {"compile": True})


def publishing(b: Buffers) -> None:
    b.result.copy_(b.x * b.scale[:, None])
    b.publish()


@pytest.mark.skipif(CUDA, reason="on a GPU the copy and what follows race: nobody may write there")
@pytest.mark.parametrize("how", KINDS, ids=str)
def test_the_outputs_are_what_they_were_when_published(how: dict[str, bool]) -> None:
    def run(b: Buffers) -> None:
        publishing(b)
        b.result.zero_()

    graph = graph_of(run, rows=2, first=batch([[9, 9], [9, 9]]), **how)
    for x in ([[1, 2], [3, 4]], [[5, 6], [7, 8]]):
        assert run_graph(graph, x) == x


@pytest.mark.skipif(not CUDA, reason="a CPU runs one thing after the other")
@pytest.mark.parametrize("how", [*KINDS, None], ids=str)
def test_the_host_has_them_while_the_pass_goes_on(how: dict[str, bool] | None) -> None:
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


def launches(run: Callable[[Buffers], None], how: dict[str, bool] | None) -> Callable[[list[list[int]]], Pending]:
    """Launches of a batch of one row: of a graph of that kind, or None: eagerly, as the planner does it."""
    if how is None:
        planner = Planner(DEVICE, enabled=False)
        planner.capture([Buckets(program(run))])
        return lambda x: planner.launch(Key("p", Shape(1)), batch(x))
    graph = graph_of(run, rows=1, first=batch([[9, 9]]), **how)

    def launch(x: list[list[int]]) -> Pending:
        graph.buffers.load(batch(x))
        graph.replay()
        return graph.buffers.fetch()

    return launch


LETTERS = SamplingParams(max_tokens=6, structured_outputs=StructuredOutputs(regex="[a-z]{6}"))


@pytest.mark.skipif(CUDA, reason="reads tapes")
@pytest.mark.parametrize("method", ["none", *DRAFTERS])
def test_who_waits_does_not_wait_for_the_drafter(
    method: str, checkpoints: dict[str, Path], tmp_path: Path, qwen3: Path
) -> None:
    """Prompts and rounds under masks publish before their drafter catches up, and then leave the outputs alone."""
    flags: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 32}
    opened = drafting(method, DRAFTERS[method](checkpoints, tmp_path), 3, **flags) if method in DRAFTERS else None
    with opened or engine(qwen3, **flags) as llm:
        tokens(llm, prompts(1, 200), LETTERS)
        seen: Counter[str] = Counter()
        for graph in llm.engine.runner.planner.graphs():
            assert isinstance(graph, Tape)
            calls = [step for step in graph.parts if isinstance(step, Call) and not step.view]
            places = [i for i, call in enumerate(calls) if call.op is torch.ops.unisono.publish.default]
            assert len(places) == (method != "none" and graph.key.program in ("extend", "score", "verify")), graph.key
            for at in places:
                after, outputs = calls[at + 1 :], storages(calls[at].args)
                assert not any(outputs & storages(*written_by(call)) for call in after)
                seen[graph.key.program] += any("attention" in str(call.op) for call in after)
        if method not in ("none", "ngram", "suffix", "mtp_frozen"):  # these have no keys and values of their own
            assert set(+seen) >= {"extend", "score"}
