"""The assistant beside a checkpoint drafts by default and says so; the start's self-test knows a wrong one."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.drafters.gemma_copies import make_pair, write
from tests.drafters.proposals import GREEDY
from tests.engine.helpers import prompts, tokens
from tests.models.make import make_checkpoint
from unisono.config import EngineConfig
from unisono.engine.startup.dry_run import dry_run
from unisono.entrypoints.llm import LLM
from unisono.models.load.checkpoint import WEIGHTS
from unisono.types import SpeculativeConfig

FLAGS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 128}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("beside"))


def decisions(llm: LLM) -> dict[str, tuple[str, str]]:
    return {row["name"]: (row["value"], row["reason"]) for row in llm.engine.info()["decisions"]}


def share(llm: LLM) -> int:
    """Accepted first drafts of the start's test, in percent."""
    return int(decisions(llm)["draft self-test"][0].split("%")[0])


def test_adjacent_assistant_is_used_by_default(pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    target, assistant = pair
    batch = prompts(3, 250, low=1, high=50, seed=1)
    with LLM(str(target), speculative=SpeculativeConfig("none"), **FLAGS) as llm:
        plain = tokens(llm, batch, GREEDY)
    with LLM(str(target), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "mtp_frozen"
        value, reason = decisions(llm)["speculative"]
        assert value == f"mtp_frozen ({assistant}), k = 3"
        assert "the assistant beside the checkpoint; --speculative-method none" in reason
        assert share(llm) > 50
        llm.engine.pin_drafts(3)
        assert tokens(llm, batch, GREEDY) == plain
        assert llm.engine.counters.accept_length > 1.5
    assert not [r for r in caplog.records if r.levelno == logging.WARNING and "self_test" in r.name]
    told = dry_run(EngineConfig(str(target), device="cpu"), target)
    assert told["model"]["drafter"] == f"mtp_frozen ({assistant}), k = 3"
    assert told["memory"]["drafter"] > 0


def wirings(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Wrong weights of the right shapes."""
    permuted = torch.Generator().manual_seed(1)
    rows = torch.randperm(len(tensors["model.embed_tokens.weight"]), generator=permuted)
    features = torch.randperm(len(tensors["pre_projection.weight"]), generator=permuted)
    return {
        "tokens in another order": {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][rows]},
        "features in another order": {"pre_projection.weight": tensors["pre_projection.weight"][features]},
    }


@pytest.mark.parametrize("wrong", ["tokens in another order", "features in another order"])
def test_failed_self_test_of_an_assistant_is_reported(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    target = shutil.copytree(pair[0], tmp_path / "target")
    assistant = shutil.copytree(pair[1], target / "assistant")  # the other place
    tensors = load_file(assistant / WEIGHTS)
    write(assistant, {**tensors, **wirings(tensors)[wrong]})
    with LLM(str(target), **FLAGS) as llm:
        assert str(assistant) in decisions(llm)["speculative"][0]
        assert share(llm) < 5
        assert "trained for another target" in decisions(llm)["draft self-test"][1]
    assert [r for r in caplog.records if r.levelno == logging.WARNING and "self_test" in r.name]


def test_one_that_does_not_fit_is_named_and_left_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "gemma4_text", hidden_size=96)
    shutil.copytree(pair[1], tmp_path / "target-assistant")
    with LLM(str(target), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "none"
        value, reason = decisions(llm)["speculative"]
        assert value == "none"
        assert "target-assistant cannot be used" in reason
        assert "It belongs to another model" in reason


def test_explicit_drafter_overrides_assistant_and_other_models_are_ignored(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with LLM(str(pair[0]), speculative=SpeculativeConfig("ngram"), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "ngram"
    target = shutil.copytree(pair[0], tmp_path / "target")
    shutil.copytree(pair[0], tmp_path / "target-assistant")  # another model
    with LLM(str(target), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "none"
        assert "speculative" not in decisions(llm)
