"""``/openapi.json``, generated from the routes and the models of their bodies, and ``/docs``, a page of it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from unisono import __version__
from unisono.http.anthropic_api.body import CountRequest, MessagesRequest
from unisono.http.openai.protocol import ChatRequest, CompletionRequest
from unisono.http.responses_api.body import ResponsesRequest
from unisono.http.routes.adapters import LoadAdapter, UnloadAdapter
from unisono.http.routes.admin import AbortRequest, MemoryRequest
from unisono.http.routes.common import described, json_response
from unisono.http.routes.conversations import ConversationBody, ItemsBody, MetadataBody
from unisono.http.routes.embeddings import EmbeddingRequest
from unisono.http.routes.pooling import ClassificationRequest, PooledRequest, RerankRequest, ScoreRequest
from unisono.http.routes.tokens import DetokenizeRequest, TokenizeRequest
from unisono.http.routes.weights import (
    LeaveGroupRequest,
    PauseRequest,
    ReceiveWeightsRequest,
    UpdateTensorsRequest,
    UpdateWeightsRequest,
    WeightGroupRequest,
)
from unisono.http.service import Service
from unisono.http.sglang_api import GenerateRequest

BODIES: tuple[type[BaseModel], ...] = (
    AbortRequest, ChatRequest, CompletionRequest, CountRequest, DetokenizeRequest, EmbeddingRequest, GenerateRequest,
    MessagesRequest, ResponsesRequest, TokenizeRequest, ConversationBody, MetadataBody, ItemsBody,
    LoadAdapter, UnloadAdapter, UpdateWeightsRequest, UpdateTensorsRequest, WeightGroupRequest, LeaveGroupRequest,
    ReceiveWeightsRequest, PauseRequest, MemoryRequest, PooledRequest, ClassificationRequest, ScoreRequest,
    RerankRequest,
)  # fmt: skip
"""The models of all bodies."""
STATUSES = {
    "400": "The request asks for something that cannot be done; the error names the field.",
    "401": "The API key is missing or wrong.",
    "403": "Only operators may do this.",
    "404": "There is no such thing.",
    "409": "It cannot be done now.",
    "413": "The body is too large.",
    "415": "The body is no JSON.",
    "429": "The client is beyond its limits; Retry-After says when to send it again.",
    "500": "The request failed in the engine.",
    "503": "The server takes no requests now, or its queue is full.",
}
"""Statuses that a route may answer beside 200."""
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#eee;padding:0 .2em}summary{cursor:pointer;margin:.3rem 0}td,th{text-align:left;"
    "padding:0 1rem 0 0;vertical-align:top}"
)


def add(app: FastAPI, service: Service) -> None:
    """Add the routes. They describe all routes that exist at the first request."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(openapi(app))
        return made

    @app.get("/openapi.json", **described("The OpenAPI document."))
    async def openapi_json() -> Response:
        return json_response(document())

    @app.get("/docs", **described("The routes and their bodies, for people."))
    async def docs() -> Response:
        return HTMLResponse(page(document()))


def api_routes(app: FastAPI) -> Iterator[APIRoute]:
    """The application's routes, in order."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            yield route


def openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application whose routes are described by ``common.described``."""
    routes = list(api_routes(app))
    document = get_openapi(title="Unisono", version=__version__, routes=routes)
    template = "#/components/schemas/{model}"
    _, schemas = models_json_schema([(body, "validation") for body in BODIES], ref_template=template)
    document["components"] = {
        "schemas": schemas.get("$defs", {}),
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    document["security"] = [{}, {"key": []}]
    for operations in document["paths"].values():
        for operation in operations.values():
            good = operation["responses"]["200"]
            operation["responses"] = {"200": {**good, "description": "Success."}}
            operation["responses"] |= {status: {"description": text} for status, text in STATUSES.items()}
    return document


def page(document: dict[str, Any]) -> str:
    """The document as one self-contained page."""
    schemas = document["components"]["schemas"]
    parts = [f"<!doctype html><meta charset=utf-8><title>Unisono</title><style>{STYLE}</style><h1>Unisono</h1>"]
    parts.append('<p>Every GET route takes HEAD too. The same as data: <a href="openapi.json">openapi.json</a>.</p>')
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            title = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation.get('summary', ''))}"
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            parts.append(f"<details><summary>{title}</summary>{_fields(schemas.get(name, {}))}</details>")
    return "".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    """A table of a body's fields."""
    rows = [
        f"<tr><td><code>{html.escape(name)}</code>{' *' if name in schema.get('required', ()) else ''}<td>"
        f"{html.escape(field.get('description') or '')}"
        for name, field in schema.get("properties", {}).items()
    ]
    about = html.escape(schema.get("description", "No body."))
    return f"<p>{about}</p>" + (f"<table><tr><th>Field<th>Value{''.join(rows)}</table>" if rows else "")
