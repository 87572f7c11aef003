"""Requests that share the drafts of a block drafter, beside other features: the same bytes, and drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.drafters.make_blocks import Block, make_dflash
from tests.drafters.watch import BlockWatch
from tests.engine.helpers import draw_drafts, engine, prompts
from tests.engine.matrix import config_of
from tests.models.make_adapters import make_adapter
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig, StructuredOutputs
from unisono.types.lora import LoRARequest

K = 5
BATCH = prompts(6, 250, low=3, high=40, seed=5)
COMMON: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=1, seed=2, logprobs=2, prompt_logprobs=1, **COMMON),
    SamplingParams(temperature=1, seed=3, structured_outputs=StructuredOutputs(regex="[0-9 ]+"), max_tokens=10),
    SamplingParams(temperature=0, presence_penalty=0.8, repetition_penalty=1.3, **COMMON),
    SamplingParams(temperature=0.8, seed=5, top_p=0.8, logit_bias={7: 2.0}, **COMMON),
    SamplingParams(temperature=0, logprobs=3, **COMMON),
]
"""Rounds that the host reads keep one width; the others share drafts at the same time."""


@pytest.fixture(scope="module")
def head(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Block:
    return make_dflash(tmp_path_factory.mktemp("head"), config_of(qwen3), (0, 1))


@pytest.fixture(scope="module")
def adapters(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Every other request has an adapter."""
    path = make_adapter(tmp_path_factory.mktemp("adapter"), qwen3, 1, size=1.0)
    return [LoRARequest("one", 1, str(path)) if i % 2 else None for i in range(len(BATCH))]


def answers(llm: LLM, lora: Any = None) -> list[Any]:
    outputs = llm.generate(BATCH, PARAMS, lora_request=lora, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


WAYS: dict[str, dict[str, Any]] = {
    "plain, in chunks": {"max_num_batched_tokens": 24},
    "fp8 keys and values": {"kv_cache_dtype": "fp8"},
    "fp8 weights": {"quantization": "fp8"},
    "adapters": {"enable_lora": True},
    "mixed passes": {"enable_mixed_chunk": True, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize("way", WAYS)
def test_same_bytes(way: str, qwen3: Path, head: Block, adapters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, with drafts made right, so that requests commit tokens of their own widths."""
    lora = adapters if way == "adapters" else None
    with engine(qwen3, enforce_eager=True, **WAYS[way]) as llm:
        expected = answers(llm, lora)
    draw_drafts(monkeypatch, lambda rng, choices: rng.choice(choices[1:-1]))
    monkeypatch.setattr("unisono.engine.worker.build.draft_choices", choices)
    spec = SpeculativeConfig("dflash", str(head.path), K)
    with engine(qwen3, speculative=spec, adaptive=True, enforce_eager=True, **WAYS[way]) as llm:
        assert llm.engine.runner.shared == (1, 2, 3)
        watch = BlockWatch(llm, [prompt + list(answer[0]) for prompt, answer in zip(BATCH, expected, strict=True)])
        assert answers(llm, lora) == expected
        assert llm.engine.counters.accept_length > 1.5
        assert len({len(drafts) for _, _, drafts, _ in watch.rounds}) > 2
        llm.engine.check_integrity()


choices: Callable[..., Any] = lambda config, most: ((0, 1, 2, 3, most), "drawn")  # noqa: E731
"""Without graphs nothing is known of costs, so a round would always have the most drafts."""
