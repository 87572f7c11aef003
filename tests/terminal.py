"""A program in a pseudo-terminal: what a person would see and type."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """The program's side of it is ``process``; ``shown`` is everything that it has written."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.shown = ""
        self._bytes = b""
        self._seen = 0

    def wait_for(self, text: str, limit: float = 60) -> str:
        """Read until ``text`` is shown after what was waited for before; returns what is between, colours left out."""
        end = time.monotonic() + limit
        while (place := (plain := CODES.sub("", self.shown)).find(text, self._seen)) < 0:
            assert time.monotonic() < end, f"{text!r} is not shown:\n{self.shown}"
            self._read(0.2)
        new, self._seen = plain[self._seen : place + len(text)], place + len(text)
        return new

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C, again every few seconds, until ``text`` is shown: the first may come before the input waits."""
        for left in reversed(range(6)):
            self.interrupt()
            try:
                self.wait_for(text, 10)
            except AssertionError:
                if not left:
                    raise
            else:
                return

    def wait_end(self, limit: float = 60) -> int:
        """The exit status."""
        end = time.monotonic() + limit
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it did not end:\n{self.shown}"
            self._read(0.05)
        self._read(0.05)
        return self.process.returncode

    def _read(self, seconds: float) -> None:
        if select.select([self._master], [], [], seconds)[0]:
            with contextlib.suppress(OSError):  # the other side is closed
                self._bytes += os.read(self._master, 65536)
                self.shown = self._bytes.decode(errors="replace")


@contextlib.contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """``unisono`` with these arguments in a terminal of 80 columns."""
    master, slave = os.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "OMP_NUM_THREADS": "1", **environment}
    variables.pop("NO_COLOR", None)
    variables |= {name: value for name, value in environment.items() if name == "NO_COLOR"}
    command = [sys.executable, "-m", "unisono", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
