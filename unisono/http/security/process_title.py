"""Removes a secret from the command line that ``ps`` shows.

A program's arguments are readable by all users of the machine while it runs. On Linux they are in the process's own
memory, at an address that the kernel reports; there they are overwritten. Elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

ARGUMENTS = 48 - 3
"""Index of ``arg_start`` (proc(5)) among the fields of /proc/self/stat that follow the program's name."""


def hide(secret: str) -> bool:
    """Overwrite ``secret`` in the arguments, alone or after the ``=`` of one. Returns True if it was found."""
    hidden = False
    try:
        fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        start, end = int(fields[ARGUMENTS]), int(fields[ARGUMENTS + 1])
        shown = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError, IndexError):
        return False
    if not secret or start == 0 or len(shown) != end - start:
        return False
    target, at = secret.encode("utf-8", "surrogateescape"), 0
    for argument in shown.split(b"\0"):
        if argument == target or argument.endswith(b"=" + target):
            ctypes.memset(start + at + len(argument) - len(target), ord("*"), len(target))
            hidden = True
        at += len(argument) + 1
    return hidden
