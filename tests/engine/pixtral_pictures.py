"""Random Mistral 3 models that see, and prompts with their pictures in rows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.engine.pictures import END, IMAGE, START, VOCAB, Picture, Prompt, words
from tests.models.fields import COMMON
from tests.models.make import make_tokenizer, randomise
from unisono.models.vision.config import VisionConfig
from unisono.types import MediaItem, vectors

PATCH, MERGE, BREAK = 4, 2, START
TEXT_MODEL = {
    **COMMON, "model_type": "mistral", "vocab_size": VOCAB, "hidden_size": 72, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 20, "sliding_window": None,
}  # fmt: skip


def make_mistral3(directory: Path, tower: dict[str, Any], seed: int = 0, bias: bool = False, **changes: Any) -> Path:
    """Write a random Mistral 3 with a Pixtral tower: four patches a token, pictures of any shape.

    tower: fields of its vision_config. bias: the projector has biases. changes: fields of its text model.
    """
    vision = {
        "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 64, "patch_size": PATCH, **tower,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "mistral3", text_config={**TEXT_MODEL, **changes}, vision_config=vision, image_token_index=IMAGE,
        spatial_merge_size=MERGE, multimodal_projector_bias=bias, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return Path(directory)


def in_rows(vision: VisionConfig, *parts: Sequence[int] | Picture, dtype: torch.dtype = torch.float32) -> Prompt:
    """A prompt of text and pictures: a token after each row of a picture, another after the last one."""
    ids: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if not isinstance(part, Picture):
            ids += part
            continue
        rows, columns = part.rows // vision.merge, part.columns // vision.merge
        start = len(ids)
        ids += ([IMAGE] * columns + [BREAK]) * rows
        ids[-1] = END
        positions = [at for at in range(start, len(ids)) if ids[at] == IMAGE]
        pixels = vectors.pack(part.pixels(vision).to(dtype))
        digest = hashlib.blake2b(f"{part.grid}".encode() + pixels.data, digest_size=16).digest()
        media.append(MediaItem("image", digest, part.grid, pixels, positions))
    return Prompt(ids, tuple(media))


def several(vision: VisionConfig, dtype: torch.dtype = torch.float32) -> list[Prompt]:
    """Text alone; a picture first, last, in between; three; the same one twice; a large one."""
    a, b, c = Picture(4, 6, 1), Picture(8, 4, 2), Picture(2, 2, 3)
    made: list[tuple[Any, ...]] = [
        (words(20, 1),),
        (a, words(9, 2)),
        (words(7, 3), b),
        (words(30, 4), a, words(3, 5), b, words(11, 6), c, words(2, 7)),
        (words(4, 8), a, a, words(5, 9)),
        (words(13, 12), Picture(10, 8, 5), words(4, 13)),
    ]
    return [in_rows(vision, *parts, dtype=dtype) for parts in made]


def images_of(patches: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """transformers' inputs of pictures: pixels [n, 3, rows, columns], zeros beyond a picture, and their sizes.

    patches: of each picture [rows · columns, 3 · p²] in the order of tokens; grids: their rows and columns.
    """
    sides = [PATCH * max(sizes) for sizes in zip(*grids, strict=True)]
    pixels = torch.zeros(len(grids), 3, *sides)
    for number, ((rows, columns), each) in enumerate(zip(grids, patches, strict=True)):
        parts = each.view(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, PATCH, PATCH)
        image = parts.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * PATCH, columns * PATCH)
        pixels[number, :, : rows * PATCH, : columns * PATCH] = image
    return {"pixel_values": pixels, "image_sizes": PATCH * torch.tensor([*grids])}
