"""Gemma's pictures from bytes and objects to token ids, positions and pixels: transformers' own are the measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.video_utils import VideoMetadata

from tests.http import pictures_ as pics
from tests.http import tokenizers_
from unisono.frontend.input_processor import InputProcessor, ModelFacts
from unisono.media.decoding.pooled import PooledImages, PooledVideos
from unisono.media.fetching.sources import MediaSource, Options
from unisono.media.loader import MediaLoader, Vision
from unisono.media.settings import MediaSettings
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, CheckpointError
from unisono.types.vectors import unpack

START, END, IMAGE = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
SIDE, PATCH, TOKENS = 8, 14, 4
PREPROCESSOR = {
    "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5] * 3, "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": TOKENS,
    "image_std": [0.5] * 3, "processor_class": "Gemma3Processor", "resample": 2, "rescale_factor": 1 / 255,
    "size": {"height": SIDE * PATCH, "width": SIDE * PATCH},
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""As Gemma 3's writes content parts."""


def tokenizer() -> Any:
    made = tokenizers_.byte_level()
    made.add_special_tokens({"additional_special_tokens": [START, END, IMAGE]})
    made.chat_template = TEMPLATE
    for name, text in {"boi_token": START, "eoi_token": END, "image_token": IMAGE}.items():
        setattr(made, name, text)
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(text))
    return made


def vision() -> Vision:
    own = tokenizer()
    return Vision(
        merge=4, patch_size=PATCH, temporal_patch_size=1, image_token_id=own.image_token_id, video_token_id=-1,
        vision_start_token_id=own.boi_token_id, vision_end_token_id=own.eoi_token_id, tokens_per_second=0, side=SIDE,
        placeholder_token_id=own.boi_token_id, around="\n\n",
    )  # fmt: skip


def write(path: Path, **changes: Any) -> Path:
    tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **changes}))
    return path


def inputs_of(path: Path) -> InputProcessor:
    facts = ModelFacts(4096, 1000, 6, "float32", (), {}, False, False, vision=vision())
    return InputProcessor(Tokenizer.load(path), facts, MediaLoader(vision(), path, MediaSettings(), "float32", 4095))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def inputs(directory: Path) -> Iterator[InputProcessor]:
    made = inputs_of(directory)
    yield made
    made.media.close()


def theirs(directory: Path, text: str, images: list[Any]) -> tuple[list[int], np.ndarray]:
    """transformers' ids, and its pixels [n, 3, S, S]."""

    class Own(Gemma3Processor):
        def check_argument_for_proper_class(self, *given: Any) -> None:
            pass

    processor = Own(AutoImageProcessor.from_pretrained(str(directory), backend="pil"), tokenizer(), None, TOKENS)
    made = processor(text=[text], images=[images], add_special_tokens=False)
    return list(made["input_ids"][0]), np.asarray(made["pixel_values"])


def square(patches: torch.Tensor) -> np.ndarray:
    """An item's patches as an image [3, S, S]: two tokens a side, 4 × 4 patches each."""
    parts = patches.view(2, 2, 4, 4, 3, PATCH, PATCH).permute(4, 0, 2, 5, 1, 3, 6)
    return parts.reshape(3, SIDE * PATCH, SIDE * PATCH).numpy()


def test_ids_positions_and_pixels_are_transformers(directory: Path, inputs: InputProcessor) -> None:
    images = [pics.picture(90, 50, 1), pics.picture(33, 170, 2)]
    text = f"Look:\n{START}\nand {START} at both."
    ids, pixels = theirs(directory, text, images)
    prompt = inputs.prompt({"prompt": text, "multi_modal_data": {"image": images}})
    assert prompt.token_ids == ids
    for item, one in zip(prompt.media, pixels, strict=True):
        assert item.grid == (1, SIDE, SIDE)
        assert np.array_equal(square(unpack(item.pixels)), one)
        assert [ids[p] for p in item.positions] == [tokenizer().image_token_id] * TOKENS
        assert ids[item.positions[0] - 1] == tokenizer().boi_token_id
        assert ids[item.positions[-1] + 1] == tokenizer().eoi_token_id
    written = inputs.prompt({"prompt": text.replace(START, f"\n\n{START}{IMAGE}{END}\n\n"),
                             "multi_modal_data": {"image": images}})  # fmt: skip
    assert written.token_ids == ids, "marks that are there already stay"


def test_a_conversation(directory: Path, inputs: InputProcessor) -> None:
    image = pics.picture(60, 60, 3)
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    loaded = inputs.media.load(MediaSource("image", "image", image))
    prompt = inputs.chat([{"role": "user", "content": parts}], media=[loaded], add_generation_prompt=True)
    text = f"<start_of_turn>user\n{START}What is it?<end_of_turn>\n<start_of_turn>model\n"
    assert prompt.token_ids == theirs(directory, text, [image])[0]
    (item,) = prompt.media
    assert len(item.positions) == TOKENS


def test_refusals(directory: Path, inputs: InputProcessor, tmp_path: Path) -> None:
    image = pics.picture(60, 60, 3)
    with pytest.raises(BadRequest, match="takes images only"):
        inputs.prompt({"prompt": "x", "multi_modal_data": {"video": [[image, image]]}})
    with pytest.raises(BadRequest, match="resized to 112 x 112 pixels by this model; leave out min_pixels"):
        inputs.media.load(MediaSource("image", "image", image, Options(max_pixels=9000)))
    with pytest.raises(BadRequest, match="1 placeholders for 2 images"):
        inputs.prompt({"prompt": START, "multi_modal_data": {"image": [image, image]}})
    for changes, what in (
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"size": {"height": 56, "width": 56}}, "56"),
    ):
        other = inputs_of(write(tmp_path / what, **changes))
        with pytest.raises(CheckpointError, match=what):
            other.media.prepare()
        other.media.close()


# ---- Gemma 4 ----------------------------------------------------------------------------------------

GEMMA4 = {
    "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "max_soft_tokens": 70,
    "image_processor_type": "Gemma4ImageProcessor", "patch_size": 16, "pooling_kernel_size": 3, "resample": 3,
    "rescale_factor": 1 / 255,
}  # fmt: skip


def looked(path: Path, config: dict[str, Any], own: Any = None, **sizes: Any) -> tuple[InputProcessor, list[Any], Any]:
    """(the frontend of a model with this processor, two images, a prompt with both)."""
    own = own or tokenizer()
    own.chat_template = None
    own.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(config))
    seen = replace(vision(), side=0, placeholder_token_id=own.image_token_id, around="", **sizes)
    facts = ModelFacts(4096, 1000, 6, "float32", (), {}, False, False, vision=seen)
    inputs = InputProcessor(Tokenizer.load(path), facts, MediaLoader(seen, path, MediaSettings(), "float32", 999))
    images = [pics.picture(200, 90, 1), pics.picture(33, 170, 2)]
    prompt = inputs.prompt({"prompt": f"Look: {IMAGE} and {IMAGE}.", "multi_modal_data": {"image": images}})
    return inputs, images, prompt


def test_gemma4_images_are_transformers(tmp_path: Path) -> None:
    """Pixels, grids and the marks around an image's tokens; its placeholder is the token itself."""
    inputs, images, prompt = looked(tmp_path, GEMMA4, merge=3, patch_size=16)
    own = tokenizer()
    found = AutoImageProcessor.from_pretrained(str(tmp_path), backend="pil").preprocess(images, return_tensors="np")
    for item, pixels, places, count in zip(
        prompt.media,
        found["pixel_values"],
        found["image_position_ids"],
        found["num_soft_tokens_per_image"],
        strict=True,
    ):
        rows, columns = item.grid[1:]
        assert rows * columns == 9 * count == 9 * len(item.positions)
        assert places.max(0).tolist() == [columns - 1, rows - 1]
        parts = unpack(item.pixels).view(rows // 3, columns // 3, 3, 3, -1).transpose(1, 2).reshape(rows * columns, -1)
        theirs = 2 * (torch.from_numpy(pixels[: rows * columns]).float() - 0.5)
        assert torch.equal(parts, theirs)
        first, last = item.positions[0], item.positions[-1]
        marks = [prompt.token_ids[first - 1], prompt.token_ids[last + 1]]
        assert marks == [own.boi_token_id, own.eoi_token_id]
    with pytest.raises(BadRequest, match="at most 70 tokens by this model; leave out"):
        inputs.media.load(MediaSource("image", "image", images[0], Options(max_pixels=9000)))
    inputs.media.close()


VIDEO = "<|video|>"


@pytest.mark.parametrize("kind", ["Gemma4", "Gemma4Unified"])
def test_gemma4_videos_are_frames_with_times(kind: str, tmp_path: Path) -> None:
    """The text of transformers' processor; each frame is an image of at most 70 tokens."""
    config = {**GEMMA4, "max_soft_tokens": 280, "image_processor_type": f"{kind}ImageProcessor"}
    own, sizes = tokenizer(), {"merge": 3, "patch_size": 16} if kind == "Gemma4" else {"merge": 1, "patch_size": 48}
    own.add_special_tokens({"additional_special_tokens": [START, END, IMAGE, VIDEO]})
    video = own.convert_tokens_to_ids(VIDEO)
    seen = {"video_token_id": video, "frame_time": "{} ", "between_frames": " ", **sizes}
    inputs, _, _ = looked(tmp_path, config, own, **seen)
    frames = [pics.picture(200, 90, seed) for seed in range(3)]
    source = MediaSource("video", "video", frames, Options(fps=0.025))
    prompt = inputs.prompt({"prompt": f"See {VIDEO}!", "multi_modal_data": {"video": [source]}})
    (item,) = prompt.media
    each = len(item.positions) // 3
    assert item.grid[0] == 3
    assert 35 <= each <= 70
    facts = VideoMetadata(total_num_frames=3, fps=0.025, frames_indices=[0, 1, 2])
    names = SimpleNamespace(boi_token=START, eoi_token=END, video_token=VIDEO)
    found = {"num_soft_tokens_per_video": [each], "video_metadata": [facts]}
    text = Gemma4Processor.replace_video_token(names, found, 0)
    assert text.startswith("00:00 <start_of_image>")
    assert " 01:20 <start_of_image>" in text
    assert prompt.token_ids == own.encode(f"See {text}!", add_special_tokens=False)
    assert all(prompt.token_ids[p] == video for p in item.positions)
    lower = InputProcessor(
        inputs.tokenizer, inputs.model,
        MediaLoader(inputs.model.vision, write_config(tmp_path / "b", {**config, "max_soft_tokens": 70}),
                    MediaSettings(), "float32", 999),
    )  # fmt: skip
    picture = lower.media.load(MediaSource("image", "image", frames[1]))
    assert picture.grid[1:] == item.grid[1:]
    patches = unpack(item.pixels).chunk(3)
    assert torch.equal(patches[1], unpack(picture.pixels))
    for made in (inputs, lower):
        made.media.close()


def write_config(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "preprocessor_config.json").write_text(json.dumps(config))
    return path


def test_gemma4_samples_files_as_transformers(tmp_path: Path) -> None:
    """32 frames of a file by default, all of a shorter one; what a request asks for goes first."""
    processor = SimpleNamespace(patch_size=16, pooling_kernel_size=3)
    rules = PooledVideos.of({}, PooledImages(processor, 16, 3))
    assert (rules.tokens, rules.frames) == (70, 32)
    wanted = list(np.arange(0, 100, 100 / 32).astype(int))
    assert rules.sampled(100, 25.0, None, None, 64) == wanted
    assert rules.sampled(20, 25.0, None, None, 64) == list(range(20))
    assert rules.sampled(100, 25.0, 2.0, None, 64) == list(np.arange(0, 100, 100 / 8).astype(int))
    assert rules.sampled(100, 25.0, None, 5, 64) == [0, 20, 40, 60, 80]
    assert len(rules.sampled(100, 25.0, None, None, 7)) == 7
    every = PooledVideos.of({"do_sample_frames": False, "max_soft_tokens": 140}, PooledImages(processor, 16, 3))
    assert every.tokens == 140
    assert every.sampled(50, 25.0, None, None, 64) == list(range(50))
    for config, what in (({"patch_size": 14}, "patch_size=14"), ({"max_soft_tokens": 71}, "max_soft_tokens=71")):
        with pytest.raises(ValueError, match=what):
            PooledVideos.of(config, PooledImages(processor, 16, 3))


def test_gemma4_12b_images_are_transformers(tmp_path: Path) -> None:
    """A token is one patch of 48 × 48 pixels, between 0 and 1; its rows are transformers' merged patches."""
    config = {**GEMMA4, "image_processor_type": "Gemma4UnifiedImageProcessor"}
    inputs, images, prompt = looked(tmp_path, config, merge=1, patch_size=48)
    found = Gemma4ImageProcessorPil(**GEMMA4).preprocess(images, return_tensors="np")
    for item, pixels, places in zip(prompt.media, found["pixel_values"], found["image_position_ids"], strict=True):
        columns, rows = (places.max(0) + 1).tolist()
        image = np.zeros((rows * 16, columns * 16, 3), np.float32)
        for patch, (x, y) in zip(pixels, places, strict=True):
            if x >= 0:
                image[16 * y : 16 * y + 16, 16 * x : 16 * x + 16] = patch.reshape(16, 16, 3)
        assert item.grid == (1, rows // 3, columns // 3)
        assert len(item.positions) == rows * columns // 9
        for number, token in enumerate(unpack(item.pixels).numpy()):
            y, x = divmod(number, columns // 3)
            assert np.array_equal(token, image[48 * y : 48 * y + 48, 48 * x : 48 * x + 48].reshape(-1))
    inputs.media.close()
