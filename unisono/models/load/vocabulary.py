"""Vocabulary of a checkpoint, for checks at start: whether two models share token ids, and samples of real text.

Reads tokenizer files itself, since only ``tokenizer.py`` handles requests' text. Called by drafters and at the engine's
start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.config.transformers_names import from_transformers
from unisono.types import CheckpointError

OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")


def strings(directory: Path, vocab_size: int) -> dict[int, str] | None:
    """String of each token id known to a model of this size; None without a tokenizer. Raises CheckpointError."""
    vocabulary = _with_tokenizer(directory, lambda tokenizer: tokenizer.get_vocab())
    return None if vocabulary is None else {i: string for string, i in vocabulary.items() if i < vocab_size}


def encode(directory: Path, texts: Sequence[str]) -> list[list[int]] | None:
    """Token ids of each text, including leading special tokens; None without a tokenizer. Raises CheckpointError."""

    def ids(tokenizer: Any) -> list[list[int]]:
        return [list(getattr(found, "ids", found)) for found in map(tokenizer.encode, texts)]

    return _with_tokenizer(directory, ids)


def _with_tokenizer(directory: Path, use: Callable[[Any], Any]) -> Any:
    """Result of ``use`` with the directory's tokenizer, of either library; None if there is none."""
    file = directory / "tokenizer.json"
    try:
        if file.is_file():  # used unchanged: transformers adds tokens to some families'
            from tokenizers import Tokenizer

            return use(Tokenizer.from_file(str(file)))
        if any((directory / name).is_file() for name in OTHER_TOKENIZERS):
            return use(from_transformers("AutoTokenizer").from_pretrained(str(directory), local_files_only=True))
    except Exception as error:  # both raise anything from KeyError to a bare Exception here
        raise CheckpointError(f"The tokenizer in {directory} cannot be loaded: {error}") from error
    return None
