"""``unisono serve tiny --tp 2`` over HTTP: one process's bytes; a rank that ends or stops takes the engine down in
time, and ``--restart-engine`` brings it back."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.adapters_ import made, spoiled
from tests.distributed.processes_ import SECONDS, gone, wait_until
from tests.distributed.served import PLAIN, Served
from unisono.config import catalog

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def started(*flags: str) -> Served:
        servers.append(Served(tmp_path / f"log{len(servers)}", *flags))
        return servers[-1]

    yield started
    for each in servers:
        each.process.kill()
        each.process.wait()


@pytest.mark.full
def test_the_bytes_of_one_process(serve: Callable[..., Served]) -> None:
    server = serve("--tp", "2")
    together = [server.chat(), server.chat(temperature=0), server.chat(response_format={"type": "json_object"})]
    told = {d["name"]: d["value"] for d in server.get("/server_info")["engine"]["decisions"]}
    assert told["ranks"] == "2"
    assert told["gathers go"] == "shared memory"
    processes = server.descendants()
    server.process.terminate()
    assert server.process.wait(60) == 0
    wait_until(lambda: all(map(gone, processes)))
    alone = serve()
    assert together == [alone.chat(), alone.chat(temperature=0), alone.chat(response_format={"type": "json_object"})]


def with_adapters(server: Served, good: dict[str, Path], bad: dict[str, Path]) -> list[Any]:
    """Texts and answers while adapters are loaded, refused, replaced and unloaded."""

    def load(name: str, path: Path, **more: Any) -> tuple[int, str]:
        return server.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)

    found: list[Any] = [server.chat(), server.chat(model="one"), load("late", good["two"])]
    found += [load("bad", path) for path in (*bad.values(), bad["none"].parents[2])]
    found += [server.chat(model="late"), load("late", good["three"], load_inplace=True), server.chat(model="late")]
    found += [server.post("/v1/unload_lora_adapter", lora_name="late"), server.chat(model="one")]
    found.append(server.post("/v1/chat/completions", model="late", messages=[]))
    return [*found, [card["id"] for card in server.get("/v1/models")["data"]]]


@pytest.mark.full
def test_adapters_are_loaded_and_unloaded_as_by_one_process(serve: Callable[..., Served], tmp_path: Path) -> None:
    base, allowed = catalog.bundled_path("tiny"), tmp_path / "allowed"
    good, bad = made(allowed / "good", base), spoiled(allowed / "bad", base)
    flags = ["--enable-lora", "--max-loras", "2", "--lora-modules", f"one={good['one']}"]
    flags += ["--allowed-lora-path", str(allowed), *PLAIN]
    together = with_adapters(serve("--tp", "2", *flags), good, bad)
    plain, first, loaded, *refused, late, replaced, other, unloaded, again, unknown, names = together
    assert [answer[0] for answer in (loaded, *refused, replaced, unloaded, unknown)] == [
        200,
        *[400] * 4,
        403,
        200,
        200,
        404,
    ]
    assert "has weights that are NaN" in refused[2][1], "which rank 1 alone sees"
    assert len({plain, first, late, other}) == 4
    assert again == first
    assert names == ["tiny", "one"]
    assert with_adapters(serve(*flags), good, bad) == together


def events(answer: Any) -> Iterator[dict[str, Any]]:
    """What a stream says, until it ends or breaks."""
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def failed(server: Served, rank: int, sent: signal.Signals, idle: bool) -> list[int]:
    """Send a signal to a rank, with a stream that has begun unless ``idle``, and see the engine end in time."""
    processes = [server.rank(0), server.rank(1)]
    if idle:
        os.kill(processes[rank], sent)
    else:
        with server.asked(max_tokens=1900, ignore_eos=True, stream=True) as answer:
            said = events(answer)
            for _ in range(3):
                assert "error" not in next(said)
            os.kill(processes[rank], sent)
            began = time.monotonic()
            last = list(said)[-1]
            assert time.monotonic() - began < SECONDS
            assert f"rank {rank}" in last["error"]["message"] or "SIGKILL" in last["error"]["message"], last
    wait_until(lambda: not server.healthy())
    wait_until(lambda: all(map(gone, processes)))
    return processes


CELLS = [
    pytest.param(
        *(rank, sent, idle),
        id=f"rank {rank} {sent.name} {'idle' if idle else 'running'}",
        marks=() if (rank, sent, idle) == (1, STOP, False) else pytest.mark.full,
    )
    for rank in (0, 1)
    for sent in (KILL, STOP)
    for idle in (False, True)
]


@pytest.mark.parametrize(("rank", "sent", "idle"), CELLS)
def test_a_rank_that_fails_ends_the_engine(
    serve: Callable[..., Served], rank: int, sent: signal.Signals, idle: bool
) -> None:
    """The API process stays up to say so, until it is told to end."""
    server = serve("--tp", "2", *PLAIN)
    rest = server.descendants()
    failed(server, rank, sent, idle)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        server.chat()
    server.process.terminate()
    server.process.wait(30)
    wait_until(lambda: all(map(gone, rest)))


@pytest.mark.full
@pytest.mark.parametrize(("rank", "sent"), [(1, STOP), (1, KILL), (0, STOP), (0, KILL)])
def test_the_engine_is_started_again_with_all_ranks(
    serve: Callable[..., Served], rank: int, sent: signal.Signals
) -> None:
    server = serve("--tp", "2", *PLAIN, "--restart-engine")
    before = server.chat()
    old = failed(server, rank, sent, idle=False)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        server.chat()
    wait_until(server.healthy, 300)
    assert server.chat() == before
    assert not {server.rank(0), server.rank(1)}.intersection(old)
