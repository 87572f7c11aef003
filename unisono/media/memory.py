"""Files in memory, which carry bytes between a process and its workers beside the messages."""

from __future__ import annotations

import os
import tempfile


def memory_file() -> int:
    """A descriptor of a file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("unisono-media", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
