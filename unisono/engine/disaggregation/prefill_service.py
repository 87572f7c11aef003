"""Prefill engine's side of disaggregation: computes prompts for other engines and sends their pages as they are ready.

Threads talk to the peers; the engine takes their requests between two steps, runs each as a request that samples one
token, and hands over pages after each prompt pass. A thread for each peer sends them. The service disconnects a peer
that takes nothing for ``timeout`` seconds, or whose outbox is full.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import msgspec

from unisono.engine.sequence import Sequence
from unisono.kv.specs import PAGE_SIZE, SNAPSHOTS
from unisono.kv.transfer import Bytes, Packing, pack_pages
from unisono.kv.window_pages import first_live_column
from unisono.transport.addresses import Address
from unisono.transport.backends import agree_to_listen
from unisono.transport.channel import Channel, ChannelError, channel_of, listen
from unisono.transport.handshake import accept
from unisono.transport.messages import Cancel, Done, Message, Pages, Prefill, decode, encode
from unisono.types import BadRequest, ConfigError, EngineRequest, FinishReason, SamplingParams, TokenDelta

logger = logging.getLogger(__name__)

MOST_WAITING = 256
"""Largest number of messages in the outbox of one peer."""
CLOSE_SECONDS = 5.0
"""Seconds that closing waits for the thread that sends to a peer."""
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True)


@dataclass(eq=False)
class _DecodePeer:
    """A connection. outbox: (message, pages) to send; None ends ``sender``, the thread that sends them."""

    channel: Channel
    name: str
    sender: threading.Thread | None = None
    outbox: queue.Queue[tuple[Message, Packing | None] | None] = field(
        default_factory=lambda: queue.Queue(MOST_WAITING)
    )


@dataclass(eq=False)
class _PrefillJob:
    """A prompt that is being computed for a peer. pages: requested whole pages; sent: number of them that are sent."""

    peer: _DecodePeer
    number: int
    pages: int
    sent: int


class PrefillService:
    """Service for decode engines. backends: transports for pages. pages: reads them. wake: called, in any thread, when
    there is news for the engine.
    """

    def __init__(
        self,
        address: Address,
        key: bytes,
        identity: bytes,
        timeout: float,
        backends: Ids[str],
        pages: Bytes,
        wake: Callable[[], None],
    ) -> None:
        self._key, self._identity, self._timeout, self._wake = key, identity, timeout, wake
        self.backends, self._pages = backends, pages
        try:
            self._listener = listen(address)
        except OSError as error:
            raise ConfigError(f"--transfer-listen {address}: {error.strerror}.") from None
        self.address = address
        if address.scheme == "tcp":
            self.address = Address("tcp", address.host, self._listener.getsockname()[1])
        self._inbox: queue.SimpleQueue[tuple[_DecodePeer, Message | None]] = queue.SimpleQueue()
        self._jobs: dict[str, _PrefillJob] = {}
        self._peers: set[_DecodePeer] = set()
        self._numbers = itertools.count()
        self.requests = self.failed = self.pages_sent = self.hung_up = 0
        self.bytes_sent: Counter[str] = Counter()  # by backend
        threading.Thread(target=self._accept, name="prefill-accept", daemon=True).start()

    # ---- the engine's side ---------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        return not self._inbox.empty()

    def poll(self, add: Callable[[EngineRequest], None], abort: Callable[[str], None]) -> None:
        """Take the peers' requests since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                peer, message = self._inbox.get_nowait()
                if isinstance(message, Prefill):
                    self._begin(peer, message, add)
                else:
                    number = message.number if isinstance(message, Cancel) else None
                    for request_id, job in list(self._jobs.items()):
                        if job.peer is peer and number in (None, job.number):
                            del self._jobs[request_id]
                            abort(request_id)

    def _begin(self, peer: _DecodePeer, message: Prefill, add: Callable[[EngineRequest], None]) -> None:
        request_id = f"prefill-{next(self._numbers)}"
        pages = (len(message.tokens) - 1) // PAGE_SIZE
        tokens = message.tokens[: pages * PAGE_SIZE + 1]
        self.requests += 1
        self._jobs[request_id] = _PrefillJob(peer, message.number, pages, message.first)
        try:
            add(EngineRequest(request_id, tokens, ONE_TOKEN, cache_salt=message.salt))
        except BadRequest as error:
            self._end(request_id, str(error))

    def committed(self, sequence: Sequence) -> None:
        """Send pages after a prompt pass of this request was read; they are in the prefix tree."""
        job = self._jobs.get(sequence.request.request_id)
        if job is None or sequence.pages is None:
            return
        nodes = sequence.pages.nodes()[: job.pages]
        last = len(nodes) == job.pages
        if len(nodes) <= job.sent and not last:
            return
        columns: dict[int, range] = {}
        if last:  # state for a request that goes on from here; it does not need earlier windows and snapshots
            for window_group in sequence.pages.windows:
                columns[window_group] = range(first_live_column(job.pages * PAGE_SIZE, window_group), job.pages)
            columns[SNAPSHOTS] = range(job.pages - 1, job.pages)
        first = min([job.sent, *(pages.start for pages in columns.values())])
        if nodes[first:]:
            packed = pack_pages(self._pages, nodes, first, columns)
            message = Pages(job.number, first, packed.complete, packed.parts)
            self.pages_sent += len(nodes) - first
            self.bytes_sent[job.peer.channel.transport] += packed.nbytes
            self._post(job.peer, message, packed.state)
        job.sent = len(nodes)

    def finished(self, deltas: Iterable[TokenDelta]) -> list[TokenDelta]:
        """End this service's own requests; return the deltas of the others."""
        others = []
        for delta in deltas:
            if delta.request_id not in self._jobs:
                others.append(delta)
            elif delta.finish is not FinishReason.RUNNING:
                self._end(delta.request_id, delta.error or "")
        return others

    def _end(self, request_id: str, error: str) -> None:
        job = self._jobs.pop(request_id)
        self.failed += bool(error)
        self._post(job.peer, Done(job.number, error), None)

    def _post(self, peer: _DecodePeer, message: Message, packed: Packing | None) -> None:
        try:
            peer.outbox.put_nowait((message, packed))
        except queue.Full:
            logger.warning("%s takes its pages too slowly: hanging up.", peer.name)
            self.hung_up += 1
            peer.channel.close()

    def close(self) -> None:
        """Hang up on all peers."""
        self._listener.close()
        for peer in list(self._peers):
            peer.channel.close()
            with contextlib.suppress(queue.Full):
                peer.outbox.put_nowait(None)
            if peer.sender is not None:
                peer.sender.join(CLOSE_SECONDS)

    @property
    def peers(self) -> Counter[str]:
        """Connections by backend."""
        return Counter(peer.channel.transport for peer in list(self._peers))

    # ---- the peers' side -----------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="prefill-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Read one peer's requests to its end."""
        channel = channel_of(connection, self._timeout)
        try:
            accept(channel, self._key, self._identity)
            channel = agree_to_listen(channel, self.backends)
        except ChannelError as error:
            logger.warning("A peer was refused: %s.", error)
            channel.close()
            return
        peer = _DecodePeer(channel, str(self.address))
        peer.sender = threading.Thread(target=self._send, args=(peer,), name="prefill-send", daemon=True)
        self._peers.add(peer)
        peer.sender.start()
        with contextlib.suppress(ChannelError, msgspec.MsgspecError):
            while True:
                self._inbox.put((peer, decode(channel.receive()[0])))
                self._wake()
        self._inbox.put((peer, None))
        self._wake()
        with contextlib.suppress(queue.Full):
            peer.outbox.put_nowait(None)
        channel.close()
        self._peers.discard(peer)

    def _send(self, peer: _DecodePeer) -> None:
        try:
            while (item := peer.outbox.get()) is not None:
                message, packed = item
                peer.channel.send(encode(message), packed.payload() if packed is not None else ())
        except ChannelError as error:
            if not peer.channel.closed:
                logger.warning("%s: pages were not taken (%s): hanging up.", peer.name, error)
            peer.channel.close()
        finally:
            peer.channel.release()
