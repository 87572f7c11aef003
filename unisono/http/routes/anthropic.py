"""Anthropic's Messages API: answer a conversation, count its tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response

from unisono.http.answers.answer import Answer
from unisono.http.answers.generation import Generation, merge
from unisono.http.answers.writer import EventReply, stream_error
from unisono.http.anthropic_api.body import CountRequest, MessagesRequest, chat_body
from unisono.http.anthropic_api.writer import Event, MessageWriter, error_object
from unisono.http.observability.request_note import note
from unisono.http.openai.hosted_tools import Ignored
from unisono.http.openai.protocol import ChatRequest
from unisono.http.openai.responses import Usage
from unisono.http.openai.translation import Renames, chat_request, checked
from unisono.http.request_body import load_object
from unisono.http.routes.common import (
    described,
    forget_inputs,
    json_response,
    new_id,
    parsed_body,
    placement_of,
    ticket_of,
    when_ready,
)
from unisono.http.service import Service

Body = TypeVar("Body", bound=CountRequest)

PREFIX = "/v1/messages"
"""Errors under this path have Anthropic's form."""


@dataclass
class MessageReply(EventReply):
    """A message in progress."""

    writer: MessageWriter
    generations: list[Generation]
    request_id: str

    def result(self) -> dict[str, Any]:
        return self.writer.message

    def failure(self, error: Exception) -> list[Event]:
        return [error_object(stream_error(error), self.request_id)]

    async def batches(self) -> AsyncGenerator[list[Event]]:
        async with aclosing(merge(self.generations)) as pieces:
            async for piece in pieces:
                usage = Usage.total(generation.usage for generation in self.generations)
                events = self.writer.feed(piece, usage)
                if piece.finish is not None:
                    events += self.writer.end(piece.finish, piece.stop, usage)
                yield events


def _read(raw: bytearray, kind: type[Body], ignored: Ignored) -> tuple[Body, ChatRequest, Renames]:
    """A body, the chat request translated from it, and the names of its fields. Raises BadRequest and ApiError."""
    data = load_object(raw)
    body = checked(data, kind, only=False)
    fields, renames = chat_body(body, data, ignored)
    return body, chat_request(fields, renames), renames


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    ready = when_ready(service)

    @app.post(PREFIX, dependencies=ready, **described("Answer a conversation.", MessagesRequest))
    async def messages(request: Request) -> Response:
        ignored = service.hosted.request()
        body, chat, renames = await parsed_body(request, lambda raw: _read(raw, MessagesRequest, ignored))
        model, message_id = service.model(body.model), new_id("msg_")
        service.hosted.tell(ignored)
        blank: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
        }
        blank |= {"stop_reason": None, "stop_sequence": None, "usage": None}
        blank |= {"ignored_tools": list(ignored.tools)} if ignored.tools else {}
        answer = Answer(service, request, message_id, placement_of(request))
        with renames.errors():
            generations = await service.serving.chat(chat, message_id, ticket_of(request))
        forget_inputs(body, chat)
        reply = MessageReply(MessageWriter(blank, new_id), generations, note(request.scope).request_id)
        return await answer.send(reply, generations, body.stream)

    @app.post(f"{PREFIX}/count_tokens", dependencies=ready, **described("Count a conversation's tokens.", CountRequest))
    async def count_tokens(request: Request) -> Response:
        ignored = service.hosted.request()
        body, chat, renames = await parsed_body(request, lambda raw: _read(raw, CountRequest, ignored))
        service.model(body.model)
        with renames.errors():
            prompt = await service.serving.chat_prompt(chat, ticket_of(request))
        return json_response({"input_tokens": len(prompt.token_ids)})
