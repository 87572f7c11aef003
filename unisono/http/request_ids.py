"""The ids of answers: new ones, or a client's name of its request.

A body's ``request_id`` (vLLM's name) or ``rid`` (SGLang's) becomes the end of the answer's id, and of the engine's. Two
requests with one id cannot run at once: ``EngineClient.submit`` refuses the second. The header X-Request-Id names the
answer too, but proxies give one to several requests; the others then get new ids.
"""

from __future__ import annotations

import re
from collections.abc import Container

from fastapi import Request

from unisono.http.errors import show
from unisono.http.observability.request_note import note
from unisono.http.routes.common import new_id
from unisono.types import BadRequest

HEADER = "x-request-id"
MAX_CHARS = 128
_ALLOWED = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_CHARS}}}")


def checked_id(value: str, field: str) -> str:
    """A client's id of its request. Raises BadRequest for one that is too long or has other characters."""
    if _ALLOWED.fullmatch(value) is None:
        raise BadRequest(
            f"{field}={show(value)} is not valid: it must have 1 to {MAX_CHARS} characters, letters, digits, '.', "
            "'_', ':' and '-'.",
            field,
        )
    return value


def answer_id(prefix: str, request: Request, named: dict[str, str | None], taken: Container[str]) -> str:
    """The id of the answer to a request.

    named: the ids in the body, by field. taken: ids of running answers.

    Raises BadRequest for an invalid name, or several.
    """
    ids = {field: value for field, value in named.items() if value is not None}
    for field, value in ids.items():
        checked_id(value, field)
    if len(set(ids.values())) > 1:
        raise BadRequest(f"{' and '.join(ids)} differ; give one of them.", next(reversed(ids)))
    if ids:
        return prefix + next(iter(ids.values()))
    header = request.headers.get(HEADER)
    if header is not None and header == note(request.scope).request_id and prefix + header not in taken:
        return prefix + header
    return new_id(prefix)
