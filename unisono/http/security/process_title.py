"""Takes a secret out of the command line that ``ps`` shows.

A program's arguments are readable by all users of the machine, for as long as it runs. On Linux they lie in the
process's own memory, at an address that the kernel tells; there they are overwritten. Elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

ARGUMENTS = 48 - 3
"""Index of ``arg_start`` (proc(5)) among the fields of /proc/self/stat that follow the program's name."""


def hide(secret: str) -> bool:
    """Overwrite ``secret`` where it is an argument, or follows the ``=`` of one. Returns whether it was found."""
    hidden = False
    try:
        fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        start, end = int(fields[ARGUMENTS]), int(fields[ARGUMENTS + 1])
        shown = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError, IndexError):
        return False
    if not secret or start == 0 or len(shown) != end - start:
        return False
    wanted, at = secret.encode("utf-8", "surrogateescape"), 0
    for argument in shown.split(b"\0"):
        if argument == wanted or argument.endswith(b"=" + wanted):
            ctypes.memset(start + at + len(argument) - len(wanted), ord("*"), len(wanted))
            hidden = True
        at += len(argument) + 1
    return hidden
