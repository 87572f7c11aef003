"""Interface of the server to its engine or engines, and placement hints of requests.

:class:`Engines` has two implementations: ``client.EngineClient``, one engine, and ``replicas.client.ReplicaClient``,
several copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unisono.cluster import ipc
from unisono.cluster.token_stream import TokenStream
from unisono.types import EngineRequest, TokenDelta, UnisonoError


@dataclass(frozen=True)
class Placement:
    """Placement hints of a request. They do not affect the output.

    session: requests of one session run on one replica while it serves; empty: no session. group: requests that must
    run together, such as the beams of a search; empty: the sequences of one prompt. rank: number of the replica; None:
    any.
    """

    session: str = ""
    group: str = ""
    rank: int | None = None


ANYWHERE = Placement()


class Engines(Protocol):
    """One engine or several; the methods are documented in EngineClient.

    stepped: called with the number of tokens of each step that brought some, and the engine's number. restarted: called
    with ``Engine.info()`` of a restarted engine, and its number. infos: the last known ``Engine.info()`` of each.
    death: the reason why no engine serves, or None; restarting: True if one will be back.
    """

    stepped: Callable[[int, int], None]
    restarted: Callable[[dict[str, Any], int], None]

    @property
    def death(self) -> str | None: ...
    @property
    def restarting(self) -> bool: ...
    @property
    def start_seconds(self) -> float: ...
    @property
    def samples(self) -> list[ipc.MetricSample]: ...
    @property
    def infos(self) -> Sequence[dict[str, Any]]: ...
    def start(self) -> None: ...
    async def ready(self) -> dict[str, Any]: ...
    async def submit(self, request: EngineRequest, placement: Placement = ANYWHERE) -> TokenStream: ...
    async def inspect(self, limit: float) -> ipc.Stats: ...
    async def call(self, command: str, limit: float, **arguments: Any) -> Any: ...
    def replicas(self) -> list[dict[str, Any]]: ...
    def cancel(self, request_id: str) -> None: ...
    def fail_all(self, error: UnisonoError) -> None: ...
    async def shutdown(self) -> None: ...
    def kill(self) -> None: ...


class Observer:
    """Observer of an engine and its requests. This base class does nothing."""

    def brought(self, stream: TokenStream, delta: TokenDelta) -> None:
        """Called for each delta of a request."""

    def left(self, stream: TokenStream, ended: bool) -> None:
        """Called when the engine no longer has this request. ended: it was not aborted."""

    def died(self) -> None:
        """Called when the engine has died."""

    def rescue(self, stream: TokenStream) -> bool:
        """Called for a request of a dead engine. Return True if another engine takes it over."""
        return False
