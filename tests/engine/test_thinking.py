"""Thoughts in the engine: budgets are exact, grammars begin after them; drafts, batches and graphs change no byte."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine.helpers import engine
from unisono.entrypoints.llm import LLM
from unisono.types import BadRequest, SamplingParams, SpeculativeConfig, StructuredOutputs, Thinking

MARKS = ("<think>", "</think>")
PATTERN = r"(yes|no|ab{1,4}){1,3}[0-9]{2}"
FORM = StructuredOutputs(regex=PATTERN)
PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n<think>",
    "Tom has 3 boxes of 4 pens. Tom has 3 boxes <think>",
    "one two " * 9 + "<think>",
]
TREE = {"method": "ngram", "num_speculative_tokens": 3, "topk": 2, "num_draft_tokens": 6}
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"speculative": SpeculativeConfig("ngram", num_speculative_tokens=3)},
    "tree": {"speculative": SpeculativeConfig.parse(TREE)},
    "chunks": {"max_num_batched_tokens": 16},
    "one slot": {"max_num_seqs": 1, "speculative": SpeculativeConfig("ngram", num_speculative_tokens=2)},
}


def params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"budget": 6, "form": FORM}, {"budget": 0, "form": FORM}, {"budget": 9, "form": None},
        {"budget": 4, "form": FORM, "state": "begin"}, {"budget": 0, "form": None, "state": "begin"},
        {"budget": None, "form": FORM}, {"budget": 12, "form": FORM},
    ]  # fmt: skip
    return [
        SamplingParams(
            temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=28, ignore_eos=kind["form"] is None,
            structured_outputs=kind["form"], thinking=Thinking(*MARKS, kind.get("state", "thinking"), kind["budget"]),
            logit_bias={} if i % 3 else {60: 2.0},
        )
        for i, kind in enumerate(kinds)
    ]  # fmt: skip


def said(llm: LLM) -> list[tuple[str, list[int], str | None]]:
    asked = params()
    given = llm.generate([PROMPTS[i % 3] for i in range(len(asked))], asked)
    return [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in given]


@pytest.fixture(scope="module")
def expected() -> Any:
    with engine("tiny", enforce_eager=True) as llm:
        yield said(llm)


def test_budgets_and_forms(expected: Any) -> None:
    for (text, ids, finish), asked in zip(expected, params(), strict=True):
        thinking = asked.thinking
        assert thinking is not None
        if thinking.state == "thinking" and thinking.budget is not None:
            _, mark, rest = text.partition(MARKS[1])
            assert mark
            assert len(ids) > thinking.budget
            if asked.structured_outputs is not None and finish == "stop":
                assert re.fullmatch(PATTERN, rest.lstrip("\n")), text
        elif thinking.state == "begin" and asked.structured_outputs is not None:
            assert re.fullmatch(PATTERN, text.partition(MARKS[1])[2].lstrip("\n") or text), text
    assert sum(finish == "stop" for _, _, finish in expected) >= 4


def test_a_budget_is_spent_to_the_token(expected: Any) -> None:
    """The same request without a budget goes on with another token where the mark was forced."""
    with engine("tiny", enforce_eager=True) as llm:
        end = llm.tokenizer.encode(MARKS[1])  # type: ignore[union-attr]
        for budget in (0, 6):
            free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            bound = SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, thinking=Thinking(*MARKS, "thinking", budget)
            )
            plain, held = (o.outputs[0].token_ids for o in llm.generate([PROMPTS[2]] * 2, [free, bound]))
            assert held[:budget] == plain[:budget]
            assert held[budget : budget + len(end)] == end
            assert plain[budget : budget + len(end)] != end


@pytest.mark.parametrize(
    "way", [w if w in ("chain", "tree") else pytest.param(w, marks=pytest.mark.full) for w in WAYS]
)
def test_same_bytes(way: str, expected: Any) -> None:
    with engine("tiny", **WAYS[way]) as llm:
        assert said(llm) == expected
        while llm.engine.has_work() or llm.engine.capture_missing():
            llm.engine.step()
        assert said(llm) == expected, "with graphs"
        assert "speculative" not in WAYS[way] or llm.engine.counters.accepted_tokens > 0


def test_thinking_budget_with_synthetic_acceptance_raises() -> None:
    with engine("tiny", speculative=SpeculativeConfig("ngram"), synthetic_acceptance_length=2.0) as llm:
        asked = SamplingParams(thinking=Thinking(*MARKS, "thinking", 3))
        with pytest.raises(BadRequest, match="thinking_token_budget"):
            llm.generate("x", asked)
        llm.generate("x", SamplingParams(thinking=Thinking(*MARKS)))
