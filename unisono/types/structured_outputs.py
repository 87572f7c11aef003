"""StructuredOutputs and Thinking: the form of an output, checked without a grammar library.

``structured_output/`` compiles values that pass these checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.types.errors import BadRequest
from unisono.types.limits import Whole, require
from unisono.types.outputs import Concise

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The fields that define the form; a request sets one."""

MAX_CHARS = 100_000
"""Characters of a schema, expression or grammar, or of all choices together."""

MAX_DEPTH = 64
"""Nesting of a JSON schema. Reading one takes time cubic in its depth: 8 ms at 64."""


def checked(kind: str, value: Any) -> Any:
    """The stored form of ``value`` of the field ``kind``: JSON as text, choices as a tuple. Raises ValueError."""
    if kind == "json_object":
        if value is not True:
            raise ValueError("it must be true, or left out")
        return True
    if kind == "choice":
        value = _choices(value)
        length = sum(map(len, value))
    else:
        value = _json(value) if kind in ("json", "structural_tag") else value
        if not (isinstance(value, str) and value):
            raise ValueError("it must be a string that is not empty")
        length = len(value)
    if length > MAX_CHARS:
        raise ValueError(f"it has {length} characters; at most {MAX_CHARS} are taken")
    return value


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError("it must be a list of strings")
    if not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError("it must have at least one string, and none that is empty")
    return tuple(value)


def _json(value: Any) -> str:
    """JSON as text, from text or data. Properties keep their order, which the output follows."""
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            return value
        try:
            value = json.loads(value)
        except RecursionError:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from None
        except ValueError as error:
            raise ValueError(f"it is not valid JSON: {error}") from None
    if _deeper(value, MAX_DEPTH):  # the limit of Python's parser depends on its version
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    if not isinstance(value, (Mapping, bool)):
        raise ValueError("it must be a JSON object")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _deeper(value: Any, limit: int) -> bool:
    """True if objects and lists are nested deeper than ``limit``."""
    layer = [value]
    for _ in range(limit + 1):
        layer = [
            part
            for one in layer
            if isinstance(one, (Mapping, list, tuple))
            for part in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not layer:
            return False
    return True


@dataclass(frozen=True, slots=True, repr=False)
class StructuredOutputs(Concise):
    """The form of the output: exactly one of these.

    Names are vLLM's.

    json: a JSON schema, as data or text (stored as text). json_object: any JSON object. regex: a regular expression
    that matches the whole output. choice: one of these strings. grammar: Lark (rule ``start``) or EBNF (rule ``root``).
    structural_tag: vLLM's form, as data or text. disable_any_whitespace: JSON without blanks between its parts.

    Raises BadRequest. Errors inside a schema, expression or grammar are found when it is compiled.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        value = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(value) != 1:
            found = f"{', '.join(value)} are set" if value else "nothing is set"
            raise BadRequest(f"structured_outputs: {found}; set one of {', '.join(KINDS)}.", "structured_outputs")
        (kind,) = value
        try:
            object.__setattr__(self, kind, checked(kind, getattr(self, kind)))
        except ValueError as error:
            shown = repr(getattr(self, kind))
            shown = shown if len(shown) <= 80 else shown[:79] + "…"
            message = f"structured_outputs.{kind}={shown} is not valid: {error}."
            raise BadRequest(message, "structured_outputs", reason=f"{error}.") from None

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


StructuredOutputsParams = StructuredOutputs
"""vLLM's name."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A reasoning section at the output's beginning, between the marks ``start`` and ``end``.

    state: the output's beginning: ``begin`` (it may open a section), ``thinking`` (the prompt has opened one) or
    ``content``. budget: most tokens of the section; then its closing mark is forced. None: no limit.

    Raises BadRequest with the value.
    """

    start: str
    end: str
    state: str = "thinking"
    budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            require(isinstance(value, str) and value != "", f"thinking.{name}", value, "it must be the text of a mark")
        ok = self.state in THINKING_STATES
        require(ok, "thinking.state", self.state, f"it must be one of {', '.join(THINKING_STATES)}")
        limit = Whole(0)
        ok = self.budget is None or limit.holds(self.budget)
        require(ok, "thinking_token_budget", self.budget, limit.rule)


THINKING_STATES = ("begin", "thinking", "content")
