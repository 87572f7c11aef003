"""Seconds that imports spend compiling modules without bytecode, and a warning if every start will spend them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source

WORTH_SECONDS = 0.5
"""Seconds of compilation from which on a warning is due."""


@dataclass
class CompiledImports:
    """Modules that imports compiled, by the paths of their sources, and the seconds that it took."""

    paths: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def warning(self) -> str | None:
        """A line for the log if the work was long and its result is lost; else None."""
        if self.seconds < WORTH_SECONDS or self._kept():
            return None
        reason = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "their directories are not writable"
        return (
            f"Python compiled {len(self.paths)} modules in {self.seconds:.1f} s, and so will every start: {reason} and "
            "they have no bytecode. Run python -m compileall on the installed packages, or give UNISONO_BYTECODE a "
            "writable directory."
        )

    def _kept(self) -> bool:
        """True if the bytecode of the last module was written."""
        return not self.paths or os.path.exists(cache_from_source(self.paths[-1]))


@contextmanager
def counted() -> Iterator[CompiledImports]:
    """Count the modules that are compiled within a block. Not reentrant."""
    found, compile_source = CompiledImports(), SourceFileLoader.source_to_code

    def source_to_code(self: SourceFileLoader, data: object, path: str, **options: int) -> object:
        began = time.thread_time()
        code = compile_source(self, data, path, **options)  # type: ignore[arg-type]
        found.seconds += time.thread_time() - began
        found.paths.append(str(path))
        return code

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        del SourceFileLoader.source_to_code  # it is inherited
