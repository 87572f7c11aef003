"""Directories of Hugging Face files in Unisono's cache that describe a model stored in another form.

The rest of the engine reads directories with a config.json. The weights stay where they are, which ``source.json``
names; only a directory that this module has written may name a source. Used by ``config/gguf`` and
``config/mistral.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono.config import env
from unisono.types import CheckpointError

SOURCE = "source.json"


def describe(form: str, source: Path, state: str, files: Callable[[], Mapping[str, Any]]) -> Path:
    """Return the directory that describes ``source``, written unless it is there.

    form: name of the form. state: everything that the files depend on. files: makes them, by name: JSON values, or
    text. Raises CheckpointError if the cache cannot be written.
    """
    try:
        key = hashlib.sha256(f"{source}\n{state}".encode()).hexdigest()[:16]
        place = _home(form) / f"{source.stem[:80]}-{key}"
        if not (place / SOURCE).is_file():
            _write(place, {**files(), SOURCE: {"file": str(source)}})
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{source}: the cache of its configuration cannot be written: {error}. Set UNISONO_CACHE to a directory "
            "that can."
        ) from None
    return place


def source_of(form: str, directory: Path) -> Path | None:
    """Return what a directory describes; None for the directory of another checkpoint."""
    try:
        if directory.parent.resolve() != _home(form).resolve() or not (directory / SOURCE).is_file():
            return None
        return Path(json.loads((directory / SOURCE).read_text())["file"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def _home(form: str) -> Path:
    return env.cache_directory() / form


def _write(place: Path, files: Mapping[str, Any]) -> None:
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
