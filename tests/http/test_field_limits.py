"""Limits of every field of every body: complete, checked before any work, and listed in docs/reference/limits.md."""

from __future__ import annotations

import importlib
import math
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, FailFast, ValidationError

from tests.http.conftest import Server
from unisono.http import request_body as body
from unisono.http.errors import ApiError, show
from unisono.http.limits import fields as field_limits
from unisono.http.limits.fields import BODIES, PARAMETERS, FirstWrongValue, validated
from unisono.types import BadRequest, SamplingParams
from unisono.types.limits import SAMPLING, Both, Chars, Data, Entries, Items, Real, Whole, shown, weight

MODULES = (
    "openai.protocol", "sglang_api", "anthropic_api.body", "responses_api.body", "routes.embeddings", "routes.pooling",
    "routes.tokens", "routes.admin", "routes.adapters", "routes.conversations", "routes.weights",
)  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs/reference/limits.md"


def models() -> Iterator[type[BaseModel]]:
    """The models of all bodies."""
    for name in MODULES:
        importlib.import_module(f"unisono.http.{name}")
    modules = [module for name, module in sys.modules.items() if name.startswith("unisono.http")]
    classes = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    own = [one for one in classes if issubclass(one, BaseModel)]
    for one in dict.fromkeys(own):
        if one.__doc__ and one.__doc__.startswith("Body of"):
            yield one


def kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kinds(inner[0])
    if origin in (typing.Union, types.UnionType):
        return {kind for one in inner for kind in kinds(one)}
    return {origin or annotation}


MOST_ERRORS = 1024
"""Errors of one field that a check may collect; each takes about 5 KiB."""


def unguarded(annotation: Any, entries: float = math.inf, guarded: bool = False) -> bool:
    """True if a list or object of checked entries collects an error for each of them. entries: of the field's limit."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        guards = (FailFast, FirstWrongValue)
        return unguarded(inner[0], entries, any(isinstance(one, guards) for one in inner[1:]))
    if origin is list and inner[0] is not Any and not guarded:
        return True
    if origin is dict and inner[1] is not Any and not guarded and entries > MOST_ERRORS:
        return True
    return any(unguarded(one, entries if origin is not list else 0) for one in inner)


def most_entries(limit: Any) -> float:
    """Entries that a limit of an object allows."""
    limits = limit.limits if isinstance(limit, Both) else (limit,)
    return min((one.most for one in limits if isinstance(one, Entries)), default=math.inf)


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_every_field_has_a_limit(model: type[BaseModel]) -> None:
    """A number, a text, a list or an object without one would be worked through before anything says no."""
    limits = BODIES[model.__name__]
    hints = typing.get_type_hints(model, include_extras=True)
    for name in model.model_fields:
        free = kinds(hints[name]) <= {bool, type(None), typing.Literal}
        assert (name in limits) is not free, name
        most = most_entries(limits.get(name))
        assert not unguarded(hints[name], most), f"{name}: a list needs FirstError, an object FirstWrongValue"
    assert limits.keys() <= model.model_fields.keys()


def test_the_first_wrong_tensor_handle_ends_the_check() -> None:
    """1 MiB of empty handles gave 400,000 errors: 1.3 s of the event loop and 380 MiB."""
    [kind] = [one for one in models() if one.__name__ == "UpdateTensorsRequest"]
    wrong = {"handles": {str(number): {} for number in range(1000)}}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(wrong)
    assert refused.value.error_count() == 5  # the fields of one handle


def test_every_number_of_sampling_params_has_a_limit() -> None:
    hints = typing.get_type_hints(SamplingParams)
    counted = {name for name, hint in hints.items() if kinds(hint) & {int, float, tuple} or name == "logit_bias"}
    assert counted <= SAMPLING.keys()


POWERS = sorted({sign * (2**power + off) for power in range(0, 70) for off in (-1, 0, 1) for sign in (1, -1)})
ODD = [*POWERS, 10**30, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.5, True, "5", None, [], [1], {}, b"x"]


@pytest.mark.parametrize("name", SAMPLING)
def test_odd_values_of_sampling_params(name: str) -> None:
    """Taken and within its limit, or refused by name: for the server, ``LLM`` and ``AsyncLLM`` alike."""
    taken, refused = 0, list[BadRequest]()
    for value in ODD:
        try:
            params = SamplingParams(**{name: value, **({} if name == "max_tokens" else {"max_tokens": None})})
        except BadRequest as error:
            refused.append(error)
            continue
        kept, taken = getattr(params, name), taken + 1
        if isinstance(SAMPLING[name], Whole | Real) and kept is not None:
            assert SAMPLING[name].holds(kept), value
    assert taken
    assert refused
    assert all(error.param == name and len(str(error)) < 300 for error in refused)


@pytest.mark.parametrize("model", BODIES)
def test_odd_numbers_of_bodies(model: str) -> None:
    """Every number of every body is refused beyond its limit, before the model sees it."""
    [kind] = [one for one in models() if one.__name__ == model]
    for name, limit in BODIES[model].items():
        if not isinstance(limit, Whole | Real):
            continue
        for value in ODD:
            if isinstance(value, int | float) and not isinstance(value, bool) and not limit.holds(value):
                with pytest.raises(BadRequest) as refused:
                    validated({name: value}, kind)
                assert refused.value.param == name
                assert limit.rule in str(refused.value)


def test_limits_in_words() -> None:
    assert Chars(3).problem("abcd") == "it has 4 characters; at most 3 are taken"
    assert Items(2, Chars(3)).problem(["a", "abcd"]) == "entry 1: it has 4 characters; at most 3 are taken"
    assert Items(1).problem([1, 2]) == "it has 2 entries; at most 1 are taken"
    assert Entries(1).problem({"a": 1, "b": 1}) == "it has 2 entries; at most 1 are taken"
    assert "a name in it has 300 characters" in str(Entries(1).problem({"x" * 300: 1}))
    assert "more than 9 characters" in str(Data(9).problem({"a": ["b" * 9]}))
    assert Data(9).problem({"a": ["b" * 2]}) is None
    for limit in (Chars(3), Items(1), Entries(1), Whole(1), Real(0, 1)):
        assert limit.problem(None) is None


def test_weighing_ends_at_the_limit() -> None:
    class Seen(list):
        read = 0

        def __iter__(self) -> Iterator[Any]:
            Seen.read += 1
            return super().__iter__()

    deep: Any = 1
    for _ in range(100_000):
        deep = Seen([deep])
    assert weight(deep, 1000) > 1000
    assert Seen.read < 1000


def test_showing_reads_the_beginning_only() -> None:
    huge = {"a": [{"b": "x" * 10_000_000}] * 1_000_000}
    for text in (show(huge), shown(huge), show([huge] * 1000), show({"k" * 10_000_000: 1}), shown(2**100_000)):
        assert len(text) <= 80


def test_the_page_has_the_table() -> None:
    """To write it: python scripts/reference.py limits."""
    text = PAGE.read_text()
    for name, table in (("limits", field_limits.table()), ("parameters", field_limits.parameter_table())):
        found = re.search(f"<!-- {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
        assert found is not None
        assert table == found[1]


# ---- parameters of paths and queries ----------------------------------------------------------------


def parameters(server: Server) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, parameter) of every route, as /openapi.json has them."""
    for path, operations in server.http.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                yield method, path, parameter


def test_every_parameter_has_a_limit(server: Server) -> None:
    limited = set()
    for method, path, parameter in parameters(server):
        schema, name = parameter["schema"], parameter["name"]
        parts = [one for one in schema.get("anyOf", [schema]) if one["type"] != "null"]
        for part in parts:
            if part["type"] == "boolean" or "enum" in part:
                continue
            if part["type"] == "array":
                assert part["items"]["enum"], (method, path, name)
                assert part["maxItems"] <= 8, (method, path, name)
                continue
            limit = PARAMETERS[name]
            expected = {"maxLength": limit.most} if isinstance(limit, Chars) else (
                {"minimum": limit.least, "maximum": limit.most}
            )  # fmt: skip
            held = part if "anyOf" not in schema else {**part, **schema}
            assert expected.items() <= held.items(), (method, path, name)
            limited.add(name)
    assert limited == PARAMETERS.keys()


def test_parameters_beyond_their_limits(server: Server) -> None:
    """Refused by name before the route runs, whatever the method and the path are."""
    for method, path, parameter in parameters(server):
        name = parameter["name"]
        limit = PARAMETERS.get(name)
        if limit is None:
            continue
        values = ["x" * (limit.most + 1)] if isinstance(limit, Chars) else [
            *(str(one) for one in POWERS if not limit.holds(one)), "9" * 5000, "1e400", "NaN", "x", "", "1.5",
        ]  # fmt: skip
        for value in values:
            url = path.replace("{" + name + "}", value) if parameter["in"] == "path" else f"{path}?{name}={value}"
            answer = server.http.request(method, re.sub(r"\{\w+\}", "a", url))
            assert answer.status_code == 400, (method, url[:80], answer.text)
            error = answer.json()["error"]
            assert error["param"] == name
            assert len(error["message"]) < 300
            if isinstance(limit, Whole) and value.lstrip("-").isdecimal() and len(value) < 100:
                assert limit.rule in error["message"]


# ---- the whole body ---------------------------------------------------------------------------------

MANY = body.MAX_PARTS + 1


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b'{"a":[' + b"1," * (body.MAX_VALUES + 1) + b"1]}", "too_many_values"),
        (b'{"a":[' + b"{}," * MANY + b"1]}", "too_many_values"),
        (b'{"a":[' + b"[]," * MANY + b"1]}", "too_many_values"),
        (b'{"a":[' + b'"",' * MANY + b"1]}", "too_many_values"),
        (b"{" + b'"a":1,' * MANY + b'"a":1}', "too_many_values"),
        (b"[" * MANY * 3, "too_many_values"),
        (b'{"a":[' + rb'"\"",' * MANY + b"1]}", "too_many_values"),
        (b'{"a":[' + rb'"\\",' * MANY + b"1]}", "too_many_values"),
        (b'{"a":"' + rb"\n" * (body.MAX_ODD_BYTES // 2 + 1) + b'"}', "too_much_text"),
        (b'{"a":"' + "é".encode() * (body.MAX_ODD_BYTES // 2 + 1) + b'"}', "too_much_text"),
    ],
    ids=["numbers", "objects", "lists", "strings", "fields", "nested", "quotes", "backslashes", "escapes", "é"],
)
def test_bodies_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch, content: bytes, code: str) -> None:
    monkeypatch.setattr(body.pydantic_core, "from_json", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ApiError) as refused:
        body.load_object(content)
    assert (refused.value.status, refused.value.code) == (400, code)


def test_delimiters_inside_strings_are_not_counted() -> None:
    """Commas, brackets and escaped quotes of texts, wherever a piece of the body is cut."""
    text = rb"[{,\"\\" * (1 << 17)
    for before in range(8):
        content = b'{"' + b"x" * before + b'":"' + text + b'"}'
        assert len(body.load_object(content)["x" * before]) == 5 * (1 << 17)


def test_a_picture_is_no_odd_text() -> None:
    content = b'{"a":"' + b"QUJD" * (10 << 20) + b'","b":"' + "é".encode() * 1000 + b'"}'
    assert len(body.load_object(content)["a"]) == 40 << 20
