"""JSON bodies to Python's data: sizes are counted before parsing, and values that no field may hold are refused.

Whole numbers of more than 64 bits and strings with half a surrogate pair are valid for some JSON parsers, and cause
errors far from their origin in others: msgpack, Rust's strings, the engine. ``protocol`` and the other APIs read bodies
here. ``routes/common.py`` limits the bytes of a body, ``limits/fields.py`` its fields.

A parsed body takes memory and time by its values, not its bytes: 64 MiB of ``[],`` are 22 million lists. So values are
counted first, in parts of the body, and a large body is read in a thread (:func:`off_loop`): no call of it keeps the
GIL for more than about 200 ms.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pydantic_core

from unisono.http.errors import ApiError, show

T = TypeVar("T")

MAX_VALUES = 1 << 20
"""Values of a body, mostly token ids. Python makes a million of them in about 70 ms."""

MAX_PARTS = 1 << 18
"""Strings (names of fields included), objects and lists of a body."""

MAX_ODD_BYTES = 16 << 20
"""Bytes of text with escapes or characters beyond ASCII, which takes four times the memory and time of other text.

They are counted by pieces of CHUNK bytes. Images in base64 have neither.
"""

CHUNK = 256 << 10
"""Bytes that are counted at a time."""

INLINE_BYTES = 32 << 10
"""Largest body that the event loop reads itself, bytes; it takes at most about 2 ms."""

NAMED_BYTES = 1 << 20
"""Largest invalid body in which the wrong field is located, bytes."""

HALF = re.compile(rb"\\u[dD][89a-fA-F]")
DIGITS = bytes(ord("0") if byte in b"0123456789" else 1 for byte in range(256))
"""Translation table that maps digits to 0, for ``bytes.translate``: ten times as fast as an expression, in bodies with
images.
"""
LONG_NUMBER = b"0" * 19
"""Found in every translated number above 64 bits, and in little else."""

MIN_INT, MAX_INT = -(2**63), 2**64 - 1
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_DIGITS = 40
"""Digits of a number in an error."""


class _Huge:
    """A whole number with more digits than Python converts."""

    def __init__(self, digits: str) -> None:
        self.digits = digits


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run ``work()``, in a thread for a body of ``size`` bytes that would block the event loop."""
    return work() if size <= INLINE_BYTES else await asyncio.to_thread(work)


def load_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in ``body``. Raises ApiError (400) for too many values, and naming what no field may hold."""
    check_size(body)
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


def check_size(body: bytes | bytearray) -> None:
    """Raise ApiError (400) for a body of too many values or parts, or too much text that is expensive to read."""
    if len(body) <= 2 * MAX_PARTS:  # a part has two bytes
        return
    values = parts = odd = 0
    inside, rest = False, b""
    for start in range(0, len(body), CHUNK):
        chunk = rest + body[start : start + CHUNK]
        rest = b"\\" if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 else b""
        chunk = chunk[: len(chunk) - len(rest)]
        escaped = b"\\" in chunk
        odd += len(chunk) if escaped or not chunk.isascii() else 0
        if escaped:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = chunk.split(b'"')
        outside = b"".join(pieces[inside::2])
        inside ^= not len(pieces) % 2
        values += outside.count(b",")
        parts += (len(pieces) - 1) // 2 + outside.count(b"{") + outside.count(b"[")
        if values > MAX_VALUES:
            raise ApiError(400, f"The body has more than {MAX_VALUES} values; send less.", code="too_many_values")
        if parts > MAX_PARTS:
            message = f"The body has more than {MAX_PARTS} strings, objects and lists; send less."
            raise ApiError(400, message, code="too_many_values")
        if odd > MAX_ODD_BYTES:
            message = (
                f"The body has more than {MAX_ODD_BYTES >> 20} MiB of text with escapes or beyond ASCII; send less."
            )
            raise ApiError(400, message, code="too_much_text")


def _is_suspicious(body: bytes | bytearray) -> bool:
    """True if there may be a number above 64 bits or a surrogate: only such bodies are looked through."""
    for start in range(0, len(body), CHUNK):
        end = start + CHUNK + len(LONG_NUMBER)  # a number across the border is in both pieces
        if HALF.search(body, start, end) or LONG_NUMBER in body[start:end].translate(DIGITS):
            return True
    return False


def _name_the_field(body: bytes | bytearray) -> None:
    """Raise the error of a field where Python's reader, which takes more, can tell which it is."""
    if len(body) <= NAMED_BYTES and _is_suspicious(body):
        try:
            data = json.loads(body, parse_int=_integer)
        except (ValueError, RecursionError):
            return
        _check(data)


def _integer(digits: str) -> Any:
    return int(digits) if len(digits) <= MAX_DIGITS else _Huge(digits)


def _check(data: Any) -> None:
    """Raise ApiError for the first value that no field may hold; iterative, because it may be nested deeply."""
    for keys, value in _values(data):
        rule = next((rule(value) for kind, rule in RULES.items() if isinstance(value, kind)), None)
        if rule is not None:
            path = _path(keys)
            name = path[:200] or "body"
            param = re.split(r"[.\[]", name, maxsplit=1)[0] if len(path) <= 200 else None
            raise ApiError(400, f"{name}={rule}.", param=param or name, code="invalid_value")


def _values(data: Any) -> Iterator[tuple[list[Any], Any]]:
    """Every key and every value that is no container, with its path of keys and indices.

    The path is one list, which changes with the next value.
    """
    keys: list[Any] = []
    if not isinstance(data, (dict, list)):
        yield keys, data
        return
    stack = [_entries(data)]
    while stack:
        for key, value in stack[-1]:
            if isinstance(key, str):
                yield keys, key
            if isinstance(value, (dict, list)):
                keys.append(key)
                stack.append(_entries(value))
                break
            if isinstance(value, (str, int, _Huge)):
                yield [*keys, key], value
        else:
            stack.pop()
            del keys[-1:]


def _entries(data: Any) -> Iterator[tuple[Any, Any]]:
    return iter(data.items()) if isinstance(data, dict) else enumerate(data)


def _path(keys: list[Any]) -> str:
    """A path in the form ``messages[2].content``."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


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
