"""Limit and delays of restarts of an engine process."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from unisono.types import ConfigError

BACKOFF = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Seconds before a start, by the number of consecutive failures."""


@dataclass
class Restarts:
    """Allow at most ``limit`` restarts within ``window`` seconds, to end a crash loop.

    Raises ConfigError for a limit below 1 or a window of zero length.
    """

    limit: int = 5
    window: float = 600.0
    _begun: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(
                f"--max-engine-restarts {self.limit} must be 1 or more; --no-restart-engine turns restarts off."
            )
        if not self.window > 0:
            raise ConfigError(f"--engine-restart-window {self.window:g} must be more than 0 seconds.")

    def begin(self) -> bool:
        """Count a restart that begins now; False if the limit is reached."""
        now = time.monotonic()
        while self._begun and now - self._begun[0] > self.window:
            self._begun.popleft()
        if len(self._begun) >= self.limit:
            return False
        self._begun.append(now)
        return True

    def exhausted(self) -> str:
        """The reason why there is no further one."""
        return (
            f"it was restarted {len(self._begun)} times within {self.window:g} s and is given up "
            "(--max-engine-restarts, --engine-restart-window)"
        )
