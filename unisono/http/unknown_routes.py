"""Advice in the errors for paths and methods that the server does not have. ``app.py`` calls it."""

from __future__ import annotations

import difflib
from collections.abc import Collection

UNSUPPORTED = {
    "/v1/assistants": "there are no assistants; /v1/responses continues conversations",
    "/v1/audio": "audio is not supported",
    "/v1/batches": "there are no batches; send the requests, the engine batches them",
    "/v1/evals": "there are no evals; `unisono eval` measures a model",
    "/v1/files": "there are no files; images are content parts",
    "/v1/fine_tuning": "models are not trained here; adapters of PEFT are served (docs/guide/adapters.md)",
    "/v1/images": "images are not generated",
    "/v1/moderations": "nothing here judges texts; /classify serves a classifier",
    "/v1/realtime": "audio and WebSockets are not supported; stream /v1/chat/completions",
    "/v1/threads": "there are no assistants; /v1/responses continues conversations",
    "/v1/uploads": "there are no files; images are content parts",
    "/v1/vector_stores": "there are no files; images are content parts",
    "/v1/videos": "videos are not generated",
}
"""First parts of OpenAI's paths that have no route -> the reason and the nearest alternative."""

RENAMED = {
    "/get_load": "/load",
    "/get_server_info": "/server_info",
    "/health_generate": "/health",
    "/healthz": "/health",
    "/invocations": "/v1/chat/completions",
    "/v1/detokenize": "/detokenize",
    "/v1/health": "/health",
    "/v1/tokenize": "/tokenize",
}
"""Paths of other servers -> the route here."""


def advice(path: str, paths: Collection[str], allowed: str | None) -> str:
    """A sentence on what to send instead.

    path: of the request. paths: of all routes. allowed: methods of the route with this path, separated by commas; None
    if there is none.
    """
    if allowed is not None:
        return f"Use {' or '.join(allowed.split(', '))}."
    reason = next((UNSUPPORTED[one] for one in UNSUPPORTED if path == one or path.startswith(f"{one}/")), None)
    if reason is not None:
        return f"It is not supported: {reason}."
    return f"{_nearest(path, paths)}GET /docs lists the routes."


def _nearest(path: str, paths: Collection[str]) -> str:
    """The question about the likely route; empty if none is near."""
    plain = path.rstrip("/")
    likely = (RENAMED.get(plain), f"/v1{plain}", plain.removeprefix("/v1"), plain)
    near = next((one for one in likely if one in paths), None)
    near = near or next(iter(difflib.get_close_matches(plain, sorted(paths), 1, 0.8)), None)
    return f"Did you mean {near}? " if near else ""
