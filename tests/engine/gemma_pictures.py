"""Random Gemmas that see, and prompts with their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.engine.pictures import END, IMAGE, START, VOCAB, Picture, Prompt, prompt, words
from tests.models.make import COMMON, FAMILIES, make_tokenizer, randomise
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
