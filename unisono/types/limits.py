"""Limits of the values in a request, and the table of limits of sampling parameters.

``types.SamplingParams`` checks its fields by :data:`SAMPLING`. ``http/limits/fields.py`` has the tables of all request
bodies, built from the same classes. A limit is checked before anything reads the value, and no check takes longer for a
larger value than its limit allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unisono.types.errors import BadRequest

MAX_STOP_IDS = 16
"""Stop token ids per slot on the device, EOS ids included."""

MAX_STOPS, MAX_STOP_CHARS = 256, 1024
"""Stop strings of a request, and characters of each."""

MAX_BIASES = 300
"""Entries of ``logit_bias``: OpenAI's limit."""

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 16
"""Token sequences that a request may forbid, and their length. A word gives up to two, one with a leading space."""

MAX_BAD_WORD_CHARS = 1024
"""Characters of a forbidden word; it is tokenized before its tokens are counted."""

MAX_LOGPROBS = 20
"""Alternatives per position that the kernel finds. A larger number copies whole rows of logits to the host."""

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
"""Values of ``--logprobs-mode``; vLLM's names."""

MAX_LOGPROB_IDS = 128
"""Tokens in ``logprob_token_ids``; vLLM's limit."""

MAX_SEQUENCES = 128
"""Largest ``n``; OpenAI's limit."""

MAX_TOKEN_IDS = 1 << 20
"""Token ids in a list that is not a prompt: more than any vocabulary has."""

MAX_REPEATED_IDS = 1 << 20
"""Entries of ``allowed_token_ids`` times the sequences of a request: each sequence has the list."""

MAX_COPIED_BYTES = 1 << 29
"""Bytes that a request's further sequences repeat: prompts, embeddings, pixels, ``extra_args``, grammars."""

MAX_PATTERNS, MAX_PATTERN_CHARS = 16, 1000
"""Expressions of ``stop_regex``, and the characters of each."""

MAX_EXTRA_ARGS = 64
"""Parameters of features that other packages add."""

MAX_SEED = 2**63 - 1
MAX_INT32 = 2**31 - 1

SHOWN_CHARS = 80
"""Characters of a value in an error."""


class Limit(Protocol):
    """A limit of one value."""

    def problem(self, value: Any) -> str | None:
        """The rule that ``value`` breaks, to follow "name=value is …"; None for a value within the limit.

        Values of other types pass: their type is checked elsewhere.
        """

    def __str__(self) -> str:
        """The limit in the words of docs/reference/limits.md."""


@dataclass(frozen=True)
class Whole:
    """A whole number from ``least`` to ``most``. note: meaning of a special value, appended to the rule."""

    least: int
    most: int = MAX_INT32
    note: str = ""

    def holds(self, value: Any) -> bool:
        """True for an integer in range; bool is no integer here."""
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most

    @property
    def rule(self) -> str:
        """The rule in words."""
        many = self.most in (MAX_INT32, MAX_SEED)
        span = f"≥ {self.least}, at most {self.most}" if many else f"from {self.least} to {self.most}"
        return f"it must be a whole number {span}" + (f"; {self.note}" if self.note else "")

    def problem(self, value: Any) -> str | None:
        counted = isinstance(value, (int, float)) and not isinstance(value, bool)
        return self.rule if counted and not self.holds(value) else None

    def __str__(self) -> str:
        return f"{self.least} to {self.most}"


@dataclass(frozen=True)
class Real:
    """A finite number from ``least`` to ``most``. above: exclude ``least``. note: appended to the rule."""

    least: float
    most: float
    note: str = ""
    above: bool = False

    def holds(self, value: Any) -> bool:
        """True for a finite number in range; bool is no number here."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    @property
    def rule(self) -> str:
        """The rule in words."""
        least, most = f"{self.least:g}", f"{self.most:g}"
        span = f"above {least} and at most {most}" if self.above else f"between {least} and {most}"
        return f"it must be {span}" + (f"; {self.note}" if self.note else "")

    def problem(self, value: Any) -> str | None:
        counted = isinstance(value, (int, float)) and not isinstance(value, bool)
        return self.rule if counted and not self.holds(value) else None

    def __str__(self) -> str:
        return f"{'above ' if self.above else ''}{self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Chars:
    """A string of at most ``most`` characters."""

    most: int

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, str) or len(value) <= self.most:
            return None
        return f"it has {len(value)} characters; at most {self.most} are taken"

    def __str__(self) -> str:
        return f"{self.most} characters"


@dataclass(frozen=True)
class Items:
    """A list of at most ``most`` entries, each within ``each``."""

    most: int
    each: Limit | None = None

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, (list, tuple)):
            return None if self.each is None else self.each.problem(value)  # one value in place of a list
        if len(value) > self.most:
            return f"it has {len(value)} entries; at most {self.most} are taken"
        if self.each is None:
            return None
        for i, one in enumerate(value):
            if (problem := self.each.problem(one)) is not None:
                return f"entry {i}: {problem}"
        return None

    def __str__(self) -> str:
        return f"{self.most} entries" + (f", each {self.each}" if self.each is not None else "")


@dataclass(frozen=True)
class Entries:
    """An object of at most ``most`` entries, with names of at most ``name_chars`` characters."""

    most: int
    each: Limit | None = None
    name_chars: int = 256

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return None
        if len(value) > self.most:
            return f"it has {len(value)} entries; at most {self.most} are taken"
        for name, one in value.items():
            if isinstance(name, str) and len(name) > self.name_chars:
                return f"a name in it has {len(name)} characters; at most {self.name_chars} are taken"
            if self.each is not None and (problem := self.each.problem(one)) is not None:
                return f"{shown(name)} has {shown(one)}: {problem}"
        return None

    def __str__(self) -> str:
        each = f", each {self.each}" if self.each is not None else ""
        return f"{self.most} entries, names of {self.name_chars} characters{each}"


@dataclass(frozen=True)
class Fields:
    """An object of at most ``most`` entries, some of which have limits by name."""

    limits: Mapping[str, Limit]
    most: int = 16

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return None
        if len(value) > self.most:
            return f"it has {len(value)} entries; at most {self.most} are taken"
        for name, limit in self.limits.items():
            if (problem := limit.problem(value.get(name))) is not None:
                return f"{name}={shown(value[name])}: {problem}"
        return None

    def __str__(self) -> str:
        return "; ".join(f"`{name}`: {limit}" for name, limit in self.limits.items()) or f"{self.most} entries"


@dataclass(frozen=True)
class Data:
    """Any JSON of at most ``most`` characters, by :func:`weight`."""

    most: int

    def problem(self, value: Any) -> str | None:
        if weight(value, self.most) <= self.most:
            return None
        return f"it has more than {self.most} characters of JSON, which is the most that is taken"

    def __str__(self) -> str:
        return f"{self.most} characters of JSON"


@dataclass(frozen=True)
class Both:
    """Several limits of one value."""

    limits: tuple[Limit, ...]

    def problem(self, value: Any) -> str | None:
        return next((found for one in self.limits if (found := one.problem(value)) is not None), None)

    def __str__(self) -> str:
        return "; ".join(map(str, self.limits))


def weight(value: Any, most: int) -> int:
    """Characters of ``value`` as JSON, a lower bound: texts and names, and 2 for any other value.

    Stops above ``most``.
    """
    total, stack = 0, [value]
    while stack and total <= most:
        one = stack.pop()
        if isinstance(one, str):
            total += len(one)
            continue
        total += 2
        if isinstance(one, Mapping):
            total += 2 * len(one)
            if total <= most:
                total += sum(len(name) for name in one if isinstance(name, str))
                stack += one.values()
        elif isinstance(one, (list, tuple)):
            if total + 2 * len(one) > most:
                return total + 2 * len(one)
            stack += one
    return total


def shown(value: object) -> str:
    """``repr`` of a value, cut to :data:`SHOWN_CHARS` without reading the rest."""
    if isinstance(value, (str, bytes)):
        text = repr(value[: SHOWN_CHARS + 1])
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{shown(name)}: {shown(one)}" for name, one in _first(value.items())) + "}"
    elif isinstance(value, (list, tuple)):
        inner = ", ".join(shown(one) for one in _first(value))
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{comma})"
    elif isinstance(value, int) and value.bit_length() > 1024:
        text = f"a number of {value.bit_length()} bits"
    else:
        text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def _first(values: Any) -> Sequence[Any]:
    return [one for one, _ in zip(values, range(SHOWN_CHARS // 2), strict=False)]


TOKEN_IDS = Items(MAX_TOKEN_IDS)

SAMPLING: Mapping[str, Limit] = {
    "temperature": Real(0, 100, "0 is greedy"),
    "top_k": Whole(0, note="0 (or -1) keeps all"),
    "top_p": Real(0, 1, "1 keeps all", above=True),
    "min_p": Real(0, 1, "0 drops none"),
    "seed": Whole(0, MAX_SEED),
    "max_tokens": Whole(1),
    "min_tokens": Whole(0, note="from 0 to max_tokens"),
    "max_drafts": Whole(0, note="0 turns speculation off"),
    "n": Whole(1, MAX_SEQUENCES),
    "stop": Items(MAX_STOPS, Chars(MAX_STOP_CHARS)),
    "stop_regex": Items(MAX_PATTERNS, Chars(MAX_PATTERN_CHARS)),
    "stop_token_ids": Items(MAX_STOP_IDS),
    "bad_words": Items(MAX_BAD_WORDS, Chars(MAX_BAD_WORD_CHARS)),
    "allowed_token_ids": TOKEN_IDS,
    "logprobs": Whole(-1, note="-1 reports the whole vocabulary, and otherwise the number is ≥ 0"),
    "logprob_token_ids": Items(MAX_LOGPROB_IDS),
    "prompt_logprobs": Whole(0, MAX_LOGPROBS),
    "logprob_start_len": Whole(0),
    "routed_experts_prompt_start": Whole(0),
    "repetition_penalty": Real(0, 100, "1 is off", above=True),
    "presence_penalty": Real(-2, 2, "0 is off"),
    "frequency_penalty": Real(-2, 2, "0 is off"),
    "logit_bias": Entries(MAX_BIASES, Real(-100, 100), name_chars=20),
    "truncate_prompt_tokens": Whole(-1, note="≥ 1, or -1 for what the context leaves"),
    "extra_args": Both((Entries(MAX_EXTRA_ARGS), Data(1 << 20))),
}
"""Limits of the fields of ``types.SamplingParams``; those of other fields follow from their types."""


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise BadRequest with the field, its value and the rule, unless ``ok``."""
    if not ok:
        raise BadRequest(f"{name}={shown(value)} is out of range: {rule}.", param=name)


def is_int(value: object) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
