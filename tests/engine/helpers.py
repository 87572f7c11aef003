"""What engine tests share: small engines, prompts, and outputs as comparable data."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.engine.scheduling.draft_controller import DraftController
from unisono.engine.startup import self_test
from unisono.engine.worker.runner import Runner
from unisono.entrypoints.llm import LLM
from unisono.graphs import GraphKey
from unisono.types import SamplingParams, SpeculativeConfig


def engine(path: Path | str, **flags: Any) -> LLM:
    """An LLM with room for a few requests; flags override. It drafts a fixed number of tokens unless ``adaptive``.

    It does not speculate unless asked to, not even with what the checkpoint carries. Its drafter's test at start is
    short: one text, three tokens. The tests of that test, and engines made otherwise, have all of it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not flags.pop("whole_self_test", False):
            patch.setattr(self_test, "TEXTS", self_test.TEXTS[:1])
            patch.setattr(self_test, "NEW_TOKENS", 3)
        return _engine(path, **flags)


def lazy_engine(path: Path | str, **flags: Any) -> LLM:
    """An engine for tests that compare texts: it captures each graph before the first pass that needs it.

    A start captures graphs that most tests never replay, and tests the drafter; both take half a second each.
    """
    return engine(path, **{"graph_capture": "lazy", **flags})


def _engine(path: Path | str, **flags: Any) -> LLM:
    spec, adaptive = flags.get("speculative") or SpeculativeConfig("none"), flags.pop("adaptive", False)
    flags["speculative"] = replace(spec, adaptive=adaptive)
    return LLM(str(path), **{"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 128, **flags})


def draw_drafts(
    monkeypatch: pytest.MonkeyPatch, draw: Callable[[random.Random, tuple[int, ...]], int] = random.Random.choice
) -> None:
    """Replace the policy: every round's number of drafts is drawn, by default from all there are."""
    rng = random.Random(7)
    monkeypatch.setattr(DraftController, "_choose", lambda self, sequences: draw(rng, self._runner.choices))


def draw_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the number of drafts of every round, often none, as if costs had decided so; then passes are mixed."""
    rng = random.Random(5)

    def choose(self: DraftController, sequences: Any) -> int:
        self.policy.drafts = rng.choice((0, 0, self._runner.choices[-1]))
        return self.policy.drafts

    monkeypatch.setattr(DraftController, "_choose", choose)


def prompts(count: int, vocab: int, low: int = 3, high: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def mixed_params(count: int, max_tokens: int = 24) -> list[SamplingParams]:
    """Greedy and sampled requests of every kind, each with a seed."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    ]
    return [
        SamplingParams(**kinds[i % len(kinds)], seed=1000 + i, max_tokens=max_tokens + i % 7, ignore_eos=True)
        for i in range(count)
    ]


def tokens(llm: LLM, batch: Any, params: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(batch, params)]


def idle(llm: LLM) -> None:
    """Read what is in flight (rounds of requests that had ended), then capture what was missing, as a server does."""
    while llm.engine.has_work():
        llm.engine.step()
    while llm.engine.capture_missing():
        pass


def counted(llm: LLM) -> dict[tuple[str, str, str], int]:
    return dict(llm.engine.runner.planner.passes)


def tensors_of(owner: Any) -> dict[str, torch.Tensor]:
    """Every tensor in the attributes of ``owner``, by attribute name and index."""
    found: dict[str, torch.Tensor] = {}
    for name, value in vars(owner).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        for i, part in enumerate(values):
            parts = part if isinstance(part, (list, tuple)) else [part]
            for j, tensor in enumerate(parts):
                if isinstance(tensor, torch.Tensor):
                    found[f"{name}.{i}.{j}"] = tensor
    return found


def note_launches(patch: pytest.MonkeyPatch, note: Callable[[GraphKey, Mapping[str, Any]], object]) -> None:
    """Have ``note(key, batch)`` called before each pass is launched."""
    real = Runner.launch

    def launch(self: Runner, key: GraphKey, batch: Mapping[str, Any], **how: Any) -> Any:
        note(key, batch)
        return real(self, key, batch, **how)

    patch.setattr(Runner, "launch", launch)
