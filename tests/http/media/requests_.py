"""Requests with pictures, and what the fake engine got of them."""

from __future__ import annotations

from typing import Any

import httpx

from tests.http import pictures_ as pics
from tests.http.conftest import Server
from tests.http.pictures_ import data_url

CHAT = "/v1/chat/completions"
CONTEXT = 2048
CAT, DOG = pics.picture(96, 64, 1), pics.picture(70, 130, 2)


def ask(server: Server, *content: Any, path: str = CHAT, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(content)}]
    return server.http.post(path, json={"messages": messages, "max_tokens": 2, **more})


def got(server: Server) -> list[dict[str, Any]]:
    """What the engine got of the last request with pictures."""
    return server.info()["media"]


def digests(server: Server) -> list[str]:
    return [one["digest"] for one in got(server)]


def frame_urls(count: int) -> list[str]:
    return [data_url(pics.picture(64, 64, i)) for i in range(count)]
