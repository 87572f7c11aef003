"""Mistral 3's Pixtral tower and its text with pictures, against transformers in fp32; drafts change no byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import engine
from tests.engine.matrix import config_of
from tests.engine.pictures import TEXT, run, vision_of, written
from tests.engine.pixtral_pictures import images_of, make_mistral3, several
from tests.models.hybrids import reference
from tests.models.towers import compare_embeddings
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError, SamplingParams, SpeculativeConfig, vectors

GREEDY = SamplingParams(
    temperature=0, max_tokens=32, ignore_eos=True, seed=0, return_hidden_states=True,
    allowed_token_ids=tuple(range(TEXT)),
)  # fmt: skip
NARROW = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=3, allowed_token_ids=tuple(range(40, 44)))
"""Few allowed tokens, so that every drafter is right sometimes."""

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral": ({"hidden_act": "silu"}, {"bias": True}),
    "ministral3": (
        {"hidden_act": "gelu", "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
        {
            "model_type": "ministral3", "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "llama_4_scaling_beta": 0.3,
                                "original_max_position_embeddings": 64},
        },
    ),
}  # fmt: skip
"""Text model -> (fields of its tower, further arguments)."""


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tower, others = MODELS[request.param]
    return make_mistral3(tmp_path_factory.mktemp(request.param), tower, **others)


@torch.no_grad()
def test_embeddings_are_transformers(path: Path) -> None:
    """Each picture's, in any pass."""
    model = reference(path).model

    def theirs(pixels: Any, grids: Any, vision: Any) -> Any:
        inputs = images_of(pixels, [grid[1:] for grid in grids])
        return model.get_image_features(**inputs, vision_feature_layer=-1).pooler_output

    compare_embeddings(path, theirs)


@torch.no_grad()
@pytest.mark.parametrize("most", [128, 21])
def test_logits_and_text_are_transformers(path: Path, most: int) -> None:
    """In one pass, and in chunks that cut pictures."""
    vision, model = vision_of(path), reference(path)
    prompts = several(vision)
    with engine(path, dtype="float32", max_num_batched_tokens=most) as llm:
        outputs = written(llm, prompts, GREEDY)
    for each, (tokens, logits) in zip(prompts, outputs, strict=True):
        pictures = {}
        if each.media:
            pictures = images_of([vectors.unpack(m.pixels) for m in each.media], [m.grid[1:] for m in each.media])
        theirs = model(input_ids=torch.tensor([each.ids + tokens[:-1]]), **pictures).logits[0]
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
        assert theirs[len(each.ids) - 1 :, :TEXT].argmax(-1).tolist() == tokens


def test_drafts_change_no_byte(path: Path, tmp_path: Path) -> None:
    prompts = several(vision_of(path))
    head = make_eagle3(tmp_path / "head", config_of(path), (2, 1, 3), aux=[2, 1, 3])
    with engine(path, dtype="float32", max_num_seqs=1, enforce_eager=True) as llm:
        plain = [run(llm, [each], NARROW)[0] for each in prompts]
    for method, model in (("ngram", None), ("eagle3", str(head.path))):
        speculative = SpeculativeConfig(method, model=model, num_speculative_tokens=3)
        with engine(path, dtype="float32", max_num_batched_tokens=24, speculative=speculative) as llm:
            assert run(llm, prompts, NARROW) == plain
            assert run(llm, prompts, NARROW) == plain, "after prefix hits"
            assert llm.engine.counters.accepted_tokens > 0
            assert llm.engine.scheduler.prefix_hits > 0


BAD = {
    "vision_feature_layer": (-2, r"vision_feature_layer=-2: the last layer's output alone is read"),
    "projector_hidden_act": ("silu", r"projector_hidden_act='silu': it must be 'gelu'"),
    "image_token_index": (270, r"image_token_index=270: it must be a token; ids are 0 to 269"),
    "vision_config.hidden_act": ("relu", r"hidden_act='relu': it must be 'silu' or 'gelu'"),
    "vision_config.model_type": ("siglip_vision_model", r"vision_config.model_type='siglip_vision_model'"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_not_computed(name: str, path: Path, tmp_path: Path) -> None:
    value, message = BAD[name]
    raw = json.loads((path / "config.json").read_text())
    inside = raw["vision_config"] if name.startswith("vision_config") else raw
    inside[name.rpartition(".")[2]] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
