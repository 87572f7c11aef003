"""EAGLE-1 and EAGLE-3 in an engine draft what their papers' forward passes draft, in every layout and every round."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.drafters.make_heads import Head, make_eagle, make_eagle3, make_speculators, reference
from tests.drafters.watch import Seen, Watch
from tests.engine import helpers
from tests.engine.helpers import mixed_params, prompts, tokens
from tests.models.make import make_checkpoint
from unisono.drafters.eagle.model import Eagle3Head
from unisono.entrypoints.llm import LLM
from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SamplingParams, SpeculativeConfig

LAYERS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)


def engine(path: Path, **flags: Any) -> LLM:
    """In float32 on a GPU too, to compare closely."""
    return helpers.lazy_engine(path, dtype="float32", **flags)


@dataclass
class Target:
    """A random target, and transformers' view of it."""

    path: Path

    def __post_init__(self) -> None:
        self.config = Checkpoint.open(self.path).config
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        self.embed, self.lm_head = self.model.get_input_embeddings().weight.detach(), self.model.lm_head.weight.detach()

    @torch.no_grad()
    def shows(self, ids: Sequence[int], layers: tuple[int, ...]) -> torch.Tensor:
        """The inputs of these layers side by side [T, layers · H], or the final hidden states."""
        inputs: dict[int, torch.Tensor] = {}
        modules = [*self.model.model.layers, self.model.model.norm]
        hooks = [
            module.register_forward_pre_hook(lambda _, given, i=i: inputs.update({i: given[0][0]}))
            for i, module in enumerate(modules)
        ]
        final = self.model.model(torch.tensor([ids])).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return torch.cat([inputs[i] for i in layers], -1) if layers else final


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target")
    return Target(make_checkpoint(path, "llama", tokenizer=False, num_hidden_layers=LAYERS))


Make = Callable[[Path, DecoderConfig, torch.Tensor], Head]
HEADS: dict[str, tuple[str, Make]] = {
    "EAGLE-1 as published": ("eagle", lambda path, target, embed: make_eagle(path, target, embed)),
    "EAGLE-1, biased qkv, nothing but its layer": (
        "eagle",
        lambda path, target, _: make_eagle(path, target, model_type="qwen2"),
    ),
    "original, pickled, reduced vocabulary, default layers": (
        "eagle3",
        lambda path, target, _: make_eagle3(path, target, (2, 2, 2), draft_vocab=101, pickled=True),
    ),
    "SGLang, the target's LM head, ids of outputs": (
        "eagle3",
        lambda path, target, _: make_eagle3(path, target, (2, 3, 4), aux=[1, 2, 3]),
    ),
    "speculators, another hidden size, EAGLE-3.1": (
        "eagle3",
        lambda path, target, _: make_speculators(
            path, target, (2, 4, 5), {"fc_norm": True, "norm_output": True}, draft_vocab=120, hidden_size=66
        ),
    ),
    "speculators of a Qwen3, norm before fc and residual": (
        "eagle3",
        lambda path, target, _: make_speculators(
            path, target, (2, 0, 3), {"norm_before_fc": True, "norm_before_residual": True}, model_type="qwen3"
        ),
    ),
}


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Head]:
    method, make = HEADS[request.param]
    return method, make(tmp_path_factory.mktemp("head"), target.config, target.embed)


def spec(method: str, head: Head | Path, k: int, **options: str) -> SpeculativeConfig:
    return SpeculativeConfig(method, str(head.path if isinstance(head, Head) else head), k, options)


def compare(target: Target, head: Head, rounds: Sequence[Seen]) -> tuple[float, float, int]:
    """The largest relative error of hidden states and of logits, and how many greedy drafts were not the best."""
    hidden_error = logits_error = 0.0
    wrong = 0
    for seen in rounds:
        shown = target.shows(seen.ids[:-1], head.layers)
        steps = reference(head, target.embed, target.lm_head, seen.ids, shown, seen.drafts)
        for draft, got, want in zip(seen.drafts, seen.steps, steps, strict=True):
            hidden_error = max(hidden_error, float((got[0] - want[0]).norm() / want[0].norm()))
            logits_error = max(logits_error, float((got[1] - want[1]).norm() / want[1].norm()))
            column = draft if head.ids is None else int((head.ids == draft).nonzero())
            wrong += seen.greedy and bool(want[1][column] < want[1].max() - 1e-3)
    return hidden_error, logits_error, wrong


CLOSE = 3e-4 if torch.cuda.is_available() else 1e-4  # float32 in another order

FLAGS = {
    "one pass": {},
    "chunks of 21, two at once": {"max_num_batched_tokens": 21, "max_num_seqs": 2},
    "preempted": {"max_model_len": 80, "num_pages": 1 + 6},
}


def of_every_head(ways: Sequence[Any]) -> list[Any]:
    """Heads and ways by turns: a head's other ways are in the long matrix."""
    return [
        pytest.param(head, way, marks=() if (i + j) % len(ways) == 0 else pytest.mark.full)
        for i, head in enumerate(HEADS)
        for j, way in enumerate(ways)
    ]


@pytest.fixture(scope="module")
def plain_texts(target: Target) -> Callable[..., list[list[int]]]:
    """The target's tokens without a drafter, once per list of requests."""

    @functools.cache
    def written(count: int, seed: int, max_tokens: int, **lengths: int) -> list[list[int]]:
        with engine(target.path) as llm:
            return tokens(llm, prompts(count, 250, seed=seed, **lengths), mixed_params(count, max_tokens))

    return written


@pytest.mark.parametrize(("case", "way"), of_every_head(tuple(FLAGS)), indirect=["case"])
def test_draft_steps_match_reference_forward(
    target: Target, case: tuple[str, Head], way: str, plain_texts: Any
) -> None:
    """Hidden states, logits and drafts; then once more behind cached prefixes, of prompts and of what was written."""
    (method, head), flags = case, FLAGS[way]
    batch, params = prompts(5, 250, low=1, high=50, seed=3), mixed_params(5, max_tokens=11)
    written = plain_texts(5, 3, 11, low=1, high=50)
    with engine(target.path, speculative=spec(method, head, 4), enforce_eager=True, **flags) as llm:
        texts = [p + t for p, t in zip(batch, written, strict=True)]
        watch = Watch(llm, texts)
        assert tokens(llm, batch, params) == written
        assert llm.engine.counters.accept_length > 2
        tokens(llm, texts, params)
        assert (llm.engine.scheduler.preemptions if "num_pages" in flags else llm.engine.scheduler.prefix_hits) > 0
    assert len(watch.rounds) > 30
    hidden_error, logits_error, wrong = compare(target, head, watch.rounds[:: 1 if not flags else 2])
    assert hidden_error < CLOSE
    assert logits_error < CLOSE
    assert wrong == 0


def test_comparison_fails_for_shifted_hidden_states(target: Target, tmp_path: Path, monkeypatch) -> None:
    """The comparison above can fail."""
    head = make_eagle3(tmp_path, target.config, (2, 3, 4), aux=[1, 2, 3])
    encode = Eagle3Head.encode
    monkeypatch.setattr(Eagle3Head, "encode", lambda self, seen: encode(self, seen.roll(1, 0)))
    with engine(target.path, speculative=spec("eagle3", head, 4), enforce_eager=True) as llm:
        watch = Watch(llm)
        tokens(llm, prompts(3, 250), GREEDY)
    hidden_error, _, wrong = compare(target, head, watch.rounds)
    assert hidden_error > 0.1
    assert wrong > len(watch.rounds)


@pytest.mark.parametrize(("case", "k"), of_every_head((1, 5)), indirect=["case"])
def test_text_equals_the_targets_own(target: Target, case: tuple[str, Head], k: int, plain_texts: Any) -> None:
    method, head = case
    batch, params = prompts(10, 250, seed=8), mixed_params(10)
    expected = plain_texts(10, 8, 24)
    with engine(target.path, speculative=spec(method, head, k)) as llm:
        assert tokens(llm, batch, params) == expected
        assert tokens(llm, batch, params) == expected
        llm.engine.check_integrity()
