"""Forced tokens: the only text that may follow, in the tokens that the tokenizer makes of it, and allowed by masks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from tests.structured_output.lane_processes import lanes
from unisono.config.catalog import resolve_name
from unisono.structured_output.matcher import Follower, Matcher
from unisono.structured_output.thinking import MarksCache, ThinkingMatcher
from unisono.structured_output.workers.grammars import Grammars
from unisono.structured_output.workers.walk import allows
from unisono.text.tokenizer import Tokenizer
from unisono.types import SamplingParams, StructuredOutputs, Thinking

DIRECTORY, VOCAB = resolve_name("tiny-hybrid"), 4096
TOKENIZER = Tokenizer.load(DIRECTORY)
assert TOKENIZER is not None
(EOS,) = TOKENIZER.eos_token_ids
SCHEMA = {
    "type": "object",
    "properties": {"name_of_the_person": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name_of_the_person", "age"],
    "additionalProperties": False,
}
ANSWER = '{"name_of_the_person":"Tom","age":7}'
FORM = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(DIRECTORY, VOCAB, [EOS])
    yield found
    found.close()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)  # type: ignore[union-attr]


def allowed(matcher: Follower, drafts: list[int]) -> np.ndarray:
    out = np.empty((1, 1 + len(drafts), VOCAB // 32), np.int32)
    matcher.masks(np.array([drafts], np.int32).reshape(1, -1), out)  # type: ignore[attr-defined]
    return out[0]


def test_keys_are_forced_as_the_tokenizer_writes_them(grammars: Grammars) -> None:
    """In an answer of fixed keys most tokens are, and masks of drafts made of them allow each."""
    matcher, tokens = Matcher(grammars.get(FORM), SamplingParams(structured_outputs=FORM)), [*ids(ANSWER), EOS]
    done, forced_in_all = 0, 0
    while done < len(tokens):
        forced = matcher.forced()
        assert forced == tokens[done : done + len(forced)], "what the tokenizer makes of the text"
        masks = allowed(matcher, forced)
        assert all(allows(mask, token) for mask, token in zip(masks, forced, strict=False))
        step = tokens[done : done + len(forced) + 1]  # a round: the drafts, and one token more
        matcher.accept(step)
        done, forced_in_all = done + len(step), forced_in_all + len(forced)
    assert forced_in_all > len(tokens) // 2
    assert matcher.forced() == []


def test_only_possible_end_is_forced(grammars: Grammars) -> None:
    form = StructuredOutputs(choice=("yes",))
    matcher = Matcher(grammars.get(form), SamplingParams(structured_outputs=form))
    assert matcher.forced() == [*ids("yes"), EOS]
    matcher.accept(ids("yes"))
    assert matcher.forced() == [EOS]


def test_nothing_is_forced_with_several_continuations(grammars: Grammars) -> None:
    form = StructuredOutputs(choice=("yes", "no"))
    matcher = Matcher(grammars.get(form), SamplingParams(structured_outputs=form))
    assert matcher.forced() == []
    matcher.accept(ids("no"))
    assert matcher.forced() == [EOS]


def test_death_of_a_process_forces_no_tokens(grammars: Grammars) -> None:
    form = StructuredOutputs(regex="abcde[fg]hijk")
    matcher = Matcher(grammars.get(form), SamplingParams(structured_outputs=form))
    first = matcher.forced()
    assert first
    matcher.accept(first[:1])
    for lane in lanes(grammars, form):
        os.kill(lane, signal.SIGKILL)
    matcher.accept(first[1:])
    matcher.forced()  # maybe nothing
    other = Matcher(grammars.get(form), SamplingParams(structured_outputs=form))
    other.accept(first)
    assert (allowed(matcher, []) == allowed(other, [])).all()
    assert matcher.forced() == other.forced()


def test_thoughts(grammars: Grammars) -> None:
    """A budget that is spent forces the closing mark; after it the grammar forces what it does."""
    thoughts = MarksCache(DIRECTORY, VOCAB)
    thinking = Thinking("<think>", "</think>", "thinking", 2)
    marks = thoughts.prepare(thinking).result()
    form = StructuredOutputs(choice=("yes",))
    matcher = ThinkingMatcher(thinking, marks, grammars.get(form), SamplingParams(structured_outputs=form))
    assert matcher.forced() == []
    matcher.accept(ids("one two")[:2])
    assert matcher.forced() == ids("</think>")
    matcher.accept(ids("</think>"))
    assert matcher.forced() == [], "a line end may come first"
    matcher.accept(ids("yes")[:1])
    assert matcher.forced() == [*ids("yes")[1:], EOS]
    thoughts.close()
