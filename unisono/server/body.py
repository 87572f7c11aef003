"""JSON bodies to Python's data: what no field may hold is refused here, once, with the field's name.

Whole numbers of more than 64 bits and strings with half a surrogate pair are JSON to some readers, and errors far from
their cause to what comes after: msgpack, Rust's strings, the engine. ``protocol`` and the other APIs read bodies here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pydantic_core

from unisono.server.errors import ApiError, show

HALF = re.compile(rb"\\u[dD][89a-fA-F]")
DIGITS = bytes(ord("0") if byte in b"0123456789" else 1 for byte in range(256))
"""Makes a 0 of each digit, for ``bytes.translate``: ten times as fast as an expression, in bodies with pictures."""
LONG_NUMBER = b"0" * 19
"""What a number above 64 bits has in common with little else."""

MIN_INT, MAX_INT = -(2**63), 2**64 - 1
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_DIGITS = 40
"""Digits of a number that an error shows."""


class _Huge:
    """A whole number with more digits than Python converts."""

    def __init__(self, digits: str) -> None:
        self.digits = digits


def load_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises ApiError (400) naming the field that no field may hold."""
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        _name_the_field(body)
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if _is_suspicious(body):
        _check(data)
    if not isinstance(data, dict):
        raise ApiError(400, f"The body is {show(data)}; it must be a JSON object.")
    return data


def _is_suspicious(body: bytes) -> bool:
    """Whether there may be a number above 64 bits or a surrogate: only such bodies are looked through."""
    return HALF.search(body) is not None or LONG_NUMBER in body.translate(DIGITS)


def _name_the_field(body: bytes) -> None:
    """Raise the error of a field where Python's reader, which takes more, can tell which it is."""
    if _is_suspicious(body):
        try:
            data = json.loads(body, parse_int=_integer)
        except (ValueError, RecursionError):
            return
        _check(data)


def _integer(digits: str) -> Any:
    return int(digits) if len(digits) <= MAX_DIGITS else _Huge(digits)


def _check(data: Any) -> None:
    """Raise ApiError for the first value that no field may hold; without recursion, for it may be nested deeply."""
    for path, value in _values(data):
        rule = next((rule(value) for kind, rule in RULES.items() if isinstance(value, kind)), None)
        if rule is not None:
            name = path[:200] or "body"
            param = re.split(r"[.\[]", name, maxsplit=1)[0] if len(path) <= 200 else None
            raise ApiError(400, f"{name}={rule}.", param=param or name, code="invalid_value")


def _values(data: Any) -> Iterator[tuple[str, Any]]:
    """Every key and every value that is no container, with its path."""
    todo: list[tuple[str, Any]] = [("", data)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict):
            for key in value:
                yield path, key
            todo += [(f"{path}.{key}" if path else key, inner) for key, inner in value.items()]
        elif isinstance(value, list):
            todo += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
        else:
            yield path, value


def _wrong_integer(value: int) -> str | None:
    if MIN_INT <= value <= MAX_INT:
        return None
    return (
        f"{_short(str(value)) if value.bit_length() < 4096 else 'a number'} is out of range: at most 64 bits are read"
    )


def _wrong_digits(value: _Huge) -> str:
    digits = value.digits.lstrip("-")
    return f"{_short(value.digits)} ({len(digits)} digits) is out of range: at most 64 bits are read"


def _wrong_text(value: str) -> str | None:
    found = SURROGATE.search(value)
    if found is None:
        return None
    return (
        f"{_short(json.dumps(value[:MAX_DIGITS]))} is no text: \\u{ord(found[0]):04x} at {found.start()} is half of a "
        "surrogate pair; send both halves, or another character"
    )


def _short(text: str) -> str:
    return text if len(text) <= MAX_DIGITS else text[: MAX_DIGITS - 1] + "…"


RULES: dict[type, Callable[[Any], str | None]] = {int: _wrong_integer, _Huge: _wrong_digits, str: _wrong_text}
