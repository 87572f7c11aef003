"""What the server needs of its engine or engines, and where a request wants to run.

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
class Wish:
    """Where a request wants to run. It changes no text.

    session: requests of one session run on one replica while it serves; empty: of none. group: requests that must run
    together, as the beams of a search; empty: the sequences of its prompt. rank: the number of the replica; None: any.
    """

    session: str = ""
    group: str = ""
    rank: int | None = None


ANYWHERE = Wish()


class Engines(Protocol):
    """One engine or several; the methods' docstrings are EngineClient's.

    stepped: called with the tokens of each step that brought some, and the engine's number. restarted: called with
    ``Engine.info()`` of an engine that was started again, and its number. infos: ``Engine.info()`` of each, the last
    that is known. death: why no engine serves, or None; restarting: one will be back.
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
    async def submit(self, request: EngineRequest, wish: Wish = ANYWHERE) -> TokenStream: ...
    async def inspect(self, limit: float) -> ipc.Stats: ...
    async def call(self, command: str, limit: float, **arguments: Any) -> Any: ...
    def replicas(self) -> list[dict[str, Any]]: ...
    def cancel(self, request_id: str) -> None: ...
    def fail_all(self, error: UnisonoError) -> None: ...
    async def shutdown(self) -> None: ...
    def kill(self) -> None: ...


class Observer:
    """Is told what happens to an engine and its requests. This one does nothing."""

    def brought(self, stream: TokenStream, delta: TokenDelta) -> None:
        """A delta of this request has come."""

    def left(self, stream: TokenStream, ended: bool) -> None:
        """The engine does not have this request any more. ended: it came to its own end."""

    def died(self) -> None:
        """The engine has died."""

    def rescue(self, stream: TokenStream) -> bool:
        """Another engine takes over a request of the dead engine; False where there is none."""
        return False
