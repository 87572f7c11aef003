"""What a checkpoint's token ids spell, for checks at start: whether two models mean the same, a sample of real text.

Reads tokenizer files itself, since nothing but ``tokenizer.py`` handles requests' text. Drafters and the engine's start
call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.types import CheckpointError

OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")


def strings(directory: Path, vocab_size: int) -> dict[int, str] | None:
    """The string of each token id that a model of this size knows; None without a tokenizer. Raises CheckpointError."""
    vocabulary = _with_tokenizer(directory, lambda tokenizer: tokenizer.get_vocab())
    return None if vocabulary is None else {i: string for string, i in vocabulary.items() if i < vocab_size}


def encode(directory: Path, texts: Sequence[str]) -> list[list[int]] | None:
    """Token ids of each text, special ones before it included; None without a tokenizer. Raises CheckpointError."""

    def ids(tokenizer: Any) -> list[list[int]]:
        return [list(getattr(found, "ids", found)) for found in map(tokenizer.encode, texts)]

    return _with_tokenizer(directory, ids)


def _with_tokenizer(directory: Path, use: Callable[[Any], Any]) -> Any:
    """What ``use`` makes of the directory's tokenizer, of either library; None where there is none."""
    file = directory / "tokenizer.json"
    try:
        if file.is_file():  # as it stands: transformers adds tokens of its own to some families'
            from tokenizers import Tokenizer

            return use(Tokenizer.from_file(str(file)))
        if any((directory / name).is_file() for name in OTHER_TOKENIZERS):
            from transformers import AutoTokenizer  # slow to import

            return use(AutoTokenizer.from_pretrained(str(directory), local_files_only=True))
    except Exception as error:  # both raise anything from KeyError to a bare Exception here
        raise CheckpointError(f"The tokenizer in {directory} cannot be loaded: {error}") from error
    return None
