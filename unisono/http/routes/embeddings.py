"""OpenAI's embeddings: pooled last hidden states of texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.frontend.pooling import GENERATIVE, Pooling, encoded
from unisono.http.answers.answer import Answer
from unisono.http.answers.generation import Generation
from unisono.http.answers.pooled import pooled_values
from unisono.http.errors import ApiError
from unisono.http.limits.fields import Strings, TokenIdLists, TokenIds
from unisono.http.openai.protocol import CompletionRequest, parse_fields
from unisono.http.openai.serving import HiddenUse
from unisono.http.openai.translation import Renames, checked
from unisono.http.request_body import load_object, off_loop
from unisono.http.routes.common import described, new_id, parsed_body, placement_of, when_ready
from unisono.http.service import Service


class EmbeddingRequest(BaseModel):
    """Body of ``/v1/embeddings``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input: str | Strings | TokenIds | TokenIdLists = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists"
    )
    model: str | None = Field(None, description="the name of a served model")
    encoding_format: Literal["float", "base64"] | None = Field(None, description='"float" or "base64"')
    dimensions: int | None = Field(None, description="a whole number")
    normalize: bool | None = Field(None, description="true (the default) or false")
    truncate_prompt_tokens: int | None = Field(None, description="a whole number")
    prompt_name: str | None = Field(None, description="a string: the model card's prompt that goes before each text")
    user: str | None = Field(None, description="a string")


@dataclass
class EmbeddingReply:
    """Embeddings in progress. They are never streamed."""

    request: EmbeddingRequest
    model: str
    pooling: Pooling
    generations: list[Generation]

    async def whole(self) -> dict[str, Any]:
        """The answer. Raises the error that ended a request early."""
        normalize = self.request.normalize is not False
        vectors = await pooled_values(
            self.generations, lambda states, _: self.pooling.pool(states, self.request.dimensions, normalize)
        )
        data = await asyncio.to_thread(self._data, vectors)
        tokens = sum(generation.usage.prompt_tokens for generation in self.generations)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        found = {"object": "list", "data": data, "model": self.model, "usage": usage}
        return found if self.pooling.meant else {**found, "note": GENERATIVE}

    def _data(self, vectors: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        form = self.request.encoding_format or "float"
        return [
            {"object": "embedding", "index": index, "embedding": encoded(vector, form)}
            for index, vector in enumerate(vectors)
        ]

    def events(self, failed: Callable[[Exception], None]) -> AsyncGenerator[bytes]:
        raise NotImplementedError("embeddings are not streamed")


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/embeddings", dependencies=when_ready(service), **described("Embed texts.", EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        body, size = await parsed_body(request, lambda raw: (checked(load_object(raw), EmbeddingRequest), len(raw)))
        model, answer_id = service.model(body.model), new_id("embd-")
        _check(body, service)
        texts = service.pooling.prompted(body.input, body.prompt_name)
        fields = {"prompt": texts, "max_tokens": 1, "temperature": 0, "return_hidden_states": True, "model": model}
        if body.truncate_prompt_tokens is not None:
            fields["truncate_prompt_tokens"] = body.truncate_prompt_tokens
        renames = Renames({"prompt": "input"})
        answer = Answer(service, request, answer_id, placement_of(request))
        with renames.errors():
            completion = await off_loop(size, lambda: parse_fields(fields, CompletionRequest))
            generations = await service.serving.completion(completion, answer_id, use=HiddenUse.POOLED)
        return await answer.send(EmbeddingReply(body, model, service.pooling, generations), generations, False)


def _check(body: EmbeddingRequest, service: Service) -> None:
    """Raise ApiError and BadRequest for fields that this server does not support."""
    if service.pooling.problem is not None:
        raise ApiError(400, f"Embeddings of this checkpoint: {service.pooling.problem}.", code="embeddings_off")
    service.pooling.check_dimensions(body.dimensions, service.serving.inputs.model.hidden_size)
