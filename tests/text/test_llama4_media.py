"""Llama 4's pictures from bytes and objects to token ids, positions and pixels: those of transformers' processor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.llama4.processing_llama4 import Llama4Processor

from tests.http import pictures_ as pics
from tests.http import tokenizers_
from unisono.frontend.input_processor import InputProcessor, ModelFacts
from unisono.media.decoding.tiles import TiledImages
from unisono.media.fetching.sources import MediaSource, Options
from unisono.media.loader import MediaLoader, Vision
from unisono.media.settings import MediaSettings
from unisono.models.families.llama4_tower import MARKS
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, CheckpointError
from unisono.types.vectors import unpack

PATCHED, IMAGE = "<|patch|>", MARKS[3]
SIDE, PATCH, MERGE = 4, 14, 2
PIXELS, TOKENS = SIDE * PATCH, (SIDE // MERGE) ** 2
PREPROCESSOR = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3,
    "image_processor_type": "Llama4ImageProcessorFast", "image_std": [0.5] * 3, "max_patches": 16,
    "processor_class": "Llama4Processor", "resample": 2, "rescale_factor": 1 / 255, "resize_to_max_canvas": False,
    "size": {"height": PIXELS, "width": PIXELS},
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|header_start|>{{ message.role }}<|header_end|>\n\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for content in message.content %}"
    "{% if content['type'] == 'image' %}<|image|>{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|eot|>{% endfor %}"
)
"""As Llama 4's writes content parts."""

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
THEIRS: list[tuple[dict[str, Any], tuple[int, int], tuple[int, int], str]] = [
    ({}, (40, 30), (1, 1), "16bc5a7967004819"),
    ({}, (56, 56), (1, 1), "af7efb71a5fe7b48"),
    ({}, (200, 100), (2, 4), "d6d321f38c80e3e2"),
    ({}, (500, 501), (4, 4), "9088e16a5ac72a62"),
    ({}, (57, 90), (2, 2), "497f5b69cf62b11f"),
    ({}, (3, 300), (6, 1), "96786413095638a3"),
    ({}, (784, 56), (1, 14), "94be9bc26f812799"),
    ({"max_patches": 4}, (300, 200), (2, 2), "3e88cb1a04415c49"),
    ({"resize_to_max_canvas": True}, (100, 200), (5, 3), "fdaa0837dc753b7a"),
    (CLIP, (80, 70), (2, 2), "b17b4560647b0b03"),
]  # fmt: skip
"""(changes of PREPROCESSOR, columns and rows of a picture, ``aspect_ratios``, digest of ``pixel_values``) of
transformers 5.24's Llama4ImageProcessor with torchvision 0.28, for ``pictures_.picture(*size)``: see
lab/2026-11-27-long-tail-end.md."""


def tokenizer(*names: str) -> Any:
    made = tokenizers_.byte_level()
    made.add_special_tokens({"additional_special_tokens": list(names or (*MARKS, PATCHED))})
    made.chat_template = TEMPLATE
    return made


def inputs_of(path: Path, *names: str, **changes: Any) -> InputProcessor:
    """An input processor of a checkpoint with these special tokens and changes of its preprocessor_config.json."""
    own = tokenizer(*names)
    own.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **changes}))
    vision = Vision(
        merge=MERGE, patch_size=PATCH, temporal_patch_size=1, image_token_id=own.convert_tokens_to_ids(PATCHED),
        video_token_id=-1, vision_start_token_id=-1, vision_end_token_id=-1, tokens_per_second=0, side=SIDE,
        tile_marks=MARKS,
    )  # fmt: skip
    facts = ModelFacts(4096, 1000, 6, "float32", (), {}, False, False, vision=vision)
    return InputProcessor(Tokenizer.load(path), facts, MediaLoader(vision, path, MediaSettings(), "float32", 4095))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InputProcessor]:
    made = inputs_of(tmp_path_factory.mktemp("llama4"))
    yield made
    made.media.close()


def written(text: str, *ratios: tuple[int, int]) -> list[int]:
    """The ids of transformers' processor for pictures with these ratios."""
    first, *rest = text.split(IMAGE)
    marks = [Llama4Processor._prompt_split_image(None, ratio, TOKENS) for ratio in ratios]
    whole = first + "".join(mark + after for mark, after in zip(marks, rest, strict=True))
    return list(tokenizer().encode(whole, add_special_tokens=False))


def whole(pixels: np.ndarray) -> np.ndarray:
    """Patches as tiles [t, 3, rows, columns]."""
    side = SIDE // MERGE
    parts = pixels.reshape(-1, side, side, MERGE, MERGE, 3, PATCH, PATCH).transpose(0, 5, 1, 3, 6, 2, 4, 7)
    return np.ascontiguousarray(parts).reshape(-1, 3, PIXELS, PIXELS)


@pytest.mark.parametrize(("changes", "size", "ratio", "digest"), THEIRS, ids=lambda value: str(value)[:24])
def test_pixels_are_transformers(
    changes: dict[str, Any], size: tuple[int, int], ratio: tuple[int, int], digest: str
) -> None:
    """Bit for bit, for pictures that are kept, enlarged and reduced, wide and high."""
    processor = TiledImages.of({**PREPROCESSOR, **changes}, {"side": SIDE, "patch_size": PATCH, "merge": MERGE})
    assert processor.tiles(*size) == ratio
    pixels, grid = processor.patches(pics.picture(*size))
    count = ratio[0] * ratio[1]
    assert grid == (count + (count > 1), SIDE, SIDE)
    assert hashlib.sha256(whole(pixels).tobytes()).hexdigest()[:16] == digest


def test_ids_and_positions_are_transformers(inputs: InputProcessor) -> None:
    images = [pics.picture(300, 90, 1), pics.picture(20, 20, 3), pics.picture(50, 100, 2)]
    text = f"Look: {IMAGE} and {IMAGE}{IMAGE} at all."
    ids = written(text, (2, 6), (1, 1), (2, 1))
    data = {"image": images}
    prompt = inputs.prompt({"prompt": text, "multi_modal_data": data})
    assert prompt.token_ids == ids
    patch = tokenizer().convert_tokens_to_ids(PATCHED)
    assert [p for item in prompt.media for p in item.positions] == [i for i, t in enumerate(ids) if t == patch]
    assert [item.grid[0] for item in prompt.media] == [13, 1, 3]
    assert all(len(item.positions) == item.grid[0] * TOKENS for item in prompt.media)
    for item, image in zip(prompt.media, images, strict=True):
        processor = TiledImages.of(PREPROCESSOR, {"side": SIDE, "patch_size": PATCH, "merge": MERGE})
        assert np.array_equal(unpack(item.pixels).numpy(), processor.patches(image)[0])
    expanded = inputs.prompt({"prompt_token_ids": ids, "multi_modal_data": data})
    assert expanded.token_ids == ids, "tiles that are there already stay"
    assert [item.positions for item in expanded.media] == [item.positions for item in prompt.media]


def test_a_conversation(inputs: InputProcessor) -> None:
    image = pics.picture(50, 100, 3)
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    loaded = inputs.media.load(MediaSource("image", "image", image))
    assert loaded.tiles == (2, 1)
    prompt = inputs.chat([{"role": "user", "content": parts}], media=[loaded])
    text = f"<|header_start|>user<|header_end|>\n\n{IMAGE}What is it?<|eot|>"
    assert prompt.token_ids == written(text, (2, 1))


def test_pictures_are_turned_before_they_are_cut(inputs: InputProcessor) -> None:
    """EXIF's orientation exchanges rows and columns."""
    exif = pics.Image.Exif()
    exif[0x0112] = 6
    data = pics.encoded(pics.picture(50, 100, 3).rotate(90, expand=True), exif=exif)
    assert inputs.media.load(MediaSource("image", "image", data)).tiles == (2, 1)


def test_refusals(inputs: InputProcessor, tmp_path: Path) -> None:
    image = pics.picture(60, 60, 3)
    with pytest.raises(BadRequest, match="takes images only"):
        inputs.prompt({"prompt": "x", "multi_modal_data": {"video": [[image, image]]}})
    with pytest.raises(BadRequest, match="at most 16 tiles of 56 x 56 pixels by this model; leave out min_pixels"):
        inputs.media.load(MediaSource("image", "image", image, Options(max_pixels=9000)))
    with pytest.raises(BadRequest, match="1 placeholders for 2 images"):
        inputs.prompt({"prompt": IMAGE, "multi_modal_data": {"image": [image, image]}})
    other = inputs_of(tmp_path, *MARKS[1:], PATCHED)
    loaded = inputs.media.load(MediaSource("image", "image", image))
    with pytest.raises(BadRequest, match=r"has no token <\|image_start\|>, which marks tiles of an image"):
        other.prompt(IMAGE, media=[loaded])
    other.media.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 336, "width": 336}}, r"size is .*336.*; config\.json asks for .*56"),
        ({"max_patches": 0}, r"max_patches=0 is not supported; it must be 1 to 1024"),
        ({"resample": 3}, r"resample=3 is not supported; it must be 2"),
        ({"do_normalize": False}, r"do_normalize=False is not supported; it must be True"),
    ],
)
def test_settings_that_are_not_supported(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    other = inputs_of(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        other.media.prepare()
    other.media.close()
