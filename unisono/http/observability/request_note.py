"""What is known of one HTTP request. ``gate`` makes a note of each; handlers write into it how the request failed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from unisono.http.errors import ApiError
from unisono.http.limits.overload import Ticket


@dataclass
class Note:
    """What is known of one HTTP request.

    arrival: ``time.monotonic()``. error: how it failed, if it did. ticket: of a request that was taken on. key: the
    name of the key that it came with.
    """

    request_id: str
    arrival: float = field(default_factory=time.monotonic)
    error: ApiError | None = None
    status: int = 0
    ticket: Ticket | None = None
    key: str = ""


def note(scope: Any) -> Note:
    """The note of the request with this ASGI scope."""
    return scope["unisono"]
