"""EAGLE-3 heads for a Gemma 4: every draft step against the paper's forward pass, and the same text with and without.

The head reads inputs of layers after the factor of the layer before. (Its norm of embeddings hides the factor of the
target's.) The target has experts beside its MLP and values from keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.make_heads import Head, make_eagle3, make_speculators, reference
from tests.drafters.watch import Seen, Watch
from tests.engine import helpers
from tests.engine.helpers import mixed_params, prompts, tokens
from tests.models import hybrids
from tests.models.fields import GEMMA4_EXPERTS
from tests.models.make import make_checkpoint
from unisono.drafters.eagle.model import Eagle3Head
from unisono.entrypoints.llm import LLM
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SpeculativeConfig

LAYERS = (2, 1, 4)
"""Inputs of layers that the heads read; that of layer 4 is the last layer's output."""


def engine(path: Path, **flags: Any) -> LLM:
    return helpers.lazy_engine(path, dtype="float32", **flags)


class Target:
    """A random target, and transformers' view of it."""

    def __init__(self, path: Path) -> None:
        self.path = make_checkpoint(path, "gemma4_text", tokenizer=False, **GEMMA4_EXPERTS)
        self.config, self.model = Checkpoint.open(self.path).config, hybrids.reference(self.path)
        self.embed = self.lm_head = self.model.get_input_embeddings().weight.detach()

    @torch.no_grad()
    def shows(self, ids: list[int]) -> torch.Tensor:
        """The inputs of the layers side by side [T, 3 · H]."""
        inputs: dict[int, torch.Tensor] = {}
        modules = [*self.model.model.layers, self.model.model.norm]
        hooks = [
            module.register_forward_pre_hook(lambda _, given, i=i: inputs.update({i: given[0][0]}))
            for i, module in enumerate(modules)
        ]
        self.model.model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return torch.cat([inputs[i] for i in LAYERS], -1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=["the target's embedding and LM head", "a vocabulary of its own"])
def head(request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Head:
    path = tmp_path_factory.mktemp("head")
    if request.param.startswith("the target's"):
        return make_speculators(path, target.config, LAYERS, {"norm_before_residual": True})
    return make_eagle3(path, target.config, LAYERS, aux=[2, 1, 4], draft_vocab=101)


def worst(target: Target, head: Head, rounds: list[Seen]) -> float:
    """The largest relative error of hidden states and logits."""
    error = 0.0
    for seen in rounds:
        steps = reference(head, target.embed, target.lm_head, seen.ids, target.shows(seen.ids[:-1]), seen.drafts)
        for got, want in zip(seen.steps, steps, strict=True):
            error = max(error, *(float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)))
    return error


def watched(target: Target, head: Head, **flags: Any) -> tuple[list[Seen], LLM]:
    batch, params = prompts(4, 250, low=1, high=50, seed=3), mixed_params(4, max_tokens=9)
    with engine(target.path) as llm:
        written = tokens(llm, batch, params)
    spec = SpeculativeConfig("eagle3", str(head.path), 3)
    with engine(target.path, speculative=spec, enforce_eager=True, **flags) as llm:
        watch = Watch(llm, [p + t for p, t in zip(batch, written, strict=True)])
        assert tokens(llm, batch, params) == written
        assert llm.engine.counters.accept_length > 1.5
    return watch.rounds, llm


def test_draft_steps_match_reference_forward(target: Target, head: Head) -> None:
    rounds, _ = watched(target, head, max_num_batched_tokens=21, max_num_seqs=2)
    assert len(rounds) > 12
    assert worst(target, head, rounds[::2]) < 1e-4


def test_comparison_fails_for_shifted_layer_inputs(target: Target, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    encode = Eagle3Head.encode
    monkeypatch.setattr(Eagle3Head, "encode", lambda self, seen: encode(self, seen.roll(1, 0)))
    rounds, _ = watched(target, head)
    assert worst(target, head, rounds[:4]) > 1e-2


def test_text_equals_the_targets_own(target: Target, head: Head) -> None:
    """In graphs, with prefix hits the second time."""
    batch, params = prompts(6, 250, low=1, high=60), mixed_params(6)
    with engine(target.path) as llm:
        expected = tokens(llm, batch, params)
    with engine(target.path, speculative=SpeculativeConfig("eagle3", str(head.path), 3)) as llm:
        assert tokens(llm, batch, params) == expected
        assert tokens(llm, batch, params) == expected
        assert llm.engine.counters.drafted_tokens > 0
