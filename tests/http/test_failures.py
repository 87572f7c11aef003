"""What fails for one request ends that request: the engine, and everybody else's answers, go on."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import zmq

from tests.http.conftest import Server
from tests.http.fake_engine import FakeConfig, FakeEngine, Trick
from unisono.cluster import engine_process, ipc
from unisono.cluster.client import _encoded
from unisono.types import BadRequest, EngineRequest, SamplingParams

TEXT = "/v1/completions"


def test_an_engine_that_fails_on_a_request_serves_the_next(slow_server: Server) -> None:
    pid = slow_server.info()["pid"]
    answer = slow_server.http.post(TEXT, json={"prompt": [int(Trick.EXHAUST)], "max_tokens": 2})
    assert answer.status_code == 500
    assert "The engine failed on this request: MemoryError: std::bad_alloc" in answer.json()["error"]["message"]
    assert slow_server.http.post(TEXT, json={"prompt": [1, 2], "max_tokens": 2}).status_code == 200
    assert slow_server.info()["pid"] == pid


def test_a_stopped_engine_is_told_with_a_time_to_retry(slow_server: Server) -> None:
    pid = slow_server.info()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = slow_server.http.get("/server_info", timeout=60)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The engine does not answer: it is busy."
    assert int(answer.headers["retry-after"]) > 0


def test_messages_that_no_engine_reads() -> None:
    """A request that the engine cannot decode is refused by its id; other garbage is passed over."""
    good = ipc.Add(EngineRequest("good", [1, 2], SamplingParams(seed=0, max_tokens=2)))
    bad = msgspec.msgpack.decode(ipc.encode(good))
    bad["request"] |= {"request_id": "bad", "prompt_token_ids": ["one"]}
    worse = msgspec.msgpack.decode(ipc.encode(good))
    worse["request"] |= {"request_id": "worse", "params": {**worse["request"]["params"], "temperature": -1.0}}
    failing: Future[Any] = Future()
    failing.set_exception(RuntimeError("it has died"))
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://loop")
        theirs.connect("inproc://loop")
        engine = FakeEngine(FakeConfig(), lambda stage, share: None)
        loop = threading.Thread(target=engine_process.EngineServer(engine, theirs).run)
        loop.start()
        for data in (b"\xc1", b"", msgspec.msgpack.encode([1]), *map(msgspec.msgpack.encode, (bad, worse, good))):
            ours.send(data)
        heard = []
        while not (heard and isinstance(heard[-1], ipc.Deltas) and heard[-1].deltas[-1].finish.value):
            assert ours.poll(10_000)
            heard.append(ipc.decode_from_engine(ours.recv()))
        assert {m.request_id for m in heard if isinstance(m, ipc.Rejected)} == {"bad", "worse"}
        assert {m.request_id for m in heard if isinstance(m, ipc.Accepted)} == {"good"}
        ours.send(ipc.encode(ipc.Shutdown()))
        loop.join(10)
        assert not loop.is_alive()


def test_unserializable_prompts_raise_bad_request() -> None:
    for prompt in ([2**70], [object()]):
        with pytest.raises(BadRequest, match="cannot be sent"):
            _encoded(EngineRequest("a", prompt, SamplingParams(seed=0)))  # type: ignore[arg-type]
