"""The event loop waits for no template and no process: other clients' streams go on, and what hangs is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.conftest import Server, servers, until
from unisono.http.errors import ApiError
from unisono.http.preparation import MAX_LOST, Preparers

CHAT = "/v1/chat/completions"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def trusting(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory) as start:
        yield start(model_dir, fresh=True, trust_request_chat_template=True, step_seconds=0.01)


def chat(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(server.url + CHAT, json={"messages": HI, "max_tokens": 2, **body}, timeout=300)


def renderers(server: Server) -> list[int]:
    """The processes that render: forks of the one that ``unisono.text.templates.renderer`` runs in."""
    found = [server.process.pid]
    for pid in found:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return [pid for pid in found if b"unisono.text.templates.renderer" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_streams_continue_while_a_template_runs_into_its_limit(trusting: Server) -> None:
    """A template of 80 bytes takes 2 s of processor time; in the event loop everybody would wait for it."""
    assert chat(trusting).status_code == 200
    body = {"prompt": [1, 2], "max_tokens": 5, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(3) as pool:
        hard = [pool.submit(chat, trusting, chat_template=f"{LOOPS}{i}") for i in range(3)]
        until(lambda: trusting.http.get("/load").json()["server_load"] == 3)
        served = 0
        while not hard[0].done():
            assert trusting.http.get("/health").status_code == 200
            assert trusting.http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            assert chat(trusting).status_code == 200, "templates of requests have threads of their own"
            served += 1
        answers = [one.result() for one in hard]
    assert served >= 5
    assert [one.status_code for one in answers] == [400] * 3
    assert all("request's chat template cannot write" in one.json()["error"]["message"] for one in answers)


def test_a_process_that_stands_still_holds_up_no_stream(trusting: Server) -> None:
    """``kill -STOP`` of everything that renders: health and streams go on, and after -CONT chats do, too."""
    assert chat(trusting).status_code == 200
    stopped = renderers(trusting)
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(chat, trusting) for _ in range(3)]
            until(lambda: trusting.http.get("/load").json()["server_load"] == 3)
            body = {"prompt": [1, 2], "max_tokens": 30, "ignore_eos": True, "stream": True}
            text = trusting.http.post("/v1/completions", json=body).text
            assert text.endswith("data: [DONE]\n\n")
            assert not any(one.done() for one in waiting)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            assert [one.result().status_code for one in waiting] == [200] * 3
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def test_killed_processes_are_replaced(trusting: Server) -> None:
    assert chat(trusting).status_code == 200
    for pid in renderers(trusting):
        os.kill(pid, signal.SIGKILL)
    assert chat(trusting).status_code == 200


def test_hung_preparation_returns_503() -> None:
    """Its clients, and those after it, get 503 with Retry-After; when it returns, work is done again."""
    asyncio.run(_give_up())


async def _give_up() -> None:
    release = threading.Event()
    made = Preparers("tests", 2, 1, 0.3)

    async def code(work: Any, *args: Any) -> Any:
        try:
            return await made.run("", work, *args)
        except ApiError as error:
            return error.code if (error.status, bool(error.retry_after)) == (503, True) else error

    first = await asyncio.gather(*(code(release.wait) for _ in range(4)))
    assert sorted(map(str, first)) == ["preparation_busy"] + ["preparation_timeout"] * 3
    assert await code(json.loads, "[1]") == [1], "other threads took their place"
    rest = [await code(release.wait) for _ in range(3)]
    assert rest[: MAX_LOST - 3] == ["preparation_timeout"] * (MAX_LOST - 3)
    assert await code(json.loads, "[1]") == "preparation_stuck"
    release.set()
    for _ in range(100):
        if await code(json.loads, "[2]") == [2]:
            break
        await asyncio.sleep(0.05)
    assert await code(json.loads, "[3]") == [3]
    with pytest.raises(ValueError, match="Expecting value"):
        await made.run("", json.loads, "x")
