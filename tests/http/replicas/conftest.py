"""The servers of ``tests.http.conftest``, and what is read of one with several engines."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.http.conftest import Server

TEXT = "/v1/completions"
UP_AGAIN = 60.0
"""Seconds for a fake engine to be back on a busy machine."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def ask(server: Server, prompt: list[int], headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    """The answer to a prompt of token ids."""
    asked = {"prompt": prompt, "max_tokens": 2, "return_token_ids": True, "seed": 1, **body}
    answer = server.http.post(TEXT, json=asked, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(server: Server) -> Counter[str]:
    """Sequences that have ended, by the number of the engine that ran them."""
    found: Counter[str] = Counter()
    text = server.http.get("/metrics").text
    for engine, value in re.findall(r'^unisono:request_success_total{.*?engine="(\d+)".*?} (\S+)$', text, re.M):
        found[engine] += int(float(value))
    return +found


def engines(server: Server) -> list[dict[str, Any]]:
    """What /server_info says of each engine."""
    return server.http.get("/server_info").json()["engines"]


def loads(server: Server) -> list[int]:
    """Open requests of each engine."""
    return [one["requests"] for one in server.http.get("/load").json()["engines"]]


def read_stream(server: Server, prompt: list[int], rank: int, **body: Any) -> tuple[list[int], str | None]:
    """The tokens of a stream, and the message of the error that ended it."""
    asked = {"prompt": prompt, "max_tokens": 40, "return_token_ids": True, "seed": 1, "stream": True, **body}
    headers = {"X-data-parallel-rank": str(rank)}
    got: list[int] = []
    with server.http.stream("POST", TEXT, json=asked, headers=headers) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                return got, event["error"]["message"]
            got += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    return got, None


def pid(server: Server, engine: int) -> int:
    return engines(server)[engine]["info"]["pid"]


def state(server: Server, engine: int) -> str:
    return server.http.get("/load").json()["engines"][engine]["state"]
