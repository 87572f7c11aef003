"""Cache of Triton on disk that never replaces a C extension.

Triton 3.6 compiles a launcher for each kind of kernel as a C extension. Processes that compile the same one replace
each other's file, and CPython knows an extension by its file's device and inode: a process that looks at the file just
before it is replaced remembers an inode that the next launcher may get, and then calls the wrong launcher ("function
takes exactly 38 arguments (31 given)"). Here the first file of a name stays.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES

import triton.knobs
from triton.runtime.cache import FileCacheManager


class KeptFiles(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Triton's cache of files; an extension (``.so``) is written only if there is none of its name."""

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Write a file and return its path. An extension of the same name stays, and its path is returned."""
        if not isinstance(data, bytes) or not filename.endswith(tuple(EXTENSION_SUFFIXES)):
            return str(super().put(data, filename, binary))
        path = os.path.join(self.cache_dir, filename)
        with tempfile.NamedTemporaryFile(dir=self.cache_dir) as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o755)  # other users of the directory load it, too
            try:
                with suppress(FileExistsError):
                    os.link(file.name, path)
            except OSError:  # a file system without links
                return str(super().put(data, filename, binary))
        return path


def keep_extensions() -> None:
    """Let Triton use :class:`KeptFiles`, unless its user has set another cache manager."""
    if triton.knobs.cache.manager_class is None:
        triton.knobs.cache.manager_class = KeptFiles
