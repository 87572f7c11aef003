"""Tests of texts against a structured output without a server or an engine.

``accepts("json", {"type": "integer"}, "5")`` is True. A text is accepted if the grammar takes it to its end, token by
token, like a generated answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from unisono.structured_output.syntax.parse import NOTHING, RefusedError, parse, reason
from unisono.structured_output.vocabulary import SPECIAL, build, describe, nameable
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, StructuredOutputs

END = 256


class CheckVocabulary:
    """The tokens in which texts are spelt: of a tokenizer, of a worker's description, or single bytes."""

    def __init__(self, tokenizer: Tokenizer | None = None, described: Mapping[str, Any] | None = None) -> None:
        import llguidance

        if described is None:
            described = _bytes() if tokenizer is None else describe(tokenizer, tokenizer.size, tokenizer.eos_token_ids)
        self.tokenizer, self.names = tokenizer, nameable(described)
        self.tokens, _ = build(described)
        self.matcher: Any = llguidance.LLMatcher
        self.limits = llguidance.LLParserLimits(verbose_errors=False)


@lru_cache(1)
def _of_bytes() -> CheckVocabulary:
    return CheckVocabulary()


def _bytes() -> dict[str, Any]:
    texts = [bytes([byte]) if byte != 0xFF else b"" for byte in range(256)]
    return {"texts": [*texts, SPECIAL + b"<end>"], "specials": [END], "eos": [END], "tokenizer": ""}


class TextCheck:
    """A structured output that texts are tested against.

    Raises BadRequest if it cannot be compiled.

    kind: the field of StructuredOutputs, value: its value. compact: ``disable_any_whitespace``. vocabulary: default:
    single bytes.
    """

    def __init__(self, kind: str, value: Any, compact: bool = False, vocabulary: CheckVocabulary | None = None) -> None:
        outputs = StructuredOutputs(**{kind: value})
        self._vocabulary = own = vocabulary or _of_bytes()
        try:
            grammar = parse(kind, getattr(outputs, kind), compact, own.names)
            self._matcher: Any = own.matcher(own.tokens, grammar, log_level=0, limits=own.limits)
            if self._matcher.is_error():
                raise RefusedError(self._matcher.get_error())
            first = self._matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                raise RefusedError(NOTHING)
        except ValueError as error:
            raise BadRequest(f"structured_outputs.{kind} cannot be compiled: {reason(error)}.", kind) from None

    def matcher(self) -> Any:
        """llguidance's matcher at the start of the form."""
        return self._matcher.deep_copy()

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text; without a tokenizer, the longest that fit."""
        if self._vocabulary.tokenizer is None:
            return list(self._vocabulary.tokens.greedy_tokenize(text))
        return self._vocabulary.tokenizer.encode(text, add_special_tokens=False)

    def accepts(self, text: str) -> bool:
        """True if ``text`` is a complete answer in this form."""
        tokens, matcher = self.tokens(text), self.matcher()
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def accepts(kind: str, value: Any, text: str, tokenizer: Tokenizer | None = None) -> bool:
    """True if ``text`` is a complete answer in the form of a StructuredOutputs with ``kind`` set to ``value``.

    Raises BadRequest if the form cannot be compiled.
    """
    vocabulary = None if tokenizer is None else CheckVocabulary(tokenizer)
    return TextCheck(kind, value, vocabulary=vocabulary).accepts(text)
