"""Decode engine's side of disaggregation: sends prompts to prefill engines and puts their pages into the prefix tree.

A request waits in front of the queue until its pages are there, then begins with a prefix hit. On any failure (no peer,
a slow one, one with another model, no room) the request joins the queue with the pages that have arrived, and the rest
of its prompt is computed here; :attr:`PrefillClient.results` counts the reasons. Threads talk to the peers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence as Ids

import msgspec

from unisono.engine.sequence import Sequence, salted
from unisono.kv.pages import OutOfPages, PagePool
from unisono.kv.prefix_tree import Token
from unisono.kv.specs import PAGE_SIZE
from unisono.kv.transfer import Bytes, Incoming
from unisono.transport.addresses import Address
from unisono.transport.backends import agree_to_connect
from unisono.transport.channel import Buffer, Channel, ChannelError, connect
from unisono.transport.handshake import PeerRefused, introduce
from unisono.transport.messages import Cancel, Done, Message, Pages, Prefill, decode, encode

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
RETRY_SECONDS = 5.0
"""Seconds before a peer that could not be reached, or was lost, is tried again."""

CLOSE_SECONDS = 5.0
"""Seconds that closing waits for the thread that reads from a peer."""

News = tuple[Message, Buffer, str]
"""A message, its payload, and the name of the backend that carried it."""


class RemotePrompt:
    """A request's prompt on its way. ``result`` is empty until it is finished."""

    def __init__(self, number: int, incoming: Incoming, request: Prefill, timeout: float) -> None:
        self.number, self.incoming, self.request = number, incoming, request
        self.inbox: queue.SimpleQueue[News | str] = queue.SimpleQueue()  # str: the reason why nothing more comes
        self.peer: _PrefillPeer | None = None
        self.result = ""
        self.pages = 0
        self.bytes: Counter[str] = Counter()
        self._timeout, self._asked = timeout, time.monotonic()

    @property
    def open(self) -> bool:
        """True once the request can be queued."""
        return bool(self.result)

    def poll(self) -> None:
        """Put received pages into the prefix tree."""
        with contextlib.suppress(queue.Empty):
            while not self.result:
                news = self.inbox.get_nowait()
                self.result = news if isinstance(news, str) else self._take(*news)
        heard = max(self._asked, self.peer.heard if self.peer is not None else 0.0)
        if not self.result and time.monotonic() - heard > self._timeout:
            self.result = "timeout"

    def _take(self, message: Message, payload: Buffer, transport: str) -> str:
        if isinstance(message, Done):
            return "failed" if message.error else "done"
        assert isinstance(message, Pages)
        try:
            self.incoming.put(message.first, message.complete, message.parts, payload)
        except OutOfPages:
            return "no room"
        except ValueError as error:
            logger.warning("Pages from a prefill engine are not usable: %s.", error)
            return "bad pages"
        self.pages += len(message.complete)
        self.bytes[transport] += len(payload)
        return ""


class PrefillClient:
    """Client of prefill engines. addresses: theirs; a prompt goes to the one with the fewest prompts in progress.

    timeout: seconds without news of a peer after which its prompts are computed here. backends: transports for pages.
    pages: writes them.
    """

    def __init__(
        self, addresses: Ids[Address], key: bytes, identity: bytes, timeout: float, backends: Ids[str], pages: Bytes
    ) -> None:
        self._pages = pages
        self._peers = [_PrefillPeer(address, key, identity, timeout, backends) for address in addresses]
        self._timeout = timeout
        self._numbers = itertools.count()
        self._open: list[RemotePrompt] = []
        self.results: Counter[str] = Counter()
        self.pages = 0
        self.bytes: Counter[str] = Counter()  # by backend

    def request(self, sequence: Sequence, pool: PagePool) -> RemotePrompt | None:
        """Send a prompt to a peer; None if nothing is gained, or if token ids do not describe it completely."""
        keys, salt = sequence.keys, sequence.request.cache_salt
        start: Token = sequence.request.prompt_token_ids[0]
        own = [start, *keys[1:]]
        known = keys[0] == (salted(start, salt) if salt is not None else start)  # no adapter, no image
        if not known or sequence.reusable < len(keys) or not all(isinstance(key, int) for key in own):
            return None
        pages = (len(keys) - 1) // PAGE_SIZE
        incoming = Incoming(pool, self._pages, keys[: pages * PAGE_SIZE])
        if incoming.first >= pages:
            incoming.close()
            return None
        coming = sum(len(one.incoming.keys) - len(one.incoming.path) for one in self._open)
        if 2 * (pages - incoming.first + coming) > pool.available:  # locked pages would crowd out running requests
            incoming.close()
            self.results["no room"] += 1
            return None
        number = next(self._numbers)
        tokens = [key for key in own if isinstance(key, int)]
        prompt = RemotePrompt(number, incoming, Prefill(number, tokens, incoming.first, salt), self._timeout)
        peers = [peer for peer in self._peers if peer.usable]
        if not peers:
            prompt.incoming.close()
            self.results["no peer"] += 1
            return None
        min(peers, key=lambda peer: len(peer.prompts)).send(prompt)
        self._open.append(prompt)
        return prompt

    def poll(self) -> None:
        """Process the messages since the last call."""
        for prompt in self._open:
            prompt.poll()
        for prompt in [prompt for prompt in self._open if prompt.result]:
            self._end(prompt)

    def drop(self, prompt: RemotePrompt) -> None:
        """Forget a prompt of an aborted request."""
        if not prompt.result:
            prompt.result = "aborted"
            self._end(prompt)

    def _end(self, prompt: RemotePrompt) -> None:
        self._open.remove(prompt)
        prompt.incoming.close()
        if prompt.peer is not None:
            prompt.peer.forget(prompt, notify=prompt.result not in ("done", "failed"))
        self.results[prompt.result] += 1
        self.pages += prompt.pages
        self.bytes += prompt.bytes

    def close(self) -> None:
        """Hang up."""
        for peer in self._peers:
            peer.close()

    @property
    def peers(self) -> dict[str, str]:
        """Backend of each prefill engine by address; empty if it is not connected."""
        return {str(peer.address): peer.transport for peer in self._peers}


class _PrefillPeer:
    """One prefill engine, connected at the first prompt. A thread connects and reads."""

    def __init__(self, address: Address, key: bytes, identity: bytes, timeout: float, backends: Ids[str]) -> None:
        self.address, self._key, self._identity = address, key, identity
        self._timeout, self._backends = timeout, backends
        self.transport = ""
        self.prompts: dict[int, RemotePrompt] = {}
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._again = self.heard = 0.0  # time of the next attempt; time of the last message

    @property
    def usable(self) -> bool:
        return time.monotonic() >= self._again

    def send(self, prompt: RemotePrompt) -> None:
        """Send a prompt, once there is a connection. Returns at once."""
        prompt.peer = self
        with self._lock:
            self.prompts[prompt.number] = prompt
            self._outbox.put(prompt.request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prefill-client", daemon=True)
                self._thread.start()

    def forget(self, prompt: RemotePrompt, notify: bool) -> None:
        with self._lock:
            known = self.prompts.pop(prompt.number, None) is not None
        if notify and known:
            self._outbox.put(Cancel(prompt.number))

    def close(self) -> None:
        self._again = float("inf")
        self._outbox.put(None)
        if self._channel is not None:
            self._channel.close()
        if (thread := self._thread) is not None:
            thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        """Connect, then read to the connection's end."""
        why, channel = "connection lost", None
        try:
            why = "no connection"
            self._channel = channel = connect(self.address, CONNECT_SECONDS)
            if self._again == float("inf"):
                channel.close()
            why = "refused"
            introduce(channel, self._key, self._identity)
            self._channel = channel = agree_to_connect(channel, self._backends, str(self.address))
            self.transport = channel.transport
            why = "connection lost"
            threading.Thread(target=self._send, args=(channel,), name="prefill-ask", daemon=True).start()
            while True:
                data, payload = channel.receive()
                self.heard = time.monotonic()
                message = decode(data)
                with self._lock:
                    prompt = self.prompts.get(getattr(message, "number", -1))
                if prompt is not None and isinstance(message, (Pages, Done)):
                    prompt.inbox.put((message, payload, channel.transport))
        except (ChannelError, msgspec.MsgspecError) as error:
            reason = "refused" if isinstance(error, PeerRefused) else why
            if self._again != float("inf"):
                logger.warning("Prefill engine %s: %s (%s). Prompts are computed here.", self.address, reason, error)
                self._again = time.monotonic() + RETRY_SECONDS
            self.transport = ""
            if channel is not None:
                channel.close()
                channel.release()
            with self._lock:
                lost, self.prompts, self._thread = list(self.prompts.values()), {}, None
                self._outbox.put(None)
                self._outbox = queue.SimpleQueue()
            for prompt in lost:
                prompt.inbox.put(reason)

    def _send(self, channel: Channel) -> None:
        outbox = self._outbox
        while (message := outbox.get()) is not None:
            try:
                channel.send(encode(message))
            except ChannelError:
                channel.close()  # the reading thread reports the loss
                return
