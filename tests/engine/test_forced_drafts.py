"""Forced tokens as drafts: fewer rounds and the same tokens, with a drafter and without one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.drafters.ledger import Entry, play
from tests.engine.helpers import engine, note_launches
from tests.engine.structured import PARAMS, PROMPTS, drafting, said
from unisono.engine.scheduling.forced_drafts import MAX_VERIFIED, merged
from unisono.entrypoints.llm import LLM
from unisono.types import ConfigError, SamplingParams, StructuredOutputs

FIXED = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"identifier": {"enum": ["first", "second"]}, "measured": {"type": "boolean"}},
        "required": ["identifier", "measured"],
        "additionalProperties": False,
    },
    disable_any_whitespace=True,
)
FORM = SamplingParams(seed=4, temperature=1.0, max_tokens=80, structured_outputs=FIXED)


def rounds(entries: Sequence[Entry]) -> int:
    return sum(len(entry.rounds) for entry in entries)


@pytest.fixture(scope="module")
def unforced_of() -> Any:
    """Target -> what three requests get, round by round, without forced drafts."""

    @functools.cache
    def run(target: Path) -> list[Entry]:
        with engine(target, max_forced_tokens=0) as llm:
            entries = play(llm, PROMPTS[:3], [replace(FORM, seed=i) for i in range(3)])
            assert llm.engine.counters.forced_tokens == 0
            return entries

    return run


@pytest.fixture(scope="module")
def unforced(qwen3: Path, unforced_of: Any) -> Any:
    return unforced_of(qwen3)


def played(llm: LLM, expected: Sequence[Entry]) -> list[Entry]:
    """The same requests on ``llm``; their tokens must be the same."""
    entries = play(llm, PROMPTS[:3], [entry.params for entry in expected])
    assert [entry.tokens for entry in entries] == [entry.tokens for entry in expected]
    return entries


def test_fixed_keys_take_few_rounds_without_a_drafter(qwen3: Path, unforced: Sequence[Entry]) -> None:
    """This tokenizer has a token a byte, so forced text has one spelling and every forced token is accepted.

    An answer's last token counts as the round's own.
    """
    with engine(qwen3) as llm:
        entries = played(llm, unforced)
        counters = llm.engine.counters
        assert 2 * rounds(entries) <= rounds(unforced)
        assert 0 <= counters.forced_tokens - counters.accepted_forced_tokens <= len(entries)
        assert counters.accepted_forced_tokens > sum(len(entry.tokens) for entry in entries) / 2
        assert max(max(entry.rounds) for entry in entries) == 8
        settings = llm.engine.info()["speculation"]
        assert isinstance(settings, dict)
        assert settings["max_forced_tokens"] == 7
        llm.engine.check_integrity()


def test_a_request_may_refuse_drafts(qwen3: Path, unforced: Sequence[Entry]) -> None:
    with engine(qwen3) as llm:
        entries = play(llm, PROMPTS[:3], [replace(entry.params, max_drafts=0) for entry in unforced])
        assert [entry.rounds for entry in entries] == [entry.rounds for entry in unforced]
        assert llm.engine.counters.forced_tokens == 0


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_forced_tokens_come_before_a_drafters_own(
    method: str, adaptive: bool, checkpoints_of: Any, unforced_of: Any
) -> None:
    """The drafter does not run in rounds that forced tokens fill."""
    unforced = unforced_of(checkpoints_of(method)[0])
    with drafting(checkpoints_of(method), method, {"num_speculative_tokens": 3}, adaptive=adaptive) as llm:
        launched: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            note_launches(patch, lambda key, batch: launched.append(key.program))
            entries = played(llm, unforced)
        assert 2 * rounds(entries) <= rounds(unforced)
        assert launched.count("draft") < launched.count("verify")
        assert llm.engine.counters.accepted_forced_tokens > 0
        llm.engine.check_integrity()


def test_drafters_that_keep_their_drafts_have_none(checkpoints_of: Any, unforced: Sequence[Entry]) -> None:
    with drafting(checkpoints_of("standalone"), "standalone", {"num_speculative_tokens": 3}) as llm:
        played(llm, unforced)
        assert llm.engine.counters.forced_tokens == 0
        (told,) = [d for d in llm.engine.config.decisions if d.name == "forced tokens"]
        assert "standalone" in told.reason
    with pytest.raises(ConfigError, match=r"--max-forced-tokens 3: the standalone drafter .* Leave it out"):
        drafting(checkpoints_of("standalone"), "standalone", {"num_speculative_tokens": 3}, max_forced_tokens=3)


@pytest.mark.parametrize("value", [-1, 16])
def test_bad_values_are_refused(qwen3: Path, value: int) -> None:
    with pytest.raises(ConfigError, match=f"--max-forced-tokens {value}: give 0 to 15"):
        engine(qwen3, max_forced_tokens=value)


def test_passes_stay_small(qwen3: Path) -> None:
    """Many requests at once have fewer forced drafts each."""
    count = 24
    with engine(qwen3, max_num_seqs=count) as llm:
        tokens: set[int] = set()
        with pytest.MonkeyPatch.context() as patch:
            note_launches(patch, lambda key, batch: tokens.add(len(batch["slots"]) * key.shape.width))
            many = play(llm, PROMPTS[:1] * count, [replace(FORM, seed=i) for i in range(count)])
        assert all(n <= MAX_VERIFIED for n in tokens)
        assert max(max(entry.rounds) for entry in many) > 1


def test_every_form_has_the_same_bytes(qwen3: Path) -> None:
    """Under penalties, biases, few allowed tokens, log-probabilities; free requests run beside."""
    with engine(qwen3, max_forced_tokens=0) as llm:
        expected = said(llm, PROMPTS, PARAMS)
    for flags in ({}, {"max_forced_tokens": 2, "max_num_seqs": 3, "enforce_eager": True}):
        with engine(qwen3, **flags) as llm:
            assert said(llm, PROMPTS, PARAMS) == expected
            assert llm.engine.counters.accepted_forced_tokens > 0


def test_merged_drops_drafts_that_contradict_forced_tokens() -> None:
    drafts = np.array([[[5, 6, 7]], [[5, 9, 7]], [[1, 2, 3]], [[5, -1, -1]]], np.int32)
    forced = np.array([[5, 6, -1], [5, 6, -1], [-1, -1, -1], [5, 6, 7]], np.int32)
    assert merged(drafts, forced).tolist() == [[[5, 6, 7]], [[5, 6, -1]], [[1, 2, 3]], [[5, 6, 7]]]
    assert merged(drafts, None) is drafts
