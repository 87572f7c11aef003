"""Pages as bytes, for engines that exchange them: one rank's part, and all ranks' parts together.

:class:`PageBytes` belongs to a worker: it executes the commands that read pages into bytes and write bytes into pages.
:class:`SharedPages` belongs to rank 0: the bytes of a page are those of every rank, one rank after another. Ranks pass
theirs through shared memory of the host. With one rank nothing is sent.

Only callers of ``Packing.payload``, in any thread, wait for the device.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from unisono.engine.worker.commands import PackPages, UnpackPages
from unisono.kv.offload.host_pages import kind_bytes
from unisono.kv.store import StateStore
from unisono.kv.transfer import Named, Packing, check_size, pack, unpack
from unisono.transport.channel import PEERS, Buffer, Channel, ChannelError, channel_of
from unisono.types import EngineDead

NUMBER = struct.Struct("<Q")
"""Message header: the number of the command that its bytes belong to."""

PATIENCE = 60.0
"""Seconds within which a rank has to take its bytes; one that hangs is noticed sooner (``RankProcesses``)."""


class PageBytes:
    """One rank's part of pages. store: its state.

    packed: results of the last commands by number, until they are taken. incoming: bytes to be written, by the numbers
    of commands to come.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.packed: dict[int, Packing] = {}
        self.incoming: dict[int, Buffer] = {}

    def execute(self, command: PackPages | UnpackPages) -> None:
        """Read pages, or write them."""
        if isinstance(command, PackPages):
            self._packed(command.number, pack(self._store, command.parts))
        else:
            unpack(self._store, command.parts, self._bytes_of(command.number))

    def _packed(self, number: int, packing: Packing) -> None:
        self.packed[number] = packing

    def _bytes_of(self, number: int) -> Buffer:
        return self.incoming.pop(number)


class RankPages(PageBytes):
    """PageBytes of a rank other than 0; bytes come from rank 0 and go there. pages: the socket for them."""

    def __init__(self, store: StateStore, pages: socket.socket) -> None:
        super().__init__(store)
        self._channel = _channel(pages)
        self._outbox: queue.SimpleQueue[tuple[int, Packing]] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="pages", daemon=True).start()

    def _packed(self, number: int, packing: Packing) -> None:
        self._outbox.put((number, packing))

    def _bytes_of(self, number: int) -> Buffer:
        message, payload = self._channel.receive()
        if NUMBER.unpack(message) != (number,):
            raise ChannelError(f"bytes of {message!r} came for pages {number}")
        return payload

    def _send(self) -> None:
        """Send packed bytes, in order, until rank 0 hangs up."""
        with contextlib.suppress(ChannelError):
            while True:
                number, packing = self._outbox.get()
                self._channel.send(NUMBER.pack(number), packing.payload())


class SharedPages:
    """All ranks' parts, for rank 0's engine thread. own: rank 0's part. send: has every rank execute a command.

    others: a socket to each of the other ranks (:class:`RankPages`).
    """

    def __init__(self, store: StateStore, own: PageBytes, send: Callable[..., object], others: Sequence[socket.socket]):
        self._store, self._own, self._send = store, own, send
        self._others = [_Other(_channel(each)) for each in others]
        self._numbers = itertools.count()

    def pack(self, parts: Named) -> Packing:
        """Read pages; their bytes are there when ``payload`` returns."""
        number = next(self._numbers)
        others = [other.expect(number) for other in self._others]
        self._send(PackPages(number, parts))
        own = self._own.packed.pop(number)
        return Packing(own.tensors, own.done, others)

    def unpack(self, parts: Named, payload: Buffer) -> None:
        """Write pages; an id of -1 skips its bytes.

        Raises ValueError unless there are bytes for all of them, EngineDead if a rank does not take its part.
        """
        check_size(self, parts, payload)
        number, each = next(self._numbers), len(payload) // self.ranks
        whole = memoryview(payload)
        for rank, other in enumerate(self._others, 1):
            try:
                other.channel.send(NUMBER.pack(number), [whole[rank * each : (rank + 1) * each]])
            except ChannelError as error:
                raise EngineDead(f"rank {rank} of the model takes no pages: {error}.") from None
        self._own.incoming[number] = whole[:each]
        self._send(UnpackPages(number, parts))

    @property
    def ranks(self) -> int:
        """Number of ranks that have a part of each page, all of the same size."""
        return 1 + len(self._others)

    def nbytes(self, parts: Named) -> int:
        """Bytes per page, all ranks."""
        return self.ranks * sum(len(ids) * kind_bytes(self._store, kind) for kind, ids in parts)

    def close(self) -> None:
        """Hang up; callers that wait for bytes get ChannelError."""
        for other in self._others:
            other.channel.close()


class _Other:
    """Rank 0's connection to another rank. A thread reads its bytes."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._lock = threading.Lock()
        self._expected: dict[int, Future[Buffer]] = {}
        self._error: ChannelError | None = None
        threading.Thread(target=self._receive, name="pages", daemon=True).start()

    def expect(self, number: int) -> Future[Buffer]:
        """Return the bytes that the rank will send for this command."""
        future: Future[Buffer] = Future()
        with self._lock:
            if self._error is None:
                self._expected[number] = future
            else:
                future.set_exception(self._error)
        return future

    def _receive(self) -> None:
        try:
            while True:
                message, payload = self.channel.receive()
                with self._lock:
                    future = self._expected.pop(NUMBER.unpack(message)[0])
                future.set_result(payload)
        except ChannelError as error:
            with self._lock:
                self._error, lost = error, list(self._expected.values())
                self._expected.clear()
            for future in lost:
                future.set_exception(error)


def _channel(end: socket.socket) -> Channel:
    """Return the channel of a rank, whose messages may be as large as a known peer's."""
    channel = channel_of(end, PATIENCE)
    channel.most = PEERS
    return channel
