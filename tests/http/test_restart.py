"""An engine process that dies or stops, and the one that is started in its place."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import PLAIN, Server, Start, alive, serving, until
from tests.http.fake_engine import Trick
from unisono.cluster.heartbeat import Watch
from unisono.cluster.restarts import Restarts
from unisono.http.server import ServerSettings
from unisono.types import ConfigError

TEXT = "/v1/completions"
WHOLE = {"prompt": [5, 6, 7], "max_tokens": 50, "return_token_ids": True, "logprobs": 2, "seed": 1}
STREAM = {**WHOLE, "stream": True}
UP_AGAIN = 60.0
"""Seconds for a fake engine to be back on a busy machine."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def read_stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The events but ``[DONE]``."""
    with server.http.stream("POST", TEXT, json={**STREAM, **body}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def tokens(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


def metrics(server: Server) -> dict[str, float]:
    text, names = server.http.get("/metrics").text, ("engine_restarts_total", "request_retries_total", "engine_up")
    return {name: float(re.findall(rf"^unisono:{name}{{.*}} (\S+)$", text, re.M)[0]) for name in names}


def healthy(server: Server) -> bool:
    return server.http.get("/health").status_code == 200


def running(server: Server, count: int) -> None:
    until(lambda: server.info()["requests"]["running"] == count)


def files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_real_engine_comes_back(tmp_path: Path) -> None:
    """After ``kill -9`` the next engine process gives the same answers, without a flag."""
    ask = {"model": "tiny", "prompt": "Tom has 3 boxes of", "max_tokens": 12, "temperature": 0.7, "seed": 3}
    flags = ("--max-num-seqs", "2", "--max-model-len", "256", *PLAIN)
    with serving(tmp_path, "tiny", *flags) as server:
        before = server.http.post(TEXT, json=ask).json()["choices"]
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        [engine] = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(engine), signal.SIGKILL)
        until(lambda: not healthy(server))
        until(lambda: healthy(server), 60)
        assert server.http.post(TEXT, json=ask).json()["choices"] == before
        assert metrics(server)["engine_restarts_total"] == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_an_engine_that_dies_or_stops_is_started_again(
    start: Start, pool: ThreadPoolExecutor, tmp_path: Path, how: int
) -> None:
    hold = tmp_path / "hold"
    server = start(
        step_seconds=0.03,
        load_seconds=2,
        restart_engine=True,
        heartbeat_timeout=30 if how == signal.SIGKILL else 1,
        drain_timeout=1,
        hold_file=str(hold),
        slots=3,
    )
    quiet = server.http.post(TEXT, json=WHOLE).json()["choices"]
    engine = server.info()["pid"]
    begun = pool.submit(read_stream, server, max_tokens=400)
    whole = pool.submit(server.http.post, TEXT, json={**WHOLE, "max_tokens": 400})
    until(lambda: server.info()["begun"] == 2)  # one client has seen tokens, the other waits for all
    hold.touch()
    fresh = pool.submit(read_stream, server)  # it has a slot and no token
    running(server, 3)
    until(lambda: server.info()["started"] == 4)
    waiting = pool.submit(read_stream, server)
    queued = pool.submit(server.http.post, TEXT, json=WHOLE)
    running(server, 5)
    os.kill(engine, how)
    events = begun.result(60)  # it ends before the engine is back, as the answers below show
    hold.unlink()
    says = "was killed by SIGKILL" if how == signal.SIGKILL else "no heartbeat for 1 s"
    for error in (events[-1]["error"], fresh.result(60)[-1]["error"], whole.result(60).json()["error"]):
        assert says in error["message"]
        assert "not run again by itself" in error["message"]
    assert whole.result().status_code == 500
    refused = [server.http.get("/health"), server.http.post(TEXT, json=WHOLE)]
    for response in refused:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_restarting")
        assert says in response.json()["error"]["message"]
        assert 1 <= int(response.headers["retry-after"]) < 60
    assert metrics(server)["engine_up"] == 0
    until(lambda: healthy(server), UP_AGAIN)
    assert queued.result(60).json()["choices"] == quiet
    assert tokens(waiting.result(60)) == quiet[0]["token_ids"]
    assert server.info()["pid"] != engine
    assert not alive(engine)
    assert metrics(server) == {"engine_restarts_total": 1, "request_retries_total": 2, "engine_up": 1}
    log = server.log.read_text()
    assert ("Watchdog: " in log) == (how == signal.SIGSTOP)
    assert "3 requests ended, 2 will run again" in log
    assert "The engine is back after" in log
    server.signal()
    assert server.wait() == 0
    assert "Traceback" not in log


def test_a_stopped_engine_without_restart(start: Start, pool: ThreadPoolExecutor) -> None:
    server = start(step_seconds=0.05, heartbeat_timeout=2)
    engine = server.info()["pid"]
    whole = pool.submit(server.http.post, TEXT, json={**WHOLE, "max_tokens": 400})
    running(server, 1)
    os.kill(engine, signal.SIGSTOP)
    assert whole.result(60).status_code == 500
    health = server.http.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
    assert "answered no heartbeat for 2 s (--heartbeat-timeout)" in health.json()["error"]["message"]
    until(lambda: not alive(engine))
    server.signal()
    assert server.wait() == 0


def test_heartbeats_continue_while_a_step_holds_the_gil(start: Start) -> None:
    server = start(heartbeat_timeout=2, restart_engine=True)
    engine = server.info()["pid"]
    answer = server.http.post(TEXT, json={"prompt": [int(Trick.HOLD)], "max_tokens": 2})
    assert answer.status_code == 200
    assert answer.elapsed.total_seconds() > 2.5
    assert server.info()["pid"] == engine
    assert "Watchdog" not in server.log.read_text()


def test_a_request_that_kills_an_engine_is_not_tried_again(start: Start) -> None:
    server = start(restart_engine=True)
    assert server.http.post(TEXT, json=WHOLE).status_code == 200
    open_files = files(server.process.pid)
    response = server.http.post(TEXT, json={"prompt": [int(Trick.KILL)]})
    assert response.status_code == 500
    assert "SIGKILL" in response.json()["error"]["message"]
    until(lambda: healthy(server), UP_AGAIN)
    assert server.http.post(TEXT, json=WHOLE).status_code == 200
    assert metrics(server) == {"engine_restarts_total": 1, "request_retries_total": 0, "engine_up": 1}
    assert files(server.process.pid) == open_files, "sockets and pipes of dead processes are closed"


def test_crash_loop_stops_restarts(start: Start) -> None:
    server = start(restart_engine=True, max_engine_restarts=1, engine_restart_window=60)
    os.kill(server.info()["pid"], signal.SIGKILL)
    until(lambda: metrics(server)["engine_restarts_total"] == 1 and healthy(server), UP_AGAIN)
    os.kill(server.info()["pid"], signal.SIGKILL)
    until(lambda: not healthy(server))
    health = server.http.get("/health").json()["error"]
    assert health["code"] == "engine_dead"
    assert "it was restarted 1 times within 60 s and is given up" in health["message"]
    assert "It takes no request until the server is restarted" in server.log.read_text()
    server.signal()
    assert server.wait() == 0


def test_an_engine_that_cannot_start_again(start: Start, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    server = start(
        restart_engine=True,
        max_engine_restarts=1,
        step_seconds=0.05,
        slots=1,
        load_error="no weights",
        error_file=str(broken),
    )
    pool.submit(server.http.post, TEXT, json={**WHOLE, "max_tokens": 400})
    until(lambda: server.info()["begun"] == 1)
    whole = pool.submit(server.http.post, TEXT, json={**WHOLE, "max_tokens": 400})
    running(server, 2)
    broken.touch()
    os.kill(server.info()["pid"], signal.SIGKILL)
    assert "no weights; it was restarted 1 times" in whole.result(60).json()["error"]["message"]
    assert "no weights" in server.http.get("/health").json()["error"]["message"]
    server.signal()
    assert server.wait() == 0


def test_draining_while_the_engine_restarts(start: Start, pool: ThreadPoolExecutor) -> None:
    """A request that will run again is waited for."""
    server = start(restart_engine=True, step_seconds=0.02, load_seconds=1, slots=1)
    long = pool.submit(server.http.post, TEXT, json={**WHOLE, "max_tokens": 400})
    until(lambda: server.info()["begun"] == 1)
    whole = pool.submit(server.http.post, TEXT, json=WHOLE)
    running(server, 2)
    os.kill(server.info()["pid"], signal.SIGKILL)
    until(lambda: not healthy(server))
    server.signal()
    assert long.result(60).status_code == 500
    assert whole.result(60).json()["usage"]["completion_tokens"] == WHOLE["max_tokens"]
    assert server.wait() == 0


@pytest.mark.parametrize("signals", [pytest.param(1, marks=pytest.mark.full), 2])
def test_ctrl_c_while_the_engine_restarts(start: Start, pool: ThreadPoolExecutor, signals: int) -> None:
    server = start(restart_engine=True, step_seconds=0.05, load_seconds=2, drain_timeout=0.5, slots=1)
    pool.submit(server.http.post, TEXT, json={**WHOLE, "max_tokens": 400})
    until(lambda: server.info()["begun"] == 1)
    whole = pool.submit(server.http.post, TEXT, json={**WHOLE, "max_tokens": 400})
    running(server, 2)
    os.kill(server.info()["pid"], signal.SIGKILL)
    until(lambda: not healthy(server))
    for _ in range(signals):
        server.signal(signal.SIGINT)
        time.sleep(0.2)
    assert server.wait(60) == (0 if signals == 1 else 130)
    if signals == 1:
        assert "--drain-timeout" in whole.result(60).json()["error"]["message"]
    assert "Traceback" not in server.log.read_text()
    until(lambda: [path.name for path in server.temp.iterdir() if path.name != "log"] == [])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"heartbeat_timeout": 0.5}, "--heartbeat-timeout 0.5"),
        ({"heartbeat_timeout": float("nan")}, "--heartbeat-timeout nan"),
        ({"restart_engine": True, "max_engine_restarts": 0}, "--max-engine-restarts 0"),
        ({"restart_engine": True, "engine_restart_window": 0.0}, "--engine-restart-window 0"),
    ],
)
def test_bad_flags(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerSettings(Path(), ("m",), **given).restarts()
    assert ServerSettings(Path(), ("m",)).restarts() == Restarts(5, 600.0), "an engine is started again by default"
    assert ServerSettings(Path(), ("m",), restart_engine=False).restarts() is None


def test_restarts_are_counted_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("unisono.cluster.restarts.time.monotonic", lambda: now[0])
    restarts = Restarts(2, 10)
    assert [restarts.begin() for _ in range(3)] == [True, True, False]
    now[0] = 10.5
    assert restarts.begin()


def test_an_engine_that_stops_right_after_it_was_ready(tmp_path: Path) -> None:
    """The long patience with a process that starts ends when it is ready, not with its first heartbeat."""
    watch = Watch(f"ipc://{tmp_path}/beat", 0.2)

    async def both() -> None:
        silent = asyncio.create_task(watch.silent())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(silent), 1)
        watch.lives()
        await asyncio.wait_for(silent, 60)

    asyncio.run(both())
    watch.close()
