"""The HTTP surface: OpenAI's endpoints, health, server info and metrics.

:func:`create_app` makes the ASGI application of a :class:`Service`; ``run`` serves it. Handlers parse, start
generations and word the answer; what they do with text and tokens lives in ``serving``, ``generation`` and ``answers``.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.server import protocol
from unisono.server.answers import Answer, EventStream, until_disconnect
from unisono.server.client import EngineClient
from unisono.server.errors import ApiError, as_api_error, show, unavailable
from unisono.server.generation import Generation, start_all
from unisono.server.metrics import ServerMetrics
from unisono.server.request_ids import HEADER, given_id
from unisono.server.responses import ChatShape, ModelCard, ModelList, Shape, TextShape
from unisono.server.serving import Serving
from unisono.types import EngineDead, UnisonoError

MAX_BODY_BYTES = 64 * 2**20
INSPECT_LIMIT = 5.0
"""Seconds /server_info and /metrics wait for the engine's step under way."""
CLIENT_GONE = 499

CHAT, TEXT = ChatShape(), TextShape()


@dataclass
class Service:
    """Everything the handlers need.

    ``draining`` refuses new requests; ``in_flight`` counts those that are not fully answered.
    """

    client: EngineClient
    serving: Serving
    metrics: ServerMetrics
    names: tuple[str, ...]
    root: str
    fingerprint: str
    settings: dict[str, Any]
    api_key: str | None = None
    draining: bool = False
    in_flight: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def refusal(self) -> ApiError | None:
        """Why no request can be taken now, or None."""
        if self.client.death is not None:
            return unavailable(f"The engine is dead: {self.client.death}. Restart the server.", "engine_dead")
        if self.draining:
            return unavailable("The server is shutting down and takes no new requests.", "shutting_down")
        return None

    def model(self, name: str | None) -> str:
        """The served name that a request means. Raises ApiError (404) for another model's."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
            message = f"The model {show(name)} is not served here; use one of: {served}."
            raise ApiError(404, message, "not_found_error", param="model", code="model_not_found")
        return name


def create_app(service: Service) -> ASGIApp:
    """The ASGI application."""
    app = FastAPI(title="Unisono", openapi_url=None)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(UnisonoError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_error)
    _add_generation_routes(app, service)
    _add_state_routes(app, service)
    return Gate(app, service)


class Gate:
    """Refuses generation while the engine is dead or the server drains; counts and dates what is in flight."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        refusal = self._service.refusal()
        if refusal is not None:
            await _json(refusal.body(), refusal.status)(scope, receive, send)
            return
        self._service.in_flight += 1
        scope["arrival"] = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            self._service.in_flight -= 1


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    authorized = [Depends(_key_check(service.api_key))]

    @app.post("/v1/chat/completions", dependencies=authorized)
    async def chat_completions(request: Request) -> Response:
        body = protocol.parse(await read_json_body(request), protocol.ChatRequest)
        return await _generate(service, request, body, CHAT, lambda name: service.serving.chat(body, name))

    @app.post("/v1/completions", dependencies=authorized)
    async def completions(request: Request) -> Response:
        body = protocol.parse(await read_json_body(request), protocol.CompletionRequest)
        return await _generate(service, request, body, TEXT, lambda name: service.serving.completion(body, name))

    @app.get("/v1/models", dependencies=authorized)
    async def models() -> Response:
        limit = service.serving.inputs.model.max_model_len
        return _json(ModelList([ModelCard(name, service.created, limit, service.root) for name in service.names]))


async def _generate(
    service: Service,
    request: Request,
    body: protocol.GenerationRequest,
    shape: Shape,
    prepare: Callable[[str], Coroutine[Any, Any, list[Generation]]],
) -> Response:
    """Check, start every generation, answer. Requests that the engine refuses get their status before any stream."""
    model = service.model(body.model)
    body.check_stream()
    given = given_id(request.headers.get(HEADER), body.request_id, body.rid)
    request_id = shape.id_prefix + (given or uuid.uuid4().hex)
    generations = await prepare(request_id)
    for generation in generations:
        generation.arrived(request.scope["arrival"])
    created = int(time.time())
    answer = Answer(shape, request_id, created, model, service.fingerprint, body, generations)
    try:
        await start_all(generations)
        if body.stream:
            return EventStream(answer)
        whole = await until_disconnect(request.receive, answer.whole())
    except BaseException:
        answer.close()
        raise
    return Response(status_code=CLIENT_GONE) if whole is None else _json(whole)


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        refusal = service.refusal()
        return _json({"status": "ok"}) if refusal is None else _json(refusal.body(), refusal.status)

    @app.get("/server_info", dependencies=[Depends(_key_check(service.api_key))])
    async def server_info() -> Response:
        try:
            stats = await service.client.inspect(INSPECT_LIMIT)
        except (EngineDead, TimeoutError) as error:
            raise unavailable(f"The engine does not answer: {error or 'it is busy'}.", "engine_unavailable") from None
        return _json({"server": service.settings, "engine": stats.info})

    @app.get("/metrics")
    async def metrics() -> Response:
        with contextlib.suppress(EngineDead, TimeoutError):  # then its last numbers must do
            await service.client.inspect(INSPECT_LIMIT)
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _key_check(api_key: str | None) -> Callable[[Request], Coroutine[Any, Any, None]]:
    async def check(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), api_key.encode()):
            message = "The API key is missing or wrong; send the header Authorization: Bearer KEY."
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")

    return check


async def read_json_body(request: Request) -> bytes:
    """The body of a JSON request. Raises ApiError 415 for another content type, 413 above MAX_BODY_BYTES."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"The content type is {show(content_type)}; send Content-Type: application/json.")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                limit = MAX_BODY_BYTES // 2**20
                raise ApiError(413, f"The body is larger than {limit} MiB; send less.", code="body_too_large")
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "The client went before its request was read.") from None
    return bytes(body)


async def _answer_error(request: Request, error: Exception) -> Response:
    api_error = as_api_error(error)
    return _json(api_error.body(), api_error.status)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    response = _json(ApiError(error.status_code, message).body(), error.status_code)
    response.headers.update(error.headers or {})
    return response


def _json(content: object, status: int = 200) -> Response:
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return Response(body, status, media_type="application/json")
