"""A GGUF file as a directory of Hugging Face files in Unisono's cache: config.json, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.config.described import describe, source_of
from unisono.config.gguf.header import GGUFHeader, read_gguf
from unisono.config.gguf.model import config_of
from unisono.config.gguf.tokenizer import end_ids, files_of

FORMAT = 1
"""Version of the written files. Change it with their contents."""

FORM = "gguf"


def described(file: Path) -> Path:
    """Return the directory that describes a GGUF file, written unless it is there. Raises CheckpointError."""
    file = file.absolute()
    header, status = read_gguf(file), file.stat()
    return describe(FORM, file, f"{FORMAT}\n{status.st_size}\n{status.st_mtime_ns}", lambda: _files(header))


def source(directory: Path) -> Path | None:
    """The GGUF file that holds a directory's weights; None for the directory of another checkpoint."""
    return source_of(FORM, directory)


def _files(header: GGUFHeader) -> dict[str, Any]:
    """The files by name: JSON values, or text."""
    files = {"config.json": config_of(header), **files_of(header)}
    if ends := end_ids(header):
        files["generation_config.json"] = {"eos_token_id": ends}
    return files
