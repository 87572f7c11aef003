"""Priorities change when requests run, salts what they share; neither changes a byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import engine, mixed_params, prompts, tokens
from unisono.entrypoints.llm import LLM
from unisono.types import EngineRequest, FinishReason, SamplingParams, SpeculativeConfig

PROMPTS = prompts(6, 250)
PARAMS = mixed_params(6, max_tokens=12)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative": SpeculativeConfig("ngram", num_speculative_tokens=3)},
}


def request(number: int, priority: int = 0, salt: str | None = None, **changes: Any) -> EngineRequest:
    params = replace(PARAMS[number], **changes)
    return EngineRequest(f"r{number}", PROMPTS[number], params, priority=priority, cache_salt=salt)


def run(
    llm: LLM, requests: list[EngineRequest], later: list[EngineRequest] | None = None
) -> tuple[dict[str, list[int]], list[str]]:
    """Tokens of each request, and the order in which they ended. later: come when a few steps are done."""
    late = list(later or ())
    found: dict[str, list[int]] = {one.request_id: [] for one in (*requests, *late)}
    ended: list[str] = []
    for one in requests:
        llm.engine.add(one)
    steps = 0
    while len(ended) < len(found):
        steps += 1
        while late and steps > 2:
            llm.engine.add(late.pop(0))
        for delta in llm.engine.step():
            found[delta.request_id] += delta.token_ids
            if delta.finish is not FinishReason.RUNNING:
                ended.append(delta.request_id)
    return found, ended


@pytest.fixture(scope="module")
def expected(qwen3: Path) -> dict[str, list[int]]:
    with engine(qwen3) as llm:
        return {f"r{i}": ids for i, ids in enumerate(tokens(llm, PROMPTS, PARAMS))}


@pytest.mark.parametrize("way", WAYS)
def test_requests_run_in_order_of_priority(qwen3: Path, expected: dict, way: str) -> None:
    """One slot: the first comes first, for it has begun; then lower values, and of equal ones the earlier."""
    priorities = [9, 5, -1, 5, 0, -1]
    requests = [request(i, priority) for i, priority in enumerate(priorities)]
    order = sorted(range(6), key=lambda i: (priorities[i], i))
    with engine(qwen3, max_num_seqs=1, scheduling_policy="priority", **WAYS[way]) as llm:
        found, ended = run(llm, requests)
        assert found == expected
        assert ended == [f"r{i}" for i in order]
        llm.engine.check_integrity()
    with engine(qwen3, max_num_seqs=1, **WAYS[way]) as llm:
        found, ended = run(llm, requests)
        assert found == expected
        assert ended == [f"r{i}" for i in range(6)], "first come, first served does not look at them"


@pytest.mark.parametrize("way", WAYS)
def test_the_least_important_request_gives_its_pages_back(qwen3: Path, way: str) -> None:
    """Both grow until the pages are short: then the first gives way to the more important one that came later."""
    prompt = prompts(2, 250, low=20, high=21)
    params = SamplingParams(seed=5, max_tokens=80, ignore_eos=True)
    first, second = (EngineRequest(f"r{i}", ids, params, priority=1 - i) for i, ids in enumerate(prompt))
    with engine(qwen3, max_num_seqs=1) as llm:
        expected = {f"r{i}": ids for i, ids in enumerate(tokens(llm, prompt, params))}
    for policy, victim in (("priority", "r0"), ("fcfs", "r1")):
        with engine(qwen3, max_model_len=112, num_pages=1 + 9, scheduling_policy=policy, **WAYS[way]) as llm:
            victims: list[str] = []
            spy(llm.engine.scheduler, victims)
            assert run(llm, [first], [second])[0] == expected
            assert victims == [victim]
            llm.engine.check_integrity()
            assert llm.engine.pool.usage == 0


def spy(scheduler: Any, victims: list[str]) -> None:
    """Note the requests that are preempted."""
    give_back = scheduler._preempt

    def preempt(one: Any) -> None:
        victims.append(one.request.request_id)
        give_back(one)

    scheduler._preempt = preempt


@pytest.mark.parametrize("way", WAYS)
def test_salts_share_no_prefix(qwen3: Path, way: str) -> None:
    prompt = prompts(1, 250, low=64, high=65)[0]
    params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)

    def ask(salt: str | None) -> tuple[int, list[int]]:
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        [output] = llm.generate([given if salt is None else given | {"cache_salt": salt}], params)
        return output.num_cached_tokens, output.outputs[0].token_ids

    with engine(qwen3, **WAYS[way]) as llm:
        asked = [ask(salt) for salt in (None, "a", "b", "a", "b", None, "c")]
        assert [cached for cached, _ in asked] == [0, 0, 0, 48, 48, 48, 0]
        assert len({tuple(ids) for _, ids in asked}) == 1
        llm.engine.check_integrity()


def test_salts_and_embeddings(qwen3: Path) -> None:
    """A prompt of embeddings is known by its digests, under a salt too."""
    ids = prompts(1, 250, low=40, high=41)[0]
    with engine(qwen3) as llm:
        weights = next(w for name, w in llm.engine.worker.model.named_parameters() if "embed" in name)
        embeds = weights[ids].detach().clone()
        params = SamplingParams(seed=3, max_tokens=4, ignore_eos=True)
        given = {"prompt_embeds": embeds}
        cached = [
            llm.generate([given | ({"cache_salt": salt} if salt else {})], params)[0].num_cached_tokens
            for salt in (None, "a", "a", None, "b")
        ]
        assert cached == [0, 0, 32, 32, 0]


def test_n_sequences_of_a_salted_prompt_share_its_pages(qwen3: Path) -> None:
    prompt = {"prompt_token_ids": prompts(1, 250, low=64, high=65)[0], "cache_salt": "s"}
    with engine(qwen3) as llm:
        llm.generate([prompt], SamplingParams(seed=1, max_tokens=4, n=3, ignore_eos=True))
        assert llm.engine.scheduler.prefix_hits == 2 * 48
