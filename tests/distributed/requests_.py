"""Requests of every kind for the tests of several ranks, and what comes of them as comparable data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.engine.helpers import engine
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig, StructuredOutputs
from unisono.types.lora import LoRARequest

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {9: 4.0}},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="[ab]{2,9}-[0-9]{2}")},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "return_hidden_states": True},
)

UNFILTERED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {9: 4.0}},
    {"temperature": 0.0, "top_k": 3, "min_tokens": 9, "allowed_token_ids": list(range(0, 250, 3))},
)
"""Of these no pass needs whole rows of logits."""

ROOMY: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 80, "max_num_batched_tokens": 32, "num_pages": None}
SCARCE = ROOMY | {"num_pages": 6}
"""Few pages, so that requests are preempted."""

MANY = ROOMY | {"max_num_seqs": 32, "max_num_batched_tokens": 128}
"""So that few passes serve many requests."""


def made(
    count: int, vocab: int, longest: int = 40, kinds: Sequence[dict[str, Any]] = KINDS
) -> tuple[list[list[int]], list[SamplingParams]]:
    """``count`` requests; every other prompt repeats a phrase, and several begin alike."""
    rng = random.Random(5)
    shared = [rng.randrange(vocab) for _ in range(33)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(3, longest))] for _ in range(count)]
    prompts = [p[: 2 + i % 4] * 5 if i % 2 else p for i, p in enumerate(prompts)]
    prompts = [shared + p[:4] if i % 5 == 4 else p for i, p in enumerate(prompts)]
    params = [SamplingParams(seed=i, max_tokens=12 + i % 9, **kinds[i % len(kinds)]) for i in range(count)]
    return prompts, params


def outcome(llm: LLM, prompts: Any, params: Any, adapters: Any = None) -> list[tuple[Any, ...]]:
    """Everything that requests get, hidden states bit by bit. adapters: of each request, one or none."""
    found = []
    for output in llm.generate(prompts, params, lora_request=adapters):
        one = output.outputs[0]
        hidden = None if one.hidden_states is None else one.hidden_states.numpy().tobytes()
        found.append((one.token_ids, one.finish_reason, str(one.logprobs), str(output.prompt_logprobs), hidden))
    return found


def run(
    path: Any, ranks: int, count: int, vocab: int = 250, captures: int = 3,
    adapters: Sequence[LoRARequest | None] = (None,), kinds: Sequence[dict[str, Any]] = KINDS, **flags: Any,
) -> dict[str, Any]:  # fmt: skip
    """The requests twice, the second time with prefix hits and with ``captures`` of the graphs that were missing.

    adapters: of the requests, in turn.
    """
    flags = {**SCARCE, **flags}
    with engine(path, tensor_parallel_size=ranks, **flags) as llm:
        prompts, params = made(count, vocab, kinds=kinds)
        named = [adapters[i % len(adapters)] for i in range(count)]
        first = outcome(llm, prompts, params, named)
        while llm.engine.has_work():
            llm.engine.step()
        for _ in range(captures):
            llm.engine.capture_missing()
        again = outcome(llm, prompts, params, named)
        core = llm.engine
        return {
            "outcomes": first + again,
            "preemptions": core.scheduler.preemptions,
            "hits": core.scheduler.prefix_hits,
            "accepted": core.counters.accepted_tokens,
            "replays": sum(n for (_, kind, _), n in core.runner.planner.passes.items() if kind != "eager"),
        }


def differing(mine: dict[str, Any], others: dict[str, Any]) -> int:
    """How many requests differ."""
    assert len(mine["outcomes"]) == len(others["outcomes"])
    return sum(a != b for a, b in zip(mine["outcomes"], others["outcomes"], strict=True))


def spec(method: str, **given: Any) -> SpeculativeConfig:
    """A speculative config."""
    return SpeculativeConfig.parse({"method": method, **given})
