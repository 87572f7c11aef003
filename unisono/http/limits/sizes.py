"""Sizes, counts and times that ``connections`` enforces.

Imports nothing slow: a server reads them before it starts its engine.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

SPARE_FILES = 256
"""Open files reserved for the engine, logs and libraries."""


@dataclass(frozen=True)
class Limits:
    """Limits of connections.

    head_bytes, headers: of a request's line and headers. head_seconds: time to send them, from the connection or the
    first byte on. body_seconds, body_rate: time for a body, plus one second per ``body_rate`` bytes. connections: open
    at once, idle ones included. write_seconds: time in which a client must read at least one byte of its answer.
    ahead_bytes: buffered pipelined bytes of all connections together.
    """

    head_bytes: int = 64 * 2**10
    headers: int = 128
    head_seconds: float = 20.0
    body_seconds: float = 30.0
    body_rate: int = 16 * 2**10
    connections: int = 4096
    write_seconds: float = 300.0
    ahead_bytes: int = 64 * 2**20

    def within_open_files(self) -> Limits:
        """These limits, with at most as many connections as this process may open."""
        return replace(self, connections=min(self.connections, open_files()))


def open_files() -> int:
    """Raise this process's limit of open files to its maximum; returns the number of possible connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):  # macOS reports more than it grants
        limit = soft
    return max(16, limit - SPARE_FILES)
