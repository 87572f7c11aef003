"""What happens when clients go, engines die and operators press Ctrl-C. Every server here is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.http.conftest import Server, Start, alive, until
from tests.http.fake_engine import Trick

TEXT = "/v1/completions"
LONG = {"prompt": [5, 6, 7], "max_tokens": 400}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def read_stream(server: Server, **body: Any) -> list[str]:
    with server.http.stream("POST", TEXT, json={**LONG, "stream": True, **body}) as response:
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def check_nothing_left(server: Server, engine: int) -> None:
    """No process, no traceback, no file."""
    assert not alive(engine)
    assert "Traceback" not in server.log.read_text(), server.log.read_text()
    assert [path.name for path in server.temp.iterdir() if path.name != "log"] == []


# ---- clients that go --------------------------------------------------------------------------


def test_a_client_that_leaves_its_stream_aborts_the_request(slow_server: Server) -> None:
    server, before = slow_server, slow_server.info()["aborted"]
    with server.http.stream("POST", TEXT, json={**LONG, "prompt": [[5], [6]], "stream": True}) as response:
        next(response.iter_lines())
        assert server.openai.models.list().data  # others are served meanwhile
    until(lambda: server.info()["aborted"] == before + 2)
    assert server.info()["requests"]["running"] == 0


def test_a_client_that_leaves_without_a_stream_aborts_the_request(slow_server: Server) -> None:
    before = slow_server.info()["aborted"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(slow_server.url + TEXT, json=LONG, timeout=0.5)
    until(lambda: slow_server.info()["aborted"] == before + 1)


def test_a_client_that_leaves_while_no_token_comes_aborts_the_request(start: Start) -> None:
    """The server must notice without having anything to send: the first token is a step of 1.5 s away."""
    server = start(step_seconds=1.5)
    body = {**LONG, "stream": True}
    with pytest.raises(httpx.ReadTimeout), httpx.stream("POST", server.url + TEXT, json=body, timeout=0.3) as response:
        list(response.iter_lines())
    until(lambda: server.info()["aborted"] == 1)


def test_a_stop_string_ends_the_request_in_the_engine(server: Server) -> None:
    before = server.info()["aborted"]
    answer = server.http.post(TEXT, json={"prompt": "abc", "max_tokens": 500, "stop": "ca"}).json()
    assert answer["choices"][0]["text"] == "ab"
    until(lambda: server.info()["aborted"] == before + 1)


# ---- engines that die -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "crashed"])
def test_a_dead_engine_ends_requests_with_an_error(start: Start, pool: ThreadPoolExecutor, how: str) -> None:
    server = start(step_seconds=0.05)
    stream = pool.submit(read_stream, server)
    whole = pool.submit(server.http.post, TEXT, json=LONG)
    until(lambda: server.info()["requests"]["running"] == 2)
    if how == "killed":
        os.kill(server.info()["pid"], signal.SIGKILL)
        says = "was killed by SIGKILL"
    else:
        pool.submit(server.http.post, TEXT, json={"prompt": [Trick.CRASH]})
        says = "RuntimeError: a fake crash"
    *_, error, done = stream.result(60)
    assert says in json.loads(error)["error"]["message"]
    assert done == "[DONE]"
    response = whole.result(60)
    assert response.status_code == 500
    assert says in response.json()["error"]["message"]
    for refused in (server.http.get("/health"), server.http.post(TEXT, json=LONG), server.http.get("/server_info")):
        assert refused.status_code == 503
        assert says in refused.json()["error"]["message"]
    with pytest.raises(openai.InternalServerError, match="engine is dead"):
        server.openai.completions.create(model="fake", prompt=[5])
    assert server.http.get("/metrics").status_code == 200
    server.signal()
    assert server.wait() == 0


def test_an_engine_killed_at_its_first_step(start: Start) -> None:
    server = start()
    response = server.http.post(TEXT, json={"prompt": [[5, 6], [Trick.KILL]], "max_tokens": 400})
    assert response.status_code == 500
    assert "SIGKILL" in response.json()["error"]["message"]


def test_an_engine_that_cannot_start(start: Start) -> None:
    """The server ends with the engine's own error, not a traceback."""
    server = start(ready=False, load_error="config.json has no architectures")
    assert server.wait(60) == 1
    assert "CheckpointError: config.json has no architectures" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def test_the_engine_ends_with_its_server(start: Start) -> None:
    """kill -9 of the API process must not leave an engine holding the GPU, idle or at work."""
    for step_seconds in (0.0, 0.01):
        server = start(step_seconds=step_seconds)
        engine = server.info()["pid"]
        if step_seconds:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + TEXT, json={"prompt": [[5]] * 50, "max_tokens": 500}, timeout=0.2)
        server.kill()
        until(lambda engine=engine: not alive(engine))


# ---- operators --------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(start: Start, pool: ThreadPoolExecutor, signum: int) -> None:
    server = start(step_seconds=0.02)
    engine = server.info()["pid"]
    stream: Future[list[str]] = pool.submit(read_stream, server, max_tokens=60)
    whole = pool.submit(server.http.post, TEXT, json={**LONG, "max_tokens": 60})
    until(lambda: server.info()["requests"]["running"] == 2)
    server.signal(signum)
    if signum == signal.SIGINT:  # the terminal sends it to the engine too
        os.kill(engine, signum)
    until(lambda: server.http.get("/health").status_code == 503)
    refused = server.http.post(TEXT, json=LONG)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert json.loads(stream.result()[-2])["choices"][0]["finish_reason"] == "length"
    assert whole.result().json()["usage"]["completion_tokens"] == 60
    assert server.wait() == 0
    check_nothing_left(server, engine)


def test_draining_has_a_limit(start: Start, pool: ThreadPoolExecutor) -> None:
    server = start(step_seconds=0.05, drain_timeout=0.3)
    engine = server.info()["pid"]
    stream = pool.submit(read_stream, server)
    whole = pool.submit(server.http.post, TEXT, json=LONG)
    until(lambda: server.info()["requests"]["running"] == 2)
    server.signal()
    assert "--drain-timeout" in json.loads(stream.result()[-2])["error"]["message"]
    assert whole.result().status_code == 500
    assert server.wait(60) == 0
    check_nothing_left(server, engine)


def test_a_second_signal_ends_everything_at_once(start: Start, pool: ThreadPoolExecutor) -> None:
    server = start(step_seconds=0.05)
    engine = server.info()["pid"]
    pool.submit(read_stream, server)
    until(lambda: server.info()["requests"]["running"] == 1)
    server.signal(signal.SIGINT)
    until(lambda: server.http.get("/health").status_code == 503)
    server.signal(signal.SIGINT)
    assert server.wait(60) == 130
    until(lambda: not alive(engine))
    check_nothing_left(server, engine)


def test_a_signal_while_the_engine_loads(start: Start) -> None:
    server = start(ready=False, load_seconds=60)
    until(lambda: any(path.name.startswith("unisono-") for path in server.temp.iterdir()))
    time.sleep(1)
    server.signal(signal.SIGINT)
    assert server.wait() == 0
    assert "Traceback" not in server.log.read_text()
    assert [path.name for path in server.temp.iterdir() if path.name != "log"] == []


def test_a_taken_port_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(ready=False, port=port)
        assert server.wait(60) == 1
    log = server.log.read_text()
    assert f"port {port}" in log
    assert "--port" in log
    assert "Traceback" not in log


def test_api_key(start: Start) -> None:
    server = start(api_key="secret")
    assert server.http.get("/health").status_code == 200
    for path in (TEXT, "/v1/models", "/server_info"):
        method = "POST" if path == TEXT else "GET"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = server.http.request(method, path, json={"prompt": [5]}, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    assert client.completions.create(model="fake", prompt=[5], max_tokens=2).choices[0].finish_reason == "length"
    info = server.http.get("/server_info", headers={"authorization": "Bearer secret"})
    assert "secret" not in info.text


def test_without_a_tokenizer_token_ids_are_taken(slow_server: Server) -> None:
    server = slow_server
    body = {"prompt": [5, 6], "max_tokens": 5, "return_token_ids": True}
    choice = server.http.post(TEXT, json=body).json()["choices"][0]
    assert (choice["token_ids"], choice["text"]) == ([5, 6, 5, 6, 5], "")
    for path, extra in [
        (TEXT, {"prompt": "ab"}),
        (TEXT, {"prompt": [5], "stop": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ]:
        response = server.http.post(path, json=extra)
        assert response.status_code == 400
        assert "has no tokenizer" in response.json()["error"]["message"]


def test_idle_engine_checks_integrity_and_captures_missing_graphs(start: Start) -> None:
    server = start()
    server.openai.completions.create(model="fake", prompt=[5])
    pid = server.info()["pid"]

    def checked() -> bool:
        time.sleep(2.5)  # who asks keeps it awake
        return server.info()["integrity_checks"] > 0

    until(checked)
    before = cpu_seconds(pid)
    time.sleep(2.5)
    assert cpu_seconds(pid) - before < 0.5
    told = server.info()
    assert told["integrity_checks"] == 1
    assert told["captures"] == 3, "two graphs were missing, and it asked until none was"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_tokens_of_one_round_arrive_together(server: Server, start: Start, model_dir: Path) -> None:
    """A round that brings several tokens changes when they come, never which: stop strings and counts included."""
    body = {"prompt": "Hello wörld 🙂", "max_tokens": 50, "stop": "🙂Hel", "return_token_ids": True, "seed": 1}
    one, five = (s.http.post(TEXT, json=body).json() for s in (server, start(model_dir, tokens_per_step=5)))
    details = [answer["usage"].pop("completion_tokens_details") for answer in (one, five)]
    assert (one["choices"], one["usage"]) == (five["choices"], five["usage"])
    assert [d["accepted_prediction_tokens"] > 0 for d in details] == [False, True], "only this may tell them apart"


def listening(pid: int) -> list[Path]:
    """The Unix sockets of a process that lie in the file system."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [Path(row[7]) for row in rows if len(row) == 8 and row[6] in inodes and row[7].startswith("/")]


def test_a_long_temporary_directory(tmp_path: Path) -> None:
    """A socket's path fits some 100 bytes: the sockets lie in /tmp then, and nothing of them stays."""
    deep = tmp_path.joinpath(*["a-directory-with-a-long-name"] * 4)
    deep.mkdir(parents=True)
    server = Server(["tests.http.launch", str(deep), "{}"], tmp_path / "log", deep)
    try:
        engine = server.wait_ready().info()["pid"]
        sockets = listening(server.process.pid)
        assert sockets
        assert {path.parent.parent for path in sockets} == {Path("/tmp")}
        assert server.openai.completions.create(model="fake", prompt=[5, 6], max_tokens=2).usage
        server.signal()
        assert server.wait() == 0
        assert not any(path.parent.exists() for path in sockets)
        check_nothing_left(server, engine)
    finally:
        server.kill()
