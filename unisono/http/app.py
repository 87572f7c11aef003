"""The HTTP application: the routes of ``http/routes``, the form of errors, and the middleware around them.

:func:`create_app` makes the ASGI application of a :class:`Service`; ``serve`` runs it.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from unisono.http.anthropic_api.writer import error_object
from unisono.http.errors import ApiError, as_api_error, show
from unisono.http.limits.fields import parameter_rule
from unisono.http.middleware import RequestMiddleware
from unisono.http.observability.request_note import note
from unisono.http.routes import (
    adapters,
    admin,
    anthropic,
    docs,
    embeddings,
    openai,
    page,
    pooling,
    responses,
    sglang,
    state,
    tokens,
    weights,
)
from unisono.http.routes.common import json_response
from unisono.http.service import Service
from unisono.http.unknown_routes import advice
from unisono.types import UnisonoError

ROUTES = tuple(
    group.add
    for group in (
        adapters,
        admin,
        anthropic,
        docs,
        embeddings,
        openai,
        page,
        pooling,
        responses,
        sglang,
        state,
        tokens,
        weights,
    )
)
"""Functions that add a group of routes each."""


def create_app(service: Service) -> ASGIApp:
    """The ASGI application."""
    app = FastAPI(title="Unisono", openapi_url=None, docs_url=None, redoc_url=None)
    for kind in (ApiError, UnisonoError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_bad_parameter)
    for add in ROUTES:
        add(app, service)
    return RequestMiddleware(app, service)


async def _answer_error(request: Request, error: Exception) -> Response:
    api_error, written = as_api_error(error), note(request.scope)
    written.error = api_error
    content: object = api_error.body()
    if request.url.path.startswith(anthropic.PREFIX):
        content = error_object(api_error, written.request_id)
    response = json_response(content, api_error.status)
    response.headers.update(api_error.headers)
    return response


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    paths = {route.path for route in request.app.routes}
    allowed = (error.headers or {}).get("Allow")
    message = f"{request.method} {request.url.path}: {error.detail}. {advice(request.url.path, paths, allowed)}"
    response = await _answer_error(request, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _answer_bad_parameter(request: Request, error: Exception) -> Response:
    """The error for an invalid parameter in the URL."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    value = first.get("input")
    message = f"{name}={show(value)} is not valid: {parameter_rule(name, value) or first['msg']}."
    return await _answer_error(request, ApiError(400, message, param=name))
