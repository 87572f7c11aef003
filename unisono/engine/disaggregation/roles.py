"""Roles of an engine in prefill/decode disaggregation: their services and reports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping

from unisono.config import ResolvedConfig, env
from unisono.engine.disaggregation.identity import engine_identity
from unisono.engine.disaggregation.page_bytes import SharedPages
from unisono.engine.disaggregation.prefill_client import PrefillClient
from unisono.engine.disaggregation.prefill_service import PrefillService
from unisono.engine.worker.runner import Runner
from unisono.passes.features.base import Metric
from unisono.transport.addresses import Address
from unisono.transport.backends import usable_backends
from unisono.types import ConfigError, EngineRequest


class Roles:
    """Services of an engine's role. service: of a prefill engine that listens, or None. client: of a decode engine with
    peers, or None.

    wakeup_socket: becomes readable when the service gets a request, for an idle engine.
    """

    def __init__(self, config: ResolvedConfig | None = None, runner: Runner | None = None) -> None:
        self.service: PrefillService | None = None
        self.client: PrefillClient | None = None
        self.wakeup_socket: socket.socket | None = None
        self._pages: SharedPages | None = None
        if config is None or runner is None or not config.requested.exchanges_pages:
            return
        requested = config.requested
        listens = [Address.parse(requested.transfer_listen, "--transfer-listen")] if requested.transfer_listen else []
        urls = requested.prefill_urls.split(",") if requested.prefill_urls else []
        peers = [Address.parse(text, "--prefill-url") for text in urls]
        if requested.transfer_backend == "nixl" and any(address.scheme == "unix" for address in listens + peers):
            raise ConfigError(
                "--transfer-backend nixl: over a Unix socket pages go through shared memory; give tcp://HOST:PORT."
            )
        backends = usable_backends(requested.transfer_backend)
        self._pages = pages = runner.share_pages()
        identity, timeout = engine_identity(config, runner.worker), requested.transfer_timeout
        for address in listens:
            self.wakeup_socket, self._wake = socket.socketpair()
            self.wakeup_socket.setblocking(False)
            self._wake.setblocking(False)
            self.service = PrefillService(address, _key([address]), identity, timeout, backends, pages, self.wake)
        if peers:
            self.client = PrefillClient(peers, _key(peers), identity, timeout, backends, pages)

    def wake(self) -> None:
        """Make :attr:`wakes` readable."""
        with contextlib.suppress(OSError):  # it is readable already, or the engine is gone
            self._wake.send(b"!")

    def poll(self, add: Callable[[EngineRequest], None], abort: Callable[[str], None]) -> None:
        """Process the messages of other engines."""
        if self.service is not None:
            self._awake()
            self.service.poll(add, abort)
        if self.client is not None:
            self.client.poll()

    def _awake(self) -> None:
        """Drain :attr:`wakes`: the engine now looks at all messages."""
        with contextlib.suppress(OSError):
            while self.wakeup_socket is not None and self.wakeup_socket.recv(4096):
                pass

    def close(self) -> None:
        """Hang up on all peers."""
        for part in (self.service, self.client, self._pages):
            if part is not None:
                part.close()


def info(roles: Roles) -> dict[str, object]:
    """Return the state of both roles for ``explain`` and ``/server_info``."""
    state: dict[str, object] = {}
    if (service := roles.service) is not None:
        state["service"] = {
            "address": str(service.address),
            "requests": service.requests,
            "failed": service.failed,
            "pages_sent": service.pages_sent,
            "bytes_sent": service.bytes_sent.total(),
            "bytes_by_transport": dict(service.bytes_sent),
            "peers_by_transport": dict(service.peers),
            "backends": list(service.backends),
            "hung_up": service.hung_up,
        }
    if (client := roles.client) is not None:
        state["client"] = {
            "results": dict(client.results),
            "pages": client.pages,
            "bytes": client.bytes.total(),
            "bytes_by_transport": dict(client.bytes),
            "peers": client.peers,
        }
    return state


def metrics(roles: Roles) -> list[Metric]:
    """Return the samples of both roles for ``/metrics``."""
    samples: list[Metric] = []
    if (service := roles.service) is not None:
        samples += [
            ("kv_transfer_prompts", "counter", {}, service.requests, "Prompts computed for other engines."),
            ("kv_transfer_pages_sent", "counter", {}, service.pages_sent, "Pages sent to other engines."),
            *_bytes("kv_transfer_bytes_sent", service.bytes_sent),
        ]
    if (client := roles.client) is not None:
        text = "Prompts sent to prefill engines, by result. All results but done: computed here, in part or whole."
        samples += [
            ("kv_transfer_requests", "counter", {"result": result}, count, text)
            for result, count in sorted({"done": 0, **client.results}.items())
        ]
        samples += [
            ("kv_transfer_pages_received", "counter", {}, client.pages, "Pages received from prefill engines."),
            *_bytes("kv_transfer_bytes_received", client.bytes),
        ]
    return samples


def _bytes(name: str, counts: Mapping[str, int]) -> list[Metric]:
    text = "Bytes of pages, by transport."
    known = {"tcp": 0, **counts}
    return [(name, "counter", {"transport": transport}, count, text) for transport, count in sorted(known.items())]


def _key(addresses: list[Address]) -> bytes:
    key = env.transfer_key()
    if not key and any(address.scheme == "tcp" for address in addresses):
        raise ConfigError(
            f"Engines that exchange pages over TCP share a key: set {env.TRANSFER_KEY.name} to the same secret for all."
        )
    return key
