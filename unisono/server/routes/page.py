"""The page at ``/``: a chat that shows accepted drafts, the server's numbers, and the route that only the page reads.

Its files lie in ``server/page``: HTML, CSS and JavaScript as browsers read them. They name no other host, and the
Content-Security-Policy forbids the page to load from or talk to any.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response

from unisono.server.errors import ApiError, show
from unisono.server.routes.common import described, json_response, owners_only
from unisono.server.service import Service

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Content types by the ends of files' names."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Of every file of the page. A browser asks each time whether its copy is the server's."""


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    contents = page_files()

    @app.get("/", **described("The page: a chat, and the server's numbers."))
    async def index(request: Request) -> Response:
        return _file(contents, "index.html", request)

    @app.get("/page/{name}", **described("A file of the page."))
    async def file(name: str, request: Request) -> Response:
        return _file(contents, name, request)

    @app.get(
        "/requests",
        dependencies=owners_only(service),
        **described("What each of the last 100 sequences waited for, the latest first. No texts. Users see their own."),
    )
    async def requests(request: Request) -> Response:
        key = service.keys.scope(request)
        found = service.metrics.history.latest()
        return json_response({"requests": [one for one in found if key is None or one.key == key]})


def page_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = files("unisono.server") / "page"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES}


def _file(contents: Mapping[str, bytes], name: str, request: Request) -> Response:
    if name not in contents:
        raise ApiError(404, f"The page has no file {show(name)}; it has: {', '.join(sorted(contents))}.")
    tag = f'"{sha256(contents[name]).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(contents[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)
