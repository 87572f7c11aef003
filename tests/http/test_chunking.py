"""The same text in any pieces has the same reasoning, content and calls: every form, every reasoning parser, odd texts.

Texts are answers of ``tool_answers`` with spans cut out, doubled or replaced, and soups of marks, JSON and blanks.
The method is that of SGLang's issue 37634: replay one text in many chunkings and compare.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.http import tokenizers_
from tests.http.tool_answers import CASES, WEATHER
from unisono.text.answer_parser import AnswerParser
from unisono.text.detokenizer import Detokenizer
from unisono.text.reasoning import PARSERS
from unisono.text.tokenizer import Tokenizer
from unisono.text.tool_parsers.base import ParserContext, Tool
from unisono.text.tool_parsers.formats import NAMES
from unisono.types import FinishReason, SamplingParams

TOOLS = [Tool("get_weather", WEATHER), Tool("now", {"type": "object", "properties": {}})]
PIECES = [
    "{", "}", "[", "]", '"', "'", "\\", '\\"', "\\u00e9", "\\ud83d", ",", ":", "=", "(", ")", ";", "\n", " ", "\t",
    "\r", "\xa0", "  ", "name", '"name": "now"', '"arguments"', '"arguments": {"a": 1}', '"arguments": "{\\"a\\": 1}"',
    '"parameters": [1]', "null", "true", "-1.5e", "12", "é", "🙂", "你好", "text", "now", "get_weather", "city", "<",
    ">", "</", "<|", "|>", '{"name": "now", "arguments": {}}', "functions.now:0", " to=functions.now", "json",
    "analysis", "final", "assistant", 'city="x"', "days=2", "now()", "[now()]", "get_weather(city='é', 2)",
]  # fmt: skip
PROMPTS = ("", "{start}", "{start}\n", "{start}{end}\n\n")
"""Ends of a prompt that say how an answer begins."""
Result = tuple[str, str, list[list[str]]]


def marks_of(form: str) -> list[str]:
    """The texts that a form's reader looks for."""
    one = NAMES[form]
    module = vars(sys.modules[type(one).__module__])
    named = [value for name, value in module.items() if name.isupper() and isinstance(value, str)]
    return [mark for mark in (*one.marks, *one.interrupts, *one.excludes, one.trigger, one.before, *named) if mark]


def odd_text(dice: random.Random, form: str, more: Sequence[str] = ()) -> str:
    """A text that looks like an answer in this form."""
    parts = [*marks_of(form), *more]
    answers = [text for of, text, _ in CASES.values() if of == form]
    if answers and dice.random() < 0.5:
        text = "".join(dice.choice(answers) for _ in range(dice.randint(1, 2)))
        for _ in range(dice.randint(0, 5)):
            begin = dice.randrange(len(text) + 1)
            span = text[begin : begin + dice.randint(0, 12)]
            other = dice.choice(["", span + span, dice.choice(parts), dice.choice(PIECES) + span])
            text = text[:begin] + other + text[begin + len(span) :]
    else:
        soup = [dice.choice(parts if dice.random() < 0.5 else PIECES) for _ in range(dice.randint(1, 14))]
        text = "".join(one[: dice.randint(0, len(one))] if dice.random() < 0.15 else one for one in soup)
    return text if dice.random() < 0.8 else text[: dice.randint(0, len(text))]


def chunkings(dice: random.Random, text: str) -> Iterator[list[str]]:
    """The whole, a character at a time, and random pieces."""
    yield [text]
    yield list(text)
    for _ in range(6):
        cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randint(1, 6)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def reader_of(
    form: str | None, parallel: bool, parser: str | None, prompt: str = "", interrupts: Any = ()
) -> AnswerParser:
    reader = None if form is None else NAMES[form].parser(ParserContext(TOOLS, lambda number: f"id{number}", parallel))
    splitter = None
    if parser is not None:
        marks = PARSERS[parser]
        splitter = marks.splitter(prompt.format(start=marks.start, end=marks.end), None, interrupts, form is not None)
    return AnswerParser(splitter, reader)


def read(reader: AnswerParser, pieces: Sequence[str], ends: bool) -> Result:
    """(reasoning, content, calls). ends: the last piece is known to be the last."""
    said = [reader.feed(piece, ends and place == len(pieces) - 1) for place, piece in enumerate(pieces)]
    said += [] if ends and pieces else [reader.feed("", True)]
    calls: list[list[str]] = []
    for delta in (delta for one in said for delta in one.calls):
        if delta.id is not None and delta.name is not None:
            calls.append([delta.id, delta.name, ""])
        assert delta.index == len(calls) - 1
        calls[-1][2] += delta.arguments
    return "".join(one.reasoning for one in said), "".join(one.content for one in said), calls


def check(dice: random.Random, text: str, *args: Any) -> None:
    expected = read(reader_of(*args), [text], False)
    for pieces in chunkings(dice, text):
        for ends in (True, False):
            assert read(reader_of(*args), pieces, ends) == expected, (text, pieces, ends, args)


def check_forms(form: str, texts: int) -> None:
    dice = random.Random(form)
    for _ in range(texts):
        check(dice, odd_text(dice, form), form, dice.random() < 0.7, None)


def check_reasoning(parser: str, texts: int) -> None:
    dice = random.Random(parser)
    marks = PARSERS[parser].start, PARSERS[parser].end
    harmony = parser in ("openai_gptoss", "gpt_oss")
    for _ in range(texts):
        form = dice.choice([None, "openai"] if harmony else [None, "hermes", "kimi_k2", "mistral"])
        begin = dice.choice(["", "", marks[0], " " + marks[0], "\n"])
        text = begin + "".join(odd_text(dice, form or "hermes", marks)[:80] for _ in range(dice.randint(1, 3)))
        interrupts = NAMES[form].interrupts if form and dice.random() < 0.7 else ()
        check(dice, text, form, True, parser, dice.choice(PROMPTS), interrupts)


DIFFERENT = list({(one, type(one)): name for name, one in PARSERS.items()}.values())
"""A name of each reasoning parser."""


@pytest.mark.parametrize("form", NAMES)
def test_calls_of_odd_texts(form: str) -> None:
    check_forms(form, 40)


@pytest.mark.parametrize("parser", DIFFERENT)
def test_reasoning_of_odd_texts(parser: str) -> None:
    check_reasoning(parser, 30)


@pytest.mark.full
@pytest.mark.parametrize("form", NAMES)
def test_calls_of_many_odd_texts(form: str) -> None:
    check_forms(form, 1000)


@pytest.mark.full
@pytest.mark.parametrize("parser", DIFFERENT)
def test_reasoning_of_many_odd_texts(parser: str) -> None:
    check_reasoning(parser, 500)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and half of the forms' marks as special tokens: the others come in parts."""
    backend = tokenizers_.byte_level()
    marks = sorted({mark for form in NAMES for mark in NAMES[form].marks})
    backend.add_special_tokens({"additional_special_tokens": marks[::2]})
    return Tokenizer(backend)


def from_tokens(tokenizer: Tokenizer, groups: Sequence[list[int]], reader: AnswerParser) -> Result:
    """The result of a stream whose tokens come in groups. The detokenizer holds back parts of characters."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False), [])
    pieces = [detokenizer.feed(group) for group in groups]
    pieces.append(detokenizer.feed([], FinishReason.LENGTH))
    return read(reader, pieces, True)


@pytest.mark.parametrize("form", NAMES)
def test_tokens_in_groups(tokenizer: Tokenizer, form: str) -> None:
    """A token at a time, all at once, and what rounds of accepted drafts bring; characters and escapes are cut."""
    dice = random.Random(form)
    cases = [text for of, text, _ in CASES.values() if of == form] or [odd_text(dice, form)]
    for text in (*cases, *(odd_text(dice, form) for _ in range(4))):
        ids = tokenizer.encode("<think>né🙂</think>" + text, add_special_tokens=False)
        ids += tokenizer.encode("🙂", add_special_tokens=False)[: dice.randint(0, 3)]  # cut inside a character
        expected = from_tokens(tokenizer, [ids], reader_of(form, True, "qwen3"))
        assert expected[0] == "né🙂"
        groups: list[list[list[int]]] = [[[one] for one in ids]]
        for most in (2, 4, 9):
            left, made = list(ids), list[list[int]]()
            while left:
                size = dice.randint(1, most)
                made.append(left[:size])
                left = left[size:]
            groups.append(made)
        for one in groups:
            assert from_tokens(tokenizer, one, reader_of(form, True, "qwen3")) == expected, (text, one)
