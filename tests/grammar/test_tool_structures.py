"""Structural tags of tool calls, compiled: what they allow is what a reader reads, special tokens included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from unisono.catalog import resolve_name
from unisono.grammar.compiler import Grammars
from unisono.grammar.matcher import GrammarError, Matcher
from unisono.server.tools.base import Context, Tool
from unisono.server.tools.formats import NAMES
from unisono.server.tools.structure import Structure
from unisono.tokenizer import Tokenizer
from unisono.types import SamplingParams, StructuredOutputs

DIRECTORY, VOCAB = resolve_name("tiny-hybrid"), 4096
TOKENIZER = Tokenizer.load(DIRECTORY)
assert TOKENIZER is not None
(EOS,) = TOKENIZER.eos_token_ids
SPECIAL = TOKENIZER.special_tokens["<|im_start|>"]
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer"}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", SCHEMA, strict=True), Tool("clock", {"type": "object", "properties": {}})]
JSON, XML = '{"unit": "C", "days": 2}', "<parameter=unit>\nC\n</parameter>\n<parameter=days>\n2\n</parameter>"
WRONG = {JSON: '{"unit": "K", "days": 2}', XML: XML.replace("C", "K")}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(DIRECTORY, VOCAB, [EOS])
    yield found
    found.close()


def takes(grammars: Grammars, asked: StructuredOutputs, text: str, specials: dict[str, int]) -> bool:
    """Whether the grammar takes a text, its special marks as tokens."""
    tokens: list[int] = []
    while text:
        places = [(text.find(mark), mark) for mark in specials if mark in text]
        place, mark = min(places, default=(len(text), ""))
        tokens += TOKENIZER.encode(text[:place])  # type: ignore[union-attr]
        tokens += [specials[mark]] if mark else []
        text = text[place + len(mark) :]
    following = Matcher(grammars.get(asked), SamplingParams(structured_outputs=asked))
    try:
        following.accept([*tokens, EOS])
    except GrammarError:
        return False
    return True


def written(form: Any, arguments: str, calls: int) -> str:
    parts = form.call(TOOLS[0])
    one = "".join(part if isinstance(part, str) else arguments for part in parts)
    return form.before + form.between.join([one] * calls) + form.after


@pytest.mark.parametrize(
    ("name", "special"),
    [*((name, None) for name in NAMES), ("mistral", "[TOOL_CALLS]"), ("deepseek_v3", "<｜tool▁calls▁begin｜>")],
)
def test_calls_that_must_come(grammars: Grammars, name: str, special: str | None) -> None:
    form, specials = NAMES[name], {special: SPECIAL} if special else {}
    good = XML if name == "qwen3_coder" else JSON
    asked = Structure(form, specials).required(TOOLS, parallel=True)
    for calls in (1, 2):
        text = written(form, good, calls)
        assert takes(grammars, asked, text, specials)
        reader = form.reader(Context(TOOLS, str))
        found = reader.feed(text, last=True)
        assert reader.count == calls
        assert json.loads("".join(call.arguments for call in found.calls if call.index == 0)) == json.loads(JSON)
    assert not takes(grammars, asked, written(form, WRONG[good], 1), specials)
    assert not takes(grammars, asked, "It is warm.", specials)
    assert not special or not takes(grammars, asked, written(form, good, 1), {}), "the token, not its letters"
    assert not takes(grammars, Structure(form, specials).required(TOOLS, False), written(form, good, 2), specials)


@pytest.mark.parametrize(
    ("name", "special"),
    [("hermes", None), ("qwen3_coder", None), ("llama3_json", None), ("mistral", "[TOOL_CALLS]"), ("mistral_v11", None),
     ("deepseek_v3", "<｜tool▁calls▁begin｜>")],
)  # fmt: skip
def test_strict_calls_in_free_text(grammars: Grammars, name: str, special: str | None) -> None:
    form, specials = NAMES[name], {special: SPECIAL} if special else {}
    good = XML if name == "qwen3_coder" else JSON
    asked = Structure(form, specials).optional(TOOLS, parallel=True)
    assert takes(grammars, asked, "It is <warm> today.", specials)
    assert takes(grammars, asked, "Let me see. " + written(form, good, 1), specials)
    assert not takes(grammars, asked, written(form, WRONG[good], 1), specials)


def test_calls_or_a_form(grammars: Grammars) -> None:
    form = NAMES["hermes"]
    given = [
        (StructuredOutputs(json=SCHEMA), JSON), (StructuredOutputs(json_object=True), '{"a": 1}'),
        (StructuredOutputs(regex="[ab]+"), "abba"), (StructuredOutputs(choice=("yes", "no")), "no"),
        (StructuredOutputs(grammar='root ::= "x" y\ny ::= "z"'), "xz"),
    ]  # fmt: skip
    for own, text in given:
        asked = Structure(form, {}).either(TOOLS, True, own)
        assert takes(grammars, asked, text, {})
        assert takes(grammars, asked, written(form, JSON, 1), {})
        assert not takes(grammars, asked, "It is warm.", {})
