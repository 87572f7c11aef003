"""Log-probabilities of sampled tokens equal, bit for bit, those of a pass that scores the same text as a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.changed_weights import speculation
from tests.engine.helpers import engine, prompts
from tests.models.make import make_checkpoint
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams

PROMPTS = prompts(6, 256, low=5, high=60, seed=11)
METHODS = ["none", "ngram", "suffix", "eagle3", "mtp", "standalone"]
FAST = ("none", "eagle3")


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=20 + seed, ignore_eos=True, logprobs=0)


def check(llm: LLM, *, drafts: bool) -> None:
    """Sample in one batch, then score each text alone and all of them in one batch."""
    outputs = llm.generate(PROMPTS, [sampling(seed) for seed in range(len(PROMPTS))])
    texts, sampled = [], []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = output.outputs[0].token_ids
        texts.append([*prompt, *ids])
        found = output.outputs[0].logprobs
        assert found is not None
        sampled.append([step[token].logprob for step, token in zip(found, ids, strict=True)])
    assert not drafts or llm.engine.counters.drafted_tokens > 0
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, seed=0)
    for batch in ([texts], [[text] for text in texts]):
        scored = [output for group in batch for output in llm.generate(group, score)]
        for text, output, expected in zip(texts, scored, sampled, strict=True):
            assert output.prompt_logprobs is not None
            steps = list(zip(output.prompt_logprobs, text, strict=True))[-len(expected) :]
            assert [step[token].logprob for step, token in steps] == expected


@pytest.mark.parametrize("method", [m if m in FAST else pytest.param(m, marks=pytest.mark.full) for m in METHODS])
def test_sampled_logprobs_equal_prompt_logprobs(checkpoints_of: Callable[[str], Any], qwen3: Path, method: str) -> None:
    target, draft = checkpoints_of(method) if method != "none" else (qwen3, None)
    spec = {} if method == "none" else {"speculative": speculation(method, draft)}
    with engine(target, **spec) as llm:
        check(llm, drafts=method != "none")


def test_raw_logits_of_sampled_tokens_equal_those_of_the_prompt(qwen3: Path) -> None:
    with engine(qwen3, speculative=speculation("ngram", None), logprobs_mode="raw_logits") as llm:
        check(llm, drafts=True)


def test_a_hybrid(tmp_path: Path) -> None:
    hybrid = make_checkpoint(tmp_path / "hybrid", "qwen3_5_text", tokenizer=False)
    with engine(hybrid, dtype="float32", speculative=speculation("ngram", None)) as llm:
        check(llm, drafts=True)


def test_64_rollouts_share_their_prompt_and_have_seeds_by_index(qwen3: Path) -> None:
    """The i-th of n sequences is the request with the i-th seed alone, and the prompt is computed once."""
    prompt = PROMPTS[1] * 3
    params = SamplingParams(n=64, temperature=1.0, seed=5, max_tokens=3, ignore_eos=True)
    with engine(qwen3, max_num_seqs=16, speculative=speculation("ngram", None)) as llm:
        (output,) = llm.generate([prompt], params)
        ids = [one.token_ids for one in sorted(output.outputs, key=lambda one: one.index)]
        assert len(ids) == 64
        assert len({tuple(one) for one in ids}) > 8
        computed = llm.engine.scheduler.prefix_queries - llm.engine.scheduler.prefix_hits
        assert computed <= 2 * len(prompt) + 64 * 16, "each of the others computes at most the last page"
        assert [one.token_ids for one in llm.generate([prompt], params)[0].outputs] == ids
        for index in (0, 1, 63):
            alone = SamplingParams(n=1, temperature=1.0, seed=5 + index, max_tokens=3, ignore_eos=True)
            assert llm.generate([prompt], alone)[0].outputs[0].token_ids == ids[index]
