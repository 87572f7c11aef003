"""Structural tags: the JSON form of xgrammar and vLLM for answers with tags, translated to Lark for llguidance.

A tag describes a text: constants, JSON of a schema, expressions, grammars and free text, in sequences and alternatives.
Adjacent plain texts become one terminal, so that a text ends where the next part begins. Free text never contains the
text that ends it. Special tokens belong to it only if a tag names tokens (``token_dispatch``, ``any_tokens``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.structured_output.syntax.ebnf import UNBOUNDED, counted, quoted
from unisono.structured_output.syntax.gemma_arguments import SharedTag, gemma_arguments
from unisono.structured_output.syntax.python_arguments import keyword_arguments
from unisono.structured_output.syntax.regex import ANYTHING, rewritten
from unisono.structured_output.syntax.xml_parameters import STYLES, parameters

Tag = Mapping[str, Any]

MAX_DEPTH = 200
MAX_PARTS = 20_000
MAX_REPEAT = 10_000


class TagError(ValueError):
    """A structural tag that cannot be compiled; the text names the part and the reason."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a tag may name. size: of the vocabulary. specials: special tokens that an answer may contain."""

    size: int
    ids: Mapping[str, int]
    specials: frozenset[int]
    eos: frozenset[int]


Embedded = Callable[[str, Any, int | None], str]
"""Translator of an embedded part to Lark: (``json`` or ``grammar``, its value, most consecutive blanks of JSON)."""


@dataclass(frozen=True)
class _Piece:
    """An expression of Lark.

    plain: the same as part of a terminal, if it is text; else empty.

    free: text that ends where the next part begins. solid: it is never empty, so that it can end free text.
    """

    rule: str
    plain: str = ""
    free: bool = False
    solid: bool = False


class TagWriter:
    """Writer of the rules of one structural tag; ``embedded`` writes its JSON and grammars."""

    def __init__(self, vocabulary: Vocabulary, embedded: Embedded) -> None:
        self._vocabulary, self._embedded = vocabulary, embedded
        self._lines: list[str] = []
        self._known: dict[str, str] = {}
        self._held: list[SharedTag] = []  # alive, so that their ids stay theirs
        self._depth = self._count = 0

    def grammar(self, tag: Tag) -> str:
        """The Lark grammar of a whole structural tag.

        Raises TagError, and errors of ``embedded`` and of expressions.
        """
        start = self._rule(_format(tag))
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])

    # ---- parts ----------------------------------------------------------------------------------

    def _rule(self, tag: Tag) -> str:
        return self._terminal([self._piece(tag)])

    def _piece(self, tag: Any) -> _Piece:
        if isinstance(tag, SharedTag):
            return self._shared(tag)
        kind = tag.get("type") if isinstance(tag, Mapping) else None
        write = getattr(self, f"_{kind}", None) if isinstance(kind, str) and kind in KINDS else None
        if write is None:
            raise TagError(f"a part's type is {kind!r}; it must be one of {', '.join(sorted(KINDS))}")
        self._depth, self._count = self._depth + 1, self._count + 1
        if self._depth > MAX_DEPTH or self._count > MAX_PARTS:
            raise TagError(f"it is nested deeper than {MAX_DEPTH}, or has more than {MAX_PARTS} parts")
        for name in ("max_tokens", "any_order"):
            if tag.get(name):
                raise TagError(f"{kind}.{name} is not supported: leave it out")
        made: _Piece = write(tag)
        self._depth -= 1
        return made

    def _const_string(self, tag: Tag) -> _Piece:
        return _constant(_string(tag, "value"))

    def _regex(self, tag: Tag) -> _Piece:
        found = rewritten(_string(tag, "pattern"), search=False)
        plain = _all_of([found.body, *found.also], found.never)
        return _Piece("", plain)

    def _any_text(self, tag: Tag) -> _Piece:
        least = _whole(tag, "min_chars") if tag.get("min_chars") is not None else 0
        most = _whole(tag, "max_chars") if tag.get("max_chars") is not None else UNBOUNDED
        bodies, never = [f"(?s:.){counted(least, most)}"], list[str]()
        for pattern in _strings(tag, "patterns"):
            found = rewritten(pattern, search=True)
            bodies += [found.body, *found.also]
            never += found.never
        return _Piece("", _all_of(bodies, never, _strings(tag, "excludes")), free=True)

    def _json_schema(self, tag: Tag) -> _Piece:
        style, schema = tag.get("style", "json"), tag.get("json_schema")
        if not isinstance(schema, (Mapping, bool)):
            raise TagError("json_schema.json_schema must be a JSON schema")
        if tag.get("excludes"):
            raise TagError("json_schema.excludes is not supported: leave it out")
        if style == "json":
            most = _whole(tag, "max_whitespace_cnt") if tag.get("max_whitespace_cnt") is not None else None
            return _Piece(self._embedded("json", schema, most))
        if style == "python":
            return self._piece(keyword_arguments(schema))
        if style == "gemma":
            quote = tag.get("quote")
            return self._piece(gemma_arguments(schema, None if quote is None else self._token_id(quote)))
        if style not in STYLES:
            names = ", ".join(("json", "python", "gemma", *STYLES))
            raise TagError(f"json_schema.style {style!r} is not supported; choose one of {names}")
        return self._piece(parameters(schema, STYLES[style]))

    def _shared(self, tag: SharedTag) -> _Piece:
        """A rule of its own, which may contain itself."""
        key = f"shared {id(tag)}"
        if key not in self._known:
            self._known[key] = name = f"shared_{len(self._known)}"
            self._held.append(tag)
            self._lines.append(f"{name}: {self._rule(tag['content'])}")
        return _Piece(self._known[key])

    def _qwen_xml_parameter(self, tag: Tag) -> _Piece:
        return self._json_schema({**tag, "style": "qwen_xml"})

    def _grammar(self, tag: Tag) -> _Piece:
        return _Piece(self._embedded("grammar", _string(tag, "grammar"), None))

    def _sequence(self, tag: Tag) -> _Piece:
        pieces = [self._piece(one) for one in _flat(tag)]
        if pieces and all(piece.plain for piece in pieces):
            return self._joined(pieces)
        return _Piece(self._terminal(pieces))

    def _or(self, tag: Tag) -> _Piece:
        pieces = [self._piece(one) for one in _list(tag, "elements")]
        if not pieces:
            raise TagError("or.elements is empty")
        if all(piece.plain and not piece.free for piece in pieces):
            solid = all(piece.solid for piece in pieces)
            return _Piece("", "(" + " | ".join(piece.plain for piece in pieces) + ")", solid=solid)
        return _Piece("(" + " | ".join(self._terminal([piece]) for piece in pieces) + ")")

    def _optional(self, tag: Tag) -> _Piece:
        return self._repeated(tag, 0, 1)

    def _star(self, tag: Tag) -> _Piece:
        return self._repeated(tag, 0, UNBOUNDED)

    def _plus(self, tag: Tag) -> _Piece:
        return self._repeated(tag, 1, UNBOUNDED)

    def _repeat(self, tag: Tag) -> _Piece:
        low, high = _whole(tag, "min"), UNBOUNDED if tag.get("max") == -1 else _whole(tag, "max")
        if high != UNBOUNDED and high < low:
            raise TagError(f"repeat.max={high} is below repeat.min={low}")
        return self._repeated(tag, low, high)

    def _repeated(self, tag: Tag, low: int, high: int) -> _Piece:
        inner = self._piece(tag.get("content"))
        sign = counted(low, high)
        if inner.plain and not inner.free:
            return _Piece("", f"({inner.plain}){sign}", solid=inner.solid and low > 0)
        return _Piece(f"({self._terminal([inner])}){sign}")

    def _tag(self, tag: Tag) -> _Piece:
        return self._sequence({"type": "sequence", "elements": _tag_parts(tag)})

    # ---- free text with triggers ----------------------------------------------------------------

    def _triggered_tags(self, tag: Tag) -> _Piece:
        tags, triggers = _list(tag, "tags"), _strings(tag, "triggers")
        rules = []
        for trigger in triggers:
            own = [one for one in tags if isinstance(one.get("begin"), str) and one["begin"].startswith(trigger)]
            parts = [_sequence(_tag_parts({**one, "begin": one["begin"].removeprefix(trigger)})) for one in own]
            if parts:
                rules.append([trigger, _either(parts)])
        if not rules or any(not any(str(one.get("begin")).startswith(t) for t in triggers) for one in tags):
            raise TagError("triggered_tags: every tag's begin must start with one of triggers")
        text = {"type": "dispatch", "rules": rules, "excludes": tag.get("excludes", [])}
        return self._triggered(tag, tags, text)

    def _token_triggered_tags(self, tag: Tag) -> _Piece:
        tags = _list(tag, "tags")
        triggers = [self._token_id(one) for one in _list(tag, "trigger_tokens")]
        rules = []
        for one in tags:
            begin = one.get("begin")
            if not isinstance(begin, Mapping) or self._token_id(begin.get("token")) not in triggers:
                raise TagError("token_triggered_tags: every tag's begin must be one of trigger_tokens")
            rules.append([begin["token"], _sequence(_tag_parts(one)[1:])])
        text = {"type": "token_dispatch", "rules": rules, "exclude_tokens": tag.get("exclude_tokens", [])}
        return self._triggered(tag, tags, text)

    def _triggered(self, tag: Tag, tags: Sequence[Tag], text: Tag) -> _Piece:
        """Free text with tags: ``at_least_one`` begins with one, ``stop_after_first`` ends with the first."""
        first = _either([_sequence(_tag_parts(one)) for one in tags])
        if tag.get("at_least_one"):
            return self._piece(first if tag.get("stop_after_first") else _sequence([first, {**text, "loop": True}]))
        return self._piece({**text, "loop": not tag.get("stop_after_first")})

    def _tags_with_separator(self, tag: Tag) -> _Piece:
        one = _either([_sequence(_tag_parts(part)) for part in _list(tag, "tags")])
        more = {
            "type": "star",
            "content": _sequence([{"type": "const_string", "value": _string(tag, "separator")}, one]),
        }
        some = one if tag.get("stop_after_first") else _sequence([one, more])
        return self._piece(some if tag.get("at_least_one") else {"type": "optional", "content": some})

    def _dispatch(self, tag: Tag) -> _Piece:
        rules = _rules(tag)
        texts = [trigger for trigger, _ in rules]
        if not all(isinstance(text, str) and text for text in texts):
            raise TagError("dispatch.rules: a pattern must be a string that is not empty")
        stops = [*texts, *_strings(tag, "excludes")]
        parts = []
        for trigger, content in rules:
            head = self._define(f"{_all_of([ANYTHING], [], stops)} {quoted(trigger)}")
            parts.append(f"{head} {self._rule(content)}")
        rest = self._define(_all_of([ANYTHING], [], stops))
        tagged = " | ".join(parts)
        if not parts:
            return _Piece(rest)
        return _Piece(f"(({tagged})* {rest})" if tag.get("loop", True) else f"({tagged} | {rest})")

    def _token_dispatch(self, tag: Tag) -> _Piece:
        rules = [(self._token_id(trigger), content) for trigger, content in _rules(tag)]
        excluded = {self._token_id(one) for one in tag.get("exclude_tokens") or ()}
        text = self._free_tokens(excluded | {i for i, _ in rules})
        tagged = " | ".join(f"<[{i}]> {self._rule(content)}" for i, content in rules)
        if not rules:
            return _Piece(text)
        return _Piece(f"(({text} ({tagged}))* {text})" if tag.get("loop", True) else f"({text} ({tagged})?)")

    # ---- tokens ---------------------------------------------------------------------------------

    def _token(self, tag: Tag) -> _Piece:
        return _Piece(f"<[{self._token_id(tag.get('token'))}]>")

    def _any_tokens(self, tag: Tag) -> _Piece:
        return _Piece(self._free_tokens({self._token_id(one) for one in tag.get("exclude_tokens") or ()}))

    def _exclude_token(self, tag: Tag) -> _Piece:
        return _Piece(self._one_token({self._token_id(one) for one in tag.get("exclude_tokens") or ()}))

    def _free_tokens(self, excluded: set[int]) -> str:
        """Any number of tokens, except ``excluded`` and those that end an answer."""
        if not excluded <= self._vocabulary.specials | self._vocabulary.eos:
            return f"{self._one_token(excluded)}*"
        left = _ranges(self._vocabulary.specials - excluded)
        text = self._define(f"/{ANYTHING}/")
        return f"({text} (<[{left}]> {text})*)" if left else text

    def _one_token(self, excluded: set[int]) -> str:
        left = set(range(self._vocabulary.size)) - excluded - self._vocabulary.eos
        return f"<[{_ranges(left)}]>"

    def _token_id(self, token: Any) -> int:
        if isinstance(token, str):
            if token not in self._vocabulary.ids:
                raise TagError(f"the vocabulary has no token {token!r}")
            return self._vocabulary.ids[token]
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocabulary.size:
            raise TagError(f"token {token!r} is not an id below {self._vocabulary.size}, nor a token's text")
        return token

    # ---- terminals ------------------------------------------------------------------------------

    def _joined(self, pieces: Sequence[_Piece]) -> _Piece:
        """Merge adjacent plain texts; free text ends before the next piece that is never empty."""
        texts = [piece.plain for piece in pieces]
        for place, piece in enumerate(pieces):
            end = next((at for at in range(place + 1, len(pieces)) if pieces[at].solid), None)
            if piece.free and end is not None:
                texts[place] = f"({piece.plain} & ~(/{ANYTHING}/ {' '.join(texts[place + 1 : end + 1])} /{ANYTHING}/))"
        return _Piece("", " ".join(texts), free=pieces[-1].free, solid=any(piece.solid for piece in pieces))

    def _terminal(self, pieces: Sequence[_Piece]) -> str:
        """Pieces as an expression of rules: runs of plain text become terminals."""
        written: list[str] = []
        run: list[_Piece] = []
        for piece in (*pieces, None):
            if piece is not None and piece.plain:
                run.append(piece)
                continue
            if run:
                written.append(self._define(self._joined(run).plain))
                run = []
            if piece is not None:
                written.append(piece.rule)
        return " ".join(text for text in written if text) or '""'

    def _define(self, body: str) -> str:
        """The name of a terminal; a constant is used directly."""
        if body.startswith('"') and _is_constant(body):
            return body
        if body not in self._known:
            self._known[body] = f"TEXT_{len(self._known)}"
            self._lines.append(f"{self._known[body]}: {body}")
        return self._known[body]


KINDS = frozenset(
    name[1:]
    for name in (
        "_const_string", "_regex", "_any_text", "_json_schema", "_qwen_xml_parameter", "_grammar", "_sequence", "_or",
        "_optional", "_star", "_plus", "_repeat", "_tag", "_triggered_tags", "_token_triggered_tags",
        "_tags_with_separator", "_dispatch", "_token_dispatch", "_token", "_any_tokens", "_exclude_token",
    )
)  # fmt: skip
"""The supported types of parts: a method of TagWriter each."""


def _format(tag: Tag) -> Tag:
    """The format in a structural tag; also of the older form with ``structures`` and ``triggers``."""
    if tag.get("type") != "structural_tag":
        raise TagError('type must be "structural_tag"')
    if isinstance(tag.get("format"), Mapping):
        return dict(tag["format"])
    if "structures" in tag and "triggers" in tag:
        tags = []
        for one in _list(tag, "structures"):
            schema = one.get("schema")
            schema = json.loads(schema) if isinstance(schema, str) else schema
            content = {"type": "json_schema", "json_schema": schema}
            tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    raise TagError("it needs a format")


def _constant(text: str) -> _Piece:
    return _Piece('""') if not text else _Piece("", quoted(text), solid=True)


def _is_constant(body: str) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _all_of(bodies: Sequence[str], never: Sequence[str], excludes: Iterable[str] = ()) -> str:
    """A terminal that matches each of ``bodies``, none of ``never``, and contains none of ``excludes``."""
    parts = [f"/{body}/" for body in bodies]
    parts += [f"~/{body}/" for body in never]
    parts += [f"~(/{ANYTHING}/ {quoted(text)} /{ANYTHING}/)" for text in dict.fromkeys(excludes)]
    return parts[0] if len(parts) == 1 else "(" + " & ".join(parts) + ")"


def _ranges(ids: Iterable[int]) -> str:
    """Token ids in Lark's form: ``0-5,7``."""
    found: list[list[int]] = []
    for i in sorted(ids):
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _tag_parts(tag: Tag) -> list[Tag]:
    """A tag as a sequence: its begin, its content and its end."""
    begin, end = tag.get("begin"), tag.get("end")
    if "content" not in tag:
        raise TagError("tag.content is missing")
    ends = end if isinstance(end, Sequence) and not isinstance(end, str) else [end]
    return [_mark(begin, "begin"), tag["content"], _either([_mark(one, "end") for one in ends])]


def _mark(mark: Any, name: str) -> Tag:
    if isinstance(mark, Mapping):
        return mark
    if not isinstance(mark, str):
        raise TagError(f"tag.{name} must be a string or a token")
    return {"type": "const_string", "value": mark}


def _sequence(elements: Sequence[Tag]) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def _either(tags: Sequence[Tag]) -> Tag:
    return tags[0] if len(tags) == 1 else {"type": "or", "elements": list(tags)}


def _flat(tag: Tag) -> list[Any]:
    """A sequence's elements, with nested sequences flattened."""
    found: list[Any] = []
    for one in _list(tag, "elements"):
        if one.get("type") == "sequence":
            found += _flat(one)
        elif one.get("type") == "tag":
            found += _flat(_sequence(_tag_parts(one)))
        elif not (one.get("type") == "const_string" and one.get("value") == ""):
            found.append(one)
    return found


def _list(tag: Tag, name: str) -> list[Any]:
    value = tag.get(name)
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value if name != "trigger_tokens"):
        raise TagError(f"{tag.get('type')}.{name} must be a list of objects")
    return value


def _rules(tag: Tag) -> list[tuple[Any, Tag]]:
    rules = tag.get("rules")
    if not isinstance(rules, list) or not all(isinstance(one, list) and len(one) == 2 for one in rules):
        raise TagError(f"{tag.get('type')}.rules must be a list of pairs: what begins it, and what follows")
    return [(trigger, content) for trigger, content in rules]


def _string(tag: Tag, name: str) -> str:
    value = tag.get(name)
    if not isinstance(value, str):
        raise TagError(f"{tag.get('type')}.{name} must be a string")
    return value


def _strings(tag: Tag, name: str) -> list[str]:
    value = tag.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise TagError(f"{tag.get('type')}.{name} must be a list of strings that are not empty")
    return value


def _whole(tag: Tag, name: str) -> int:
    value = tag.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_REPEAT:
        raise TagError(f"{tag.get('type')}.{name} must be a whole number from 0 to {MAX_REPEAT}")
    return value
