"""Checks of a model with pictures, shared by its tests: logits and text of transformers, drafts, refused values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.make_heads import make_eagle3
from tests.engine.helpers import engine
from tests.engine.matrix import config_of
from tests.engine.pictures import TEXT, Prompt, run, written
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import CheckpointError, MediaItem, SamplingParams, SpeculativeConfig

GREEDY = SamplingParams(
    temperature=0, max_tokens=32, ignore_eos=True, seed=0, return_hidden_states=True,
    allowed_token_ids=tuple(range(TEXT)),
)  # fmt: skip
NARROW = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=3, allowed_token_ids=tuple(range(40, 44)))
"""Few allowed tokens, so that every drafter is right sometimes."""


def compare_logits(
    path: Path,
    prompts: Sequence[Prompt],
    most: int,
    logits_of: Callable[[list[int], Sequence[MediaItem]], torch.Tensor],
) -> None:
    """Compare logits and greedy text with those of ``logits_of(ids, media)`` [tokens, V]. most: tokens of a pass."""
    with engine(path, dtype="float32", max_num_batched_tokens=most) as llm:
        outputs = written(llm, prompts, GREEDY)
    for each, (tokens, logits) in zip(prompts, outputs, strict=True):
        theirs = logits_of(each.ids + tokens[:-1], each.media)
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
        assert theirs[len(each.ids) - 1 :, :TEXT].argmax(-1).tolist() == tokens


def check_drafts(path: Path, prompts: Sequence[Prompt], head: Path) -> None:
    """Compare texts with n-gram and EAGLE-3 drafts, before and after prefix hits, with those without drafts.

    head: an empty directory for the EAGLE-3 head.
    """
    made = make_eagle3(head, config_of(path), (2, 1, 3), aux=[2, 1, 3])
    with engine(path, dtype="float32", max_num_seqs=1, enforce_eager=True) as llm:
        plain = [run(llm, [each], NARROW)[0] for each in prompts]
    for method, model in (("ngram", None), ("eagle3", str(made.path))):
        speculative = SpeculativeConfig(method, model=model, num_speculative_tokens=3)
        with engine(path, dtype="float32", max_num_batched_tokens=24, speculative=speculative) as llm:
            assert run(llm, prompts, NARROW) == plain
            assert run(llm, prompts, NARROW) == plain, "after prefix hits"
            assert llm.engine.counters.accepted_tokens > 0
            assert llm.engine.scheduler.prefix_hits > 0


def check_refusal(path: Path, field: str, value: Any, message: str, directory: Path) -> None:
    """Check that a checkpoint with another value of a field, such as "vision_config.hidden_act", is refused."""
    raw = json.loads((path / "config.json").read_text())
    inside = raw["vision_config"] if field.startswith("vision_config") else raw
    inside[field.rpartition(".")[2]] = value
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)
