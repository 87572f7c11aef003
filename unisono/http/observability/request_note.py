"""Notes on one HTTP request. The middleware creates one per request; handlers record how the request failed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from unisono.http.errors import ApiError
from unisono.http.limits.overload import Ticket


@dataclass
class RequestNote:
    """The notes on one HTTP request.

    arrival: ``time.monotonic()``. error: the failure, if any. ticket: of an admitted request. key: name of its API key.
    """

    request_id: str
    arrival: float = field(default_factory=time.monotonic)
    error: ApiError | None = None
    status: int = 0
    ticket: Ticket | None = None
    key: str = ""


def note(scope: Any) -> RequestNote:
    """The note of the request with this ASGI scope."""
    return scope["unisono"]
