"""What tests of pictures share: random models that see, prompts with pictures, and requests straight to the engine."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.models.fields import COMMON
from tests.models.make import make_tokenizer, randomise
from unisono.entrypoints.llm import LLM
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.vision.config import VisionConfig
from unisono.types import EngineRequest, SamplingParams, TokenDelta, vectors
from unisono.types.media_item import MediaItem

VOCAB, IMAGE, VIDEO, START, END = 270, 264, 265, 266, 267
TEXT = 250
"""Token ids of text are below this number."""

TOWER = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "in_channels": 3,
    "temporal_patch_size": 2, "spatial_merge_size": 2,
}  # fmt: skip

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        {
            "hidden_size": 84, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [5, 4, 3], "mrope_interleaved": True,
            },
        },
        {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen2_5_vl": (
        {
            "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2, "hidden_act": "silu"},
    ),
    "qwen3_5": (
        {
            "hidden_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        {"num_position_embeddings": 25},
    ),
}  # fmt: skip
FAMILIES["qwen2_vl"] = (FAMILIES["qwen2_5_vl"][0], {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 80})
FAMILIES["qwen3_vl_moe"] = (
    {**FAMILIES["qwen3_vl"][0], "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 52},
    FAMILIES["qwen3_vl"][1],
)
"""Family -> fields of its text model, and of its tower."""


def make_seeing(directory: Path, family: str = "qwen3_vl", seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint of a family that sees. changes: fields of its text model."""
    text, tower = FAMILIES[family]
    text = {**COMMON, "vocab_size": VOCAB, **text, **changes}
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config={**TOWER, **tower, "out_hidden_size": text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return Path(directory)


def vision_of(path: Path) -> VisionConfig:
    vision = Checkpoint.open(path).config.vision
    assert vision is not None
    return vision


@dataclass(frozen=True)
class Picture:
    """An item that a prompt has somewhere: its grid in patches; its pixels are drawn from the seed."""

    rows: int = 4
    columns: int = 6
    seed: int = 0
    frames: int = 1
    kind: str = "image"
    seconds: float = 0.0

    def pixels(self, vision: VisionConfig) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        patches = self.frames * self.rows * self.columns
        return torch.randn(patches, vision.patch_elements, generator=generator)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.frames, self.rows, self.columns


Part = int | Picture


@dataclass(frozen=True)
class Prompt:
    """Token ids and the items in them."""

    ids: list[int]
    media: tuple[MediaItem, ...] = field(default=())


def prompt(vision: VisionConfig, *parts: Sequence[int] | Picture, dtype: torch.dtype = torch.float32) -> Prompt:
    """A prompt of text (token ids) and pictures. A video whose frames are apart has a text token between two."""
    ids: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if not isinstance(part, Picture):
            ids += part
            continue
        tokens = part.rows * part.columns // vision.unit
        apart = part.kind == "video" and vision.frames_apart
        positions: list[int] = []
        for number in range(part.frames):
            if number == 0 or apart:
                ids.append(START)
            positions += range(len(ids), len(ids) + tokens)
            ids += [IMAGE if part.kind == "image" else VIDEO] * tokens
            if apart or number == part.frames - 1:
                ids += [END, *([9 + number] if apart else [])]
        pixels = vectors.pack(part.pixels(vision).to(dtype))
        digest = hashlib.blake2b(f"{part.kind}{part.grid}".encode() + pixels.data, digest_size=16).digest()
        media.append(MediaItem(part.kind, digest, part.grid, pixels, positions, part.seconds))  # type: ignore[arg-type]
    return Prompt(ids, tuple(media))


def words(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TEXT) for _ in range(count)]


def several(vision: VisionConfig, dtype: torch.dtype = torch.float32) -> list[Prompt]:
    """Text alone; a picture first, last, in between; three; the same one twice; a video, if the model takes any."""
    a, b, c = Picture(4, 6, 1), Picture(8, 4, 2), Picture(2, 2, 3)
    video = Picture(4, 4, 4, frames=3, kind="video", seconds=1.5)
    made: list[tuple[Any, ...]] = [
        (words(20, 1),),
        (a, words(9, 2)),
        (words(7, 3), b),
        (words(30, 4), a, words(3, 5), b, words(11, 6), c, words(2, 7)),
        (words(4, 8), a, a, words(5, 9)),
        (words(11, 10), video if vision.video_token_id >= 0 else c, words(6, 11)),
        (words(13, 12), Picture(12, 10, 5), words(4, 13)),
        (words(40, 14),),
    ]
    return [prompt(vision, *parts, dtype=dtype) for parts in made]


def run(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | SamplingParams) -> list[list[int]]:
    """Each request's tokens; all are added at once."""
    return [[token for delta in deltas for token in delta.token_ids] for deltas in stepped(llm, prompts, params)]


def stepped(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | SamplingParams, name: str = "r"
) -> list[list[TokenDelta]]:
    """Each request's deltas."""
    engine = llm.engine
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    found: dict[str, list[TokenDelta]] = {}
    for number, (each, how) in enumerate(zip(prompts, every, strict=True)):
        how = replace(how, seed=number) if how.seed is None else how
        request = EngineRequest(f"{name}{number}", each.ids, how, media=each.media)
        found[request.request_id] = []
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            found[delta.request_id].append(delta)
    return list(found.values())


def written(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[tuple[list[int], torch.Tensor]]:
    """The tokens after each prompt, and the logits of every position but the last; params return hidden states."""
    found = []
    for deltas in stepped(llm, prompts, params):
        hidden = [deltas[0].prompt_hidden_states, *(delta.hidden_states for delta in deltas)]
        states = torch.cat([vectors.unpack(each) for each in hidden if each is not None])
        logits = llm.engine.worker.model.logits(states.to(llm.engine.config.device)).cpu()
        found.append(([token for delta in deltas for token in delta.token_ids], logits))
    return found
