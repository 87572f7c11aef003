"""Engines as actors of a Ray cluster: Ray places, starts and restarts them.

Each replica has an :class:`EngineSlot`: a placement group of one bundle, so that a whole model is on one machine, and
an actor in it that Ray restarts for as long as the server lives. The actor runs the engine's loop. Messages travel over
ZeroMQ as between processes of one machine, here over TCP and encrypted (``cluster/curve.py``): one message per step, in
order, without the object store. Only this module imports Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

import zmq

from unisono.cluster import curve, engine_process, ipc
from unisono.cluster.engine_handle import SHUTDOWN_LIMIT, EngineHandle
from unisono.types import ConfigError, EngineDead

logger = logging.getLogger(__name__)

NAMESPACE = "unisono"
POLL_SECONDS = 0.5
"""Seconds between two checks if Ray has restarted an actor."""
SAY_AFTER = 10.0
"""Seconds that a replica may wait for its place before the log reports it."""


def connect(address: str | None) -> Any:
    """Join the cluster at ``address``, HOST:PORT; None and auto: the cluster of this machine. Returns ``ray``.

    Raises ConfigError without Ray or without a cluster.
    """
    if address is not None and "://" in address:
        raise ConfigError(
            f"--ray-address {address}: engines talk to the server directly, so it must run on a machine of the "
            "cluster. Run `ray start --address=HOST:PORT` on this machine and give HOST:PORT or auto."
        )
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "--distributed-executor-backend ray needs Ray, which is not installed; install unisono[ray]."
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address or "auto", namespace=NAMESPACE, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, TimeoutError, RuntimeError) as error:
            raise ConfigError(
                f"--ray-address {address or 'auto'}: no Ray cluster answers: {_one_line(error)}. Start one with "
                "`ray start --head`, and join it on each machine with `ray start --address=HOST:PORT`."
            ) from None
    return ray


class EngineActor:
    """Actor that runs an engine."""

    def ping(self) -> str:
        """Return the id of the actor's node."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def serve(self, address: str, factory: str, config: Any, heartbeats: str | None, key: bytes) -> None:
        """Make the engine and serve it until Shutdown. Another error ends the actor's process."""
        engine_process.main(address, factory, config, heartbeats, key)


class EngineSlot:
    """Place of one replica in a cluster, and its actor. bundle: its resources, ``{"GPU": 1, "CPU": 1}``."""

    def __init__(self, ray: Any, number: int, bundle: dict[str, float]) -> None:
        self.ray, self.number, self.bundle = ray, number, bundle
        self._group: Any = None
        self._actor: Any = None

    def actor(self) -> Any:
        """Return the actor; a new one if there is none. It may not be up yet."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._actor is None:
            self._group = placement_group([self.bundle], strategy="STRICT_PACK")
            remote = self.ray.remote(EngineActor).options(
                name=None,
                num_cpus=self.bundle.get("CPU", 0),
                num_gpus=self.bundle.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
            )
            self._actor = remote.remote()
        return self._actor

    async def up(self) -> str:
        """Wait until Ray has the actor up, without a limit; return its node's id. Raises EngineDead."""
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        saying = asyncio.get_running_loop().call_later(SAY_AFTER, self._say)
        try:
            while True:
                try:
                    node: str = await self.actor().ping.remote()
                    return node
                except ActorUnavailableError:
                    await asyncio.sleep(POLL_SECONDS)
                except ActorDiedError as error:
                    self.release()  # for good; the next start makes another
                    raise EngineDead(f"its Ray actor died for good: {_one_line(error)}") from None
        finally:
            saying.cancel()

    def _say(self) -> None:
        needs = ", ".join(f"{count:g} {name}" for name, count in self.bundle.items())
        logger.warning("Engine %d waits for Ray to place it: it needs %s on one machine.", self.number, needs)

    def restart(self) -> None:
        """End the actor's process; Ray starts another."""
        if self._actor is not None:
            with contextlib.suppress(Exception):  # it is gone already
                self.ray.kill(self._actor, no_restart=False)

    def release(self) -> None:
        """End the actor and release its place. May be called more than once."""
        from ray.util.placement_group import remove_placement_group

        actor, group, self._actor, self._group = self._actor, self._group, None, None
        if not self.ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # the cluster may be gone
            if actor is not None:
                self.ray.kill(actor, no_restart=True)
            if group is not None:
                remove_placement_group(group)


class RayHandle(EngineHandle):
    """Handle of an engine in the actor of ``slot``. The other arguments are EngineHandle's."""

    def __init__(self, *arguments: Any, slot: EngineSlot) -> None:
        super().__init__(*arguments)
        self._slot = slot
        self._run: Any = None
        self._node = ""

    def start(self) -> None:
        """Open the sockets; have the actor make the engine as soon as Ray has it up."""
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
        public, secret = curve.keys()
        self._bind(f"tcp://{host}:*", f"tcp://{host}:*", secret)
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._read()))
        self._tasks.append(loop.create_task(self._serve(public)))

    async def _serve(self, key: bytes) -> None:
        """Run the engine in its actor until it ends."""
        try:
            self._node = await self._slot.up()
            logger.info("Engine %d is on %s.", self._slot.number, self.where)
            heartbeats = None
            if self._watch is not None:
                heartbeats = self._watch.endpoint
                self._tasks.append(asyncio.get_running_loop().create_task(self._guard(self._watch)))
            where = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._run = self._slot.actor().serve.remote(where, self._factory, self._config, heartbeats, key)
            await self._run
            self._end(EngineDead("the engine ended by itself"))
        except EngineDead as error:
            self._end(error)
        except Exception as error:  # Ray has many
            self._end(EngineDead(f"its Ray actor ended: {_one_line(error)}"))

    async def stop(self, gently: bool) -> None:
        """End the engine; Ray keeps its place. ``EngineSlot.release`` releases it."""
        self.over = True
        if gently and self._run is not None:
            self.send(ipc.encode(ipc.Shutdown()))
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._run.future())), SHUTDOWN_LIMIT)
        elif self._run is not None:
            self._end_process()
        await self._close()

    def kill(self) -> None:
        """End the actor at once and release its place."""
        self._slot.release()

    def hide(self) -> None:
        """Do nothing: there are no names on disk."""

    @property
    def where(self) -> str:
        return f"Ray node {self._node}" if self._node else "waiting for Ray"

    def _end_process(self) -> None:
        self._slot.restart()


def slots(count: int, address: str | None, device: str, ranks: int) -> list[EngineSlot]:
    """Return places for ``count`` replicas with ``ranks`` GPUs each, not requested from Ray yet. Raises ConfigError.

    device: as of ``--device``; auto takes GPUs if the cluster has any.
    """
    kind, _, index = device.partition(":")
    if index:
        raise ConfigError(f"--device {device} is one GPU of this machine; Ray chooses GPUs: give --device cuda.")
    ray = connect(address)
    gpus = kind != "cpu" and (kind == "cuda" or ray.cluster_resources().get("GPU", 0) > 0)
    bundle = {"CPU": float(ranks), **({"GPU": float(ranks)} if gpus else {})}
    return [EngineSlot(ray, i, bundle) for i in range(count)]


def launcher(slot: EngineSlot) -> Any:
    """Return the launcher of ``slot``'s engine."""
    return partial(RayHandle, slot=slot)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
