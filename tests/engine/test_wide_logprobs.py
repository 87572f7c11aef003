"""Log-probabilities of the whole vocabulary and of named tokens: right numbers, the same bits under every schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import engine, idle, prompts
from unisono.types import LOGPROBS_MODES, BadRequest, SamplingParams, SpeculativeConfig

PROMPTS = prompts(3, 250)
PLAIN: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 4, "max_tokens": 10, "ignore_eos": True}
PARAMS = [
    SamplingParams(**PLAIN, logprobs=-1),
    SamplingParams(**PLAIN, logprobs=3),
    SamplingParams(**PLAIN, logprobs=0, logprob_token_ids=[7, 3, 200]),
]
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 16},
    "drafts": {"speculative": SpeculativeConfig("ngram", num_speculative_tokens=3)},
}


def run(llm: Any) -> list[Any]:
    found = []
    for output in llm.generate(PROMPTS, PARAMS):
        [one] = output.outputs
        found.append((one.token_ids, [{i: e.logprob for i, e in p.items()} for p in one.logprobs]))
    return found


@pytest.fixture(scope="module", params=LOGPROBS_MODES)
def expected(request: pytest.FixtureRequest, qwen3: Path) -> tuple[str, list[Any]]:
    with engine(qwen3, max_num_seqs=1, max_logprobs=-1, logprobs_mode=request.param) as llm:
        return request.param, run(llm)


def test_the_numbers(qwen3: Path, expected: tuple[str, list[Any]]) -> None:
    mode, (whole, few, named) = expected
    with engine(qwen3, max_logprobs=-1, logprobs_mode=mode) as llm:
        vocabulary = llm.engine.checkpoint.config.vocab_size
        twenty = llm.generate([PROMPTS[0]], SamplingParams(**PLAIN, logprobs=20))[0].outputs[0]
    assert twenty.token_ids == whole[0]
    for position, kernel in zip(whole[1], twenty.logprobs, strict=True):
        assert len(position) == vocabulary
        if mode.endswith("logprobs"):
            assert sum(map(math.exp, position.values())) == pytest.approx(1, abs=1e-5)
        for token, entry in kernel.items():
            assert position[token] == pytest.approx(entry.logprob, abs=1e-5)
        likeliest = [i for i in position if i != next(iter(position))][:19]
        assert len(set(likeliest) & set(kernel)) >= 18
    for token, position in zip(named[0], named[1], strict=True):
        assert set(position) == {token, 3, 7, 200}
    assert all(len(position) in (3, 4) for position in few[1])


@pytest.mark.parametrize("way", WAYS)
def test_same_bits(qwen3: Path, expected: tuple[str, list[Any]], way: str) -> None:
    mode, numbers = expected
    with engine(qwen3, max_logprobs=-1, logprobs_mode=mode, **WAYS[way]) as llm:
        assert run(llm) == numbers
        idle(llm)
        assert run(llm) == numbers, "from graphs that were captured since"


def test_limits(qwen3: Path) -> None:
    with engine(qwen3) as llm:
        for wanted in (21, -1):
            with pytest.raises(BadRequest, match=f"logprobs={wanted} .* 0 to 20.*--max-logprobs"):
                llm.generate([PROMPTS[0]], SamplingParams(logprobs=wanted))
        with pytest.raises(BadRequest, match="vocabulary's ids"):
            llm.generate([PROMPTS[0]], SamplingParams(logprob_token_ids=[10**6]))
    with engine(qwen3, max_logprobs=21) as llm:
        [output] = llm.generate([PROMPTS[0]], SamplingParams(logprobs=21, max_tokens=2, temperature=0))
        assert [len(position) for position in output.outputs[0].logprobs] == [21, 21]
