"""What tests of weight updates share: a checkpoint with other weights, and an engine's answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engine.helpers import prompts, tokens
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig

PROMPTS = prompts(4, 200, low=20, high=50)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0)


def other(directory: Path, copy: Path) -> Path:
    """A copy of a checkpoint with other weights, equal where the copied ones are."""
    shutil.copytree(directory, copy)
    for file in copy.glob("*.safetensors"):
        tensors = load_file(file)
        for number, (name, tensor) in enumerate(sorted(tensors.items())):
            if tensor.is_floating_point() and name != "embed_tokens.weight":
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
                tensors[name] = (tensor + 0.2 * tensor.std().nan_to_num() * noise).to(tensor.dtype)
        save_file(tensors, file, {"format": "pt"})
    return copy


def speculation(method: str, draft: Path | None) -> SpeculativeConfig:
    return SpeculativeConfig(method, draft and str(draft), num_speculative_tokens=2)


def answers(llm: LLM) -> tuple[list[list[int]], int]:
    """Token ids, and accepted drafts. Those of n-gram do not count: it copies from earlier answers, too."""
    before = llm.engine.counters.accepted_tokens
    ids = tokens(llm, PROMPTS, GREEDY)
    return ids, 0 if llm.engine.worker.drafter.name == "ngram" else llm.engine.counters.accepted_tokens - before
