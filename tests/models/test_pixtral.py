"""Mistral 3's Pixtral tower and its text with pictures, against transformers in fp32; drafts change no byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pictures import vision_of
from tests.engine.pixtral_pictures import images_of, make_mistral3, several
from tests.models.hybrids import reference
from tests.models.picture_checks import check_drafts, check_refusal, compare_logits
from tests.models.towers import compare_embeddings
from unisono.types import MediaItem, vectors

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
    model = reference(path)

    def logits_of(ids: list[int], media: Sequence[MediaItem]) -> torch.Tensor:
        pictures = images_of([vectors.unpack(m.pixels) for m in media], [m.grid[1:] for m in media]) if media else {}
        return model(input_ids=torch.tensor([ids]), **pictures).logits[0]

    compare_logits(path, several(vision_of(path)), most, logits_of)


def test_drafts_change_no_byte(path: Path, tmp_path: Path) -> None:
    check_drafts(path, several(vision_of(path)), tmp_path / "head")


BAD = {
    "vision_feature_layer": (-2, r"vision_feature_layer=-2: the last layer's output alone is read"),
    "projector_hidden_act": ("silu", r"projector_hidden_act='silu': it must be 'gelu'"),
    "image_token_index": (270, r"image_token_index=270: it must be a token; ids are 0 to 269"),
    "vision_config.hidden_act": ("relu", r"hidden_act='relu': it must be 'silu' or 'gelu'"),
    "vision_config.model_type": ("siglip_vision_model", r"vision_config.model_type='siglip_vision_model'"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_not_computed(name: str, path: Path, tmp_path: Path) -> None:
    check_refusal(path, name, *BAD[name], tmp_path)
