"""Replicas that die or stop under load: only what their clients have seen is lost."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Start, alive, until
from tests.http.fake_engine import Trick
from tests.http.replicas.conftest import TEXT, UP_AGAIN, ask, ended, engines, loads, pid, read_stream, state


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_a_death_under_load(start: Start, pool: ThreadPoolExecutor, tmp_path: Path, how: int) -> None:
    """What ran on the dead replica fails: it may be what killed it. All else ends with the bytes of a quiet run."""
    hold, patience = tmp_path / "hold", 30 if how == signal.SIGKILL else 1
    server = start(
        step_seconds=0.05,
        load_seconds=0.5,
        data_parallel_size=2,
        heartbeat_timeout=patience,
        hold_file=str(hold),
        slots=2,
    )
    prompts = [[i + 1, 50, 60 + i] for i in range(4)]
    quiet = list(pool.map(lambda prompt: ask(server, prompt, max_tokens=40)["choices"], prompts))
    dead = pid(server, 0)
    begun = [pool.submit(read_stream, server, prompt, rank) for prompt in prompts[:2] for rank in (0, 1)]
    until(lambda: [one["info"]["begun"] for one in engines(server)] == [2, 2])
    hold.touch()
    whole = [
        pool.submit(ask, server, prompt, {"X-data-parallel-rank": str(rank)}, max_tokens=40)
        for prompt in prompts
        for rank in (0, 1)
    ]
    fresh = [pool.submit(read_stream, server, prompt, 0) for prompt in prompts]
    until(lambda: loads(server) == [10, 6])
    os.kill(dead, how)
    hold.unlink()
    results = [one.result(60) for one in begun]
    says = "was killed by SIGKILL" if how == signal.SIGKILL else "no heartbeat for 1 s"
    for (got, error), prompt, rank in zip(results, [prompts[0]] * 2 + [prompts[1]] * 2, [0, 1] * 2, strict=True):
        right = quiet[prompts.index(prompt)][0]["token_ids"]
        if rank == 0:
            assert error is not None
            assert says in error
            assert 0 < len(got) < 40
        else:
            assert error is None
        assert got == right[: len(got)]
    assert server.http.get("/health").status_code == 200, "one engine is enough"
    for one, prompt in zip(whole, [p for p in prompts for _ in range(2)], strict=True):
        assert one.result(60)["choices"] == quiet[prompts.index(prompt)]
    for stream, prompt in zip(fresh, prompts, strict=True):
        assert stream.result(60) == (quiet[prompts.index(prompt)][0]["token_ids"], None)
    until(lambda: state(server, 0) == "serving", UP_AGAIN)
    told = engines(server)
    assert [one["restarts"] for one in told] == [1, 0]
    assert told[0]["info"]["pid"] != dead
    assert loads(server) == [0, 0]
    before = ended(server)
    for i in range(4):
        ask(server, [700 + i, 3])
    assert ended(server)["0"] > before["0"], "it takes load again"
    text = server.http.get("/metrics").text
    assert 'unisono:request_retries_total{engine="1"' in text.replace('model_name="fake",', "")
    assert "8 run again on other engines" in server.log.read_text()
    pids = [one["info"]["pid"] for one in engines(server)]
    server.signal()
    assert server.wait() == 0
    assert not any(map(alive, [dead, *pids]))
    assert not list(server.temp.glob("unisono-*"))


def test_a_request_that_kills_takes_one_engine_only(start: Start, pool: ThreadPoolExecutor) -> None:
    server = start(step_seconds=0.02, data_parallel_size=3, load_seconds=0.5)
    long = [pool.submit(ask, server, [9, i], {"X-data-parallel-rank": str(i)}, max_tokens=250) for i in range(3)]
    until(lambda: loads(server) == [1, 1, 1])
    body = {"prompt": [Trick.KILL], "max_tokens": 2}
    refused = server.http.post(TEXT, json=body, headers={"X-data-parallel-rank": "0"})
    assert refused.status_code == 500
    assert "was killed by SIGKILL" in refused.json()["error"]["message"]
    answers: list[Future[Any]] = long[1:]
    assert [one.result(60)["choices"][0]["token_ids"] for one in answers] == [([9, i] * 125)[:250] for i in (1, 2)]
    assert long[0].exception(60) is not None, "it ran beside the one that killed"
    until(lambda: all(state(server, i) == "serving" for i in range(3)), UP_AGAIN)
    assert sorted(one["restarts"] for one in engines(server)) == [0, 0, 1]


def test_surviving_replicas_serve_without_restarts(start: Start) -> None:
    server = start(data_parallel_size=2, restart_engine=False)
    os.kill(pid(server, 1), signal.SIGKILL)
    until(lambda: state(server, 1) == "dead")
    for i in range(4):
        ask(server, [i + 1, 2])
    assert set(ended(server)) == {"0"}
    answer = server.http.post(TEXT, json={"prompt": [5]}, headers={"X-data-parallel-rank": "1"})
    assert answer.status_code == 503
    assert "Engine 1, requested by X-data-parallel-rank, does not serve now" in answer.json()["error"]["message"]
    os.kill(engines(server)[0]["info"]["pid"], signal.SIGKILL)
    until(lambda: server.http.get("/health").status_code == 503)
    error = server.http.post(TEXT, json={"prompt": [5]}).json()["error"]
    assert error["code"] == "engine_dead"
    assert "engine 0: the engine process was killed by SIGKILL; engine 1:" in error["message"]
    assert server.http.get("/load").json()["engines"][0]["state"] == "dead"
