"""Every error that is raised on purpose.

Imports nothing of the project; all rooms import these names from ``types``.
"""

from __future__ import annotations

from collections.abc import Sequence


class FieldPath(str):
    """The path of a request's parameter as a part of an error's message, for example ``messages[0].content``."""


def message_parts(message: str | Sequence[str], param: str | None) -> tuple[str, ...]:
    """The parts of a message; those of type :class:`FieldPath` name parameters.

    message: its parts, or a text; a text that begins with ``param`` has it as its first part.
    """
    if not isinstance(message, str):
        return tuple(message)
    rest = message[len(param or "") :]
    if not param or not message.startswith(param) or rest[:1] == "_" or rest[:1].isalnum():
        return (message,)
    return FieldPath(param), rest


class UnisonoError(Exception):
    """Base of every error that is raised on purpose."""


class BadRequest(UnisonoError):
    """Wrong input of the caller.

    The text names the value, the limit and the way out.

    message: a text, or its parts (:func:`message_parts`). An API that has other names for parameters replaces the
    paths among them. param: the offending parameter as the OpenAI API spells it, or None. code: OpenAI's
    machine-readable code, for example ``context_length_exceeded``. reason: the part of the message that says why,
    without the parameter and its value.
    """

    def __init__(
        self,
        message: str | Sequence[str],
        param: str | None = None,
        code: str | None = None,
        reason: str | None = None,
    ) -> None:
        self.parts = message_parts(message, param)
        super().__init__("".join(self.parts))
        self.param = None if param is None else str(param)
        self.code = code
        self.reason = reason


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
