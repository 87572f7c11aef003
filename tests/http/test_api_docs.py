"""docs/reference/http-api.md, /openapi.json and /docs tell of exactly the routes that there are."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from tests.http.conftest import Server
from unisono.http import app as application
from unisono.http.routes.docs import api_routes

PAGE = (Path(__file__).parents[2] / "docs/reference/http-api.md").read_text()


def routes() -> dict[tuple[str, str], Any]:
    """(method, path) of every route of the application, and the route."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    service: Any = SimpleNamespace(keys=None, adapters=None, serving=SimpleNamespace(inputs=None))
    for add in application.ROUTES:
        add(app, service)
    return {(method, route.path_format): route for route in api_routes(app) for method in route.methods}


def test_the_page_has_every_route_and_no_other() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    written = [found for row in rows for found in re.findall(r"`(GET|POST|DELETE) ([^`]+)`", row.split("|")[1])]
    assert sorted(written) == sorted(routes())


def test_api_page_lists_route_permissions() -> None:
    """By asking each route's dependencies: without a key, and from another machine."""
    for row in (line for line in PAGE.splitlines() if line.startswith("| `")):
        _, names, who, *_ = row.split("|")
        for key in re.findall(r"`(GET|POST|DELETE) ([^`]+)`", names):
            checks = [d.dependency.__qualname__.split(".")[0] for d in routes()[key].dependencies]
            kinds = {"when_ready": "key", "clients_only": "key", "operators_only": "operator", "owners_only": "own"}
            assert {kinds[check] for check in checks} == ({who.strip()} - {""}), key


def test_openapi_is_true(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    told = {(m.upper(), path) for path, operations in document["paths"].items() for m in operations}
    assert told == set(routes())
    schemas = document["components"]["schemas"]
    for (method, path), route in routes().items():
        operation = document["paths"][path][method.lower()]
        assert operation["summary"]
        reference = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        if reference is not None:
            assert reference["$ref"].rpartition("/")[2] in schemas, route
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    assert {"messages", "temperature", "tools", "stream_options"} <= chat["properties"].keys()
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= schemas.keys()


def test_required_fields_are_those_that_are_refused_when_missing(server: Server) -> None:
    """What the document says of bodies is what the server does."""
    document = server.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        schema = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        complete = ("/v1/embeddings", "/abort", "/abort_request", "/v1/conversations", "/resume_memory_occupation")
        if schema is None or path in complete:
            continue
        body = document["components"]["schemas"][schema["schema"]["$ref"].rpartition("/")[2]]
        answer = server.http.post(path, json={})
        assert answer.status_code == 400
        for name in body.get("required", [])[:1]:
            assert f"{name} is missing" in answer.json()["error"]["message"]


def test_docs_is_a_page_that_loads_nothing(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "POST /v1/messages" in page.text
    assert "max_output_tokens" in page.text
    assert not re.search(r"<script|src=|https?://", page.text)


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_every_get_takes_head(server: Server, path: str) -> None:
    assert server.http.head(path).status_code == 200
