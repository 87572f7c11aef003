"""Helpers of all routes: bodies, authentication, answers as JSON and as streams, and the description of a route."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Depends, Request
from fastapi.params import Depends as Dependency
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from unisono.cluster.engines import Placement
from unisono.http.answers.writer import until_disconnect
from unisono.http.errors import ApiError, show
from unisono.http.limits.fields import MAX_BODY_BYTES, SMALL_BODY_BYTES
from unisono.http.limits.overload import Ticket
from unisono.http.observability.request_note import note
from unisono.http.request_body import off_loop
from unisono.http.service import CLIENT_GONE, Service

T = TypeVar("T")

SESSION_HEADERS = ("x-session-id", "x-smg-routing-key", "x-user-id")
"""Headers with a request's session, the first one wins: those of vLLM's and SGLang's routers."""
RANK_HEADER = "X-data-parallel-rank"
"""vLLM's header with the number of the engine for a request."""


def clients_only(service: Service, works: bool = False, stored: bool = False) -> list[Dependency]:
    """Dependencies of a route that needs a key if the server has keys.

    works: its requests have to be prepared, so they count towards limits and take turns. stored: it returns stored
    answers, so without keys the client must use a known host name of the server.
    """

    async def check(request: Request) -> None:
        service.keys.check(request)
        if stored:
            service.keys.check_reader(request)
        client = service.keys.client(request)
        note(request.scope).key = client.name
        if works:
            note(request.scope).ticket = service.admission.enter(client)

    return [Depends(check)]


def when_ready(service: Service) -> list[Dependency]:
    """Dependencies of a route that generates: the server takes requests, and the client has a key."""

    async def ready() -> None:
        service.check_ready()

    return [Depends(ready), *clients_only(service, works=True)]


def operators_only(service: Service) -> list[Dependency]:
    """Dependencies of a route that changes the server: with the key, or from this machine if there are no keys."""

    async def check(request: Request) -> None:
        service.keys.check_operator(request)
        note(request.scope).key = service.keys.client(request).name

    return [Depends(check)]


def owners_only(service: Service) -> list[Dependency]:
    """Dependencies of a route on which users reach only their own, by ``Keys.scope``, and operators everything."""

    async def check(request: Request) -> None:
        service.keys.check(request)
        if not service.keys:
            service.keys.check_operator(request)
        note(request.scope).key = service.keys.client(request).name

    return [Depends(check)]


def json_response(content: object, status: int = 200) -> Response:
    """An answer with ``content`` (encoded JSON, or data)."""
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return Response(body, status, media_type="application/json")


async def parsed_body(request: Request, parse: Callable[[bytearray], T]) -> T:
    """``parse(body)`` of a JSON request, when it is its client's turn; a large body is parsed in a thread.

    No caller gets the body itself: it would keep its bytes to the end of the answer, and the ticket gives them back as
    soon as the request is prepared. Raises what ``parse`` raises, and ApiError: 415 for another content type, 413 above
    MAX_BODY_BYTES (SMALL_BODY_BYTES on routes without a ticket, which no budget counts), 503 where too many bytes wait.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"The content type is {show(content_type)}; send Content-Type: application/json.")
    body, ticket = bytearray(), note(request.scope).ticket
    most = SMALL_BODY_BYTES if ticket is None else MAX_BODY_BYTES
    try:
        async for part in request.stream():
            if ticket is not None:
                ticket.grow(len(part))
            body += part
            if len(body) > most:
                message = f"The body is larger than {most // 2**20} MiB; send less."
                raise ApiError(413, message, code="body_too_large")
        if ticket is not None and not ticket.take_turn() and not await until_disconnect(request.receive, ticket.turn()):
            raise ApiError(CLIENT_GONE, "The client went before its turn came.")
        return await off_loop(len(body), lambda: parse(body))
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "The client went before its request was read.") from None
    finally:
        with suppress(BufferError):  # a thread reads it for a client that has left
            body.clear()  # a traceback may hold this frame, and the ticket gives the bytes back now


INPUTS = ("messages", "prompt", "prompt_embeds", "embedding_overrides", "image_data", "video_data")
"""Fields of bodies that may hold megabytes and that no answer needs after the prompt is made."""


def forget_inputs(*bodies: Any) -> None:
    """Empty the INPUTS of prepared bodies (models or objects): answers keep bodies until they end."""
    for body in bodies:
        if isinstance(body, dict):
            body.clear()
            continue
        for name in INPUTS:
            if getattr(body, name, None):
                setattr(body, name, None)


def ticket_of(request: Request) -> Ticket | None:
    """The ticket of an admitted request."""
    return note(request.scope).ticket


def new_id(prefix: str) -> str:
    """A new id of an answer or of a part of it."""
    return prefix + uuid.uuid4().hex


def placement_of(request: Request) -> Placement:
    """The routing hints of a request's headers. Raises ApiError for an invalid rank."""
    headers = request.headers
    named = next((name for name in SESSION_HEADERS if headers.get(name)), None)
    session = "" if named is None else _session(note(request.scope).key, named, headers[named])
    if (rank := headers.get(RANK_HEADER)) is None:
        return Placement(session)
    if not (rank.isascii() and rank.isdecimal() and len(rank) < 9):
        raise ApiError(
            400, f"{RANK_HEADER}={show(rank)} is not valid: give the number of an engine.", param=RANK_HEADER
        )
    return Placement(session, rank=int(rank))


def _session(*parts: str) -> str:
    """The key of a session from its client, header and value: sessions of two clients never share one."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def described(summary: str, body: type[BaseModel] | None = None) -> dict[str, Any]:
    """Arguments of a route's decorator that describe it in ``/openapi.json``: a sentence, and the body's model."""
    extra: dict[str, Any] = {}
    if body is not None:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        extra = {"openapi_extra": {"requestBody": {"required": True, "content": content}}}
    return {"summary": summary, **extra}
