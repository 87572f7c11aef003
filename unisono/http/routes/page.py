"""The page at ``/``: a chat that shows accepted drafts, the server's numbers, and the routes that only the page uses.

Its files are in ``http/page``: HTML, CSS and JavaScript without a build step. They name no other host, and the
Content-Security-Policy forbids the page to load from or send to any. It also forbids inline scripts and, by Trusted
Types, that text becomes markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from unisono.http.errors import ApiError, show
from unisono.http.limits.fields import FileName
from unisono.http.page_state import page_state
from unisono.http.routes.common import clients_only, described, json_response, owners_only
from unisono.http.service import Service
from unisono.types import EngineDead

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "txt": "text/plain; charset=utf-8",
}
"""Content types by file extension. Other files of the directory are not served."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""blob: is for previews of images that the user attaches."""
INSPECT_SECONDS = 0.3
"""Timeout of ``/page/state`` for the engine's answer, seconds; then it serves the last numbers.

The page polls every 0.5 s.
"""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of every file of the page. A browser revalidates its copy each time."""


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    contents = page_files()

    @app.get("/", **described("The page: a chat, and the server's numbers."))
    async def index(request: Request) -> Response:
        return _file(contents, "index.html", request)

    @app.get(
        "/page/state",
        dependencies=clients_only(service),
        **described("The numbers that the page shows, and what the model takes."),
    )
    async def state() -> Response:
        fresh = True
        try:
            await service.client.inspect(INSPECT_SECONDS)
        except (EngineDead, TimeoutError):
            fresh = False
        info = next(iter(service.client.infos), {})
        return json_response(page_state(service, info, service.client.samples, fresh))

    @app.get("/page/{name:path}", **described("A file of the page."))
    async def file(name: FileName, request: Request) -> Response:
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
    """The page's files by path, for example ``vendor/marked/marked.esm.js``."""
    return dict(_files(files("unisono.http") / "page", ""))


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _files(one, f"{prefix}{one.name}/")
        elif one.name.rpartition(".")[2] in TYPES:
            yield prefix + one.name, one.read_bytes()


def _file(contents: Mapping[str, bytes], name: str, request: Request) -> Response:
    if name not in contents:
        raise ApiError(404, f"The page has no file {show(name)}; it has: {', '.join(sorted(contents))}.")
    tag = f'"{sha256(contents[name]).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(contents[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)
