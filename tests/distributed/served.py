"""``unisono serve tiny --tp 2`` in a process of its own, and its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.forks import SERVERS

FLAGS = ["--max-num-seqs", "2", "--max-model-len", "2000", "--enforce-eager", "--port", "0", "--device", "cpu"]
PLAIN = ["--speculative-method", "none"]
"""Which start sooner."""
QUESTION = {"messages": [{"role": "user", "content": "Tom has 3 boxes of 4 pens."}], "temperature": 0.8, "seed": 3}


class Served:
    """A server in a process of its own."""

    def __init__(self, log: Path, *flags: str) -> None:
        command = ["-m", "unisono", "serve", "tiny", *FLAGS, *flags]
        with log.open("w") as file:
            self.process = SERVERS.python(*command, log=file.fileno(), environment=os.environ)
        end = time.monotonic() + 180
        while "Serving" not in log.read_text() or "/v1" not in log.read_text():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        self.url = log.read_text().rpartition(" on ")[2].split("/v1")[0]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return json.loads(answer.read() or b"null")

    def healthy(self) -> bool:
        """Whether ``/health`` says 200."""
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def asked(self, **more: Any) -> Any:
        """The open answer to a question."""
        return self._post("/v1/chat/completions", {"model": "tiny", "max_tokens": 40, **QUESTION, **more})

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        """The status of an answer and its text."""
        try:
            with self._post(path, body) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _post(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(asked, timeout=60)

    def chat(self, **more: Any) -> Any:
        with self.asked(**more) as answer:
            return json.loads(answer.read())["choices"][0]["message"]["content"]

    def descendants(self) -> list[int]:
        """Process ids of all that the server started."""
        found, rest = [], [self.process.pid]
        while rest:
            listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(rest.pop())], capture_output=True, text=True)
            children = [int(pid) for pid in listed.stdout.split()]
            found += children
            rest += children
        return found

    def rank(self, index: int) -> int:
        """The process id of rank 0, which is the engine, or of rank 1."""
        name = (b"spawn_main", b"unisono.engine.worker.rank")[index]
        (pid,) = [pid for pid in self.descendants() if name in command_of(pid)]
        return pid


def command_of(pid: int) -> bytes:
    """The command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
