"""The outermost layer: what fails without having been foreseen is answered and logged, and the connection stays."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from unisono.http.middleware import RequestMiddleware
from unisono.http.observability.metrics import ServerMetrics


async def fails(request: Request) -> Response:
    raise RuntimeError("nobody thought of that")


def test_unhandled_exceptions_are_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An exception that left the application would have uvicorn close the connection under the next request."""
    asyncio.run(_ask(caplog))


async def _ask(caplog: pytest.LogCaptureFixture) -> None:
    service: Any = SimpleNamespace(in_flight=0, allow_unknown_fields=False, metrics=ServerMetrics("m", lambda: []))
    gate = RequestMiddleware(Starlette(routes=[Route("/fails", fails, methods=["POST"])]), service)
    transport = httpx.ASGITransport(gate, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        with caplog.at_level(logging.ERROR):
            answer = await client.post("/fails")
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] in caplog.text
    assert "nobody thought of that" in caplog.text
    assert service.in_flight == 0
