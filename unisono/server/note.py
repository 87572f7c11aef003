"""What is known of one HTTP request. ``gate`` makes a note of each; handlers write into it how the request failed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from unisono.server.errors import ApiError


@dataclass
class Note:
    """What is known of one HTTP request. ``arrival``: ``time.monotonic()``. ``error``: how it failed, if it did."""

    request_id: str
    arrival: float = field(default_factory=time.monotonic)
    error: ApiError | None = None
    status: int = 0


def note(scope: Any) -> Note:
    """The note of the request with this ASGI scope."""
    return scope["unisono"]
