"""Kimi K2.5: the text model of a checkpoint with a tower, under the names of its export and of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.models.fields import COMMON, FAMILIES
from tests.models.harness import load, whole
from tests.models.make import randomise
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint

PROMPT = [7, 50, 91, 7, 50, 91, 7, 50] * 9
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def published(name: str) -> str:
    """A tensor's name in the hub's checkpoints. transformers 5.24 writes them, but for the text model's layers."""
    return name.replace("language_model.model.blocks.", "language_model.model.layers.")


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A whole Kimi K2.5 with the names of its export, and transformers' model."""
    path = tmp_path_factory.mktemp("kimi")
    text: dict[str, Any] = {"model_type": "deepseek_v3", **COMMON, **FAMILIES["deepseek_v3"]}
    config = AutoConfig.for_model(
        "kimi_k25", text_config=text, vision_config=TOWER, projection_hidden_size=32, tie_word_embeddings=False
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(path)
    tensors = {published(name): tensor for name, tensor in load_file(path / WEIGHTS).items()}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw["architectures"], raw["text_config"]["model_type"] = ["KimiK25ForConditionalGeneration"], "kimi_k2"
    raw.pop("tie_word_embeddings")
    raw["text_config"].pop("architectures", None)
    (path / "config.json").write_text(json.dumps(raw))
    return path, model.eval()


@torch.no_grad()
def test_the_text_is_transformers(kimi: tuple[Path, Any]) -> None:
    path, model = kimi
    assert any(name.startswith("language_model.model.layers.0.") for name in load_file(path / WEIGHTS))
    whys = {prefix: why for prefix, _, why in Checkpoint.open(path).unread()}
    assert {prefix.removeprefix("model.") for prefix in whys} == {"vision_tower.*", "mm_projector.*"}
    assert all("pictures are refused" in why for why in whys.values())
    (ours,) = whole(load(path), [PROMPT])
    theirs = model(input_ids=torch.tensor([PROMPT])).logits[0]
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
