"""The servers of ``python -m benchmarks.soak``: processes, memory, and what they hold when nothing runs.

Files and processes are counted by kind, so that a report of a leak names what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.structured_output.workers.processes import LANES
from unisono.tools.load.server_process import wait_for_url

IDLE_LIMIT, END_LIMIT = 60.0, 60.0
"""Seconds for a server to hold nothing after the last answer, and to end."""
KEEP_ALIVE, SETTLED = 15, 25.0
"""Seconds until the server closes an idle connection, and until files and processes that stay count as left: a client
that leaves in the middle of an answer may keep its socket open, which is not the server's fault.
"""
API = "the API process"
COMPILER = "unisono.structured_output.workers.worker, forked"
LANE = f"{COMPILER}, forked"


@dataclass
class Held:
    """What a server holds when nothing runs.

    files: open ones of the API process and of the engine process, by kind. processes: by kind.
    """

    pages: float
    running: float
    waiting: float
    load: float
    files: tuple[Counter[str], Counter[str]]
    processes: Counter[str] = field(default_factory=Counter)

    def left_beyond(self, before: Held) -> list[str]:
        """Files and processes of which there are more than before, in words.

        A grammar's second to last lane starts when as many outputs follow it at once, and stays as long as the grammar
        is kept: lanes count where there are more than a grammar may have.
        """
        found = []
        lanes = min(self.processes[LANE], LANES * self.processes[COMPILER])
        before = replace(before, processes=before.processes | Counter({LANE: lanes}))
        kinds = ("files of the API process", "files of the engine process", "processes")
        pairs = zip((*before.files, before.processes), (*self.files, self.processes), strict=True)
        for kind, (old, new) in zip(kinds, pairs, strict=True):
            if new.total() > old.total():
                names = ", ".join(f"{name} {old[name]} → {new[name]}" for name in sorted(new - old))
                found.append(f"{kind}: {old.total()} before, {new.total()} after: {names}")
        return found


class SoakServer:
    """A server in a process of its own. log: its output. temp: its temporary directory."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, temp: Path) -> None:
        self.process, self.log, self.temp = process, log, temp
        self.url = wait_for_url(process, log)

    async def held_after(self, client: Any, before: Held) -> Held:
        """What the server holds once it holds no more than before, or after SETTLED seconds."""
        end = time.monotonic() + SETTLED
        while (found := await self.held(client)).left_beyond(before) and time.monotonic() < end:
            await asyncio.sleep(1)
        return found

    async def held(self, client: Any) -> Held:
        """What the server holds once it is idle, or after IDLE_LIMIT seconds."""
        end = time.monotonic() + IDLE_LIMIT
        while True:
            await asyncio.sleep(2.5)  # an idle engine checks its bookkeeping after a second
            numbers = await metrics(client)
            load = (await client.http.get("/load")).json()["server_load"]
            held = (numbers["kv_cache_usage_perc"], numbers["num_requests_running"], numbers["num_requests_waiting"])
            if not any((*held, load)) or time.monotonic() > end:
                break
        await client.http.aclose()  # its connections are files of the server's
        await asyncio.sleep(0.5)
        processes = self._processes()
        files = files_by_kind(self.process.pid), files_by_kind(self._engine(list(processes)))
        client.reopen()
        return Held(*held, load, files, Counter(processes.values()))

    def memory(self) -> Counter[str]:
        """KiB that are no file's, by kind of process; pages that several processes share count once."""
        found: Counter[str] = Counter()
        for pid, kind in self._processes().items():
            found[kind] += _proportional(pid)
        return found

    def signal_engine(self, number: int) -> None:
        """Send a signal to the engine process."""
        os.kill(self._engine(list(self._processes())), number)

    def end(self) -> list[str]:
        """Stop the server; returns what went wrong with that, or before."""
        self.process.send_signal(signal.SIGTERM)
        processes = self._processes()
        try:
            status = self.process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            return [f"the server did not end within {END_LIMIT:g} s of SIGTERM"]
        found = [f"the server ended with status {status}"] if status else []
        end = time.monotonic() + IDLE_LIMIT / 10
        while (alive := [pid for pid in processes if lives(pid)]) and time.monotonic() < end:
            time.sleep(0.1)
        found += [f"processes left: {[processes[pid] for pid in alive]}"] if alive else []
        found += ["the server's log has a traceback"] if "Traceback" in self.log.read_text() else []
        names = sorted(path.name for path in self.temp.glob("unisono-*"))
        return [*found, *([f"files left: {names}"] if names else [])]

    def _processes(self) -> dict[int, str]:
        """The server's process and all that come from it, each with its kind; parents come first."""
        found = {self.process.pid: API}
        new = [self.process.pid]
        for pid in new:  # it grows meanwhile
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    children = list(map(int, path.read_text().split()))
                    found |= {child: kind_of(child, found[pid]) for child in children}
                    new += children
        return found

    def _engine(self, processes: list[int]) -> int:
        return max(processes[1:], key=_proportional)


def kind_of(pid: int, parent: str) -> str:
    """Name a process by its command line: the module that it runs, and how often it was forked since that began.

    parent: its parent's kind. A fork has its parent's command line.
    """
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    names = [word for word in words if re.fullmatch(r"(unisono|benchmarks)(\.\w+)+", word)]
    if not names:
        names = re.findall(r"multiprocessing\.(\w+)", " ".join(words)) or [words[0] if words else "ended"]
    if parent.startswith(names[-1]):
        return f"{parent}, forked"
    return names[-1]


def files_by_kind(pid: int) -> Counter[str]:
    """Count the open files of a process: TCP connections, other sockets, pipes, and paths."""
    connections: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            connections |= {f"socket:[{line.split()[9]}]" for line in lines}
    found: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(path)
            found["TCP connection" if target in connections else re.sub(r"^(socket|pipe):.*", r"\1", target)] += 1
    return found


def lives(pid: int) -> bool:
    """True for a process that has not ended; a zombie has."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def _proportional(pid: int) -> int:
    """KiB of a process that are no file's, those that it shares divided by their users; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(value) for value in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup, re.M))
    return 0


async def metrics(client: Any) -> dict[str, float]:
    """The server's metrics, without labels."""
    text = (await client.http.get("/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^unisono:(\w+){[^}]*} (\S+)$", text, re.M)}


@contextlib.contextmanager
def soak_server(model: str, flags: Sequence[str]) -> Iterator[SoakServer]:
    """Run ``unisono serve`` with these flags and a temporary directory of its own."""
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        log, temp = Path(directory) / "log", Path(directory)
        command = [sys.executable, "-m", "unisono", "serve", model, "--port", "0", *flags]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, "TMPDIR": directory})
        try:
            yield SoakServer(process, log, temp)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
