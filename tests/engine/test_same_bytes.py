"""The promise: batching, chunking, prefix hits, preemption and graphs change when bytes come, never which.

On a GPU this runs in bfloat16, on a CPU in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.helpers import counted, lazy_engine, mixed_params, prompts, tokens

PROMPTS = prompts(12, 250)
PARAMS = mixed_params(12)


@pytest.fixture(scope="module")
def alone(qwen3: Path) -> list[list[int]]:
    """Each request by itself: eager, no batch, its whole prompt in one pass, an empty prefix cache."""
    with lazy_engine(qwen3, max_num_seqs=1, enforce_eager=True) as llm:
        return [tokens(llm, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 37, "max_num_seqs": 5},
        {"enforce_eager": True},
    ],
    ids=["batched", "three at once", "chunks of 16", "chunks of 37", "eager"],
)
def test_batching_and_chunking(qwen3: Path, alone: list[list[int]], flags: dict) -> None:
    with lazy_engine(qwen3, **flags) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == alone
        kinds = {kind for (program, kind, _) in counted(llm) if program == "round"}
        graph = "full" if llm.engine.config.device.type == "cuda" else "tape"
        assert kinds == ({"eager"} if flags.get("enforce_eager") else {graph})
        llm.engine.check_integrity()


def test_prefix_hits(qwen3: Path, alone: list[list[int]]) -> None:
    with lazy_engine(qwen3) as llm:
        tokens(llm, PROMPTS, PARAMS)
        assert tokens(llm, PROMPTS, PARAMS) == alone
        cached = [o.num_cached_tokens for o in llm.generate(PROMPTS, PARAMS)]
        assert cached == [(len(p) - 1) // 16 * 16 for p in PROMPTS]


def test_a_prefix_shared_by_running_requests(qwen3: Path) -> None:
    shared = prompts(1, 250, low=64, high=65, seed=5)[0]
    batch, params = [shared + p for p in PROMPTS[:12]], PARAMS[:12]
    with lazy_engine(qwen3, max_num_seqs=1) as llm:
        expected = [tokens(llm, [p], [q])[0] for p, q in zip(batch, params, strict=True)]
    with lazy_engine(qwen3, max_num_seqs=4) as llm:
        assert tokens(llm, batch, params) == expected
        assert llm.engine.scheduler.prefix_hits >= 64 * 8, "all but those that begin together"


def test_preemption(qwen3: Path) -> None:
    """With pages for about two requests, eight compete: some give theirs back and resume."""
    batch, params = PROMPTS[:7], mixed_params(7, max_tokens=40)
    with lazy_engine(qwen3, max_num_seqs=1) as llm:
        expected = [tokens(llm, [p], [q])[0] for p, q in zip(batch, params, strict=True)]
    with lazy_engine(qwen3, max_model_len=128, num_pages=1 + 9) as llm:
        assert tokens(llm, batch, params) == expected
        assert llm.engine.scheduler.preemptions >= 3
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


def test_comparison_fails_for_another_seed(qwen3: Path, alone: list[list[int]]) -> None:
    """The comparison above can fail: another seed gives other bytes, for sampled requests only."""
    from dataclasses import replace

    other = [replace(p, seed=p.seed + 77) for p in PARAMS]
    with lazy_engine(qwen3) as llm:
        changed = tokens(llm, PROMPTS, other)
    for params, before, after in zip(PARAMS, alone, changed, strict=True):
        assert (before == after) == (params.temperature == 0)
