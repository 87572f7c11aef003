"""Checkpoint directories of models that see (tokenizer and processors alone), pictures, transformers' processors."""

from __future__ import annotations

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.http import tokenizers_

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3-VL's writes content parts."""
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
COMMON = {"temporal_patch_size": 2, "merge_size": 2}
FILES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_vl": {
        "preprocessor_config.json": {
            "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}, "patch_size": 16, **COMMON, **HALF,
            "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        "video_preprocessor_config.json": {
            "size": {"shortest_edge": 4096, "longest_edge": 1 << 20}, "patch_size": 16, **COMMON, **HALF,
            "processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor",
        },
    },
    "qwen2_5_vl": {
        "preprocessor_config.json": {
            "min_pixels": 3136, "max_pixels": 200_000, "patch_size": 14, **COMMON, **CLIP,
            "processor_class": "Qwen2_5_VLProcessor", "image_processor_type": "Qwen2VLImageProcessor",
        },
    },
}  # fmt: skip
"""As these checkpoints have them, with smaller bounds."""
FILES["qwen2_vl"] = {
    name: {**content, "processor_class": "Qwen2VLProcessor"} for name, content in FILES["qwen2_5_vl"].items()
}
PROCESSORS = {"qwen3_vl": Qwen3VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen2_vl": Qwen2VLProcessor}


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """The byte-level tokenizer with the tokens of Qwen's models that see."""
    made = tokenizers_.byte_level()
    made.add_special_tokens({"additional_special_tokens": [START, END, IMAGE, VIDEO]})
    made.chat_template = template
    return made


def write_checkpoint(path: Path, style: str = "qwen3_vl", template: str | None = TEMPLATE) -> Path:
    """A tokenizer and the processors' files."""
    tokenizer(template).save_pretrained(path)
    for name, content in FILES[style].items():
        (path / name).write_text(json.dumps(content))
    return path


def vision(style: str = "qwen3_vl") -> dict[str, Any]:
    """What an engine tells of the tower (``VisionConfig`` as a dict)."""
    size = FILES[style]["preprocessor_config.json"]["patch_size"]
    ids = dict(
        zip(
            ("start", "end", "image", "video"),
            tokenizer().convert_tokens_to_ids([START, END, IMAGE, VIDEO]),
            strict=True,
        )
    )
    return {
        "merge": 2, "patch_size": size, "temporal_patch_size": 2, "patch_elements": 3 * 2 * size * size,
        "hidden_size": 6, "deepstack": 0, "image_token_id": ids["image"], "video_token_id": ids["video"],
        "vision_start_token_id": ids["start"], "vision_end_token_id": ids["end"], "mrope_section": [1, 1, 1],
        "mrope_interleaved": True, "tokens_per_second": 2 if style == "qwen2_5_vl" else 0,
        "even_frames": style == "qwen2_vl",
    }  # fmt: skip


def processor(path: Path, style: str = "qwen3_vl") -> Any:
    """transformers' own processor, for pictures; its videos need torchvision."""

    class Own(PROCESSORS[style]):  # type: ignore[misc, name-defined]
        def check_argument_for_proper_class(self, *given: Any) -> None:
            pass

    images = AutoImageProcessor.from_pretrained(str(path), backend="pil")
    return Own(image_processor=images, tokenizer=tokenizer(), video_processor=None)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise over a gradient."""
    rng = np.random.default_rng(seed)
    rows = np.linspace(0, 200, height)[:, None, None] + rng.integers(0, 55, (height, width, 3))
    return Image.fromarray(rows.astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """A file of a picture."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes | Image.Image, kind: str = "image/png") -> str:
    """A data URL of a file's bytes, or of a picture as PNG."""
    data = encoded(data) if isinstance(data, Image.Image) else data
    return f"data:{kind};base64,{base64_of(data)}"


def animated(frames: list[Image.Image], milliseconds: int, form: str = "GIF") -> bytes:
    """A file with these frames."""
    options = {"lossless": True} if form == "WEBP" else {}
    return encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0, **options)


def bomb(width: int, height: int) -> bytes:
    """A PNG of some hundred bytes that claims this size, its rows missing."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    rows = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def part(url: Any, **more: Any) -> dict[str, Any]:
    """A content part with a picture."""
    return {"type": "image_url", "image_url": {"url": url}, **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}
