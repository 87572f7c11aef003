"""Messages between the API process and the engine process, and their bytes (msgpack).

Requests and deltas travel as the dataclasses of ``types``. One PAIR socket carries both directions; order within a
direction is kept, so a request's ``Accepted`` comes before its first delta.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.types import EngineRequest, TokenDelta


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """One number of the engine: ``Engine.metrics()`` returns a list of such tuples.

    name: without prefix and without ``_total``. kind: ``counter`` or ``gauge``. labels: name to value. help: its
    description.
    """

    name: str
    kind: str
    labels: dict[str, str]
    value: float
    help: str


class Add(msgspec.Struct, tag="add"):
    """Add a request. Answered by Accepted or Rejected, then by deltas."""

    request: EngineRequest


class Abort(msgspec.Struct, tag="abort"):
    """Forget a request; unknown ids are ignored. Not answered."""

    request_id: str


class Inspect(msgspec.Struct, tag="inspect"):
    """Request info and metrics. Answered by Stats after the current step."""


class OperatorCall(msgspec.Struct, tag="call"):
    """Run an operator's command between two steps. Answered by Called."""

    number: int
    command: str
    arguments: dict[str, Any]


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Free everything and exit with status 0."""


class Loading(msgspec.Struct, tag="loading"):
    """Progress of the start: a stage's name and its completed fraction, 0 … 1."""

    stage: str
    share: float


class Ready(msgspec.Struct, tag="ready"):
    """The engine is loaded and captured; ``info`` is ``Engine.info()``."""

    info: dict[str, Any]


class Accepted(msgspec.Struct, tag="accepted"):
    request_id: str


class Rejected(msgspec.Struct, tag="rejected"):
    """``Engine.add`` raised BadRequest, or failed (``failed``); the engine holds nothing of the request."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None
    reason: str | None = None
    failed: bool = False


class Started(msgspec.Struct, tag="started"):
    """These requests have slots. Sent before the first pass that may compute them."""

    request_ids: list[str]


class Deltas(msgspec.Struct, tag="deltas"):
    """The deltas of one step, of all requests."""

    deltas: list[TokenDelta]


class Stats(msgspec.Struct, tag="stats"):
    info: dict[str, Any]
    samples: list[MetricSample]


class Called(msgspec.Struct, tag="called"):
    """Result of a command, or the error of a failed one (then ``value`` is null)."""

    number: int
    value: Any
    error: str | None = None


class Fatal(msgspec.Struct, tag="fatal"):
    """The error that ended the engine. ``error`` is the exception's class name, ``message`` one line."""

    error: str
    message: str


ToEngine = Add | Abort | Inspect | OperatorCall | Shutdown
FromEngine = Loading | Ready | Accepted | Rejected | Started | Deltas | Stats | Called | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

encode = _encoder.encode


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def request_in(data: bytes) -> str | None:
    """Return the request id in a message that :func:`decode_to_engine` could not read; None if it has none."""
    try:
        found = msgspec.msgpack.decode(data)["request"]["request_id"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)
