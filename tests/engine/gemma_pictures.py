"""Random Gemmas that see, and prompts with their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.engine.pictures import END, IMAGE, START, VIDEO, VOCAB, Picture, Prompt, prompt, words
from tests.models.fields import COMMON, FAMILIES
from tests.models.make import make_tokenizer, randomise
from unisono.models.vision.config import VisionConfig

SIDE, PATCH = 8, 4
GEMMA3 = {
    **COMMON, **FAMILIES["gemma3_text"], "vocab_size": VOCAB, "sliding_window": 7, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
"""A window smaller than a picture, which has 16 tokens."""


def make_gemma3(directory: Path, seed: int = 0, tokens: int = 16, **changes: Any) -> Path:
    """Write a random Gemma 3 with a SigLIP tower: 8 × 8 patches, four a token. tokens: of a picture."""
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": SIDE * PATCH, "patch_size": PATCH, "vision_use_head": False,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "gemma3", text_config={"model_type": "gemma3_text", **GEMMA3, **changes}, vision_config=tower,
        mm_tokens_per_image=tokens, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
        eos_token_id=GEMMA3.get("eos_token_id"),
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return Path(directory)


GEMMA4 = {
    **COMMON, **FAMILIES["gemma4_text"], "vocab_size": VOCAB, "sliding_window": 7, "pad_token_id": 3,
    "use_bidirectional_attention": "vision",
}  # fmt: skip


def make_gemma4(directory: Path, seed: int = 0, clipped: bool = False, **changes: Any) -> Path:
    """Write a random Gemma 4 with its tower: four patches a token, pictures of any shape.

    clipped: products of the tower have bounds that bind, and tokens are shifted and scaled.
    """
    tower = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 24, "patch_size": PATCH, "pooling_kernel_size": 2,
        "position_embedding_size": 16, "use_clipped_linears": clipped, "standardize": clipped,
    }  # fmt: skip
    text = {"model_type": "gemma4_text", **GEMMA4, **changes}
    config = AutoConfig.for_model(
        "gemma4", text_config=text, vision_config=tower, audio_config=None, image_token_id=IMAGE, boi_token_id=START,
        eoi_token_id=END, video_token_id=VIDEO, audio_token_id=269,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        bound = 0.7 + torch.rand((), generator=generator)
        if name.endswith(("put_min", "put_max")):
            buffer.copy_(-bound if name.endswith("min") else bound)
        elif name.endswith(("std_bias", "std_scale")):
            buffer.copy_(name.endswith("scale") + 0.2 * torch.randn(buffer.shape, generator=generator))
    table = model.model.vision_tower.patch_embedder.position_embedding_table
    table.data.copy_(torch.randn(table.shape, generator=generator))
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return Path(directory)


UNIFIED = {
    **COMMON, **FAMILIES["gemma4_unified_text"], "vocab_size": VOCAB, "sliding_window": 7, "pad_token_id": 3,
    "use_bidirectional_attention": "vision",
}  # fmt: skip


def make_gemma4_unified(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random Gemma 4 12B: a token is a patch of 8 × 8 pixels, pictures have any shape."""
    tower = {
        "patch_size": PATCH, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32,
    }  # fmt: skip
    text = {"model_type": "gemma4_unified_text", **UNIFIED, **changes}
    config = AutoConfig.for_model(
        "gemma4_unified", text_config=text, vision_config=tower, audio_config=None, image_token_id=IMAGE,
        boi_token_id=START, eoi_token_id=END, video_token_id=VIDEO, audio_token_id=269,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    table = model.model.embed_vision.pos_embedding
    table.data.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(seed)))
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return Path(directory)


def shapes(vision: VisionConfig, dtype: torch.dtype = torch.float32) -> list[Prompt]:
    """Prompts with pictures of several shapes."""
    a, b, c = Picture(4, 6, 1), Picture(8, 4, 2), Picture(2, 2, 3)
    made: list[tuple[Any, ...]] = [
        (words(20, 1),),
        (a, words(9, 2)),
        (words(7, 3), b),
        (words(30, 4), a, words(3, 5), b, words(11, 6), c, words(2, 7)),
        (words(4, 8), a, a, words(5, 9)),
        (words(13, 12), Picture(10, 8, 5), words(4, 13)),
    ]
    return [prompt(vision, *parts, dtype=dtype) for parts in made]


def padded(patches: list[torch.Tensor], grids: list[tuple[int, int]], vision: VisionConfig) -> dict[str, torch.Tensor]:
    """transformers' inputs of a Gemma 4: pixels [n, most, C] from 0 to 1 in rows, and their columns and rows."""
    most = 4 * max(rows * columns for rows, columns in grids)
    pixels, places = torch.zeros(len(grids), most, vision.patch_elements), torch.full((len(grids), most, 2), -1)
    for number, (each, (rows, columns)) in enumerate(zip(patches, grids, strict=True)):
        parts = each.view(rows // 2, columns // 2, 2, 2, -1).transpose(1, 2).reshape(rows * columns, -1)
        pixels[number, : rows * columns] = parts / 2 + 0.5
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places[number, : rows * columns] = torch.stack((column, row), -1).view(-1, 2)
    return {"pixel_values": pixels, "image_position_ids": places}


def merged(patches: list[torch.Tensor], grids: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """transformers' inputs of a Gemma 4 12B: patches [n, most, C], and their columns and rows."""
    most = max(len(each) for each in patches)
    pixels, places = torch.zeros(len(grids), most, patches[0].shape[1]), torch.full((len(grids), most, 2), -1)
    for number, (each, (rows, columns)) in enumerate(zip(patches, grids, strict=True)):
        pixels[number, : len(each)] = each
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places[number, : len(each)] = torch.stack((column, row), -1).view(-1, 2)
    return {"pixel_values": pixels, "image_position_ids": places}


def several(vision: VisionConfig, dtype: torch.dtype = torch.float32) -> list[Prompt]:
    """Text alone; a picture first, last, in between; three; the same one twice; long ones."""
    a, b, c = (Picture(vision.side, vision.side, seed) for seed in (1, 2, 3))
    made: list[tuple[Any, ...]] = [
        (words(20, 1),),
        (a, words(9, 2)),
        (words(7, 3), b),
        (words(30, 4), a, words(3, 5), b, words(11, 6), c, words(2, 7)),
        (words(4, 8), a, a, words(5, 9)),
        (words(40, 14),),
    ]
    return [prompt(vision, *parts, dtype=dtype) for parts in made]


def images_of(patches: torch.Tensor, vision: VisionConfig) -> torch.Tensor:
    """Pixels [n, 3, S, S] of patches [n · side², 3 · p²] in the order of tokens."""
    merge, patch, tokens = vision.merge, vision.patch_size, vision.side // vision.merge
    parts = patches.view(-1, tokens, tokens, merge, merge, 3, patch, patch)
    return parts.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(len(parts), 3, vision.side * patch, vision.side * patch)
