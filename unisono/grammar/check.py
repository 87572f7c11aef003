"""Tests texts against a structured output without a server or an engine.

``accepts("json", {"type": "integer"}, "5")`` is True. A text is accepted if the grammar takes it to its end, token by
token, as an answer would be written.
"""

from __future__ import annotations

from typing import Any

from unisono.grammar.parse import NOTHING, RefusedError, parse, reason
from unisono.grammar.structural_tag import Vocabulary
from unisono.grammar.vocabulary import SPECIAL, build, describe
from unisono.tokenizer import Tokenizer
from unisono.types import BadRequest, StructuredOutputs

END = 256
_BYTES: dict[str, Any] = {
    "texts": [*(bytes([byte]) if byte != 0xFF else b"" for byte in range(256)), SPECIAL + b"<end>"],
    "specials": [END],
    "eos": [END],
    "tokenizer": "",
}


class TextCheck:
    """A structured output that texts are tested against. Raises BadRequest if it cannot be compiled.

    kind: the field of StructuredOutputs, value: what it is set to. compact: as ``disable_any_whitespace``. tokenizer:
    whose tokens spell the texts; a vocabulary of single bytes by default.
    """

    def __init__(self, kind: str, value: Any, compact: bool = False, tokenizer: Tokenizer | None = None) -> None:
        import llguidance

        asked = StructuredOutputs(**{kind: value})
        described = _BYTES if tokenizer is None else describe(tokenizer, tokenizer.size, tokenizer.eos_token_ids)
        self._tokenizer = tokenizer
        made, _ = build(described)
        ids = {text.removeprefix(SPECIAL).decode(errors="replace"): i for i, text in enumerate(described["texts"])}
        eos = frozenset(described["eos"])
        vocabulary = Vocabulary(len(described["texts"]), ids, frozenset(described["specials"]) - eos, eos)
        try:
            grammar = parse(kind, getattr(asked, kind), compact, vocabulary)
            self._matcher: Any = llguidance.LLMatcher(
                made, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False)
            )
            if self._matcher.is_error():
                raise RefusedError(self._matcher.get_error())
            first = self._matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                raise RefusedError(NOTHING)
        except ValueError as error:
            raise BadRequest(f"structured_outputs.{kind} cannot be compiled: {reason(error)}.", kind) from None

    def accepts(self, text: str) -> bool:
        """Whether ``text`` is a whole answer in this form."""
        tokens = (
            list(text.encode()) if self._tokenizer is None else self._tokenizer.encode(text, add_special_tokens=False)
        )
        matcher = self._matcher.deep_copy()
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def accepts(kind: str, value: Any, text: str, tokenizer: Tokenizer | None = None) -> bool:
    """Whether ``text`` is a whole answer in the form of a StructuredOutputs with ``kind`` set to ``value``.

    Raises BadRequest if the form cannot be compiled.
    """
    return TextCheck(kind, value, tokenizer=tokenizer).accepts(text)
