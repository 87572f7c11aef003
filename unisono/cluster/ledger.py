"""Ledger of begun requests, in a file that outlives the engine.

The engine process writes an id before the first pass that may compute the request. A message reports the same, but a
process that is killed at that moment loses its unsent messages. The API process reads the file once the engine is dead.
Engines on other machines have messages only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

MAX_BYTES = 1 << 20
"""Size in bytes after which the file is truncated: messages have reported the older entries."""
SUFFIX = ".started"
LOCAL = "ipc://"


class Ledger:
    """The file beside the socket at ``address``. Both processes open it before its name is removed."""

    def __init__(self, address: str) -> None:
        path = address.removeprefix(LOCAL) + SUFFIX
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600) if address.startswith(LOCAL) else None
        self._size = 0

    def write(self, request_ids: Sequence[str]) -> None:
        """Append requests that are about to begin."""
        if self._file is None:
            return
        if self._size > MAX_BYTES:
            os.ftruncate(self._file, 0)
            self._size = 0
        self._size += os.write(self._file, "".join(f"{one}\n" for one in request_ids).encode())

    def read(self) -> list[str]:
        """Return the requests that were begun last."""
        if self._file is None:
            return []
        size = os.fstat(self._file).st_size
        return os.pread(self._file, size, 0).decode(errors="replace").split("\n")

    def close(self) -> None:
        """Close the file. May be called more than once."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
