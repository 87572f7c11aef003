"""Structural tags of tool calls, compiled: what they allow is what a reader reads, special tokens included."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.text_check import CheckVocabulary, TextCheck
from unisono.config.catalog import resolve_name
from unisono.http.openai.tool_definitions import tool_use
from unisono.structured_output.json_schema.refs import References
from unisono.structured_output.json_schema.values import Validator
from unisono.structured_output.matcher import GrammarError, Matcher
from unisono.structured_output.workers.grammars import Grammars
from unisono.text.tokenizer import Tokenizer
from unisono.text.tool_parsers.base import ParserContext, SchemaPart, TagPart, Tool
from unisono.text.tool_parsers.formats import NAMES
from unisono.text.tool_parsers.structure import MAX_CALLS, Structure
from unisono.types import SamplingParams, StructuredOutputs

DIRECTORY, VOCAB = resolve_name("tiny-hybrid"), 4096
TOKENIZER = Tokenizer.load(DIRECTORY)
assert TOKENIZER is not None
(EOS,) = TOKENIZER.eos_token_ids
SPECIAL = TOKENIZER.special_tokens["<|im_start|>"]
VOCABULARY = CheckVocabulary(TOKENIZER)
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer"}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", SCHEMA, strict=True), Tool("clock", {"type": "object", "properties": {}})]
JSON, XML = '{"unit": "C", "days": 2}', "<parameter=unit>\nC\n</parameter>\n<parameter=days>\n2\n</parameter>"
GLM = "<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
PYTHON = 'unit="C", days=2'
GEMMA = '{unit:<|"|>C<|"|>,days:2}'
WRONG = {JSON: '{"unit": "K", "days": 2}'} | {text: text.replace("C", "K") for text in (XML, GLM, PYTHON)}
WRONG[GEMMA] = '{unit:<|"|>K<|"|>,days:2}'
ARGUMENTS = {"qwen3_coder": XML, "glm45": GLM, "pythonic": PYTHON, "gemma4": GEMMA}


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
    own = {SchemaPart: arguments, TagPart: "0" if form.name == "kimi_k2" else arguments}
    one = "".join(part if isinstance(part, str) else own[type(part)] for part in parts)
    return form.before + form.between.join([one] * calls) + form.after


@pytest.mark.parametrize(
    ("name", "special"),
    [
        *((name, None) for name in NAMES),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
        ("gemma4", "<|tool_call>"),
        ("gemma4", '<|"|>'),
    ],
)
def test_calls_that_must_come(grammars: Grammars, name: str, special: str | None) -> None:
    form, specials = NAMES[name], {special: SPECIAL} if special else {}
    good = ARGUMENTS.get(name, JSON)
    asked = Structure(form, specials).required(TOOLS, parallel=True)
    for calls in (1, 2):
        text = written(form, good, calls)
        assert takes(grammars, asked, text, specials)
        reader = form.parser(ParserContext(TOOLS, str))
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
     ("deepseek_v3", "<｜tool▁calls▁begin｜>"), ("glm45", None), ("kimi_k2", None), ("granite", "<|tool_call|>"),
     ("internlm", None), ("internlm", "<|action_start|>"), ("kimi_k2", "<|tool_calls_section_begin|>"),
     ("openai", None), ("gemma4", None), ("gemma4", "<|tool_call>")],
)  # fmt: skip
def test_strict_calls_in_free_text(grammars: Grammars, name: str, special: str | None) -> None:
    form, specials = NAMES[name], {special: SPECIAL} if special else {}
    good = ARGUMENTS.get(name, JSON)
    asked = Structure(form, specials).optional(TOOLS, parallel=True)
    assert takes(grammars, asked, "It is <warm> today.", specials)
    assert takes(grammars, asked, "Let me see. " + written(form, good, 1), specials)
    assert not takes(grammars, asked, written(form, WRONG[good], 1), specials)


def test_strict_calls_of_harmony(grammars: Grammars) -> None:
    """All its marks are tokens; text stands in messages."""
    form, tokenizer = NAMES["openai"], TOKENIZER
    assert tokenizer is not None
    others = sorted(set(range(60, 200)) - tokenizer.special_ids)
    names = {text: i for text, i in tokenizer.special_tokens.items() if i != EOS}
    ids = dict(zip(form.marks, [*names.values(), *others], strict=False))
    asked = Structure(form, ids).optional(TOOLS, parallel=True)
    said, call = "<|start|>assistant<|channel|>final<|message|>It is warm.<|end|>", written(form, JSON, 1)
    wrong = written(form, WRONG[JSON], 1)
    assert takes(grammars, asked, said, ids)
    assert takes(grammars, asked, call, ids)
    assert takes(grammars, asked, "<|start|>assistant<|channel|>commentary<|message|>So.<|end|>" + call, ids)
    assert not takes(grammars, asked, wrong, ids)
    assert not takes(grammars, asked, said + wrong, ids)
    evading = f"<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{WRONG[JSON]}"
    assert not takes(grammars, asked, evading, ids)
    answer = Structure(form, ids).answer(StructuredOutputs(json=SCHEMA))
    assert takes(grammars, answer, f"<|start|>assistant<|channel|>final<|message|>{JSON}", ids)
    assert not takes(grammars, answer, JSON, ids)
    either = Structure(form, ids).either(TOOLS, True, StructuredOutputs(json=SCHEMA))
    assert takes(grammars, either, f"<|start|>assistant<|channel|>final<|message|>{JSON}", ids)
    assert takes(grammars, either, call, ids)
    assert not takes(grammars, either, said, ids)


def test_strict_calls_of_python(grammars: Grammars) -> None:
    """Their beginning is a function's name, so that lists in the text stay text."""
    form = NAMES["pythonic"]
    asked = Structure(form, {}).optional(TOOLS, parallel=True)
    assert takes(grammars, asked, "It is [1, 2] today.", {})
    assert takes(grammars, asked, f"[clock(), weather({PYTHON})]", {})
    assert takes(grammars, asked, f"[weather({PYTHON}), clock()]", {})
    assert not takes(grammars, asked, f"[weather({WRONG[PYTHON]})]", {})
    assert not takes(grammars, asked, "[weather(days=2)]", {})
    loose = Structure(form, {}).optional([Tool("any", {})], parallel=False)
    assert takes(grammars, loose, '[any(x="C", y=[1])]', {})
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(12)}}
    few = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3)}}
    for schema in (many, few):
        required = Structure(form, {}).required([Tool("f", schema)], parallel=False)
        for arguments in ("", "p0=1", "p1=1, p2=2"):
            assert takes(grammars, required, f"[f({arguments})]", {})
        assert not takes(grammars, required, "[f(p99=1)]", {})


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


BOUNDED = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "kind": {"type": "string", "pattern": "^[ab]{2}$"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "anyOf": [{"required": ["kind"]}, {"required": ["unit"]}],
}


@pytest.mark.parametrize("name", NAMES)
def test_random_walks_over_masks_end_in_valid_calls(name: str) -> None:
    """Calls written at random, token by token; the reader's arguments satisfy the schema."""
    tools, references = [Tool("weather", BOUNDED, strict=True)], References(BOUNDED)
    asked = Structure(NAMES[name], {}).required(tools, parallel=True)
    form = TextCheck("structural_tag", asked.structural_tag, vocabulary=VOCABULARY)
    chance, calls = random.Random(1), 0
    for _ in range(3):
        matcher, written = form.matcher(), list[int]()
        while len(written) < 400 and not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            assert not matcher.is_error(), TOKENIZER.decode(written)  # type: ignore[union-attr]
            if bits[EOS]:
                break
            token = int(chance.choice(np.flatnonzero(bits)))
            assert matcher.consume_token(token)
            written.append(token)
        if not matcher.is_accepting():
            continue
        reader = NAMES[name].parser(ParserContext(tools, str))
        found = reader.feed(TOKENIZER.decode(written), last=True)  # type: ignore[union-attr]
        assert found.calls
        for index in range(reader.count):
            arguments = json.loads("".join(call.arguments for call in found.calls if call.index == index))
            assert Validator(references).valid(arguments, references.root), arguments
            calls += 1
    assert calls


def test_calls_end(grammars: Grammars) -> None:
    """One call where one is allowed; otherwise at most MAX_CALLS."""
    form = NAMES["hermes"]
    structure = Structure(form, {})
    assert takes(grammars, structure.required(TOOLS, True), written(form, JSON, MAX_CALLS), {})
    assert not takes(grammars, structure.required(TOOLS, True), written(form, JSON, MAX_CALLS + 1), {})
    one = tool_use([definition("weather", SCHEMA), definition("clock", {})], named("weather"), None)
    assert one is not None
    assert not one.parallel, "a named function is called once"
    several = tool_use([definition("weather", SCHEMA)], "required", None)
    assert several is not None
    assert several.parallel


def test_unlisted_arguments_are_masked(grammars: Grammars) -> None:
    form, open_ = NAMES["hermes"], {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema, may in ((open_, False), ({**open_, "additionalProperties": True}, True)):
        asked = Structure(form, {}).required([Tool("f", schema)], False)
        call = '<tool_call>\n{"name": "f", "arguments": {"a": 1%s}}\n</tool_call>'
        assert takes(grammars, asked, call % "", {})
        assert takes(grammars, asked, call % ', "b": 2', {}) == may


def definition(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
