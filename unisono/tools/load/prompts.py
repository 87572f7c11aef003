"""Prompts of a given length in tokens, made of random words or random token ids.

A tokenizer makes lengths exact or nearly so. Without one, each word of a short list counts as one token, and the
server's own count (``usage``) has the real lengths.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from unisono.config import catalog
from unisono.text.tokenizer import Tokenizer
from unisono.types import ConfigError

Prompt = str | list[int]

_WORDS = """
time way year work day world life hand part child eye place week case point group number room fact book water
money story month right study job word business issue side kind head house service friend power hour game line
end member law car city name team minute idea body back parent face level office door health art war party
"""
WORDS = _WORDS.split()
"""Words that are one token in nearly every tokenizer."""

WORD, LETTER = re.compile(r" [a-zA-Z]{2,}"), re.compile(r"[a-zA-Z ]")
FEWEST = 16
"""Fewest distinct tokens that random text is made of."""


def span(flag: str, text: str) -> tuple[int, int]:
    """Parse a length ``N``, or a range ``A:B`` for uniform draws. Raises ConfigError."""
    first, mark, last = text.partition(":")
    try:
        low, high = int(first), int(last if mark else first)
    except ValueError:
        low, high = 0, -1
    if not 1 <= low <= high < 2**31:
        raise ConfigError(f"{flag} {text!r}: give a number of tokens, or a range A:B with 1 <= A <= B.")
    return low, high


@dataclass(frozen=True)
class PromptSource:
    """Generator of prompts. tokenizer: counts tokens; None: words are counted. vocab_size: of random token ids."""

    tokenizer: Tokenizer | None
    vocab_size: int = 0
    as_ids: bool = False
    exact: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact", self.as_ids or self.tokenizer is not None)

    def prompt(self, rng: random.Random, tokens: int) -> Prompt:
        """A prompt of ``tokens`` tokens."""
        return self.ids(rng, tokens) if self.as_ids else self.text(rng, tokens)

    def ids(self, rng: random.Random, tokens: int) -> list[int]:
        """Random token ids."""
        special = self.tokenizer.special_ids if self.tokenizer is not None else ()
        found: list[int] = []
        while len(found) < tokens:
            drawn = (rng.randrange(self.vocab_size) for _ in range(tokens - len(found)))
            found += [i for i in drawn if i not in special]
        return found

    def text(self, rng: random.Random, tokens: int) -> str:
        """Random words of ``tokens`` tokens; a few more or fewer if a tokenizer joins words."""
        if self.tokenizer is None:
            return " ".join(rng.choices(WORDS, k=tokens))
        pieces = rng.choices(self._pieces, k=tokens)
        for _ in range(4):
            have = self.count("".join(pieces))
            if have == tokens or (have > tokens and len(pieces) == 1):
                break
            pieces = pieces[: tokens - have] if have > tokens else pieces + rng.choices(self._pieces, k=tokens - have)
        return "".join(pieces)

    def count(self, prompt: Prompt) -> int:
        """Tokens of a prompt, without those that the server adds."""
        if isinstance(prompt, list):
            return len(prompt)
        if self.tokenizer is None:
            return len(prompt.split())
        return len(self.tokenizer.encode(prompt, add_special_tokens=False))

    @cached_property
    def _pieces(self) -> Sequence[str]:
        """Texts of single tokens that stay single tokens when concatenated: words, or else letters."""
        assert self.tokenizer is not None
        texts = [self.tokenizer.decode([i]) for i in range(self.tokenizer.size) if i not in self.tokenizer.special_ids]
        for kind in (WORD, LETTER):
            found = [text for text in texts if kind.fullmatch(text)]
            if len(found) >= FEWEST:
                return found
        return [" " + word for word in WORDS]


def source_of(names: Sequence[str | None], as_ids: bool) -> PromptSource:
    """The source for the first of ``names`` that is a directory or bundled checkpoint.

    as_ids: prompts are token ids, which needs a vocabulary: a tokenizer's or that of a config.json. Raises ConfigError.
    """
    for name in names:
        path = None if not name else catalog.resolve_name(name)
        if path is None or not path.is_dir():
            continue
        tokenizer, size = Tokenizer.load(path), _vocab_size(path)
        if tokenizer is not None or (as_ids and size):
            return PromptSource(
                tokenizer, min(filter(None, (size, tokenizer.size if tokenizer else 0)), default=0), as_ids
            )
    if as_ids:
        raise ConfigError("--token-ids needs a vocabulary: give --tokenizer, a directory with a tokenizer or config.")
    return PromptSource(None)


def _vocab_size(path: Path) -> int:
    """``vocab_size`` of a checkpoint's config.json; 0 if there is none."""
    try:
        config = json.loads((path / "config.json").read_text())
        return int((config.get("text_config") or config).get("vocab_size") or 0)
    except (OSError, ValueError, AttributeError):
        return 0
