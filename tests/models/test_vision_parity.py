"""Models that see against transformers in fp32: logits of every position, and the text that greedy decoding writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.helpers import engine
from tests.engine.pictures import (
    FAMILIES,
    IMAGE,
    TEXT,
    VIDEO,
    Prompt,
    make_seeing,
    several,
    vision_of,
    written,
)
from tests.models.hybrids import reference
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, vectors

GREEDY = SamplingParams(
    temperature=0, max_tokens=64, ignore_eos=True, seed=0, return_hidden_states=True,
    allowed_token_ids=tuple(range(TEXT)),
)  # fmt: skip

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
"""Versions that take the seconds of Qwen2.5-VL's videos as whole numbers (seen in 5.17, mended in 5.23)."""


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LLM]]:
    path = make_seeing(tmp_path_factory.mktemp(request.param), request.param)
    with engine(path, dtype="float32", max_num_batched_tokens=40) as llm:
        yield path, llm


def inputs(prompt: Prompt, tokens: list[int]) -> dict[str, Any]:
    """Inputs of transformers for a prompt and the tokens after it, except the last."""
    ids = torch.tensor([prompt.ids + tokens[:-1]])
    given: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE) + 2 * (ids == VIDEO)}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        items = [item for item in prompt.media if item.kind == kind]
        if items:
            given[pixels] = torch.cat([vectors.unpack(item.pixels) for item in items])
            given[f"{kind}_grid_thw"] = torch.tensor([item.grid for item in items])
    return given


@torch.no_grad()
def test_logits_and_text_are_transformers(case: tuple[Path, LLM], record_property: Any) -> None:
    path, llm = case
    vision = vision_of(path)
    prompts, model, worst = several(vision), reference(path), 0.0
    assert {item.kind for prompt in prompts for item in prompt.media} == {"image", "video"}
    for prompt, (tokens, logits) in zip(prompts, written(llm, prompts, GREEDY), strict=True):
        given = inputs(prompt, tokens)
        seconds = [item.seconds for item in prompt.media if item.kind == "video"]
        if vision.tokens_per_second and any(second % 1 for second in seconds) and OLD:
            continue
        if vision.tokens_per_second and seconds:
            given["second_per_grid_ts"] = torch.tensor(seconds)
        theirs = model(**given).logits[0]
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
        assert theirs[len(prompt.ids) - 1 :, :TEXT].argmax(-1).tolist() == tokens
        worst = max(worst, float((logits - theirs).abs().max()))
    record_property("largest logit error", f"{type(model).__name__} {worst:.1e}")
