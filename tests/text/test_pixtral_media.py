"""Pixtral's pictures from bytes and objects to token ids, positions and pixels: those of transformers' image processor,
and the rows of tokens that its processor (which needs torchvision) writes for their sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoImageProcessor

from tests.http import pictures_ as pics
from tests.http import tokenizers_
from unisono.frontend.input_processor import InputProcessor, ModelFacts
from unisono.media.fetching.sources import MediaSource, Options
from unisono.media.loader import MediaLoader, Vision
from unisono.media.settings import MediaSettings
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, CheckpointError
from unisono.types.vectors import unpack

IMG, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
PATCH, MERGE, EDGE = 14, 2, 140
PREPROCESSOR = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "PixtralImageProcessorFast", "processor_class": "PixtralProcessor",
    "patch_size": {"height": PATCH, "width": PATCH}, "resample": 3, "rescale_factor": 1 / 255,
    "size": {"longest_edge": EDGE},
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}[INST]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for block in message.content %}{% if block['type'] == 'text' %}{{ block['text'] }}"
    "{% elif block['type'] in ['image', 'image_url'] %}[IMG]{% endif %}{% endfor %}{% endif %}[/INST]{% endfor %}"
)
"""As Mistral Small 3.1's writes content parts."""


def tokenizer(*names: str) -> Any:
    made = tokenizers_.byte_level()
    made.add_special_tokens({"additional_special_tokens": list(names or (IMG, BREAK, END))})
    made.chat_template = TEMPLATE
    return made


def inputs_of(path: Path, *names: str, **changes: Any) -> InputProcessor:
    """An input processor of a checkpoint with these special tokens and changes of its preprocessor_config.json."""
    own = tokenizer(*names)
    own.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **changes}))
    vision = Vision(
        merge=MERGE, patch_size=PATCH, temporal_patch_size=1, image_token_id=own.convert_tokens_to_ids(IMG),
        video_token_id=-1, vision_start_token_id=-1, vision_end_token_id=-1, tokens_per_second=0,
        row_end=BREAK, picture_end=END,
    )  # fmt: skip
    facts = ModelFacts(4096, 1000, 6, "float32", (), {}, False, False, vision=vision)
    return InputProcessor(Tokenizer.load(path), facts, MediaLoader(vision, path, MediaSettings(), "float32", 4095))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pixtral")


@pytest.fixture(scope="module")
def inputs(directory: Path) -> Iterator[InputProcessor]:
    made = inputs_of(directory)
    yield made
    made.media.close()


def theirs(directory: Path, text: str, images: list[Any]) -> tuple[list[int], list[np.ndarray]]:
    """The ids, and transformers' pixels [3, rows, columns] of each image, without their padding."""
    side = PATCH * MERGE
    processor = AutoImageProcessor.from_pretrained(str(directory), backend="pil")
    made = processor.preprocess(images, patch_size={"height": side, "width": side}, return_tensors="np")
    first, *rest = text.split(IMG)
    cut, written = [], first
    for pixels, (height, width), after in zip(made["pixel_values"], made["image_sizes"], rest, strict=True):
        cut.append(pixels[:, : int(height), : int(width)])
        rows = [IMG * (int(width) // side)] * (int(height) // side)
        written += BREAK.join(rows) + END + after
    return list(tokenizer().encode(written, add_special_tokens=False)), cut


def whole(item: Any) -> np.ndarray:
    """An item's patches as an image [3, rows, columns]."""
    _, rows, columns = (size // MERGE for size in item.grid)
    parts = unpack(item.pixels).view(rows, columns, MERGE, MERGE, 3, PATCH, PATCH).permute(4, 0, 2, 5, 1, 3, 6)
    return parts.reshape(3, rows * MERGE * PATCH, columns * MERGE * PATCH).numpy()


def test_ids_positions_and_pixels_are_transformers(directory: Path, inputs: InputProcessor) -> None:
    """Larger and smaller than the longest edge, wide and high, and of one token."""
    images = [pics.picture(300, 90, 1), pics.picture(33, 120, 2), pics.picture(20, 20, 3)]
    text = f"Look: {IMG} and {IMG}{IMG} at all."
    ids, pixels = theirs(directory, text, images)
    data = {"image": images}
    prompt = inputs.prompt({"prompt": text, "multi_modal_data": data})
    assert prompt.token_ids == ids
    image = tokenizer().convert_tokens_to_ids(IMG)
    assert sorted(p for item in prompt.media for p in item.positions) == [i for i, t in enumerate(ids) if t == image]
    for item, one in zip(prompt.media, pixels, strict=True):
        assert np.array_equal(whole(item), one)
        assert len(item.positions) == item.grid[1] * item.grid[2] // MERGE**2
    expanded = inputs.prompt({"prompt_token_ids": ids, "multi_modal_data": data})
    assert expanded.token_ids == ids, "rows that are there already stay"
    assert [item.positions for item in expanded.media] == [item.positions for item in prompt.media]


def test_a_conversation(directory: Path, inputs: InputProcessor) -> None:
    image = pics.picture(60, 90, 3)
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    loaded = inputs.media.load(MediaSource("image", "image", image))
    prompt = inputs.chat([{"role": "user", "content": parts}], media=[loaded])
    assert prompt.token_ids == theirs(directory, f"[INST]{IMG}What is it?[/INST]", [image])[0]
    assert len(prompt.media) == 1


def test_refusals(inputs: InputProcessor, tmp_path: Path) -> None:
    image = pics.picture(60, 60, 3)
    with pytest.raises(BadRequest, match="takes images only"):
        inputs.prompt({"prompt": "x", "multi_modal_data": {"video": [[image, image]]}})
    with pytest.raises(BadRequest, match="at most 140 pixels on an edge by this model; leave out min_pixels"):
        inputs.media.load(MediaSource("image", "image", image, Options(max_pixels=9000)))
    with pytest.raises(BadRequest, match="2 x 800 pixels, more than 200 times as long as wide"):
        inputs.media.load(MediaSource("image", "image", pics.picture(2, 800, 1)))
    with pytest.raises(BadRequest, match="1 placeholders for 2 images"):
        inputs.prompt({"prompt": IMG, "multi_modal_data": {"image": [image, image]}})
    other = inputs_of(tmp_path, IMG, BREAK, patch_size={"height": 16, "width": 16})
    with pytest.raises(CheckpointError, match=r"config\.json asks for 14 pixels"):
        other.media.prepare()
    other.media.close()
    loaded = inputs.media.load(MediaSource("image", "image", image))
    with pytest.raises(BadRequest, match=r"has no token \[IMG_END\], which ends rows of an image"):
        other.prompt(IMG, media=[loaded])
