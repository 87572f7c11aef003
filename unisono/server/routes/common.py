"""What routes share: reading bodies, who may call, answers as JSON and as streams, and the description of a route."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Depends, Request
from fastapi.params import Depends as Dependency
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from unisono.server.answers import EventStream, Reply, until_disconnect
from unisono.server.body import off_loop
from unisono.server.engines import Wish
from unisono.server.errors import ApiError, show
from unisono.server.generation import Generation, start_all
from unisono.server.note import note
from unisono.server.overload import Ticket
from unisono.server.service import CLIENT_GONE, MAX_BODY_BYTES, SMALL_BODY_BYTES, Service
from unisono.types import BadRequest

T = TypeVar("T")

SESSION_HEADERS = ("x-session-id", "x-smg-routing-key", "x-user-id")
"""What names a request's session, the first one that is there: the headers of vLLM's and SGLang's routers."""
RANK_HEADER = "X-data-parallel-rank"
"""The number of the engine that is to run a request, in vLLM."""


def clients_only(service: Service, works: bool = False, stored: bool = False) -> list[Dependency]:
    """Dependencies of a route that needs a key where the server has keys.

    works: its requests have to be prepared, so they count towards limits and take turns. stored: it tells stored
    answers, so without keys the client must know the server by one of its names.
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
    """Dependencies of a route that changes the server: with the key, or from this machine where there is none."""

    async def check(request: Request) -> None:
        service.keys.check_operator(request)
        note(request.scope).key = service.keys.client(request).name

    return [Depends(check)]


def owners_only(service: Service) -> list[Dependency]:
    """Dependencies of a route on which users reach what is their own, by ``Keys.scope``, and operators everything."""

    async def check(request: Request) -> None:
        service.keys.check(request)
        if not service.keys:
            service.keys.check_operator(request)
        note(request.scope).key = service.keys.client(request).name

    return [Depends(check)]


def json_response(content: object, status: int = 200) -> Response:
    """``content`` (JSON already, or data) as an answer."""
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
"""Fields of bodies that may hold megabytes and that no answer needs once its prompt is made."""


def forget_inputs(*bodies: Any) -> None:
    """Empty the INPUTS of bodies (models or objects) that have been prepared: answers keep bodies until they end."""
    for body in bodies:
        if isinstance(body, dict):
            body.clear()
            continue
        for name in INPUTS:
            if getattr(body, name, None):
                setattr(body, name, None)


def ticket_of(request: Request) -> Ticket | None:
    """The ticket of a request that was taken on."""
    return note(request.scope).ticket


def new_id(prefix: str) -> str:
    """A new id of an answer or of a part of it."""
    return prefix + uuid.uuid4().hex


async def answer(
    service: Service,
    request: Request,
    answer_id: str,
    prepare: Callable[[], Coroutine[Any, Any, list[Generation]]],
    reply_of: Callable[[list[Generation]], Reply],
    stream: bool | None,
    closed: Callable[[], None] = lambda: None,
) -> Response:
    """Start every generation and answer. Requests that the engine refuses get their status before any stream.

    closed: called once the answer is sent, has failed, or has lost its client.
    """
    wish = wish_of(request)
    generations = await prepare()
    prepared(request, generations)
    for generation in generations:
        generation.wish = wish
        generation.arrived(note(request.scope).arrival)
    reply = reply_of(generations)
    if answer_id in service.running:
        raise BadRequest(f"request_id={show(answer_id)} is running already; give another.", "request_id")
    service.running[answer_id] = generations

    def close() -> None:
        service.close(answer_id, generations, request, note(request.scope).arrival)
        closed()

    try:
        await start_all(generations)
        if stream:
            return EventStream(reply, note(request.scope), close)
        whole = await until_disconnect(request.receive, reply.whole())
    except BaseException:
        close()
        raise
    close()
    return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)


def prepared(request: Request, generations: list[Generation]) -> None:
    """A request has these generations; its turn to be prepared is over."""
    if (ticket := note(request.scope).ticket) is None:
        return
    ticket.turn_over()
    ticket.resize(len(generations))
    for generation in generations:
        generation.client, generation.key = ticket.client.label, ticket.client.name


def wish_of(request: Request) -> Wish:
    """Where a request wants to run, by its headers. Raises ApiError for a rank that is none."""
    headers = request.headers
    named = next((name for name in SESSION_HEADERS if headers.get(name)), None)
    session = "" if named is None else _session(note(request.scope).key, named, headers[named])
    if (rank := headers.get(RANK_HEADER)) is None:
        return Wish(session)
    if not (rank.isascii() and rank.isdecimal() and len(rank) < 9):
        raise ApiError(
            400, f"{RANK_HEADER}={show(rank)} is not valid: give the number of an engine.", param=RANK_HEADER
        )
    return Wish(session, rank=int(rank))


def _session(*parts: str) -> str:
    """Return the key of a session from its client, header and value: sessions of two clients are never the same."""
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
