"""What prefill and decode engines say to each other once they have shaken hands."""

from __future__ import annotations

import msgspec


class Prefill(msgspec.Struct, tag=True):
    """Compute these tokens' state and send it. number: the asking end's name of the request. salt: cache_salt.

    first: the first page that is wanted.
    """

    number: int
    tokens: list[int]
    first: int
    salt: str | None = None


class Cancel(msgspec.Struct, tag=True):
    """Nobody waits for this request any more."""

    number: int


class Pages(msgspec.Struct, tag=True):
    """Pages ``first`` … of a request. complete: of each page. parts: kind and the pages that have it, in the payload's
    order: for each kind each tensor of its state, of all of its pages."""

    number: int
    first: int
    complete: list[bool]
    parts: list[tuple[int, list[int]]]


class Done(msgspec.Struct, tag=True):
    """Everything was sent. error: why it was not; empty: it was."""

    number: int
    error: str = ""


Message = Prefill | Cancel | Pages | Done
_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.encode


def decode(data: bytes) -> Message:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(data)
