"""Prefill and decode apart: what an engine of a role has beside the usual, and what it tells."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping

from unisono.config import ResolvedConfig
from unisono.engine.disaggregation.identity import engine_identity
from unisono.engine.disaggregation.page_bytes import SharedPages
from unisono.engine.disaggregation.prefill_client import PrefillClient
from unisono.engine.disaggregation.prefill_service import PrefillService
from unisono.engine.worker.runner import Runner
from unisono.passes.features.base import Metric
from unisono.transport.addresses import Address
from unisono.transport.backends import usable_backends
from unisono.types import ConfigError, EngineRequest

KEY = "UNISONO_TRANSFER_KEY"
"""The environment variable with the key that engines share."""


class Roles:
    """service: of a prefill engine that listens. client: of a decode engine that has peers. Either may be None.

    wakes: a socket that becomes readable when the service has news for an engine that sleeps.
    """

    def __init__(self, config: ResolvedConfig | None = None, runner: Runner | None = None) -> None:
        self.service: PrefillService | None = None
        self.client: PrefillClient | None = None
        self.wakes: socket.socket | None = None
        self._pages: SharedPages | None = None
        if config is None or runner is None or not config.asked.exchanges_pages:
            return
        asked = config.asked
        listens = [Address.parse(asked.transfer_listen, "--transfer-listen")] if asked.transfer_listen else []
        urls = asked.prefill_urls.split(",") if asked.prefill_urls else []
        peers = [Address.parse(text, "--prefill-url") for text in urls]
        if asked.transfer_backend == "nixl" and any(address.scheme == "unix" for address in listens + peers):
            raise ConfigError(
                "--transfer-backend nixl: over a Unix socket pages go through shared memory; give tcp://HOST:PORT."
            )
        backends = usable_backends(asked.transfer_backend)
        self._pages = pages = runner.share_pages()
        identity, timeout = engine_identity(config, runner.worker), asked.transfer_timeout
        for address in listens:
            self.wakes, self._wake = socket.socketpair()
            self.wakes.setblocking(False)
            self._wake.setblocking(False)
            self.service = PrefillService(address, _key([address]), identity, timeout, backends, pages, self.wake)
        if peers:
            self.client = PrefillClient(peers, _key(peers), identity, timeout, backends, pages)

    def wake(self) -> None:
        """Make :attr:`wakes` readable."""
        with contextlib.suppress(OSError):  # it is readable already, or the engine is gone
            self._wake.send(b"!")

    def poll(self, add: Callable[[EngineRequest], None], abort: Callable[[str], None]) -> None:
        """Take what other engines ask and send."""
        if self.service is not None:
            self._awake()
            self.service.poll(add, abort)
        if self.client is not None:
            self.client.poll()

    def _awake(self) -> None:
        """The engine looks at everything now."""
        with contextlib.suppress(OSError):
            while self.wakes is not None and self.wakes.recv(4096):
                pass

    def close(self) -> None:
        """Hang up on everybody."""
        for part in (self.service, self.client, self._pages):
            if part is not None:
                part.close()


def info(roles: Roles) -> dict[str, object]:
    """For ``explain`` and ``/server_info``."""
    told: dict[str, object] = {}
    if (service := roles.service) is not None:
        told["service"] = {
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
        told["client"] = {
            "results": dict(client.results),
            "pages": client.pages,
            "bytes": client.bytes.total(),
            "bytes_by_transport": dict(client.bytes),
            "peers": client.peers,
        }
    return told


def metrics(roles: Roles) -> list[Metric]:
    """For ``/metrics``."""
    samples: list[Metric] = []
    if (service := roles.service) is not None:
        samples += [
            ("kv_transfer_prompts", "counter", {}, service.requests, "Prompts computed for other engines."),
            ("kv_transfer_pages_sent", "counter", {}, service.pages_sent, "Pages sent to other engines."),
            *_bytes("kv_transfer_bytes_sent", service.bytes_sent),
        ]
    if (client := roles.client) is not None:
        text = "Prompts given to prefill engines, by how they ended; all but done were computed here, in part or whole."
        samples += [
            ("kv_transfer_requests", "counter", {"result": result}, count, text)
            for result, count in sorted({"done": 0, **client.results}.items())
        ]
        samples += [
            ("kv_transfer_pages_received", "counter", {}, client.pages, "Pages that prefill engines sent."),
            *_bytes("kv_transfer_bytes_received", client.bytes),
        ]
    return samples


def _bytes(name: str, counts: Mapping[str, int]) -> list[Metric]:
    text = "Bytes of these, by what carried them."
    known = {"tcp": 0, **counts}
    return [(name, "counter", {"transport": transport}, count, text) for transport, count in sorted(known.items())]


def _key(addresses: list[Address]) -> bytes:
    key = os.environ.get(KEY, "")
    if not key and any(address.scheme == "tcp" for address in addresses):
        raise ConfigError(f"Engines that exchange pages over TCP share a key: set {KEY} to the same secret for all.")
    return key.encode()
