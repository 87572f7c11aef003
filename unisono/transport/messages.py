"""Messages of prefill and decode engines after the handshake."""

from __future__ import annotations

import msgspec


class Prefill(msgspec.Struct, tag=True):
    """Compute the state of these tokens and send it. number: the sender's name of the request. salt: cache_salt.

    first: the first requested page.
    """

    number: int
    tokens: list[int]
    first: int
    salt: str | None = None


class Cancel(msgspec.Struct, tag=True):
    """Abort a request."""

    number: int


class Pages(msgspec.Struct, tag=True):
    """Pages of a request from ``first`` on. complete: per page. parts: kind and its pages, in the payload's order: for
    each kind each tensor of its state, of all of its pages.
    """

    number: int
    first: int
    complete: list[bool]
    parts: list[tuple[int, list[int]]]


class Done(msgspec.Struct, tag=True):
    """End of a request's pages. error: the reason of a failure; empty: success."""

    number: int
    error: str = ""


Message = Prefill | Cancel | Pages | Done
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.encode


def decode(data: bytes) -> Message:
    """Decode a message. Raises msgspec.MsgspecError."""
    return _decoder.decode(data)
