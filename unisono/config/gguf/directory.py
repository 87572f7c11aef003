"""A GGUF file as a directory of Hugging Face files in Unisono's cache: config.json, tokenizer and chat template.

The rest of the engine reads directories. The weights stay in the GGUF file, which ``source.json`` names; only a
directory that this module has written may name one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from unisono.config import env
from unisono.config.gguf.header import GGUFHeader, read_gguf
from unisono.config.gguf.model import config_of
from unisono.config.gguf.tokenizer import end_ids, files_of
from unisono.types import CheckpointError

FORMAT = 1
"""Version of the written files. Change it with their contents."""

SOURCE = "source.json"


def described(file: Path) -> Path:
    """Return the directory that describes a GGUF file, written unless it is there. Raises CheckpointError."""
    file = file.absolute()
    header = read_gguf(file)
    status = file.stat()
    state = f"{FORMAT}\n{file}\n{status.st_size}\n{status.st_mtime_ns}"
    try:
        place = _home() / f"{file.stem[:80]}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
        if not (place / SOURCE).is_file():
            _write(place, _files(header))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{file}: the cache of GGUF files' configurations cannot be written: {error}. Set UNISONO_CACHE to a "
            "directory that can."
        ) from None
    return place


def source(directory: Path) -> Path | None:
    """The GGUF file that holds a directory's weights; None for the directory of another checkpoint."""
    try:
        if directory.parent.resolve() != _home().resolve() or not (directory / SOURCE).is_file():
            return None
        return Path(json.loads((directory / SOURCE).read_text())["file"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def _home() -> Path:
    return env.cache_directory() / "gguf"


def _files(header: GGUFHeader) -> dict[str, Any]:
    """The files by name: JSON values, or text."""
    files = {"config.json": config_of(header), **files_of(header)}
    if ends := end_ids(header):
        files["generation_config.json"] = {"eos_token_id": ends}
    return {**files, SOURCE: {"file": str(header.file)}}


def _write(place: Path, files: dict[str, Any]) -> None:
    """Write a directory with all files, or none."""
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        for name, content in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1)
            (made / name).write_text(text, encoding="utf-8")
        try:
            os.rename(made, place)
        except OSError:
            if not (place / SOURCE).is_file():  # another process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
