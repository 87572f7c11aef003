"""The bytes of each token of a vocabulary, and llguidance's tokenizer made from them.

The engine's process reads the checkpoint's tokenizer (:func:`describe`); a process of ``worker.py`` makes an
LLTokenizer of the description (:func:`build`), without importing transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from unisono.structured_output.syntax.structural_tag import Vocabulary
from unisono.text.tokenizer import Tokenizer

SPECIAL = b"\xff"
"""Prefix of a special token's name in llguidance's vocabularies: a byte that never occurs in UTF-8."""

MARK = "\x02"
"""A character that no token spells together with another."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


@cache
def _byte_of_character() -> Mapping[str, int]:
    """Character -> byte in byte-level BPE vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level(text: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes(table[char] for char in text)
    except KeyError:  # a token added to the vocabulary as plain text
        return text.encode()


def _byte_fallback(text: str) -> bytes:
    found = _BYTE.fullmatch(text)
    return bytes([int(found[1], 16)]) if found else text.replace(_METASPACE, " ").encode()


def _speller(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """The function from a vocabulary entry to bytes, chosen by the tokenizer's decoder."""
    vocabulary = tokenizer.backend.get_vocab()
    written = _fast_json(tokenizer)
    kinds = set(_types(json.loads(written).get("decoder"))) if written else set()
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace", "Replace"} or "<0x0A>" in vocabulary:
        return _byte_fallback
    if not written and any(text.startswith("\u0120") for text in vocabulary):
        return _byte_level
    return _byte_fallback if any(text.startswith(_METASPACE) for text in vocabulary) else str.encode


def _types(decoder: Any) -> list[str]:
    """The types of a decoder of tokenizer.json and of its nested decoders."""
    if not isinstance(decoder, dict):
        return []
    return [str(decoder.get("type")), *(name for one in decoder.get("decoders") or () for name in _types(one))]


def _fast_json(tokenizer: Tokenizer) -> str:
    """The text of tokenizer.json from the ``tokenizers`` library; empty for tokenizers written in Python."""
    backend = getattr(tokenizer.backend, "_tokenizer", None)
    return str(backend.to_str()) if tokenizer.backend.is_fast and backend is not None else ""


def spellings(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of each of ``vocab_size`` tokens: a special token's name, and nothing for unused ids."""
    spell, added = _speller(tokenizer), tokenizer.backend.added_tokens_decoder
    texts = [b""] * vocab_size
    for text, i in tokenizer.backend.get_vocab().items():
        if 0 <= i < vocab_size:
            texts[i] = text.encode() if i in added else spell(text)
    return texts


def describe(tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> dict[str, Any]:
    """A vocabulary as a message for :func:`build`.

    Special tokens never belong to an answer's text: they are marked, so that only a grammar that names one allows it.
    """
    texts = spellings(tokenizer, vocab_size)
    specials = sorted({i for i in (*tokenizer.special_ids, *eos) if i < vocab_size})
    for i in specials:
        texts[i] = SPECIAL + (texts[i] or b"<|unused|>")
    texts = [b"" if text.startswith(SPECIAL) and i not in specials else text for i, text in enumerate(texts)]
    return {"texts": texts, "specials": specials, "eos": list(eos), "tokenizer": _fast_json(tokenizer)}


def nameable(described: Mapping[str, Any]) -> Vocabulary:
    """The tokens of a description that a structural tag may name."""
    texts, eos = described["texts"], frozenset(described["eos"])
    ids = {text.removeprefix(SPECIAL).decode(errors="replace"): i for i, text in enumerate(texts)}
    return Vocabulary(len(texts), ids, frozenset(described["specials"]) - eos, eos)


class _Wrapper:
    """The object that LLTokenizer reads a vocabulary from. Called with a text, it returns token ids."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.tokens: list[bytes] = list(described["texts"])
        self.special_token_ids: list[int] = list(described["specials"])
        self.eos_token_id: int = described["eos"][0]
        self._backend: Any = None
        if described["tokenizer"]:
            import tokenizers

            self._backend = tokenizers.Tokenizer.from_str(described["tokenizer"])
            self._backend.no_padding()
            self._backend.no_truncation()
        self._by_text = {text: i for i, text in enumerate(self.tokens) if text and i not in self.special_token_ids}
        self._longest = max(map(len, self._by_text), default=1)

    def __call__(self, text: str) -> list[int]:
        data = text.encode()
        if self._backend is not None:
            ids = self._encode(text)
            if self._spelt(ids) == data:
                return ids
            ids = self._encode(MARK + text)  # some tokenizers begin every text with a space
            while ids and self._spelt(ids) != data:
                del ids[0]
            if ids:
                return ids
        return self._greedy(data)

    def _encode(self, text: str) -> list[int]:
        return [i for i in self._backend.encode(text, add_special_tokens=False).ids if i < len(self.tokens)]

    def _spelt(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[i] for i in ids)

    def _greedy(self, data: bytes) -> list[int]:
        """Greedy tokenization: repeatedly the longest token that fits."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self._by_text), 0)
            if not size:
                return ids
            ids.append(self._by_text[data[at : at + size]])
            at += size
        return ids


def build(described: Mapping[str, Any]) -> tuple[Any, bool]:
    """(LLTokenizer of a description, canonical). canonical: it tokenizes text as the checkpoint does."""
    import llguidance

    wrapper = _Wrapper(described)
    made = llguidance.LLTokenizer(wrapper, eos_token=list(described["eos"]))  # type: ignore[arg-type]
    return made, bool(described["tokenizer"])
