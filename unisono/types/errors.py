"""Every error that is raised on purpose.

Imports nothing of the project; all rooms import these names from ``types``.
"""

from __future__ import annotations


class UnisonoError(Exception):
    """Base of every error that is raised on purpose."""


class BadRequest(UnisonoError):
    """Wrong input of the caller.

    The text names the value, the limit and the way out.

    param: the offending parameter as the OpenAI API spells it, or None. code: OpenAI's machine-readable code, for
    example ``context_length_exceeded``.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(UnisonoError):
    """A flag or a combination of flags cannot be honoured."""


class CheckpointError(UnisonoError):
    """A checkpoint is missing, broken, truncated or of an unsupported architecture."""


class TemporaryFailure(UnisonoError):
    """Something that the request needs is unavailable now. The same request may succeed some seconds later."""


class EngineUnavailable(UnisonoError):
    """The engine that a request names is not serving now; others may be."""


class EngineDead(UnisonoError):
    """The engine stopped; every request it held ends with this error."""


def request_failure(error: str | None, param: str | None) -> UnisonoError:
    """The exception for a request that the engine ended with ``error``. param: its field that is to blame, or None."""
    if param is not None:
        return BadRequest(f"The request cannot go on: {error}", param)
    return UnisonoError(f"The engine failed on this request: {error}")
