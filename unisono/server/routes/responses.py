"""OpenAI's Responses API: make, read, list the input of, cancel and delete responses, and count a body's tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response

from unisono.server.answers import EventReply, stream_error
from unisono.server.body import INLINE_BYTES, load_object, off_loop
from unisono.server.errors import ApiError, as_api_error
from unisono.server.field_limits import After, PageSize, ResponseId
from unisono.server.generation import Generation, merge, start_all
from unisono.server.hosted_tools import Ignored, hosted_type
from unisono.server.note import note
from unisono.server.protocol import ChatRequest
from unisono.server.responses_api.body import (
    ResponsesRequest,
    chat_body,
    conversation_of,
    since,
    to_items,
    to_messages,
    turns,
)
from unisono.server.responses_api.conversations import ConversationStore
from unisono.server.responses_api.store import Item, ResponseStore, Stored
from unisono.server.responses_api.writer import Event, Writer
from unisono.server.routes import conversations
from unisono.server.routes.common import (
    answer,
    clients_only,
    described,
    json_response,
    new_id,
    now,
    parsed_body,
    prepared,
    ticket_of,
    when_ready,
)
from unisono.server.service import Service
from unisono.server.translation import Renames, chat_request, checked
from unisono.types import BadRequest

logger = logging.getLogger(__name__)


@dataclass
class Asked:
    """A checked body. items: of the whole conversation; earlier: how many are of previous responses.

    conversation: the id of the one that the response goes on with. ignored: hosted tools that are left out.
    """

    request: ResponsesRequest
    chat: ChatRequest
    renames: Renames
    items: list[Item]
    earlier: int
    model: str
    conversation: str | None
    ignored: Ignored


@dataclass
class ResponseReply(EventReply):
    """A response on its way. ``finished`` is told of its last state."""

    writer: Writer
    generations: list[Generation]
    finished: Callable[[], None]

    def result(self) -> dict[str, Any]:
        return self.writer.response

    def failure(self, error: Exception) -> list[Event]:
        events = self.writer.fail(stream_error(error))
        self.finished()
        return events

    async def batches(self) -> AsyncGenerator[list[Event]]:
        async with aclosing(merge(self.generations)) as pieces:
            async for piece in pieces:
                events = self.writer.feed(piece)
                if piece.finish is not None:
                    events += self.writer.end(piece.finish, self.generations[0].usage)
                    self.finished()
                yield events


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    store, kept = ResponseStore(), ConversationStore()
    tasks: set[asyncio.Task[None]] = set()
    conversations.add(app, service, kept)
    _add_stored(app, service, store)

    @app.post("/v1/responses", dependencies=when_ready(service), **described("Make a response.", ResponsesRequest))
    async def create(request: Request) -> Response:
        asked = await _asked(service, store, kept, request)
        response = _blank(asked, service)
        stored = Stored(response, asked.items, service.keys.owner(request))
        keep = partial(_keep, asked, stored, store, kept)

        async def prepare() -> list[Generation]:
            with asked.renames.errors():
                return await service.serving.chat(asked.chat, response["id"], ticket_of(request))

        def reply_of(generations: list[Generation]) -> ResponseReply:
            writer = Writer(response, bool(asked.chat.logprobs), new_id)
            keep()
            return ResponseReply(writer, generations, keep)

        if asked.request.background:
            generations = await prepare()
            prepared(request, generations)
            response["status"] = "queued"
            keep()
            if (ticket := note(request.scope).ticket) is not None:
                ticket.hold()
            task = asyncio.create_task(_in_background(service, reply_of(generations), request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return json_response(response)

        def closed() -> None:
            if response["status"] == "in_progress":  # the client has gone
                response["status"] = "cancelled"
                keep()

        try:
            return await answer(service, request, response["id"], prepare, reply_of, asked.request.stream, closed)
        except Exception:
            store.forget(response["id"])
            raise

    @app.post(
        "/v1/responses/input_tokens",
        dependencies=when_ready(service),
        **described("Count the input tokens of a body of /v1/responses.", ResponsesRequest),
    )
    async def input_tokens(request: Request) -> Response:
        asked = await _asked(service, store, kept, request)
        with asked.renames.errors():
            prompt = await service.serving.chat_prompt(asked.chat, ticket_of(request))
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


def _keep(asked: Asked, stored: Stored, store: ResponseStore, kept: ConversationStore) -> None:
    """Keep a response's state, if it is to be stored; once it has ended, its conversation goes on with it."""
    response = stored.response
    if asked.request.store is not False:
        store.put(stored)
    if asked.conversation is not None and response["status"] in ("completed", "incomplete"):
        kept.append(asked.conversation, [*asked.items[asked.earlier :], *response["output"]])


def _add_stored(app: FastAPI, service: Service, store: ResponseStore) -> None:
    clients = clients_only(service, stored=True)

    @app.get("/v1/responses/{response_id}", dependencies=clients, **described("Read a stored response."))
    async def read(request: Request, response_id: ResponseId, stream: bool = False) -> Response:
        found = store.get(response_id, service.keys.owner(request))
        if stream:
            raise ApiError(400, "stream=true: events are not stored; read the response without.", param="stream")
        return json_response(found.response)

    @app.delete("/v1/responses/{response_id}", dependencies=clients, **described("Forget a stored response."))
    async def delete(request: Request, response_id: ResponseId) -> Response:
        store.delete(response_id, service.keys.owner(request))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel", dependencies=clients, **described("End a response early."))
    async def cancel(request: Request, response_id: ResponseId) -> Response:
        found = store.get(response_id, service.keys.owner(request))
        for generation in service.running.get(response_id, ()):
            generation.cancel()
        for _ in range(100):  # its last state comes with the next turn of the loop
            if found.response["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.01)
        return json_response(found.response)

    @app.get(
        "/v1/responses/{response_id}/input_items", dependencies=clients, **described("The input of a stored response.")
    )
    async def input_items(
        request: Request,
        response_id: ResponseId,
        limit: PageSize = 20,
        order: Literal["asc", "desc"] = "desc",
        after: After = None,
    ) -> Response:
        items = store.get(response_id, service.keys.owner(request)).items
        return json_response(conversations.page_of(items, limit, order, after))


async def _asked(service: Service, store: ResponseStore, kept: ConversationStore, request: Request) -> Asked:
    """The body, checked. Raises BadRequest and ApiError."""
    size, data, body = await parsed_body(request, lambda raw: (len(raw), *_read(raw)))
    model, who = service.model(body.model), service.keys.owner(request)
    earlier: list[Item] = []
    conversation = conversation_of(body)
    if body.previous_response_id is not None or conversation is not None:
        service.keys.check_reader(request)
    if body.previous_response_id is not None:
        earlier = store.ended(body.previous_response_id, who, "previous_response_id").conversation
    before = "previous_response_id"
    if conversation is not None:
        before, earlier = "conversation", kept.get(conversation, who, "conversation").items

    def stored(item_id: str) -> Item | None:
        service.keys.check_reader(request)
        return store.item(item_id, who)

    items = [*earlier, *to_items(body.input, new_id, stored)]
    ignored = service.hosted.request()

    def made() -> Asked:
        messages = to_messages(items, body.instructions, len(earlier), before, ignored=ignored)
        chat, renames = chat_body(body, data, messages, ignored)
        return Asked(body, chat_request(chat, renames), renames, items, len(earlier), model, conversation, ignored)

    asked = await off_loop(_size(size, items), made)
    service.hosted.tell(ignored)
    return await _fitting(service, asked, data, request) if body.truncation == "auto" else asked


def _read(raw: bytearray) -> tuple[dict[str, Any], ResponsesRequest]:
    data = load_object(raw)
    return data, checked(data, ResponsesRequest, only=False)


def _size(size: int, items: list[Item]) -> int:
    """Bytes for :func:`off_loop`: those of a body, and of stored items at least what makes many of them large."""
    return size + len(items) * INLINE_BYTES // 64


async def _fitting(service: Service, asked: Asked, data: Mapping[str, Any], request: Request) -> Asked:
    """``truncation: auto``: without as many of the oldest turns as it takes to fit the context.

    The stored items stay whole. Where even the last turn alone is too long it is left as it is, and refused later.
    """
    room = service.serving.inputs.model.max_model_len - (asked.request.max_output_tokens or 1)
    choices = [0, *turns(asked.items)]
    made: dict[int, Asked] = {}

    def shortened(start: int) -> Asked:
        items = since(asked.items, start)
        earlier = max(0, len(items) - (len(asked.items) - asked.earlier))
        messages = to_messages(items, asked.request.instructions, earlier, ignored=asked.ignored)
        chat, renames = chat_body(asked.request, data, messages, asked.ignored)
        return replace(asked, chat=chat_request(chat, renames), renames=renames)

    async def fits(choice: int) -> bool:
        made[choice] = await off_loop(_size(0, asked.items), lambda: shortened(choices[choice]))
        try:
            with made[choice].renames.errors():
                return len((await service.serving.chat_prompt(made[choice].chat, ticket_of(request))).token_ids) <= room
        except BadRequest as error:
            if error.code != "context_length_exceeded":
                raise
            return False

    if await fits(0):
        return made[0]
    low, high = 1, len(choices) - 1
    if high < 1:
        return asked
    while low < high:  # the fewest turns that have to go
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(middle) else (middle + 1, high)
    await fits(low)
    return made[low]


def _blank(asked: Asked, service: Service) -> dict[str, Any]:
    """The response before anything is generated."""
    body, defaults = asked.request, service.serving.inputs.model.generation_defaults
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": bool(body.background),
        "conversation": {"id": asked.conversation} if asked.conversation is not None else None,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": _given(body.temperature, defaults, "temperature"),
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool for tool in body.tools or [] if hosted_type(tool.get("type")) is None],
        **({"ignored_tools": list(asked.ignored.tools)} if asked.ignored.tools else {}),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _given(body.top_p, defaults, "top_p"),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _given(value: float | None, defaults: Mapping[str, float], name: str) -> float:
    return defaults.get(name, 1.0) if value is None else value


async def _in_background(service: Service, reply: ResponseReply, request: Request) -> None:
    """Run a response that nobody waits for. Its end is in the store."""
    response_id, arrival = reply.writer.response["id"], note(request.scope).arrival
    ticket = note(request.scope).ticket
    service.running[response_id] = reply.generations
    service.in_flight += 1
    try:
        for generation in reply.generations:
            generation.arrived(arrival)
        await start_all(reply.generations)
        await reply.whole()
    except Exception as error:
        reply.failure(error)
        logger.warning("Response %s failed: %s", response_id, as_api_error(error))
    finally:
        service.in_flight -= 1
        if ticket is not None:
            ticket.leave()
        service.close(response_id, reply.generations, request, arrival)
