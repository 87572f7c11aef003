"""Llama 4's tower and its text with pictures, against transformers in fp32; drafts change no byte."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import engine
from tests.engine.pictures import run, vision_of
from tests.engine.tile_pictures import SIDE, cut, make_llama4, several, tiles_of
from tests.models.hybrids import reference
from tests.models.picture_checks import NARROW, check_drafts, check_refusal, compare_logits
from tests.models.towers import compare_embeddings
from unisono.types import BadRequest, MediaItem, vectors


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chunks of attention end within pictures."""
    return make_llama4(tmp_path_factory.mktemp("llama4"), attention_chunk_size=24)


def seen(model: Any, patches: Sequence[torch.Tensor]) -> torch.Tensor:
    """transformers' embeddings of pictures [tokens, H]."""
    states = model.get_image_features(tiles_of(patches)).last_hidden_state
    return model.multi_modal_projector(states).flatten(0, 1)


def logits_of(model: Any, ids: list[int], media: Sequence[MediaItem]) -> torch.Tensor:
    """transformers' logits [tokens, V], put together here: its ``forward`` of the whole model ends with an
    AttributeError (5.24)."""
    embedded = model.get_input_embeddings()(torch.tensor([ids]))
    if media:
        at = [position for item in media for position in item.positions]
        embedded[0, at] = seen(model, [vectors.unpack(item.pixels) for item in media])
    return model.language_model(inputs_embeds=embedded).logits[0]


@torch.no_grad()
def test_embeddings_are_transformers(path: Path) -> None:
    """Those of each tile, in any pass, also before patches that are no whole tile."""
    model = reference(path)

    def theirs(pixels: Any, grids: Any, vision: Any) -> Any:
        return seen(model, pixels).split([len(each) // vision.unit for each in pixels])

    pictures = [picture for _, _, picture in (cut(1, 1, 1), cut(2, 1, 2), cut(2, 3, 3))]
    tower = compare_embeddings(path, theirs, pictures)
    vision = vision_of(path)
    alone = pictures[0].pixels(vision)
    padded = tower(torch.cat((alone, alone[: vision.unit])), {})
    assert torch.equal(padded[:-1], tower(alone, {}))
    assert padded[-1].eq(0).all()
    assert tower(alone[: vision.unit], {}).shape == (1, vision.hidden_size)


@torch.no_grad()
@pytest.mark.parametrize("most", [128, 21])
def test_logits_and_text_are_transformers(path: Path, most: int) -> None:
    """In one pass, and in chunks that cut tiles."""
    compare_logits(path, several(vision_of(path)), most, functools.partial(logits_of, reference(path)))


def test_drafts_change_no_byte(path: Path, tmp_path: Path) -> None:
    check_drafts(path, several(vision_of(path)), tmp_path / "head")


BAD: dict[str, tuple[Any, str]] = {
    "image_token_index": (270, r"image_token_index=270: it must be a token; ids are 0 to 269"),
    "vision_config.model_type": ("siglip_vision_model", r"vision_config.model_type='siglip_vision_model'"),
    "vision_config.pixel_shuffle_ratio": (0.4, r"pixel_shuffle_ratio=0.4: it must be 1 divided by a whole number"),
    "vision_config.image_size": (28, r"image_size=28: it must be a multiple of 2 patches of 4 pixels"),
    "vision_config.intermediate_size": (40, r"intermediate_size=40: it must be 128"),
    "vision_config.projector_input_dim": (44, r"projector_output_dim=40: it must be 44"),
    "vision_config.vision_output_dim": (44, r"vision_output_dim=44: it must be 40"),
    "vision_config.hidden_act": ("relu", r"hidden_act='relu': it must be 'gelu'"),
    "vision_config.norm_eps": (1e-6, r"norm_eps=1e-06: it must be 1e-05"),
    "vision_config.multi_modal_projector_bias": (True, r"multi_modal_projector_bias=True: it must be False"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_not_computed(name: str, path: Path, tmp_path: Path) -> None:
    check_refusal(path, name, *BAD[name], tmp_path)


def test_pictures_of_other_sides_are_refused(path: Path) -> None:
    one = several(vision_of(path))[1]
    other = replace(one, media=(replace(one.media[0], grid=(1, SIDE // 2, 2 * SIDE)),))
    refused = pytest.raises(BadRequest, match="every picture of this model has 6 rows and columns")
    with engine(path, dtype="float32", enforce_eager=True) as llm, refused:
        run(llm, [other], NARROW)
