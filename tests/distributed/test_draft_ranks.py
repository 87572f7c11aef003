"""Draft models whose layers are divided among the ranks draft what whole ones do: the same drafts, the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import CELLS, UNTRAINED
from tests.distributed.requests_ import MANY, ROOMY, differing, run
from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import draw_drafts, engine
from tests.engine.matrix import config_of
from unisono.config import EngineConfig, catalog
from unisono.engine.engine import Engine
from unisono.types import ConfigError, SpeculativeConfig

FULL = ("tiny, eagle3", "tiny, mtp", "tiny, eagle", "tiny, standalone", "tiny, eagle3 tree", "tiny-hybrid, mtp",
        "tiny-hybrid, eagle3", "tiny, standalone tree", "tiny, dflash", "tiny-hybrid, dspark")  # fmt: skip


@pytest.mark.parametrize(
    ("setup", "ranks", "count"),
    [
        ("tiny, eagle3", 2, 4),
        ("tiny, dflash", 2, 4),
        *(pytest.param(name, ranks, 60, marks=pytest.mark.full) for name in FULL for ranks in (2, 4)),
    ],
)
def test_same_drafts(setup: str, ranks: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, given = CELLS[setup](tmp_path)
    flags: dict[str, Any] = {**(MANY if count > 20 else ROOMY), "adaptive": not given.paths}
    found = []
    for number in (1, ranks):
        draw_drafts(monkeypatch)
        spec = replace(given, draft_tensor_parallel_size=number)
        found.append(run(target, number, count, captures=1, speculative=spec, **flags))
    alone, together = found
    print(f"{setup}, {ranks} ranks: {differing(alone, together)} of {2 * count} differ", flush=True)
    assert differing(alone, together) == 0
    assert together["accepted"] == alone["accepted"]
    assert alone["accepted"] > 0 or setup in UNTRAINED


@pytest.mark.full
def test_same_drafts_in_fp8(tmp_path: Path) -> None:
    """A rank's part of the draft's own LM head has 100 outputs, which no block of 128 divides."""
    target, _ = CELLS["tiny, eagle3"](tmp_path)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512}
    head = make_eagle3(tmp_path / "head", config_of(target), (2, 1, 3), aux=[2, 1, 3], draft_vocab=200, **sizes).path
    options = {"model": str(head), "num_speculative_tokens": 2, "draft_quantization": "fp8"}
    spec = SpeculativeConfig.parse({"method": "eagle3", **options})
    alone, together = (run(target, ranks, 4, speculative=spec, **ROOMY) for ranks in (1, 2))
    assert differing(alone, together) == 0
    assert together["accepted"] == alone["accepted"]


@pytest.mark.parametrize("method", ["eagle3", "standalone"])
def test_a_rank_keeps_its_heads_of_the_draft_only(method: str) -> None:
    kept = []
    for number in (1, 2):
        model = {"eagle3": "tiny-eagle3", "standalone": "tiny-draft"}[method]
        spec = SpeculativeConfig(method, model=model, draft_tensor_parallel_size=number)
        with engine("tiny", tensor_parallel_size=2, speculative=spec, enforce_eager=True) as llm:
            kept.append(llm.engine.worker.store.token_bytes("drafter"))
    assert kept[1] < 0.55 * kept[0]  # EAGLE-3 keeps a little of each page besides


@pytest.mark.parametrize(
    ("ranks", "spec", "says"),
    [
        (2, {"method": "eagle3", "draft_tensor_parallel_size": 4}, "=4: give 1, or as many .*--tensor-parallel-size 2"),
        (1, {"method": "eagle3", "draft_tensor_parallel_size": 2}, "=2: give 1, or as many .*--tensor-parallel-size 1"),
        (1, {"method": "eagle3", "draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size=0: give a whole number"),
        (2, {"method": "ngram", "draft_tensor_parallel_size": 2}, "'ngram' has no layers that could be divided so"),
    ],
)
def test_invalid_draft_tensor_parallel_size_raises(
    ranks: int, spec: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.engine.worker.runner.Team", lambda *given: None)
    spec |= {"model": "tiny-eagle3"} if spec["method"] == "eagle3" else {}
    with pytest.raises(ConfigError, match=says):
        Engine(EngineConfig("tiny", tensor_parallel_size=ranks, speculative=SpeculativeConfig.parse(spec)))


@pytest.mark.parametrize(
    ("given", "heads", "says"),
    [
        ({}, 4, "divided among 2 ranks, by default"),
        ({}, 1, "whole on every rank, by default"),
        ({"method": "standalone", "model": "tiny-draft"}, 0, "whole on every rank, by default"),
    ],
    ids=["EAGLE-3", "heads that cannot be divided", "draft model"],
)
def test_default_division_of_draft_layers(given: dict[str, Any], heads: int, says: str, tmp_path: Path) -> None:
    if heads:
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64}
        head = make_eagle3(
            tmp_path / "head", config_of(catalog.bundled_path("tiny")), (2, 1, 3), aux=[2, 1, 3], **sizes
        )
        given = {"method": "eagle3", "model": str(head.path), **given}
    with engine("tiny", tensor_parallel_size=2, speculative=SpeculativeConfig.parse(given), enforce_eager=True) as llm:
        [decision] = [d for d in llm.engine.config.decisions if d.name == "draft layers"]
    assert f"{decision.value}, {decision.reason}" == says
