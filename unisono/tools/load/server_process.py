"""A server started by a benchmark: ``unisono serve`` in its own process."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from unisono.config.flag_aliases import nearest
from unisono.types import ConfigError, UnisonoError

START_LIMIT, END_LIMIT = 600.0, 60.0
"""Seconds for a server to start, and to end after SIGTERM."""


def check_flags(model: str, context: typer.Context) -> None:
    """Check that ``unisono serve`` knows the further flags of a benchmark, before anything runs.

    context: of the benchmark's command; the advice about an unknown flag names one of its own. Raises ConfigError.
    """
    own = {name for option in context.command.params for name in option.opts}
    command = [sys.executable, "-m", "unisono", "serve", model, *context.args, "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        message = result.stderr.strip().removeprefix("Error: ")
        unknown = re.match(r"(--\S+) is unknown", message)
        if unknown is not None and (near := nearest(unknown[1], own)) is not None:
            message = f"{unknown[1]} is unknown. Did you mean {near}?"
        raise ConfigError(message)


def wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL in a starting server's log, once it serves. Raises UnisonoError if it ends or takes too long."""
    end = time.monotonic() + START_LIMIT
    while (match := re.search(r"Serving .* on (https?://\S+)/v1", log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > end:
            raise UnisonoError(f"The server did not start: {log.read_text()[-600:]}")
        time.sleep(0.05)
    return match[1]


@contextlib.contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[str]:
    """The URL of a server for ``model`` that runs during this context."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server ends with this process
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        log = Path(directory) / "log"
        command = [sys.executable, "-m", "unisono", "serve", model, "--port", "0", *flags]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            yield wait_for_url(process, log)
        finally:
            process.terminate()
            try:
                process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
