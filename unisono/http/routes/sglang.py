"""SGLang's native endpoint."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from unisono.http.answers.answer import Answer
from unisono.http.errors import ApiError, show
from unisono.http.observability.request_note import note
from unisono.http.openai.protocol import CompletionRequest, parse_fields
from unisono.http.openai.translation import Renames, checked
from unisono.http.request_body import load_object
from unisono.http.request_ids import checked_id
from unisono.http.routes.common import (
    described,
    forget_inputs,
    new_id,
    parsed_body,
    placement_of,
    ticket_of,
    when_ready,
)
from unisono.http.service import Service
from unisono.http.sglang_api import GenerateReply, GenerateRequest, completion_body, media_sources
from unisono.media.fetching.sources import MediaSource


def _read(raw: bytearray) -> tuple[GenerateRequest, CompletionRequest, list[list[MediaSource]], Renames]:
    """A body, the completion request translated from it, its media, and the names of its fields.

    Raises BadRequest and ApiError.
    """
    data = load_object(raw)
    body = checked(data, GenerateRequest, only=False)
    fields, renames = completion_body(body, data)
    media = media_sources(body)
    with renames.errors():
        return body, parse_fields(fields, CompletionRequest), media, renames


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/generate", dependencies=when_ready(service), **described("Continue prompts.", GenerateRequest))
    async def generate(request: Request) -> Response:
        body, completion, media, renames = await parsed_body(request, _read)
        if body.adapter is not None and body.adapter not in service.adapters:
            names = ", ".join(service.adapters) or "there are none"
            message = f"lora_path={show(body.lora_path)} names no adapter that is served; served: {names}."
            raise ApiError(404, message, "not_found_error", param="lora_path", code="model_not_found")
        service.model(completion.model)
        answer_id = checked_id(body.rid, "rid") if body.rid else new_id("gen-")
        answer = Answer(service, request, answer_id, placement_of(request))
        with renames.errors():
            generations = await service.serving.completion(completion, answer_id, media, ticket_of(request))
        forget_inputs(body, completion)
        media.clear()
        several = isinstance(body.text, list) or bool(body.input_ids and isinstance(body.input_ids[0], list))
        many = several or len(generations) > 1
        reply = GenerateReply(body, answer_id, generations, many, note(request.scope).arrival, service.weights.version)
        return await answer.send(reply, generations, body.stream)
