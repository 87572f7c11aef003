"""Waiting for processes to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 5.0
"""Within which the engine is down."""


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(holds: Callable[[], bool], seconds: float = SECONDS) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, "too late"
        time.sleep(0.05)
    return time.monotonic() - began
