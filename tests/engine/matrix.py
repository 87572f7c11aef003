"""The test matrix of the engine: the drafters with their checkpoints, the requests, and the ways to run them.

A new drafter joins every parametrised test by one line in ``DRAFTERS``. A drafter that supports trees also gets a line
in ``TREE_DRAFTERS``.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.drafters.make_blocks import make_dflash, make_dspark
from tests.drafters.make_frozen import random_weights
from tests.drafters.make_heads import make_eagle, make_eagle3
from tests.drafters.noisy import noisy
from tests.engine.helpers import engine, prompts
from tests.models.make_mtp import named, random_modules, write_alone, write_beside
from unisono.entrypoints.llm import LLM
from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SamplingParams, SpeculativeConfig

CUDA = torch.cuda.is_available()
GRAPH = "full" if CUDA else "tape"

Checkpoints = tuple[Path, Path | None]
"""(target, draft checkpoint); None for a drafter without a checkpoint."""

DRAFTERS: dict[str, Callable[[dict[str, Path], Path], Checkpoints]] = {
    "combined": lambda targets, folder: (targets["mistral"], make_dflash(folder, config_of(targets["mistral"])).path),
    "dflash": lambda targets, folder: (targets["mistral"], make_dflash(folder, config_of(targets["mistral"])).path),
    "dspark": lambda targets, folder: (targets["qwen3"], make_dspark(folder, config_of(targets["qwen3"])).path),
    "eagle": lambda targets, folder: (targets["mistral"], make_eagle(folder, config_of(targets["mistral"])).path),
    "eagle3": lambda targets, folder: (
        targets["mistral"],
        make_eagle3(folder, config_of(targets["mistral"]), (2, 1, 3), aux=[2, 1, 3], draft_vocab=150).path,
    ),
    "mtp": lambda targets, folder: (with_modules(targets["qwen3"], folder / "target"), None),
    "mtp_frozen": lambda targets, folder: (targets["llama"], write_alone(folder, random_weights(targets["llama"]))),
    "ngram": lambda targets, folder: (targets["qwen3"], None),
    "standalone": lambda targets, folder: (targets["qwen3"], noisy(targets["qwen3"], folder / "draft", 0.05)),
    "suffix": lambda targets, folder: (targets["qwen3"], None),
}
"""Method -> a function from (random checkpoint of each family, empty folder) to the checkpoints of its tests."""


def config_of(target: Path) -> DecoderConfig:
    """The model configuration of a checkpoint."""
    return Checkpoint.open(target).config


def with_modules(target: Path, directory: Path, depth: int = 2) -> Path:
    """Copy ``target`` to ``directory`` and add ``depth`` random MTP modules to its weights."""
    config = config_of(target)
    tensors = named(random_modules(config, depth, shared=True), "qwen", config.num_layers)
    return write_beside(Path(shutil.copytree(target, directory)), tensors)


TREE_DRAFTERS: dict[str, Callable[[dict[str, Path], Path], Checkpoints]] = {
    **{method: DRAFTERS[method] for method in ("ngram", "standalone", "eagle", "eagle3")},
    "mtp": lambda targets, folder: (with_modules(targets["qwen3"], folder / "target", 1), None),
}
"""As ``DRAFTERS``, for the methods that draft trees. MTP needs a checkpoint with one module."""

TREES: dict[str, dict[str, Any]] = {
    "binary": {"topk": 2, "num_draft_tokens": 6},
    "wide": {"speculative_token_tree": "[(0,), (1,), (2,), (3,), (0, 0), (1, 0)]"},
    "uneven": {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)]"},
}


# ---- the requests -----------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"top_p": 0.9, "min_p": 0.02},
    "edited": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {9: 4.0}},
    # Few allowed tokens, so that every drafter is right sometimes.
    "narrow": {"allowed_token_ids": tuple(range(40, 44)), "logit_bias": {40: 1.5}},
}
TEMPERATURES = (0.0, 0.7, 1.0)
MAX_DRAFTS = (None, 0, 1)


def mix() -> tuple[list[list[int]], list[SamplingParams]]:
    """(prompts, parameters), one request per combination. Every other prompt repeats a phrase; every fourth request has
    stop tokens.
    """
    combinations = list(itertools.product(TEMPERATURES, KINDS.values(), MAX_DRAFTS))
    random.Random(1533).shuffle(combinations)  # with this seed the first 12 contain nearly all pairs of values
    params = [
        SamplingParams(
            temperature=temperature, max_drafts=most, seed=i, max_tokens=12 + i % 9, ignore_eos=True,
            stop_token_ids=(41, *range(100, 112)) if i % 4 == 3 else (), **kind,
        )
        for i, (temperature, kind, most) in enumerate(combinations)
    ]  # fmt: skip
    random_prompts = prompts(len(params), 250, low=3, high=50, seed=3)
    return [p if i % 2 else p[: 2 + i % 5] * 6 for i, p in enumerate(random_prompts)], params


PROMPTS, PARAMS = mix()


# ---- the ways to run them ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to run the requests. k: drafts per round. again: run them twice, to hit the prefix cache."""

    k: int
    flags: dict[str, Any] = field(default_factory=dict)
    again: bool = False

    @property
    def name(self) -> str:
        return ", ".join([f"k={self.k}", *(f"{name}={value}" for name, value in self.flags.items())])


SCARCE = {"max_model_len": 80, "num_pages": 1 + 5}
"""Flags that leave pages for only one of the longest requests, so that requests are preempted."""


def drafting(method: str, checkpoints: Checkpoints, k: int, **flags: Any) -> LLM:
    """An engine that drafts chains of up to ``k`` tokens with this method."""
    target, model = checkpoints
    return engine(target, speculative=SpeculativeConfig(method, None if model is None else str(model), k), **flags)


def drafting_tree(method: str, checkpoints: Checkpoints, tree: dict[str, Any], **flags: Any) -> LLM:
    """An engine that drafts this tree, one of the values of ``TREES``."""
    target, model = checkpoints
    given = {"method": method, **tree} | ({} if model is None else {"model": str(model)})
    return engine(target, speculative=SpeculativeConfig.parse(given), **flags)
