"""Text to tokens and back, with vLLM's and SGLang's endpoints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.http.errors import ApiError
from unisono.http.limits.fields import TokenIds, check_name
from unisono.http.openai.protocol import ChatRequest
from unisono.http.openai.translation import Renames, chat_request, checked, passed_on
from unisono.http.request_body import load_object
from unisono.http.routes.common import clients_only, described, json_response, parsed_body, ticket_of
from unisono.http.service import Service
from unisono.types import BadRequest
from unisono.types.unknown_fields import dropped

FREE_TOKENS = 1 << 18
"""Most token ids that are decoded at once, unless the context is longer. The tokenizer holds Python's lock meanwhile,
0.2 s for a million.
"""


class TokenizeRequest(BaseModel):
    """Body of ``/tokenize``: a prompt, or messages with the fields of a chat body that shape the prompt."""

    model_config = ConfigDict(strict=True, extra="allow")

    prompt: str | None = Field(None, description="a string")
    messages: list[Any] | None = Field(None, description="a list of messages")
    model: str | None = Field(None, description="the name of a served model")
    add_special_tokens: bool | None = Field(None, description="true or false; default: true for a prompt")
    return_token_strs: bool | None = Field(None, description="true or false")


class DetokenizeRequest(BaseModel):
    """Body of ``/detokenize``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: TokenIds = Field(description="a list of token ids")
    model: str | None = Field(None, description="the name of a served model")
    skip_special_tokens: bool | None = Field(None, description="true or false; default: false")


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    clients, workers = clients_only(service), clients_only(service, works=True)
    inputs = service.serving.inputs

    @app.post("/tokenize", dependencies=workers, **described("Token ids of a prompt.", TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body, chat = await parsed_body(request, _read)
        service.model(body.model)
        ids = await _ids(service, request, body, chat)
        tokenizer = inputs.require_tokenizer("prompt")
        spelled = tokenizer.backend.convert_ids_to_tokens
        names = await asyncio.to_thread(spelled, ids) if body.return_token_strs else None
        context = inputs.model.max_model_len
        return json_response({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": names})

    @app.post("/detokenize", dependencies=workers, **described("The text of token ids.", DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await parsed_body(request, lambda raw: checked(load_object(raw), DetokenizeRequest))
        service.model(body.model)
        size, most = inputs.model.vocab_size, max(FREE_TOKENS, inputs.model.max_model_len)
        if len(body.tokens) > most:
            raise BadRequest(f"tokens has {len(body.tokens)} ids; at most {most} are taken. Split them.", "tokens")
        wrong = next((one for one in body.tokens if not 0 <= one < size), None)
        if wrong is not None:
            raise BadRequest(f"tokens has {wrong}; ids are whole numbers from 0 to {size - 1}.", "tokens")
        tokenizer = inputs.require_tokenizer("tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
        return json_response({"prompt": text, "text": text})  # vLLM's name and SGLang's

    @app.get("/tokenizer_info", dependencies=clients, **described("The tokenizer's configuration."))
    async def tokenizer_info() -> Response:
        tokenizer = inputs.require_tokenizer("tokenizer_info")
        path = Path(service.root) / "tokenizer_config.json"
        try:
            config = json.loads(await asyncio.to_thread(path.read_text, encoding="utf-8"))
        except (OSError, ValueError):
            raise ApiError(404, "The checkpoint has no tokenizer_config.json.", code="no_tokenizer_config") from None
        template = config.get("chat_template") or tokenizer.backend.chat_template
        return json_response({**config, "tokenizer_class": type(tokenizer.backend).__name__, "chat_template": template})


def _read(raw: bytearray) -> tuple[TokenizeRequest, ChatRequest | None]:
    """A body, and its conversation in the chat endpoint's form. Raises BadRequest and ApiError."""
    data = load_object(raw)
    body = checked(data, TokenizeRequest, only=False)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("prompt and messages: give one of them.", "prompt")
    own = TokenizeRequest.model_fields.keys()
    if body.messages is not None:
        value = ("messages", "model", "add_special_tokens")
        fields = {name: data[name] for name in value if data.get(name) is not None}
        return body, chat_request(fields | passed_on(data, own, {}), Renames({}))
    for name in data:
        check_name(name)
        if name not in own and not dropped(name):
            raise ApiError(400, f"{name} is not a known field; remove it.", param=name, code="unknown_field")
    return body, None


async def _ids(service: Service, request: Request, body: TokenizeRequest, chat: ChatRequest | None) -> list[int]:
    """The token ids of a prompt, or of a conversation as the chat endpoint renders it."""
    if chat is not None:
        return (await service.serving.chat_prompt(chat, ticket_of(request))).token_ids
    assert body.prompt is not None
    return await service.serving.encode(body.prompt, body.add_special_tokens is not False)
