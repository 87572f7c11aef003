"""The id that a client gives its request: vLLM's ``request_id``, SGLang's ``rid`` or the header X-Request-Id.

It becomes a part of the answer's id and of the engine's. Two requests of one id cannot run at once:
``EngineClient.submit`` refuses the second.
"""

from __future__ import annotations

import re

from unisono.server.errors import show
from unisono.types import BadRequest

HEADER = "x-request-id"
MAX_CHARS = 128
_ALLOWED = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_CHARS}}}")


def given_id(header: str | None, request_id: str | None, rid: str | None) -> str | None:
    """The id that a request brings, None for none; the header wins, as in vLLM. Raises BadRequest."""
    if request_id is not None and rid is not None and request_id != rid:
        raise BadRequest("request_id and rid differ; give one of them.", "rid")
    named = {"request_id": request_id, "rid": rid, "X-Request-Id": header}
    for name, value in named.items():
        if value is not None and _ALLOWED.fullmatch(value) is None:
            raise BadRequest(
                f"{name}={show(value)} is not valid: it must have 1 to {MAX_CHARS} characters, letters, digits, '.', "
                "'_', ':' and '-'.",
                name,
            )
    return next((value for value in (header, request_id, rid) if value is not None), None)
