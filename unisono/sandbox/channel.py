"""Messages between a process and its sandboxed helpers, over Unix sockets.

A message is its length, then msgpack; file descriptors may travel with it. Both sides of every channel are this
project's own code: the trusted side relies on nothing but the types of the few fields that it reads.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

HEADER = struct.Struct("<I")
MAX_BYTES = 1 << 28
"""Largest message in bytes; the largest in use is a vocabulary."""


class Gone(Exception):
    """The other side has ended."""


class ForkChannel:
    """One end of a socket pair. ``send`` and ``receive`` raise Gone, and TimeoutError where a timeout is set."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    @classmethod
    def of(cls, descriptor: int) -> ForkChannel:
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        payload = msgspec.msgpack.encode(message)
        data = HEADER.pack(len(payload)) + payload
        try:
            sent = 0
            if descriptors:
                sent = socket.send_fds(self.socket, [data], list(descriptors))
            if sent < len(data):
                self.socket.sendall(memoryview(data)[sent:])
        except TimeoutError:
            raise
        except OSError as error:
            raise Gone(str(error)) from None

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message, and the descriptors that came with it."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self.socket, HEADER.size, 4)
            head += self._exactly(HEADER.size - len(head)) if head else b""
            if not head:
                raise Gone("the other side has ended")
            (size,) = HEADER.unpack(head)
            if size > MAX_BYTES:
                raise Gone(f"a message of {size} bytes")
            return msgspec.msgpack.decode(self._exactly(size)), descriptors
        except TimeoutError:
            raise
        except (OSError, msgspec.DecodeError) as error:
            raise Gone(str(error)) from None

    def ended(self) -> bool:
        """True if the other side has ended. Does not wait."""
        try:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN)
            ready = poll.poll(0)  # recv itself would wait for the socket's timeout
            return bool(ready) and self.socket.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            got = self.socket.recv_into(view[done:])
            if not got:
                raise Gone("the other side has ended")
            done += got
        return bytes(data)


def pair() -> tuple[ForkChannel, socket.socket]:
    """Return one end of a new socket pair, and the other end, to be passed on and closed."""
    ours, theirs = socket.socketpair()
    return ForkChannel(ours), theirs
