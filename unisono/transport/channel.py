"""Channels: messages with payloads over a socket, the payload inline or in shared memory.

A frame is a header of two little-endian lengths (message 4 bytes, payload 8 bytes), the message, and the payload. Over
a Unix socket the payload is an anonymous memory file whose descriptor is passed along: it has no name, so nothing
remains when either end dies. Every length is checked before anything is allocated.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

from unisono.transport.addresses import Address

HEADER = struct.Struct("<IQ")
STRANGERS = 4096, 0
"""Largest message and payload, in bytes, from a peer that has not proved its key."""
PEERS = 16 << 20, 4 << 30
"""Largest message and payload, in bytes, from a peer that has."""
Buffer = bytes | bytearray | memoryview


class ChannelError(Exception):
    """The peer is gone, silent, or violates the protocol."""


class Channel:
    """One end of a connection, payloads inline. One thread may send while another receives.

    timeout: seconds that one send or one started receive may take without progress. ``transport``: name of the
    transport of payloads, for counters.
    """

    transport = "tcp"
    _closes = False

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket, self._timeout = connection, timeout
        self._sending = threading.Lock()
        self.most = STRANGERS
        connection.settimeout(timeout)

    def send(self, message: Buffer, payload: Sequence[Buffer] = ()) -> None:
        """Send a message with its payload. Raises ChannelError."""
        size = sum(memoryview(part).nbytes for part in payload)
        with self._sending, self._errors():
            self._socket.sendall(HEADER.pack(len(message), size) + bytes(message))
            self._send_payload(payload, size)

    def receive(self, wait: float | None = None) -> tuple[bytes, Buffer]:
        """Return the next message and its payload. wait: seconds for it to begin; None: no limit. Raises
        ChannelError.
        """
        with self._errors():
            if not self.arrives(wait):  # the socket's own timeout applies to a sending thread, too
                raise TimeoutError
            first = self._socket.recv(1)
            if not first:
                raise ChannelError("the peer closed the connection")
            length, size = HEADER.unpack(first + self._read(HEADER.size - 1))
            if length > self.most[0] or size > self.most[1]:
                raise ChannelError(f"a message of {length} bytes with {size} bytes of payload is above the limit")
            return bytes(self._read(length)), self._receive_payload(size)

    def arrives(self, wait: float | None) -> bool:
        """True if a message begins, or the connection ends, within this number of seconds. Raises ChannelError."""
        with self._errors():
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(None if wait is None else wait * 1000))

    def ended(self) -> bool:
        """True if the peer closed the connection and all its data was read. Raises ChannelError."""
        with self._errors():
            return self.arrives(0) and not self._socket.recv(1, socket.MSG_PEEK)

    def close(self) -> None:
        """End the connection; a thread that waits in :meth:`receive` gets ChannelError. Any thread may call it."""
        self._closes = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the socket as ChannelError."""
        try:
            yield
        except TimeoutError:
            raise ChannelError("the peer is silent") from None
        except (OSError, ValueError) as error:
            raise ChannelError("the connection is closed" if self._closes else str(error)) from None

    def release(self) -> None:
        """Free the buffers of payloads; called last by the thread that sent or received them."""

    def _take_over(self, channel: Channel) -> None:
        """Take over another channel's connection."""
        Channel.__init__(self, channel._socket, channel._timeout)
        self.most = channel.most

    def _send_payload(self, payload: Sequence[Buffer], size: int) -> None:
        for part in payload:
            self._socket.sendall(part)

    def _receive_payload(self, size: int) -> Buffer:
        return self._read(size)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ChannelError("the peer closed the connection")
            view = view[count:]
        return data


class SharedMemoryChannel(Channel):
    """A channel with payloads in memory that both ends map."""

    transport = "shared_memory"

    def _send_payload(self, payload: Sequence[Buffer], size: int) -> None:
        if not size:
            return
        file = os.memfd_create("unisono-pages", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
            with mmap.mmap(file, size) as memory:
                for part in payload:
                    memory.write(part)
            socket.send_fds(self._socket, [b"p"], [file])
        finally:
            os.close(file)

    def _receive_payload(self, size: int) -> Buffer:
        if not size:
            return b""
        mark, files, _, _ = socket.recv_fds(self._socket, 1, 1)
        try:
            if mark != b"p" or len(files) != 1 or os.fstat(files[0]).st_size != size:
                raise ChannelError("a payload's memory did not come along")
            with mmap.mmap(files[0], size, prot=mmap.PROT_READ) as memory:
                return memory.read(size)
        finally:
            for file in files:
                os.close(file)


def channel_of(connection: socket.socket, timeout: float) -> Channel:
    """Return the channel class for a connected socket."""
    if connection.family == socket.AF_UNIX:
        return SharedMemoryChannel(connection, timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection, timeout)


def connect(address: Address, timeout: float) -> Channel:
    """Connect to an address. Raises ChannelError."""
    connection = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(address.name)
    except OSError as error:
        connection.close()
        raise ChannelError(f"{address}: {error.strerror or error}") from None
    return channel_of(connection, timeout)


def listen(address: Address) -> socket.socket:
    """Return a listening socket; a Unix one is for this user only. Raises OSError."""
    if address.scheme == "unix":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address.path)
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        if address.scheme == "tcp":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.name)
        if address.scheme == "unix":
            os.chmod(address.path, 0o600)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener
