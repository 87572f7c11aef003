"""Llama 4: the text model of a checkpoint with a tower, the end of the context, and values that are not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.engine.helpers import engine, tokens
from tests.models.harness import load, whole
from tests.models.hybrids import reference
from tests.models.make import COMMON, FAMILIES, make_checkpoint, randomise
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError, ConfigError, SamplingParams, SpeculativeConfig

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = [[7, 50, 91, 7, 50, 91, 7, 50] * 9, [3, 141, 59, 26]]
TOWER = {
    "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Llama 4, as the hub's are."""
    path = tmp_path_factory.mktemp("llama4")
    text: dict[str, Any] = {"model_type": "llama4_text", **COMMON, **FAMILIES["llama4_text"]}
    config = AutoConfig.for_model("llama4", text_config=text, vision_config=TOWER)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(path)
    return path


@torch.no_grad()
def test_the_text_of_a_seeing_checkpoint_is_transformers(seeing: Path) -> None:
    ((prefix, _, why),) = [each for each in Checkpoint.open(seeing).unread() if "vision" in each[0]]
    assert "pictures are refused" in why, prefix
    (ours,) = whole(load(seeing), PROMPTS[:1])
    theirs = reference(seeing).language_model(torch.tensor(PROMPTS[:1])).logits[0]
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_drafts_change_no_byte(seeing: Path) -> None:
    with engine(seeing, dtype="float32", max_model_len=128) as llm:
        plain = tokens(llm, PROMPTS, GREEDY)
    with engine(seeing, dtype="float32", max_model_len=128, speculative=SpeculativeConfig("ngram")) as llm:
        assert tokens(llm, PROMPTS, GREEDY) == plain


def test_context_is_limited_to_the_first_chunk(seeing: Path) -> None:
    assert Checkpoint.open(seeing).config.max_positions == 300
    with pytest.raises(ConfigError, match="300"), engine(seeing, dtype="float32", max_model_len=301):
        pass


def test_values_that_are_not_computed(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", "llama4_text", tokenizer=False)
    raw = json.loads((path / "config.json").read_text())
    for name, value, message in (
        ("num_experts_per_tok", 2, "one expert a token is computed where its input is multiplied"),
        ("layer_types", ["sliding_attention"] * 4, "full_attention and chunked_attention"),
    ):
        (path / "config.json").write_text(json.dumps({**raw, name: value}))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(path)
