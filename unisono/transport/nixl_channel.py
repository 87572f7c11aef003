"""Channels whose receiver reads payloads out of the sender's memory, through NIXL. Messages stay on TCP.

A prefill engine stages a payload in segments, in memory registered for this one peer, and sends the place of each over
TCP. The decode engine reads it and confirms; the segment's place is then free for the next one::

    sender    [ 0 | 1 | 2 | ... ]  --(offset, length)-->  receiver reads into its own segment, copies it out
              place 1 is free       <-----  TAKEN  -----

Staged memory is bounded, the peer can read that memory only, and neither end writes to the other's. Either side gives
up after the channel's timeout without progress.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from unisono.transport.channel import Buffer, Channel, ChannelError
from unisono.transport.nixl_agent import Agent

SEGMENT = 4 << 20
"""Largest number of bytes of one read; a receiver registers as many."""
SEGMENTS = 8
"""Segments that a sender registers for each peer."""
RECORD = struct.Struct("<QI")
"""Offset in the sender's area, length."""
TAKEN = b""
"""Confirmation that the oldest segment was read. No other message is empty."""
POLL_SECONDS = 0.0005


class Area(msgspec.Struct):
    """Memory that a peer may read. metadata: of the agent that registered it. address, size: in bytes."""

    metadata: bytes
    address: int
    size: int


class StagingChannel(Channel):
    """The sending end. It takes over an open channel. Raises NixlError."""

    transport = "nixl"

    def __init__(self, channel: Channel) -> None:
        self.agent = Agent(np.zeros(SEGMENT * SEGMENTS, np.uint8))
        self._take_over(channel)
        self._segment = SEGMENT
        self._staged = 0
        self._change = threading.Condition()

    def area(self) -> Area:
        memory = self.agent.memory
        return Area(self.agent.metadata(), memory.ctypes.data, memory.nbytes)

    def receive(self, wait: float | None = None) -> tuple[bytes, Buffer]:
        while True:
            message, payload = super().receive(wait)
            if message != TAKEN:
                return message, payload
            with self._change:
                if not self._staged:
                    raise ChannelError("the peer took what was not there")
                self._staged -= 1
                self._change.notify()

    def _send_payload(self, payload: Sequence[Buffer], size: int) -> None:
        memory, place = self.agent.memory, 0
        for parts in _segments(payload, self._segment):
            self._wait(memory.nbytes // self._segment - 1)
            at = place
            for part in parts:
                memory[at : at + len(part)] = np.frombuffer(part, np.uint8)
                at += len(part)
            with self._change:
                self._staged += 1
            self._socket.sendall(RECORD.pack(place, at - place))
            place = (place + self._segment) % memory.nbytes
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Wait until at most this number of segments is staged."""
        staged, limit = self._staged, time.monotonic() + self._timeout
        while self._staged > most:
            if self._staged < staged:
                staged, limit = self._staged, time.monotonic() + self._timeout
            if self.closed:
                raise ChannelError("the connection is closed")
            if time.monotonic() > limit:
                raise ChannelError("the peer is silent")
            self.agent.progress()
            with self._change:
                if self._staged > most:
                    self._change.wait(POLL_SECONDS)

    def release(self) -> None:
        self.agent.close()


class LandingChannel(Channel):
    """The receiving end. area: the sender's. It takes over an open channel. Raises ChannelError."""

    transport = "nixl"

    def __init__(self, channel: Channel, area: Area) -> None:
        if not 0 < area.size <= 1 << 40 or not 0 <= area.address <= (1 << 64) - area.size:
            raise ChannelError(f"{area.size} bytes at {area.address} are no memory of a peer")
        self.agent = Agent(np.zeros(SEGMENT, np.uint8))
        self._take_over(channel)
        self._area = area

    def connect(self, timeout: float, probe: bytes) -> None:
        """Connect to the sender, whose area begins with ``probe``. timeout: seconds. Raises ChannelError."""
        self.agent.connect(self._area.metadata)
        if self.read(0, len(probe), timeout).tobytes() != probe:
            raise ChannelError("what NIXL reads is not what the peer has")

    def read(self, offset: int, length: int, timeout: float) -> np.ndarray:
        """Read bytes of the sender's area: uint8 [length], valid until the next call. timeout: seconds.

        Raises ChannelError, after which only :meth:`close` and :meth:`release` may be called.
        """
        if not 0 < length <= self.agent.memory.nbytes or offset + length > self._area.size:
            raise ChannelError(f"{length} bytes at {offset} are not a segment of {self._area.size} bytes")
        limit, pause = time.monotonic() + timeout, 0.0
        reading = self.agent.read(self._area.address + offset, length)
        try:
            while not reading.done():
                if self.closed or self.ended():
                    raise ChannelError("the peer closed the connection")
                if time.monotonic() > limit:
                    raise ChannelError("the peer's memory does not answer")
                time.sleep(pause)
                pause = min(2 * pause + 1e-5, POLL_SECONDS)
        finally:
            reading.release()
        return self.agent.memory[:length]

    def _receive_payload(self, size: int) -> Buffer:
        data = np.empty(size, np.uint8)
        at = 0
        while at < size:
            offset, length = RECORD.unpack(self._read(RECORD.size))
            if length > size - at:
                raise ChannelError(f"a segment of {length} bytes where {size - at} are left")
            data[at : at + length] = self.read(offset, length, self._timeout)
            at += length
            self.send(TAKEN)
        return data.data

    def release(self) -> None:
        self.agent.close()


def _segments(payload: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
    """Cut and join the payload's parts into lists of ``size`` bytes; the last is shorter."""
    parts: list[memoryview] = []
    room = size
    for part in payload:
        view = memoryview(part).cast("B")
        while view:
            piece, view = view[:room], view[room:]
            parts.append(piece)
            room -= len(piece)
            if not room:
                yield parts
                parts, room = [], size
    if parts:
        yield parts
