"""What ranks gather of the LM head: of passes without filters the best of each part, of all others whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cells import CELLS, COUNT, UNTRAINED
from tests.distributed.parts_ import loaded
from tests.distributed.requests_ import KINDS, MANY, ROOMY, SCARCE, UNFILTERED, differing, run, spec
from tests.drafters.make_heads import make_eagle
from tests.engine.helpers import draw_drafts, engine
from tests.engine.matrix import config_of
from tests.models.make import make_checkpoint
from unisono.distributed.columns import Columns
from unisono.distributed.gather import Ranks
from unisono.distributed.shared_memory import SharedMemory
from unisono.graphs import GraphKey
from unisono.graphs.graph_set import GraphSet, Launch
from unisono.types import SpeculativeConfig

VOCAB, RANKS = 268, 2
"""No other layer of the models here has rows as wide as a part of the logits."""

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Of models whose heads two ranks can divide."""

FULL = pytest.mark.full

K = 2
"""Drafts of a round."""


class Gathers:
    """What rank 0 said in each pass: (key, [(type, columns) of each gather])."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[GraphKey, list[tuple[torch.dtype, int]]]] = []
        gather, run = SharedMemory.all_gather, GraphSet._run
        said: list[tuple[torch.dtype, int]] = []

        def all_gather(memory: SharedMemory, x: torch.Tensor) -> torch.Tensor:
            said.append((x.dtype, x.shape[1]))
            return gather(memory, x)

        def launched(graphs: GraphSet, command: Launch) -> Any:
            said.clear()  # captures gather too
            outputs = run(graphs, command)
            self.passes.append((command.key, said[:]))
            return outputs

        monkeypatch.setattr(SharedMemory, "all_gather", all_gather)
        monkeypatch.setattr(GraphSet, "_run", launched)

    def of(self, program: str, whole: bool) -> list[tuple[int, int]]:
        """Of each such pass how many gathers were of logits, and how many of keys."""
        size = VOCAB // RANKS
        return [
            (sum(columns == size for _, columns in said), sum(kind == torch.int64 for kind, _ in said))
            for key, said in self.passes
            if key.program == program and key.features.whole_logits == whole
        ]


def both(monkeypatch: pytest.MonkeyPatch, cell: Path | str, kinds: Any, count: int, **flags: Any) -> Gathers:
    """The requests on one rank and on two; returns what these said."""
    draw_drafts(monkeypatch)
    alone = run(cell, 1, count, kinds=kinds, **flags)
    draw_drafts(monkeypatch)
    gathers = Gathers(monkeypatch)
    together = run(cell, RANKS, count, kinds=kinds, **flags)
    assert differing(alone, together) == 0
    for counted in ("hits", "preemptions", "accepted"):
        assert together[counted] == alone[counted], counted
    return gathers


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "target", "qwen3", vocab_size=VOCAB, **SIZES)


def sharing(target: Path, **tree: Any) -> SpeculativeConfig:
    """A drafter with random weights and the target's LM head: each draft is sampled from it, and one after a round."""
    head = make_eagle(target.parent / "head", config_of(target), num_attention_heads=4, num_key_value_heads=2).path
    return spec("eagle", model=str(head), **tree or {"num_speculative_tokens": K})


@pytest.mark.parametrize("drafting", [pytest.param("none", marks=FULL), pytest.param("chain", marks=FULL), "tree"])
def test_without_filters_no_gather_is_as_wide_as_the_vocabulary(
    drafting: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds, their drafts, the draft after them, and prompts; penalties and biases are in each part."""
    tree = {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1)]"} if drafting == "tree" else {}
    given = spec("none") if drafting == "none" else sharing(target, **tree)
    gathers = both(monkeypatch, target, UNFILTERED, 6, captures=1, speculative=given, **SCARCE)
    drafts = 0 if drafting == "none" else K
    assert not gathers.of("round", whole=True)
    assert not gathers.of("extend", whole=True)
    for program, each in (("round", 1 + drafts), ("extend", 1 + (drafts > 0))):
        said = gathers.of(program, whole=False)
        assert len(said) > 4
        assert set(said) == {(0, each)}, program


def test_filters_and_log_probabilities_gather_logits(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes with such a request beside others; greedy requests filter nothing. Some passes have no such request."""
    filtered: list[dict[str, Any]] = [
        {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.0, "logprobs": -1}, {"temperature": 0.0, "top_p": 0.5},
    ]  # fmt: skip
    flags = ROOMY | {"speculative": sharing(target), "max_logprobs": -1}
    gathers = both(monkeypatch, target, [*filtered, *UNFILTERED, *UNFILTERED], 12, **flags)
    rounds = gathers.of("round", whole=True), gathers.of("round", whole=False)
    assert all(rounds)
    assert set(rounds[0]) == {(1 + K, 0)}
    assert set(rounds[1]) == {(0, 1 + K)}


def test_one_graph_for_whole_rows_serves_all(target: Path) -> None:
    """At the start there is no more than these; the others are captured for the first pass that wants them."""
    with engine(target, tensor_parallel_size=RANKS, **ROOMY) as llm:
        planner, features = llm.engine.runner.planner, llm.engine.runner.features
        captured = {graph.key.features for graph in planner.graphs() if graph.key.program in ("round", "extend")}
        key = llm.engine.runner.round_key(2, 0)
        assert captured == {key.features | llm.engine.runner.request_features[0].context.whole_logits}
        assert captured != {features}
        assert planner.plan(key).graph.key.covers(key)  # type: ignore[union-attr]
        llm.generate([[1, 2, 3]], None)
        assert features in {graph.key.features for graph in planner.graphs()}
        said = {each.name: each.value for each in llm.engine.config.decisions}
        assert said["gathered of logits"] == "8 bytes a row from 17 rows on: the best of each part"
    with engine(target, **ROOMY) as llm:
        assert not any(graph.key.features.whole_logits for graph in llm.engine.runner.planner.graphs())
        assert "gathered of logits" not in {each.name for each in llm.engine.config.decisions}


def test_the_head_is_divided_or_whole(tmp_path: Path) -> None:
    """A vocabulary that the ranks do not divide is whole on each, and so are its logits."""
    for vocab, divided in ((264, True), (263, False)):
        path = make_checkpoint(tmp_path / str(vocab), "qwen3", vocab_size=vocab, **SIZES)
        for index in range(2):
            model = loaded(path, Ranks(index, 2))
            hidden = torch.randn(3, model.config.hidden_size)
            logits = model.logit_columns(hidden)
            assert model.divides_logits == isinstance(logits, Columns) == divided
            assert (logits.first if divided else 0) == index * divided * vocab // 2
        assert isinstance(loaded(path, Ranks()).logit_columns(hidden), torch.Tensor)


@FULL
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_an_uneven_vocabulary(graphs: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", vocab_size=263, **SIZES)
    found = [run(path, ranks, 6, kinds=[*UNFILTERED, *KINDS], graphs=graphs) for ranks in (1, 2)]
    assert differing(*found) == 0


def test_masks_without_graphs(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs under masks have whole rows; a pass that runs eagerly has the parts that it asks for."""
    kinds = [KINDS[3], {**KINDS[3], "temperature": 0.0}, {"temperature": 1.0}]
    gathers = both(monkeypatch, target, kinds, 6, graphs="off", **ROOMY)
    assert set(gathers.of("verify", whole=False)) == {(0, 1)}


@FULL
@pytest.mark.parametrize("setup", CELLS)
def test_200_requests_of_every_cell_without_filters(
    setup: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two and four ranks against one process; then with filters here and there: passes of both kinds alternate."""
    target, given = CELLS[setup](tmp_path)
    flags = {**MANY, "speculative": given, "adaptive": given.method != "none" and not given.paths}
    for kinds, count in ((UNFILTERED, COUNT), ([*UNFILTERED * 6, KINDS[4]], COUNT // 4)):
        draw_drafts(monkeypatch)
        alone = run(target, 1, count, kinds=kinds, **flags)
        if kinds is UNFILTERED:
            assert given.method == "none" or alone["accepted"] > 0 or setup in UNTRAINED
        for ranks in (2, 4):
            draw_drafts(monkeypatch)
            together = run(target, ranks, count, kinds=kinds, **flags)
            assert differing(alone, together) == 0
            for counted in ("hits", "preemptions", "accepted"):
                assert together[counted] == alone[counted], counted
