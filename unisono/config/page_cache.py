"""Reading of weight files into the page cache while an engine process imports its packages.

The API process starts it before the engine process: imports take seconds in which the disk would be idle. The engine
then copies the bytes from memory, and waits only for those that are still on their way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from unisono.config.gguf.directory import source as gguf_source
from unisono.config.preflight.weights import weight_files
from unisono.types import CheckpointError

CHUNK = 1 << 26
"""Bytes of one request to the kernel."""
MOST_OF_MEMORY = 0.5
"""Largest fraction of the available memory that the files may fill: beyond it, pages would be dropped unread."""


def read_ahead(directories: Sequence[Path]) -> threading.Thread | None:
    """Have the kernel read the weight files of checkpoints, in the order in which they are loaded, in a thread.

    Returns the thread; None if the files are too large for the memory, or the system has no such request. Any error is
    the loader's to report.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    files = [file for directory in directories for file in files_of(directory)]
    total = 0
    with suppress(OSError):
        total = sum(file.stat().st_size for file in files)
    if not total or total > MOST_OF_MEMORY * available_memory():
        return None
    thread = threading.Thread(target=_request, args=(files,), name="read-weights-ahead", daemon=True)
    thread.start()
    return thread


def files_of(directory: Path) -> list[Path]:
    """The weight files of a checkpoint's directory; none if they cannot be found."""
    try:
        gguf = gguf_source(directory)
        return [gguf] if gguf is not None else weight_files(directory)[0]
    except (CheckpointError, OSError):
        return []


def _request(files: Sequence[Path]) -> None:
    """Request all pages of the files. The kernel reads on after the call returns, and skips pages that it has."""
    with suppress(OSError):
        for file in files:
            opened = os.open(file, os.O_RDONLY)
            try:
                for start in range(0, os.fstat(opened).st_size, CHUNK):
                    os.posix_fadvise(opened, start, CHUNK, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(opened)


def available_memory() -> int:
    """Bytes of memory that this process may fill, as the kernel and the process's control group tell; 0 if unknown."""
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        rows = Path("/proc/meminfo").read_text().splitlines()
        limits.append(next(int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" without a limit
    return min(limits, default=0)
