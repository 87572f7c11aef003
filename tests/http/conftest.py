"""Servers in processes of their own, and a tokenizer to serve with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from tests.forks import SERVERS, Process
from tests.http import tokenizers_
from unisono.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TLS = httpx.create_ssl_context()
"""Shared: a client takes 0.05 s to read the certificates of its own."""


class Server:
    """A running server process, of ``python -m module arguments``. fresh: it is a new interpreter and no fork."""

    def __init__(self, arguments: list[str], log: Path, temp: Path, fresh: bool = False, **environment: str) -> None:
        self.log, self.temp = log, temp
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temp), **environment}
        self.process: Process
        with log.open("w") as file:
            if fresh:
                command = [sys.executable, "-m", *arguments]
                self.process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=file, stdout=subprocess.DEVNULL)
            else:
                self.process = SERVERS.python("-m", *arguments, log=file.fileno(), environment=env)

    def wait_ready(self, limit: float = 120) -> Server:
        end = time.monotonic() + limit
        while (match := re.search(r"Serving .* on (http://\S+)/v1", self.log.read_text())) is None:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            assert time.monotonic() < end, f"the server did not start:\n{self.log.read_text()}"
            time.sleep(0.02)
        self.url = match[1]
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=TLS)
        own = httpx.Client(verify=TLS)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=own
        )
        return self

    def info(self) -> dict[str, Any]:
        return self.http.get("/server_info").json()["engine"]

    def signal(self, signum: int = signal.SIGTERM) -> None:
        self.process.send_signal(signum)

    def wait(self, limit: float = 60) -> int:
        return self.process.wait(limit)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


Start = Callable[..., Server]


PLAIN = ("--enforce-eager", "--speculative-method", "none")
"""Flags of ``unisono serve``: without graphs and drafts it starts in less than half the time."""


@contextmanager
def serving(directory: Path, *flags: str, fresh: bool = False) -> Iterator[Server]:
    """``unisono serve`` with these flags on the CPU, ready; its log and temporary files are in ``directory``."""
    command = ["unisono", "serve", "--port", "0", "--device", "cpu", *flags]
    server = Server(command, directory / "log", directory, fresh)
    try:
        yield server.wait_ready(120)
    finally:
        server.kill()


def until(condition: Callable[[], Any], limit: float = 60) -> None:
    """Wait until ``condition()`` is true, ``limit`` seconds at most."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def in_one_try(check: Callable[[], None], tries: int = 8) -> None:
    """Call ``check`` until it passes once.

    For what must come in time: a busy machine may be late, a mistake always is.
    """
    for left in reversed(range(tries)):
        try:
            return check()
        except AssertionError:
            if left == 0:
                raise


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream whose events have names; checks the framing of each."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer and a chat template, and nothing else."""
    path = tmp_path_factory.mktemp("model")
    tokenizers_.byte_level().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of :func:`model_dir`."""
    found = Tokenizer.load(model_dir)
    assert found is not None
    return found


@contextmanager
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    started: list[Server] = []

    def start(model: Path | None = None, ready: bool = True, fresh: bool = False, **options: Any) -> Server:
        directory = tmp_path_factory.mktemp("s")
        arguments = ["tests.http.launch", str(model or directory), json.dumps(options)]
        server = Server(arguments, directory / "log", directory, fresh)
        started.append(server)
        return server.wait_ready() if ready else server

    try:
        yield start
    finally:
        for server in started:
            server.kill()


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a server with a fake engine; keyword arguments are FakeConfig's and ServerSettings' fields.

    Without ``model`` it has no tokenizer: it takes token ids only, and starts in a third of the time.
    """
    with servers(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with a tokenizer, for all tests that leave it as they found it."""
    with servers(tmp_path_factory) as start:
        yield start(model_dir, step_seconds=0.001)


@pytest.fixture(scope="session")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server whose steps take 50 ms, without a tokenizer."""
    with servers(tmp_path_factory) as start:
        yield start(step_seconds=0.05)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``unisono serve`` up to the server's start: (exit code, output, engine's config, server's settings)."""

    def run(*arguments: str) -> tuple[int, str, Any, Any]:
        from unisono.cli.main import app

        seen: list[Any] = [None, None]
        monkeypatch.setattr(
            "unisono.http.server.serve",
            lambda config, settings, progress: seen.__setitem__(slice(2), [config, settings]),
        )
        result = CliRunner().invoke(app, ["serve", *arguments])
        return result.exit_code, result.output, *seen

    return run


ECHO = (
    "{% for message in messages %}{{ message.content or '' }}<|im_end|>{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
"""The fake engine repeats its prompt, so every answer is the first message."""


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers repeat the first message, three tokens a round."""
    path = tmp_path_factory.mktemp("echo")
    tokenizer = tokenizers_.byte_level()
    tokenizer.chat_template = ECHO
    tokenizer.save_pretrained(path)
    with servers(tmp_path_factory) as start:
        yield start(path, tokens_per_step=3, max_model_len=4096, reasoning_parser="qwen3", step_seconds=0.01)
