"""A checkpoint that carries MTP modules speculates with them unless told otherwise; the reason is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.proposals import GREEDY
from tests.engine.helpers import prompts, tokens
from tests.models.make import make_checkpoint
from tests.models.make_mtp import named, options, random_modules, write_beside
from unisono.drafters import from_checkpoint
from unisono.entrypoints.llm import LLM
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SpeculativeConfig

LAYERS = 3
FLAGS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 128}


@pytest.fixture(scope="module")
def carrying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("carrying") / "target", "qwen3", **options())
    modules = random_modules(Checkpoint.open(path).config, 1, shared=True)
    return write_beside(path, named(modules, "qwen", LAYERS))


def decision(llm: LLM) -> tuple[str, str] | None:
    rows = [row for row in llm.engine.info()["decisions"] if row["name"] == "speculative"]
    return (rows[0]["value"], rows[0]["reason"]) if rows else None


def test_checkpoint_mtp_modules_are_used_by_default(carrying: Path) -> None:
    batch = prompts(3, 60, low=1, high=50, seed=1)
    with LLM(str(carrying), speculative=SpeculativeConfig("none"), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "none"
        assert llm.engine.info()["settings"]["speculative"]["method"] == "none"
        assert decision(llm) is None
        plain = tokens(llm, batch, GREEDY)
    with LLM(str(carrying), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "mtp"
        settings = llm.engine.info()["settings"]["speculative"]
        assert (settings["method"], settings["num_speculative_tokens"]) == ("mtp", 3)
        value, reason = decision(llm) or ("", "")
        assert value == "mtp, k = 3"
        assert "1 MTP module, named as by Qwen3-Next, Qwen3.5; --speculative-method none" in reason
        llm.engine.pin_drafts(3)  # on a busy machine the measured times may speak against drafting
        assert tokens(llm, batch, GREEDY) == plain
        assert llm.engine.counters.drafted_tokens > 0


def test_explicit_method_overrides_bundled_mtp(carrying: Path) -> None:
    with LLM(str(carrying), speculative=SpeculativeConfig("ngram"), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "ngram"
        assert decision(llm) is None


def test_modules_come_before_an_assistant(carrying: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_checkpoint, "assistant_beside", lambda directory: directory / "assistant")
    spec, reason = from_checkpoint.carried_speculation(carrying, Checkpoint.open(carrying).config) or (None, "")
    assert spec == SpeculativeConfig("mtp")
    assert f"they come before the assistant {carrying / 'assistant'}, which mtp_frozen reads" in reason


def test_random_weights_and_other_checkpoints_do_not_speculate(carrying: Path, tmp_path: Path) -> None:
    with LLM(str(carrying), load_format="dummy", **FLAGS) as llm:
        assert decision(llm) is None
    with LLM(str(make_checkpoint(tmp_path / "plain", "qwen3", **options())), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "none"
        assert decision(llm) is None


def test_unusable_mtp_modules_are_reported(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "target", "qwen3", **options())
    stored = load_file(path / "model.safetensors")
    stored |= {"mtp.fc.weight": torch.zeros(2, 2), "mtp.layers.0.input_layernorm.weight": torch.zeros(2)}
    save_file(stored, path / "model.safetensors")
    with LLM(str(path), **FLAGS) as llm:
        assert llm.engine.info()["speculation"]["drafter"] == "none"
        value, reason = decision(llm) or ("", "")
        assert value == "none"
        assert "which cannot be used" in reason
