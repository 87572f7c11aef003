"""Random Llama 4 models that see, and prompts with pictures that are cut into tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.engine.pictures import END, IMAGE, START, VOCAB, Picture, Prompt, words
from tests.models.fields import COMMON, FAMILIES
from tests.models.make import make_tokenizer, randomise
from unisono.models.vision.config import VisionConfig
from unisono.types import MediaItem, vectors

SIDE, PATCH, MERGE = 6, 4, 2
BETWEEN, AFTER, WHOLE = 260, 261, 262
"""Tokens between the tiles of a row, after a row, and before the tile of the whole picture."""
TOWER = {
    "hidden_size": 32, "intermediate_size": 32 * MERGE**2, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": SIDE * PATCH, "patch_size": PATCH, "vision_output_dim": 40, "projector_input_dim": 40,
    "projector_output_dim": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip


def make_llama4(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random Llama 4 whose tiles have 6 × 6 patches, nine tokens. changes: fields of its text model."""
    text = {"model_type": "llama4_text", **COMMON, **FAMILIES["llama4_text"], "vocab_size": VOCAB, **changes}
    config = AutoConfig.for_model("llama4", text_config=text, vision_config=TOWER, image_token_index=IMAGE)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return Path(directory)


def cut(rows: int, columns: int, seed: int = 0) -> tuple[int, int, Picture]:
    """A picture of these tiles, and the whole one if there are several."""
    count = rows * columns
    return rows, columns, Picture(SIDE, SIDE, seed, frames=count + (count > 1))


def in_tiles(vision: VisionConfig, *parts: Sequence[int] | tuple[int, int, Picture]) -> Prompt:
    """A prompt of text and pictures of :func:`cut`, as transformers' processor writes them."""
    ids: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if not (len(part) == 3 and isinstance(part[2], Picture)):
            ids += part  # type: ignore[arg-type]
            continue
        rows, columns, picture = part
        tile, start = [IMAGE] * (SIDE // MERGE) ** 2, len(ids)
        ids.append(START)
        for _ in range(rows if rows * columns > 1 else 0):
            ids += [*[*tile, BETWEEN] * (columns - 1), *tile, AFTER]
        ids += [WHOLE, *tile, END]
        positions = [at for at in range(start, len(ids)) if ids[at] == IMAGE]
        pixels = vectors.pack(picture.pixels(vision))
        digest = hashlib.blake2b(f"{picture.grid}".encode() + pixels.data, digest_size=16).digest()
        media.append(MediaItem("image", digest, picture.grid, pixels, positions))
    return Prompt(ids, tuple(media))


def several(vision: VisionConfig) -> list[Prompt]:
    """Text alone; a picture of one tile first; one in between; three; the same one twice."""
    a, b, c = cut(1, 1, 1), cut(2, 1, 2), cut(1, 3, 3)
    made: list[tuple[Any, ...]] = [
        (words(20, 1),),
        (a, words(9, 2)),
        (words(7, 3), b, words(3, 6)),
        (words(9, 4), a, words(3, 5), c, words(11, 6), b, words(2, 7)),
        (words(4, 8), a, a, words(5, 9)),
    ]
    return [in_tiles(vision, *parts) for parts in made]


def tiles_of(patches: Sequence[torch.Tensor]) -> torch.Tensor:
    """transformers' pixels [tiles, 3, rows, columns] of pictures; patches: of each [n, 3 · p²], in tokens' order."""
    side = SIDE // MERGE
    parts = torch.cat([*patches]).view(-1, side, side, MERGE, MERGE, 3, PATCH, PATCH)
    return parts.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, SIDE * PATCH, SIDE * PATCH)
