"""Prompt log-probabilities compute the logits that are asked for, and no others; their bits do not depend on which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import counted, engine, note_launches, prompts
from unisono.entrypoints.llm import LLM
from unisono.graphs import GraphKey, Logits, selected_rows
from unisono.types import BadRequest, SamplingParams

PLAIN = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SCORED = replace(PLAIN, prompt_logprobs=2)
(PROMPT,) = prompts(1, 250, low=100, high=101, seed=1)
ROUNDS = PLAIN.max_tokens - 1  # type: ignore[operator]


@contextmanager
def rows_of_the_lm_head(llm: LLM) -> Iterator[list[int]]:
    """How many rows each call had, of positions that are sampled and of those that are scored."""
    model, rows = llm.engine.worker.model, []
    sampled, scored = model.logit_columns, model.logits
    model.logit_columns = lambda hidden: (rows.append(hidden.shape[0]), sampled(hidden))[1]  # type: ignore[method-assign]
    model.logits = lambda hidden: (rows.append(hidden.shape[0]), scored(hidden))[1]  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del model.logits, model.logit_columns


def prompt_logprobs(llm: LLM, batch: list[list[int]], params: Any) -> list[Any]:
    return [output.prompt_logprobs for output in llm.generate(batch, params)]


def test_from_a_position_on(qwen3: Path) -> None:
    with engine(qwen3, enforce_eager=True) as llm:
        (everything,) = prompt_logprobs(llm, [PROMPT], SCORED)
        for start in (0, 1, 2, 70, 99, 100, 500):
            given = replace(SCORED, logprob_start_len=start)
            llm.engine.reset_prefix_cache()
            with rows_of_the_lm_head(llm) as rows:
                (some,) = prompt_logprobs(llm, [PROMPT], given)
            first = max(1, start)
            wanted = max(0, 100 - first)
            assert some == [None] * min(first, 100) + everything[first:]
            extra = 0 if not wanted else selected_rows(100) if wanted <= selected_rows(100) else 100
            sampled = llm.engine.runner.max_extend_rows + ROUNDS
            assert sum(rows) == sampled + extra
            cached = llm.generate([PROMPT], given)[0]
            assert cached.num_cached_tokens == min(first - 1, 99) // 16 * 16, "what is before it comes from the cache"
            assert cached.prompt_logprobs == some


def test_a_mixed_batch(qwen3: Path) -> None:
    """One of five asks: its rows only."""
    batch = [*prompts(4, 250, low=25, high=26, seed=2), PROMPT[:20]]
    params = [PLAIN] * 4 + [SCORED]
    with engine(qwen3, enforce_eager=True) as llm:
        expected = prompt_logprobs(llm, batch[4:], params[4:])
        with rows_of_the_lm_head(llm) as rows:
            together = prompt_logprobs(llm, batch, params)
        assert together == [None] * 4 + expected
        assert sum(rows) - llm.engine.runner.max_extend_rows - 5 * ROUNDS == selected_rows(120) < 120


def test_graphs(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that score some tokens replay graphs that could score all."""
    keys: list[GraphKey] = []
    note_launches(monkeypatch, lambda key, batch: keys.append(key))
    given = replace(SCORED, logprob_start_len=90)
    with engine(qwen3, enforce_eager=True) as llm:
        expected = prompt_logprobs(llm, [PROMPT], given)
    keys.clear()
    with engine(qwen3, graphs="full") as llm:  # whatever a graph saves of so small a model
        keys.clear()
        assert prompt_logprobs(llm, [PROMPT], given) == expected
        assert [key.features.logits for key in keys] == [Logits.SELECTED] + [Logits.LAST] * ROUNDS
        assert {reason for _, _, reason in counted(llm)} == {""}, "all of them replays"
        program = keys[0].program
        assert program == "score"


def test_chunks(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk in front of the first scored token is a plain one."""
    names: list[str] = []
    note_launches(monkeypatch, lambda key, batch: names.append(key.program))
    with engine(qwen3) as llm:
        expected = prompt_logprobs(llm, [PROMPT], SCORED)[0]
    with engine(qwen3, max_num_batched_tokens=32) as llm:
        names.clear()
        (some,) = prompt_logprobs(llm, [PROMPT], replace(SCORED, logprob_start_len=60))
        assert some == [None] * 60 + expected[60:]
        assert names[:4] == ["extend", "score", "score", "score"]


def test_refusals() -> None:
    for value in (-1, True, 1.5):
        with pytest.raises(BadRequest, match=f"logprob_start_len={value}"):
            SamplingParams(logprob_start_len=value)  # type: ignore[arg-type]
