"""Client of several engines with the interface of one: routes requests, and sends operators' commands to all.

Runs in the API process's event loop. Each replica has its own ``EngineClient``, which restarts it after its death;
meanwhile its requests run on the others, unless their clients have received tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.cluster import ipc
from unisono.cluster.client import HEARTBEAT_TIMEOUT, EngineClient
from unisono.cluster.engine_handle import Launcher, Progress
from unisono.cluster.engines import ANYWHERE, Observer, Placement
from unisono.cluster.replicas.prefixes import DEFAULT_PAGE_SIZE
from unisono.cluster.replicas.router import Router
from unisono.cluster.restarts import Restarts
from unisono.cluster.token_stream import TokenStream
from unisono.types import BadRequest, EngineDead, EngineRequest, TokenDelta, UnisonoError

logger = logging.getLogger(__name__)

PAGES = 1 << 16
"""Default number of pages of a replica that does not report it."""
SUMMED = frozenset({"reset_prefix_cache", "free_memory"})
"""Commands whose results are added up over the replicas."""
_UPDATES = "update_weights", "update_weights_from_tensor", "update_weights_from_distributed"
FORGETTING = frozenset({"reset_prefix_cache", "sleep", *_UPDATES})
"""Commands that empty a replica's cache."""


@dataclass
class ReplicaPlan:
    """Start of the replicas.

    launchers: one for each replica; each starts that replica's engine. configs: each engine's config; empty: all have
    the same. restarts: makes each one's counter of restarts. release: called at the end.
    """

    launchers: Sequence[Launcher]
    restarts: Callable[[], Restarts | None] = lambda: None
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    release: Sequence[Callable[[], None]] = ()
    configs: Sequence[Any] = ()


class ReplicaClient:
    """Several engines, started according to ``plan``, with one router. factory, config, progress: as of EngineClient.

    ``death``: the reason why no engine serves; None while one serves. ``restarting``: True if no engine serves and one
    will be back.
    """

    def __init__(
        self, factory: str, config: Any, plan: ReplicaPlan, progress: Progress = lambda stage, share: None
    ) -> None:
        self.router, self._release = Router(len(plan.launchers)), plan.release
        self.stepped: Callable[[int, int], None] = lambda tokens, number: None
        self.restarted: Callable[[dict[str, Any], int], None] = lambda info, number: None
        self._homes: dict[str, int] = {}
        self.clients = [
            EngineClient(
                factory,
                plan.configs[i] if plan.configs else config,
                progress if i == 0 else lambda stage, share: None,
                plan.restarts(),
                plan.heartbeat_timeout,
                number=i,
                launcher=launcher,
                observer=_ReplicaObserver(self, i),
                name=f"Engine {i}",
            )
            for i, launcher in enumerate(plan.launchers)
        ]
        for client in self.clients:
            client.stepped = lambda tokens, number: self.stepped(tokens, number)
            client.restarted = self._back

    def start(self) -> None:
        """Start all processes; :meth:`ready` waits for them."""
        for client in self.clients:
            client.start()

    async def ready(self) -> dict[str, Any]:
        """Return ``Engine.info()`` of the first replica once all are loaded. Raises the first error of loading."""
        infos = await asyncio.gather(*(client.ready() for client in self.clients))
        for i, info in enumerate(infos):
            self._sized(i, info)
        return infos[0]

    @property
    def infos(self) -> list[dict[str, Any]]:
        return [info for client in self.clients for info in client.infos]

    @property
    def death(self) -> str | None:
        deaths = [client.death for client in self.clients]
        if any(one is None for one in deaths):
            return None
        return "; ".join(f"engine {i}: {death}" for i, death in enumerate(deaths))

    @property
    def restarting(self) -> bool:
        return self.death is not None and any(client.restarting for client in self.clients)

    @property
    def start_seconds(self) -> float:
        return min(client.start_seconds for client in self.clients)

    @property
    def samples(self) -> list[ipc.MetricSample]:
        """Metrics of the last :meth:`inspect`, and the router's. Each has the label ``engine``."""
        found = []
        for i, client in enumerate(self.clients):
            found += [_labelled(sample, i) for sample in (*client.samples, *self._routing(i))]
        return found

    def _routing(self, replica: int) -> list[ipc.MetricSample]:
        router, text = self.router, "Requests routed to an engine, by deciding rule."
        routed = [
            ipc.MetricSample("routed_requests", "counter", {"reason": reason}, float(count), text)
            for (one, reason), count in sorted(router.routed.items())
            if one == replica
        ]
        work = "Estimated remaining cost of an engine's open requests, in prompt tokens."
        matched = "Prompt tokens that the router expected an engine to have cached."
        return [
            *routed,
            ipc.MetricSample("outstanding_work", "gauge", {}, float(router.loads[replica].work), work),
            ipc.MetricSample("router_matched_tokens", "counter", {}, float(router.matched[replica]), matched),
        ]

    async def submit(self, request: EngineRequest, placement: Placement = ANYWHERE) -> TokenStream:
        """Send ``request`` to the chosen replica. Raises BadRequest, and EngineDead if none is left."""
        if request.request_id in self._homes:
            raise BadRequest(f"request_id={request.request_id!r} is running already; give another.", "request_id")
        waiting = [i for i, client in enumerate(self.clients) if client.restarting]
        home = self.router.choose(request, placement, waiting)
        self._homes[request.request_id] = home
        try:
            return await self.clients[home].submit(request, placement)
        except BaseException:
            self._close(self._homes.get(request.request_id, home), request.request_id)
            raise

    async def inspect(self, limit: float) -> ipc.Stats:
        """Return fresh metrics of all serving replicas, and the info of the first one. Raises as EngineClient's."""
        queries = [client.inspect(limit) for client in self.clients if client.death is None]
        if not queries:
            raise EngineDead(str(self.death))
        answers = await asyncio.gather(*queries, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, ipc.Stats):
                return answer
        raise next(answer for answer in answers if isinstance(answer, BaseException))

    def replicas(self) -> list[dict[str, Any]]:
        """Return each replica's number, place, state, restarts, open requests and their work."""
        return [
            {
                "engine": i,
                "where": one.where,
                "state": "serving" if one.death is None else "restarting" if one.restarting else "dead",
                "death": one.death,
                "restarts": one.restart_count,
                "requests": load.requests,
                "outstanding_work": load.work,
                "router_pages": len(load.pages),
            }
            for i, (one, load) in enumerate(zip(self.clients, self.router.loads, strict=True))
        ]

    async def call(self, command: str, limit: float, **arguments: Any) -> Any:
        """Run a command in every serving replica.

        Return the sum of the results of SUMMED commands; of others the result, or a list if they differ. Raises as
        EngineClient's.
        """
        serving = [i for i, client in enumerate(self.clients) if client.death is None]
        if not serving:
            raise EngineDead(str(self.death))
        results = await asyncio.gather(*(self.clients[i].call(command, limit, **arguments) for i in serving))
        if command in FORGETTING:
            for i in serving:
                self.router.forget(i)
        if command in SUMMED:
            return sum(results)
        return results[0] if all(one == results[0] for one in results) else list(results)

    def cancel(self, request_id: str) -> None:
        """See EngineClient's."""
        if (home := self._homes.get(request_id)) is not None:
            self.clients[home].cancel(request_id)

    def fail_all(self, error: UnisonoError) -> None:
        """End every request with ``error``."""
        for client in self.clients:
            client.fail_all(error)

    async def shutdown(self) -> None:
        """End all processes."""
        await asyncio.gather(*(client.shutdown() for client in self.clients))
        for release in self._release:
            release()

    def kill(self) -> None:
        """End all processes at once."""
        for client in self.clients:
            client.kill()

    def _sized(self, replica: int, info: dict[str, Any]) -> None:
        cache = info.get("kv_cache", {})
        self.router.sized(replica, cache.get("pages", PAGES), cache.get("page_size", DEFAULT_PAGE_SIZE))

    def _back(self, info: dict[str, Any], replica: int) -> None:
        """Update the router after a replica's restart."""
        self._sized(replica, info)
        self.restarted(info, replica)

    def _move(self, stream: TokenStream, dead: int) -> bool:
        """Move a request of a dead replica to another one; False if none serves."""
        request = stream.request
        if not any(load.serves for load in self.router.loads):
            return False
        stream.retry()
        home = self.router.choose(request, replace(self.router.placement(dead, request.request_id), rank=None))
        self._homes[request.request_id] = home
        self.clients[home].adopt(stream)
        return True

    def _close(self, replica: int, request_id: str, tokens: Sequence[int] = (), ended: bool = False) -> None:
        """Remove a request that a replica has finished."""
        self.router.close(replica, request_id, tokens, ended)
        if self._homes.get(request_id) == replica:
            del self._homes[request_id]


class _ReplicaObserver(Observer):
    """Report the events of one replica to the router."""

    def __init__(self, owner: ReplicaClient, replica: int) -> None:
        self._owner, self._replica = owner, replica

    def brought(self, stream: TokenStream, delta: TokenDelta) -> None:
        self._owner.router.progress(self._replica, stream.request.request_id, len(delta.token_ids))

    def left(self, stream: TokenStream, ended: bool) -> None:
        self._owner._close(self._replica, stream.request.request_id, stream.tokens, ended)

    def died(self) -> None:
        self._owner.router.lost(self._replica)

    def rescue(self, stream: TokenStream) -> bool:
        return self._owner._move(stream, self._replica)


def _labelled(sample: ipc.MetricSample, replica: int) -> ipc.MetricSample:
    labels = {**sample.labels, "engine": str(replica)}
    return ipc.MetricSample(sample.name, sample.kind, labels, sample.value, sample.help)
