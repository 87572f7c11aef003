"""Masks against brute force: of a list of choices spelt byte by byte, what may come next is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.fields import END
from tests.models.make import make_tokenizer
from unisono.structured_output.matcher import GrammarError, Matcher
from unisono.structured_output.workers import grammars as grammars_module
from unisono.structured_output.workers.grammars import Grammars
from unisono.types import BadRequest, SamplingParams, StructuredOutputs

VOCAB = 263
WORDS = -(-VOCAB // 32)
CHOICES = ("abc", "abd", "ab", 'b"\\\n', "ünï", "c" * 12)
EVERYTHING = set(range(VOCAB))
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Iterator[Grammars]:
    grammars = Grammars(directory, VOCAB, [END])
    yield grammars
    grammars.close()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def matcher(grammars: Grammars, choices: tuple[str, ...] = CHOICES, **params: Any) -> Matcher:
    asked = StructuredOutputs(choice=choices)
    return Matcher(grammars.get(asked), SamplingParams(structured_outputs=asked, **params))


def masks(following: Matcher, *paths: list[int]) -> list[list[set[int]]]:
    """The ids that each position of each path allows."""
    out = np.full((len(paths), 1 + len(paths[0]), WORDS), -1, np.int32)
    following.masks(np.array(paths, np.int32).reshape(len(paths), -1), out)
    bits = np.unpackbits(out.view(np.uint8), axis=-1, bitorder="little")[..., :VOCAB]
    return [[set(np.flatnonzero(row).tolist()) for row in path] for path in bits]


def possible(prefix: list[int], choices: tuple[str, ...] = CHOICES) -> set[int]:
    """What may follow ``prefix``, by trying every choice."""
    spelt = [[*ids(choice), END] for choice in choices]
    return {tokens[len(prefix)] for tokens in spelt if tokens[: len(prefix)] == prefix and len(tokens) > len(prefix)}


def expected(drafts: list[int], before: list[int]) -> list[set[int]]:
    """Behind a draft that is refused, or ends the text, or is none, everything."""
    rows, prefix = [], list(before)
    for draft in [*drafts, -1]:
        rows.append(possible(prefix))
        if draft not in rows[-1] or draft == END:
            break
        prefix.append(draft)
    return rows + [EVERYTHING] * (1 + len(drafts) - len(rows))


@pytest.mark.parametrize("choice", CHOICES)
def test_masks_allow_continuations_of_a_choice(grammars: Grammars, choice: str) -> None:
    following, done = matcher(grammars), []
    for token in [*ids(choice), END]:
        assert masks(following, []) == [[possible(done)]]
        following.accept([token])
        done.append(token)


@pytest.mark.parametrize("before", ["", "a", "ab", "cccc"])
@pytest.mark.parametrize("drafts", ["abc", "abx", "xab", "bab", "ccc"])
@pytest.mark.parametrize("cut", [(), (0,), (1,)], ids=["whole", "none", "one"])
def test_masks_of_drafts(grammars: Grammars, before: str, drafts: str, cut: tuple[int, ...]) -> None:
    """And making them leaves the matcher where it was."""
    following, tokens = matcher(grammars), ids(drafts)
    for place in cut:
        tokens[place:] = [-1] * (len(tokens) - place)
    following.accept(ids(before))
    for _ in range(2):
        assert masks(following, tokens) == [expected(tokens, ids(before))]
        assert masks(following, []) == [[possible(ids(before))]]


def test_a_draft_that_ends_the_text(grammars: Grammars) -> None:
    following = matcher(grammars)
    drafts = [*ids("ab"), END, END]
    assert masks(following, drafts) == [[possible([]), possible(ids("a")), possible(ids("ab")), *[EVERYTHING] * 2]]
    following.accept([*ids("ab"), END])


def test_tree_paths_get_independent_masks(grammars: Grammars) -> None:
    following, paths = matcher(grammars), [ids("abc"), ids("abd"), ids("abx"), ids("bab"), [ids("a")[0], -1, -1]]
    together = masks(following, *paths)
    assert together == [masks(following, path)[0] for path in paths]
    assert together == [expected(path, []) for path in paths]


def test_min_tokens_and_ignore_eos_mask_the_end_while_continuations_exist(grammars: Grammars) -> None:
    more = possible(ids("ab")) - {END}
    assert END in possible(ids("ab"))
    for params in ({"min_tokens": 3}, {"ignore_eos": True}):
        following = matcher(grammars, **params)
        assert masks(following, [*ids("ab"), END])[0][2:] == [more, EVERYTHING], "and no draft may end it either"
        following.accept(ids("ab"))
        assert masks(following, []) == [[more]]
        following.accept(ids("c"))
        assert masks(following, []) == [[{END}]], "complete"
    following = matcher(grammars, min_tokens=2)
    following.accept(ids("ab"))
    assert masks(following, []) == [[possible(ids("ab"))]], "long enough"
    following = matcher(grammars, min_tokens=3, stop_token_ids=ids("c"))
    following.accept(ids("ab"))
    assert masks(following, []) == [[possible(ids("ab")) - {END, *ids("c")}]]


def test_a_token_that_does_not_continue_is_an_error(grammars: Grammars) -> None:
    following = matcher(grammars)
    with pytest.raises(GrammarError, match="after 1 tokens"):
        following.accept(ids("ax"))


def test_expression_with_exploding_mask_time_fails(grammars: Grammars) -> None:
    """Its third nested repetition: after some thirty letters one more mask would take seconds, and then minutes."""
    asked = StructuredOutputs(regex="((a{0,30}){0,30}){0,30}b")
    following = Matcher(grammars.get(asked), SamplingParams(structured_outputs=asked))
    (a,) = ids("a")

    def write() -> None:
        for _ in range(200):
            masks(following, [])
            following.accept([a])

    with pytest.raises(
        GrammarError, match=r"too ambiguous after \d+ tokens: (its masks have|a mask took|it meets a limit)"
    ):
        write()


def test_special_tokens_and_ids_beyond_the_tokenizer_are_never_allowed(grammars: Grammars) -> None:
    asked = StructuredOutputs(regex="(.|\\n)*")
    following = Matcher(grammars.get(asked), SamplingParams(structured_outputs=asked))
    allowed = masks(following, [])[0][0]
    assert allowed <= set(range(256)) | {END}
    assert len(allowed) > 150


def test_equal_requests_are_compiled_once(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    turned = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    given = [StructuredOutputs(json=schema), StructuredOutputs(json=dict(schema)), StructuredOutputs(json=turned)]
    first, second, third = (grammars.get(asked) for asked in given)
    assert first is second
    assert first is not third, "answers follow the order of properties"


BAD = {
    "json": [('{"type": "wibble"}', "wibble"), ({"properties": 5}, "properties"), ({"$ref": "#/x"}, "x"), (False, "")],
    "regex": [("(ab", "not closed"), ("a**", "repetition"), (r"(a)\1", "back reference")],
    "grammar": [("root ::= foo", '"foo", which is not defined'), ('foo ::= "a"', "root"), ("nonsense", "")],
    "structural_tag": [({"type": "structural_tag"}, ""), ("[]", "")],
}


@pytest.mark.parametrize(("kind", "value", "says"), [(k, *row) for k, rows in BAD.items() for row in rows], ids=str)
def test_uncompilable_structured_outputs_raise(grammars: Grammars, kind: str, value: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=rf"structured_outputs\.{kind}=") as caught:
        grammars.get(StructuredOutputs(**{kind: value}))
    assert says in str(caught.value)
    assert "<state>" not in str(caught.value)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "nothing is set"),
        ({"regex": "a", "choice": ["b"]}, "regex, choice are set"),
        ({"choice": []}, "at least one"),
        ({"choice": [""]}, "none that is empty"),
        ({"choice": "yes"}, "list of strings"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "string"),
        ({"regex": "a" * 100_001}, "at most 100000"),
        ({"json_object": False}, "true"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "5"}, "JSON object"),
        ({"json": {"a": {1, 2}}}, "not JSON"),
        ({"json": "[" * 5000 + "]" * 5000}, "deeper than 64"),
        ({"json": "[" * 100 + "]" * 100}, "deeper than 64"),
    ],
)
def test_invalid_structured_outputs_raise(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        StructuredOutputs(**given)
    assert len(str(caught.value)) < 300


def test_without_a_tokenizer_or_an_end(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="no tokenizer"):
        Grammars(tmp_path, VOCAB, [END]).get(StructuredOutputs(regex="a"))
    monkeypatch.setattr(grammars_module.Tokenizer, "eos_token_ids", ())
    with pytest.raises(BadRequest, match="eos_token_id"):
        Grammars(directory, VOCAB, []).get(StructuredOutputs(regex="a"))
