"""While it loads, a drafter shows how far it is; what it chose by itself stands among the engine's decisions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import engine
from tests.engine.matrix import DRAFTERS, Checkpoints, config_of, drafting
from unisono.types import SpeculativeConfig

CHOICES = {
    "combined": {
        "drafts": ("dflash, after ngram", "a match of 8 tokens or more"),
        "row of the first draft": ("the first mask's", "the default of a dflash head"),
    },
    "dflash": {
        "target layers read by the draft head": ("inputs of [1, 3]", "target_layer_ids names outputs of layers"),
        "row of the first draft": ("the first mask's", "the default of a dflash head"),
        "block": ("8 tokens; layers: whole block", "config.json"),
        "draft embedding": ("the target's", "stores none"),
        "draft LM head": ("the target's", "stores none"),
    },
    "dspark": {
        "target layers read by the draft head": ("inputs of [1, 3]", "target_layer_ids names outputs of layers"),
        "row of the first draft": ("the last token's", "the default of a dspark head"),
        "draft LM head": ("the target's", "stores none"),
    },
    "eagle": {
        "draft vocabulary": ("263 of the target's 263", "one of its own"),
        "draft embedding": ("the target's", "stores none"),
        "draft LM head": ("the target's", "stores none"),
    },
    "eagle3": {
        "target layers read by the draft head": ("inputs of [2, 1, 3]", "[2, 1, 3] can only name inputs"),
        "draft vocabulary": ("150 of the target's 263", "d2t"),
        "draft embedding": ("the target's", "stores none"),
        "draft LM head": ("its own", "stores another"),
    },
    "mtp": {
        "draft modules": ("2 of 2, named as by Qwen3-Next, Qwen3.5", "one for each step"),
        "draft embedding": ("the target's", "stores none"),
        "draft LM head": ("the target's", "stores none"),
    },
    "mtp_frozen": {"layers whose KV the drafter reads": ("[", "the target's last")},
    "standalone": {"draft vocabulary": ("263 token ids", "the same string in both tokenizers")},
}
"""By method: name -> (how the value begins, what the reason says). Methods that are not listed load nothing."""


def decisions(llm: Any) -> dict[str, tuple[str, str]]:
    return {d["name"]: (d["value"], d["reason"]) for d in llm.engine.info()["decisions"]}


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafter_loading_reports_progress_and_decisions(
    method: str, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made: Callable[..., Checkpoints] = DRAFTERS[method]
    shares: list[float] = []
    report = {"progress": lambda stage, share: shares.append(share) if stage == "load draft" else None}
    with drafting(method, made(checkpoints, tmp_path_factory.mktemp(method)), 3, **report) as llm:
        found = decisions(llm)
    loads = method in CHOICES
    assert len(shares) > 1 if loads else not shares
    assert shares == sorted(shares)
    assert not loads or (0 < shares[0] < 1, shares[-1]) == (True, 1)
    for name, (value, reason) in CHOICES.get(method, {}).items():
        assert found[name][0].startswith(value)
        assert reason in found[name][1]


def test_reused_mtp_module_is_a_decision(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with drafting("mtp", DRAFTERS["mtp"](checkpoints, tmp_path), 1) as llm:
        assert decisions(llm)["draft modules"][0].startswith("1 of 2")
        assert decisions(llm)["draft modules"][1] == "reused for every step"


def test_explicit_aux_layers_are_a_decision(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    target = checkpoints["mistral"]
    head = make_eagle3(tmp_path, config_of(target), (3, 2, 1), aux=[2, 1, 0]).path
    spec = SpeculativeConfig("eagle3", str(head), 3, {"aux_layers": "output"})
    with engine(target, speculative=spec) as llm:
        value, reason = decisions(llm)["target layers read by the draft head"]
    assert value == "inputs of [3, 2, 1]"
    assert reason == "set in the speculative config (output)"
