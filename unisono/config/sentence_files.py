"""Limits of texts in sentence-transformers' files: ``sentence_bert_config.json``, or its name by model type.

Read by the checkpoint (the longest text) and the frontend (lower case). Imports types and checkpoint_files only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unisono.config.checkpoint_files import read_object
from unisono.types import CheckpointError

FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file, in the order in which sentence-transformers looks for it."""


@dataclass(frozen=True)
class TextRules:
    """Rules of texts. longest: tokens of a text, with special ones; None: no limit. lower_case: texts are lowered."""

    longest: int | None = None
    lower_case: bool = False


def text_rules(directory: Path) -> TextRules:
    """The rules in a directory's file; none without one. Raises CheckpointError for values that cannot be used."""
    file = next((directory / name for name in FILES if (directory / name).is_file()), None)
    if file is None:
        return TextRules()
    found = read_object(file)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again.")
    longest, lower = found.get("max_seq_length"), found.get("do_lower_case")
    if longest is not None and (not isinstance(longest, int) or isinstance(longest, bool) or longest < 2):
        raise CheckpointError(
            f"{file}: max_seq_length={repr(longest)[:80]} must be a number of tokens, at least 2, or null."
        )
    if lower not in (None, False, True):
        raise CheckpointError(f"{file}: do_lower_case={str(lower)[:80]} must be true or false.")
    return TextRules(longest, bool(lower))
