"""Masks of outputs that begin with a thought, against the text: budgets to the token, grammars after the mark."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from unisono.config.catalog import resolve_name
from unisono.structured_output.matcher import GrammarError
from unisono.structured_output.thinking import LINE_ENDS, Marks, MarksCache, ThinkingMatcher
from unisono.structured_output.workers.grammars import Grammars
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, SamplingParams, StructuredOutputs, Thinking

DIRECTORY, VOCAB = resolve_name("tiny-hybrid"), 4096
TOKENIZER = Tokenizer.load(DIRECTORY)
assert TOKENIZER is not None
START, END = TOKENIZER.encode("<think></think>")
(EOS,) = TOKENIZER.eos_token_ids
WORDS = VOCAB // 32
EVERYTHING = set(range(VOCAB))
PATTERN = r"(ab|ba){1,3}-[0-9]{1,2}"
FORM = StructuredOutputs(regex=PATTERN)


@pytest.fixture(scope="module")
def thoughts() -> Iterator[MarksCache]:
    found = MarksCache(DIRECTORY, VOCAB)
    yield found
    found.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(DIRECTORY, VOCAB, [EOS])
    yield found
    found.close()


Make = Any


@pytest.fixture
def make(thoughts: MarksCache, grammars: Grammars) -> Make:
    def matcher(
        state: str = "thinking",
        budget: int | None = None,
        form: StructuredOutputs | None = None,
        marks: tuple[str, str] = ("<think>", "</think>"),
        **params: Any,
    ) -> ThinkingMatcher:
        thinking = Thinking(*marks, state, budget)
        given = SamplingParams(thinking=thinking, structured_outputs=form, **params)
        compiled = None if form is None else grammars.get(form)
        return ThinkingMatcher(thinking, thoughts.prepare(thinking).result(), compiled, given)

    return matcher


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)  # type: ignore[union-attr]


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)  # type: ignore[union-attr]


def masks(following: ThinkingMatcher, *paths: list[int]) -> list[list[set[int]]]:
    out = np.full((len(paths), 1 + len(paths[0]), WORDS), -1, np.int32)
    following.masks(np.array(paths, np.int32).reshape(len(paths), -1), out)
    bits = np.unpackbits(out.view(np.uint8), axis=-1, bitorder="little")
    return [[set(np.flatnonzero(row).tolist()) for row in path] for path in bits]


def mask(following: ThinkingMatcher) -> set[int]:
    return masks(following, [])[0][0]


def test_budget_ends_the_reasoning(make: Make) -> None:
    for budget in (0, 1, 5):
        following = make(budget=budget)
        for token in ids("one two three four five six")[:budget]:
            assert mask(following) == EVERYTHING
            following.accept([token])
        assert mask(following) == {END}
        following.accept([END])
        assert mask(following) == EVERYTHING, "what follows is free"
        following.accept([*ids("yes <think>"), EOS])


def test_reasoning_that_ends_before_its_budget(make: Make) -> None:
    for mark in ([END], ids("</") + ids("think") + ids(">")):
        following = make(budget=5)
        following.accept([*ids("one"), *mark, *ids("two three four five six seven")])
        assert mask(following) == EVERYTHING


def test_a_mark_of_several_tokens(make: Make) -> None:
    marks = ("[[think]]", "[[/think]]")
    following = make(budget=2, marks=marks)
    end = ids(marks[1])
    assert len(end) > 2
    following.accept(ids("a b")[:2])
    for token in end:
        assert mask(following) == {token}
        following.accept([token])
    assert mask(following) == EVERYTHING


def test_output_that_may_open_reasoning(make: Make) -> None:
    following = make("begin", budget=1)
    following.accept([*ids("\n"), START])
    assert mask(following) == EVERYTHING
    following.accept(ids("a"))
    assert mask(following) == {END}
    spelt = make("begin", budget=0)
    spelt.accept(ids("<") + ids("think") + ids(">"))
    assert mask(spelt) == {END}
    free = make("begin", budget=0)
    free.accept(ids("<thin air> it is"))
    assert mask(free) == EVERYTHING


def test_grammar_begins_after_the_reasoning(make: Make) -> None:
    following = make(form=FORM)
    assert mask(following) == EVERYTHING - {EOS} - overrunning(""), "no end, and no token beyond the mark"
    following.accept(ids("hm, a </think"))
    assert mask(following) == EVERYTHING - {EOS} - overrunning("</think")
    following.accept(ids(">"))
    line_ends = {i for i in EVERYTHING if (text := text_of([i])) and not text.strip("\n") and len(text) <= LINE_ENDS}
    begin = {i for i in EVERYTHING if text_of([i]) and could_begin(text_of([i]))}
    assert line_ends
    assert mask(following) == begin | line_ends
    following.accept(ids("\n"))
    assert mask(following) == begin | {i for i in line_ends if text_of([i]) == "\n"}
    following.accept(ids("ab-7"))
    assert EOS in mask(following)
    following.accept([EOS])


def overrunning(before: str) -> set[int]:
    """Tokens in which the closing mark ends before they do, by trying all."""
    found = set()
    for i in EVERYTHING:
        text = before + text_of([i])
        place = text.find("</think>")
        if 0 <= place < len(text) - len("</think>"):
            found.add(i)
    return found


def could_begin(text: str) -> bool:
    return any(whole.startswith(text) for whole in WHOLES)


WHOLES = [
    "".join(parts) + f"-{number}"
    for parts in (("ab",), ("ba",), *((a, b) for a in ("ab", "ba") for b in ("ab", "ba")),
                  *((a, b, c) for a in ("ab", "ba") for b in ("ab", "ba") for c in ("ab", "ba")))
    for number in range(100)
]  # fmt: skip


def test_a_grammar_may_begin_at_once(make: Make) -> None:
    following = make("begin", form=FORM)
    assert mask(following) == {i for i in EVERYTHING if text_of([i]) and could_begin(text_of([i]))} | {START}
    following.accept([*ids("ab-12"), EOS])
    thinks = make("begin", form=FORM)
    thinks.accept([START, *ids("a thought"), END, *ids("ab-12"), EOS])


def test_min_tokens_counts_reasoning_tokens(make: Make) -> None:
    following = make(form=StructuredOutputs(choice=("a", "aa")), min_tokens=5)
    following.accept([*ids("hm hm"), END, *ids("a")])
    length = len(ids("hm hm")) + 2
    assert (EOS in mask(following)) == (length >= 5)
    later = make(form=StructuredOutputs(choice=("a", "aa")), min_tokens=12)
    later.accept([END, *ids("a")])
    assert EOS not in mask(later)


@pytest.mark.parametrize("state", ["begin", "thinking"])
@pytest.mark.parametrize("budget", [None, 0, 3])
@pytest.mark.parametrize("form", [None, FORM], ids=["free", "grammar"])
def test_masks_of_drafts_equal_sequential_masks(make: Make, state: str, budget: int | None, form: Any) -> None:
    """Wherever an output stands and whatever is drafted: the same masks as if the drafts had been taken one by one."""
    dice = random.Random(f"{state}{budget}{form}")
    likely = [START, END, EOS, *ids("</"), *ids("think"), *ids(">"), *ids("\n"), *ids("ab"), *ids("-"), *ids("12")]
    for _ in range(8):
        taken: list[int] = []
        following = make(state, budget, form)
        for _ in range(8):
            allowed = mask(following)
            drafts = [dice.choice([*likely, dice.randrange(VOCAB)]) for _ in range(3)] + [-1]
            if dice.random() < 0.8:  # a path that may really come
                drafts = path(make, state, budget, form, taken, dice, likely)
            other = [drafts[0], *dice.choices(likely, k=3)]
            for tokens, found in zip((drafts, other), masks(following, drafts, other), strict=True):
                assert found == one_by_one(make, state, budget, form, taken, tokens)
            assert mask(following) == allowed, "and nothing has moved"
            choice = [t for t in likely if t in allowed and t != EOS] or [min(allowed - {EOS}, default=EOS)]
            if choice == [EOS]:
                break
            taken.append(dice.choice(choice))
            following.accept(taken[-1:])


def path(make: Make, state: str, budget: Any, form: Any, taken: list[int], dice: Any, likely: list[int]) -> list[int]:
    following, drafts = make(state, budget, form), []
    following.accept(taken)
    for _ in range(4):
        allowed = mask(following)
        drafts.append(dice.choice([t for t in likely if t in allowed] or sorted(allowed)))
        if drafts[-1] == EOS:
            return drafts + [-1] * (4 - len(drafts))
        following.accept(drafts[-1:])
    return drafts


def one_by_one(make: Make, state: str, budget: Any, form: Any, taken: list[int], drafts: list[int]) -> list[set[int]]:
    following, rows = make(state, budget, form), []
    following.accept(taken)
    for draft in [*drafts, -1]:
        rows.append(mask(following))
        if draft not in rows[-1] or (draft == EOS and form is not None):
            break
        following.accept([draft])
    return rows + [EVERYTHING] * (1 + len(drafts) - len(rows))


def test_random_outputs_satisfy_budget_and_grammar(make: Make) -> None:
    dice = random.Random(3)
    for number in range(30):
        budget = dice.choice([0, 2, 7])
        following, tokens = make("thinking", budget, FORM), []
        while not tokens or tokens[-1] != EOS:
            allowed = mask(following)
            near = [t for t in (*ids("</"), *ids("think"), *ids(">"), END) if t in allowed]
            tokens.append(dice.choice(near if near and dice.random() < 0.5 else sorted(allowed)))
            following.accept(tokens[-1:])
        thought, mark, rest = text_of(tokens[:-1]).partition("</think>")
        assert mark
        assert re.fullmatch(PATTERN, rest.lstrip("\n")), (number, thought, rest)
        assert (
            tokens.index(END) <= budget if END in tokens[: budget + 1] else "</think>" in text_of(tokens[: budget + 9])
        )


def test_a_token_that_may_not_come_is_an_error(make: Make) -> None:
    with pytest.raises(GrammarError, match="after 0 tokens"):
        make(budget=0).accept(ids("x"))
    with pytest.raises(GrammarError, match="structured output"):
        make(form=FORM).accept([END, *ids("x")])


def test_special_tokens_that_have_no_text_do_not_part_a_mark(make: Make) -> None:
    following = make(budget=5)
    following.accept([*ids("</"), EOS, *ids("think>"), *ids("free")])
    assert mask(following) == EVERYTHING
    parted = make(budget=9, skip_special_tokens=False)
    parted.accept([*ids("</"), EOS, *ids("think>"), *ids("a b c d e f g")[:4]])
    assert mask(parted) == {END}


def test_invalid_thinking_params_raise() -> None:
    for bad in ({"start": ""}, {"end": 3}, {"state": "gone"}, {"budget": -1}, {"budget": True}):
        with pytest.raises(BadRequest):
            Thinking(**{"start": "<", "end": ">", **bad})
    with pytest.raises(BadRequest, match="thinking"):
        SamplingParams(thinking="<think>")  # type: ignore[arg-type]


def test_without_a_tokenizer(tmp_path: Any) -> None:
    with pytest.raises(BadRequest, match="no tokenizer"):
        MarksCache(tmp_path, VOCAB).prepare(Thinking("<", ">")).result()


def test_marks_are_found_once(thoughts: MarksCache) -> None:
    first = thoughts.prepare(Thinking("<think>", "</think>")).result()
    assert isinstance(first, Marks)
    assert thoughts.prepare(Thinking("<think>", "</think>", "begin", 3)).result() is first


def test_a_mark_that_begins_with_itself(make: Make) -> None:
    """``]]]>`` has ``]]>`` in it, wherever tokens part it."""
    for text in ("]]]>", "]]]]>", "a]]]>"):
        following = make(budget=9, marks=("[[<", "]]>"))
        following.accept([token for char in text for token in ids(char)] + ids("one two three four five six seven"))
        assert mask(following) == EVERYTHING


def test_a_failed_search_for_marks_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, thinking = MarksCache(DIRECTORY, VOCAB), Thinking("<think>", "</think>")
    with monkeypatch.context() as patch:
        patch.setattr("unisono.structured_output.thinking.Spelling", lambda *given: [].pop())
        with pytest.raises(IndexError):
            cache.prepare(thinking).result(60)
    found = cache.prepare(thinking)
    assert isinstance(found.result(60), Marks)
    assert cache.prepare(thinking) is found
    cache.close()
