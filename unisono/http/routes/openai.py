"""OpenAI's endpoints: chat completions, completions and the list of models."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from unisono.http import request_ids
from unisono.http.answers.answer import Answer
from unisono.http.answers.generation import Generation
from unisono.http.answers.writer import OpenAIReply
from unisono.http.limits.fields import ModelId
from unisono.http.openai import protocol
from unisono.http.openai.responses import ChatShape, ModelCard, ModelList, ResponseShape, TextShape
from unisono.http.routes.common import (
    clients_only,
    described,
    forget_inputs,
    json_response,
    now,
    parsed_body,
    placement_of,
    ticket_of,
    when_ready,
)
from unisono.http.service import Service

CHAT, TEXT = ChatShape(), TextShape()


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    ready, clients = when_ready(service), clients_only(service)

    @app.post("/v1/chat/completions", dependencies=ready, **described("Answer a conversation.", protocol.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: protocol.parse(raw, protocol.ChatRequest))
        return await _generate(
            service, request, body, CHAT, lambda name: service.serving.chat(body, name, ticket_of(request))
        )

    @app.post("/v1/completions", dependencies=ready, **described("Continue prompts.", protocol.CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: protocol.parse(raw, protocol.CompletionRequest))
        return await _generate(service, request, body, TEXT, lambda name: service.serving.completion(body, name))

    @app.get("/v1/models", dependencies=clients, **described("The served names."))
    async def models() -> Response:
        return json_response(ModelList([_card(service, name) for name in (*service.names, *service.adapters)]))

    @app.get("/v1/models/{model_id:path}", dependencies=clients, **described("One served name."))
    async def model(model_id: ModelId) -> Response:
        return json_response(_card(service, service.model(model_id)))


def _card(service: Service, name: str) -> ModelCard:
    length, adapter = service.serving.inputs.model.max_model_len, service.adapters.found.get(name)
    if adapter is not None:
        return ModelCard(name, adapter.created, length, adapter.path, parent=service.names[0])
    return ModelCard(name, service.created, length, service.root)


async def _generate(
    service: Service,
    request: Request,
    body: protocol.GenerationRequest,
    shape: ResponseShape,
    prepare: Callable[[str], Coroutine[Any, Any, list[Generation]]],
) -> Response:
    model = service.model(body.model)
    body.check_stream()
    named = {"request_id": body.request_id, "rid": body.rid}
    answer_id = request_ids.answer_id(shape.id_prefix, request, named, service.claimed)
    service.claimed.add(answer_id)
    release = partial(service.claimed.discard, answer_id)
    try:
        answer = Answer(service, request, answer_id, placement_of(request), release)
        generations = await prepare(answer_id)
        forget_inputs(body)
        reply = OpenAIReply(
            shape, answer_id, now(), model, service.model_fingerprint, body, generations, service.acceptance
        )
        return await answer.send(reply, generations, body.stream)
    except BaseException:
        release()
        raise
