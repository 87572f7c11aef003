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

from unisono.cluster.engines import ANYWHERE
from unisono.http.answers.answer import Answer
from unisono.http.answers.generation import Generation, merge, start_all
from unisono.http.answers.writer import EventReply, stream_error
from unisono.http.errors import ApiError, as_api_error
from unisono.http.limits.fields import After, PageSize, ResponseId
from unisono.http.observability.request_note import note
from unisono.http.openai.hosted_tools import Ignored, hosted_type
from unisono.http.openai.protocol import ChatRequest
from unisono.http.openai.translation import Renames, chat_request, checked
from unisono.http.request_body import INLINE_BYTES, load_object, off_loop
from unisono.http.responses_api.body import (
    ResponsesRequest,
    chat_body,
    conversation_of,
    since,
    to_items,
    to_messages,
    turns,
)
from unisono.http.responses_api.conversations import ConversationStore
from unisono.http.responses_api.store import Item, ResponseStore, StoredResponse
from unisono.http.responses_api.writer import Event, ResponseWriter
from unisono.http.routes import conversations
from unisono.http.routes.common import (
    clients_only,
    described,
    json_response,
    new_id,
    now,
    parsed_body,
    placement_of,
    ticket_of,
    when_ready,
)
from unisono.http.service import Service
from unisono.types import BadRequest

logger = logging.getLogger(__name__)


@dataclass
class CheckedRequest:
    """A checked body.

    items: of the whole conversation. earlier: number of items from previous responses.

    conversation: id of the one that the response continues. ignored: hosted tools that are left out.
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
    """A response in progress. ``finished`` is called with its last state."""

    writer: ResponseWriter
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
        parsed = await _asked(service, store, kept, request)
        response = _blank(parsed, service)
        stored = StoredResponse(response, parsed.items, service.keys.owner(request))
        keep = partial(_keep, parsed, stored, store, kept)

        def closed() -> None:
            if response["status"] == "in_progress":  # the client has gone
                response["status"] = "cancelled"
                keep()

        background = parsed.request.background
        answer = Answer(service, request, response["id"], ANYWHERE if background else placement_of(request), closed)
        with parsed.renames.errors():
            generations = await service.serving.chat(parsed.chat, response["id"], ticket_of(request))
        reply = ResponseReply(ResponseWriter(response, bool(parsed.chat.logprobs), new_id), generations, keep)
        if background:
            answer.admit(generations)
            response["status"] = "queued"
            keep()
            if (ticket := note(request.scope).ticket) is not None:
                ticket.hold()
            task = asyncio.create_task(_in_background(answer, reply))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return json_response(response)
        keep()
        try:
            return await answer.send(reply, generations, parsed.request.stream)
        except Exception:
            store.forget(response["id"])
            raise

    @app.post(
        "/v1/responses/input_tokens",
        dependencies=when_ready(service),
        **described("Count the input tokens of a body of /v1/responses.", ResponsesRequest),
    )
    async def input_tokens(request: Request) -> Response:
        parsed = await _asked(service, store, kept, request)
        with parsed.renames.errors():
            prompt = await service.serving.chat_prompt(parsed.chat, ticket_of(request))
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


def _keep(parsed: CheckedRequest, stored: StoredResponse, store: ResponseStore, kept: ConversationStore) -> None:
    """Store a response's state, if requested; once it has ended, append it to its conversation."""
    response = stored.response
    if parsed.request.store is not False:
        store.put(stored)
    if parsed.conversation is not None and response["status"] in ("completed", "incomplete"):
        kept.append(parsed.conversation, [*parsed.items[parsed.earlier :], *response["output"]])


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
        for _ in range(100):  # its last state comes in the next iteration of the loop
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


async def _asked(service: Service, store: ResponseStore, kept: ConversationStore, request: Request) -> CheckedRequest:
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

    def made() -> CheckedRequest:
        messages = to_messages(items, body.instructions, len(earlier), before, ignored=ignored)
        chat, renames = chat_body(body, data, messages, ignored)
        return CheckedRequest(
            body, chat_request(chat, renames), renames, items, len(earlier), model, conversation, ignored
        )

    parsed = await off_loop(_size(size, items), made)
    service.hosted.tell(ignored)
    return await _fitting(service, parsed, data, request) if body.truncation == "auto" else parsed


def _read(raw: bytearray) -> tuple[dict[str, Any], ResponsesRequest]:
    data = load_object(raw)
    return data, checked(data, ResponsesRequest, only=False)


def _size(size: int, items: list[Item]) -> int:
    """Bytes for :func:`off_loop`: those of a body, and a lower bound for stored items."""
    return size + len(items) * INLINE_BYTES // 64


async def _fitting(
    service: Service, parsed: CheckedRequest, data: Mapping[str, Any], request: Request
) -> CheckedRequest:
    """``truncation: auto``: drop as many of the oldest turns as needed to fit the context.

    The stored items stay complete. If even the last turn alone is too long, nothing is dropped, and it is refused
    later.
    """
    room = service.serving.inputs.model.max_model_len - (parsed.request.max_output_tokens or 1)
    choices = [0, *turns(parsed.items)]
    made: dict[int, CheckedRequest] = {}

    def shortened(start: int) -> CheckedRequest:
        items = since(parsed.items, start)
        earlier = max(0, len(items) - (len(parsed.items) - parsed.earlier))
        messages = to_messages(items, parsed.request.instructions, earlier, ignored=parsed.ignored)
        chat, renames = chat_body(parsed.request, data, messages, parsed.ignored)
        return replace(parsed, chat=chat_request(chat, renames), renames=renames)

    async def fits(choice: int) -> bool:
        made[choice] = await off_loop(_size(0, parsed.items), lambda: shortened(choices[choice]))
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
        return parsed
    while low < high:  # the fewest turns to drop
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(middle) else (middle + 1, high)
    await fits(low)
    return made[low]


def _blank(parsed: CheckedRequest, service: Service) -> dict[str, Any]:
    """The response before anything is generated."""
    body, defaults = parsed.request, service.serving.inputs.model.generation_defaults
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": bool(body.background),
        "conversation": {"id": parsed.conversation} if parsed.conversation is not None else None,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": parsed.model,
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
        **({"ignored_tools": list(parsed.ignored.tools)} if parsed.ignored.tools else {}),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _given(body.top_p, defaults, "top_p"),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _given(value: float | None, defaults: Mapping[str, float], name: str) -> float:
    return defaults.get(name, 1.0) if value is None else value


async def _in_background(answer: Answer, reply: ResponseReply) -> None:
    """Run a response in the background. Its end is in the store."""
    service, notes = answer.service, note(answer.request.scope)
    service.running[answer.id] = answer.generations
    service.in_flight += 1
    try:
        await start_all(answer.generations)
        await reply.whole()
    except Exception as error:
        reply.failure(error)
        logger.warning("Response %s failed: %s", answer.id, as_api_error(error))
    finally:
        service.in_flight -= 1
        if notes.ticket is not None:
            notes.ticket.leave()
        service.close(answer.id, answer.generations, answer.request, notes.arrival)
