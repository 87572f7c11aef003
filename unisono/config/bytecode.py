"""Bytecode of a program whose packages have none: written to a cache directory of the user, and read from it.

A start imports 3,600 modules. Python compiles each that has no bytecode, 2 to 4 s in all, and keeps the result beside
the source unless that directory is read-only or ``PYTHONDONTWRITEBYTECODE`` is set, as in many images. The program
``unisono`` calls :func:`keep_bytecode` before any other import. A program that imports the package is left alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

from unisono.config import env

LARGEST = "torch"
"""The package with most of the modules. It stands for all."""
PREFIX, NEVER = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def keep_bytecode() -> Path | None:
    """Have this process and its children keep bytecode in ``env.bytecode()``, if Python has none and would keep none.

    Returns the directory; None if nothing was changed: bytecode exists, Python writes it by itself, the user has named
    a directory for it, or the cache directory is not writable or not the user's own.
    """
    if sys.pycache_prefix is not None or _python_keeps_it():
        return None
    directory = env.bytecode()
    if directory is None or not _own(directory):
        return None
    sys.pycache_prefix = os.environ[PREFIX] = str(directory)
    sys.dont_write_bytecode = False
    os.environ.pop(NEVER, None)
    return directory


def _python_keeps_it() -> bool:
    """True if the package LARGEST is absent, has bytecode, or gets it at its first import."""
    found = importlib.util.find_spec(LARGEST)
    if found is None or found.origin is None or found.cached is None:
        return True
    if os.path.exists(found.cached):
        return True
    return not sys.dont_write_bytecode and os.access(os.path.dirname(found.origin), os.W_OK)


def _own(directory: Path) -> bool:
    """True for a directory, made if it is absent, that this user owns and nobody else may write: Python runs its
    contents.
    """
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.stat()
        return state.st_uid == os.geteuid() and not state.st_mode & 0o022 and os.access(directory, os.W_OK)
    return False
