"""Errors in the form of the OpenAI API: ``{"error": {"message", "type", "param", "code"}}`` and an HTTP status."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unisono.types import BadRequest, EngineDead, EngineUnavailable, TemporaryFailure, UnisonoError
from unisono.types.errors import message_parts
from unisono.types.excerpts import show as show

NO_ANSWER_RETRY_AFTER = 5
"""Seconds after which a client may ask again where the engine did not answer."""


class ApiError(Exception):
    """An error of the client (4xx) or the server (5xx).

    message: a text, or its parts (:func:`unisono.types.errors.message_parts`). retry_after: seconds until the client
    may retry.
    """

    def __init__(
        self,
        status: int,
        message: str | Sequence[str],
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.parts = message_parts(message, param)
        super().__init__("".join(self.parts))
        self.status = status
        self.kind = kind
        self.param = None if param is None else str(param)
        self.code = code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer with this error."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def body(self) -> bytes:
        """The error JSON."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    """503: the server takes no requests now."""
    return ApiError(503, message, "service_unavailable_error", code=code, retry_after=retry_after)


def no_answer(error: EngineDead | TimeoutError) -> ApiError:
    """503: the engine did not answer a command: it is busy, or it has ended and may be restarted."""
    reason = str(error) or "it is busy"  # a TimeoutError has no text
    return unavailable(f"The engine does not answer: {reason}.", "engine_unavailable", NO_ANSWER_RETRY_AFTER)


def as_api_error(error: Exception) -> ApiError:
    """The client's view of an error that was raised while a request ran."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, TemporaryFailure):
        return unavailable(f"The request could not be prepared: {error}. Send it again later.", "try_again", 5)
    if isinstance(error, EngineUnavailable):
        return unavailable(str(error), "engine_unavailable")
    if isinstance(error, EngineDead):
        return ApiError(500, f"The request ended early: {error}.", "server_error", code="engine_dead")
    if isinstance(error, UnisonoError):
        return ApiError(500, str(error), "server_error")
    return ApiError(
        500, "The server failed on this request; the reason is in its log.", "server_error", code="internal_error"
    )
