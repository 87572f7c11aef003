"""Microseconds of the API process's CPU time for each token that it streams. The engine only makes tokens up.

    python -m benchmarks.streaming                           256 streams, steps of 0.5 ms, 2 ms and 20 ms
    python -m benchmarks.streaming --steps 20 --tokens 4     a step brings four tokens of each request
    python -m benchmarks.streaming --profile api.prof        writes a profile of the API process, for pstats

The tokenizer is the bundled ``tiny`` model's. Requests go to ``/v1/completions``, each on a connection of its own. The
time to the first event, in seconds from sending, says whether streams wait while the engine is ahead. The engine and
the client have processes of their own, so wall times need three free processors.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config.catalog import bundled_path
from unisono.tools.load.server_process import wait_for_url
from unisono.tools.load.workers import run
from unisono.types import EngineRequest, FinishReason, TokenDelta

PROMPT = "The quick brown fox jumps over the lazy dog and runs on into the dark and silent forest."


@dataclass(frozen=True)
class MadeUpConfig:
    """seconds: of a step. tokens: of each request in a step."""

    seconds: float
    tokens: int


class MadeUpEngine:
    """Repeats each request's prompt, ``tokens`` tokens a step."""

    def __init__(self, config: MadeUpConfig, progress: Callable[[str, float], None]) -> None:
        self.config, self.due = config, 0.0
        self.requests: dict[str, tuple[EngineRequest, int]] = {}

    def prepare(self, request: EngineRequest) -> None:
        return None

    def add(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request, 0

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[TokenDelta]:
        """One delta of each request, not before the step's time has passed."""
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.due = time.monotonic() + self.config.seconds
        deltas = []
        for name, (request, done) in list(self.requests.items()):
            prompt, limit = request.prompt_token_ids, request.params.max_tokens or 1
            end = min(limit, done + self.config.tokens)
            finish = FinishReason.LENGTH if end == limit else FinishReason.RUNNING
            deltas.append(TokenDelta(name, [prompt[at % len(prompt)] for at in range(done, end)], finish))
            self.requests[name] = request, end
            if end == limit:
                del self.requests[name]
        return deltas

    def info(self) -> dict[str, Any]:
        settings = {"max_model_len": 4096, "dtype": "float32", "max_logprobs": 20, "max_num_seqs": 1024}
        settings |= {"enable_prompt_embeds": False, "enable_return_hidden_states": False, "scheduling_policy": "fcfs"}
        return {
            "settings": settings, "vocab_size": 1 << 20, "hidden_size": 64, "eos_token_ids": [],
            "generation_defaults": {}, "vision": None,
        }  # fmt: skip

    def metrics(self) -> list[tuple[str, str, dict[str, str], float, str]]:
        return []

    def check_integrity(self) -> None: ...
    def capture_missing(self) -> int:
        return 0

    def reset_prefix_cache(self) -> int:
        return 0

    def shutdown(self) -> None: ...


def serve_made_up(seconds: float, tokens: int, profile: str) -> None:
    """Serve the made-up engine until SIGTERM. profile: a file to write the API process's profile to, or empty."""
    from unisono.http.server import ServerSettings, serve  # engine processes import this module, and need none of it

    logging.basicConfig(level=logging.INFO)
    settings = ServerSettings(bundled_path("tiny"), ("tiny",), port=0, engine="benchmarks.streaming:MadeUpEngine")
    profiler = cProfile.Profile(time.process_time)
    if profile:
        profiler.enable()
    serve(MadeUpConfig(seconds, tokens), settings)
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)


class Reader(asyncio.Protocol):
    """Reads one streamed answer and closes. It parses as little as it can: the client shares the processors."""

    def __init__(self, request: bytes) -> None:
        self._request, self._last = request, b""
        self.events, self.first = 0, 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport, self._begun = transport, time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if (events := data.count(b"data: {")) and not self.events:
            self.first = time.monotonic() - self._begun
        self.events += events
        self._last = self._last[-16:] + data[-32:]
        if b"[DONE]" in self._last:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


async def stream(port: int, length: int) -> tuple[float, int]:
    """Seconds to the first event of one answer, and its events."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": length, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(data)
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: Reader(head + data), "127.0.0.1", port)
    await reader.done
    return reader.first, reader.events


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(port: int, streams: int, requests: int, length: int) -> list[tuple[float, int]]:
    """Send requests, at most ``streams`` at once."""
    slots = asyncio.Semaphore(streams)

    async def one() -> tuple[float, int]:
        async with slots:
            return await stream(port, length)

    return await asyncio.gather(*(one() for _ in range(requests)))


def measure(step: float, options: argparse.Namespace) -> None:
    """Serve and load one server, and print a line. step: milliseconds."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        code = (
            f"import benchmarks.streaming as b; b.serve_made_up({step / 1000}, {options.tokens}, {options.profile!r})"
        )
        with log.open("wb") as sink:
            process = subprocess.Popen([sys.executable, "-c", code], stdout=sink, stderr=sink)
        try:
            port = int(wait_for_url(process, log).rpartition(":")[2])
            run(lambda: load(port, options.streams, options.streams, 8))
            before, begun = cpu_seconds(process.pid), time.monotonic()
            answers = run(lambda: load(port, options.streams, options.requests, options.length))
            cpu, wall = cpu_seconds(process.pid) - before, time.monotonic() - begun
        finally:
            process.terminate()
            process.wait(60)
    tokens, firsts = options.requests * options.length, [first for first, _ in answers]
    print(
        f"step {step:g} ms: {1e6 * cpu / tokens:.1f} us CPU/token, {tokens / wall:.0f} tokens/s, "
        f"{tokens / sum(events for _, events in answers):.1f} tokens/event, "
        f"first event {statistics.median(firsts):.3f} s median, {max(firsts):.3f} s at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=float, nargs="+", default=[0.5, 2.0, 20.0], help="milliseconds of a step")
    parser.add_argument("--tokens", type=int, default=1, help="of each request in a step")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--length", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--profile", default="", help="file for a profile of the API process")
    options = parser.parse_args()
    for step in options.steps:
        measure(step, options)


if __name__ == "__main__":
    main()
