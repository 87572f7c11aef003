"""Engines as actors of a Ray cluster: Ray says where each one runs, starts it, and starts it again when it has died.

Each replica has an :class:`EngineSlot`: a placement group of one bundle, so that a whole model is on one machine, and
an actor in it that Ray restarts for as long as the server lives. The actor runs the engine's loop. Messages go the way
they go between processes of one machine, over ZeroMQ, here over TCP and encrypted (``cluster/curve.py``): one message a
step in order, the same loop, and no object store in between. Only this module imports Ray.
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
"""Between two looks at whether Ray has an actor up again."""
SAY_AFTER = 10.0
"""Seconds that a replica may wait for its place before the log says what it waits for."""


def connect(address: str | None) -> Any:
    """Join the cluster at ``address``, HOST:PORT; None and auto: the one that this machine belongs to. Returns ``ray``.

    Raises ConfigError where there is no Ray, or no cluster.
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
    """What runs in an actor's process."""

    def ping(self) -> str:
        """The id of the node that it runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def serve(self, address: str, factory: str, config: Any, heartbeats: str | None, key: bytes) -> None:
        """Make the engine and serve it until it is told to stop. Another error ends the actor's process."""
        engine_process.main(address, factory, config, heartbeats, key)


class EngineSlot:
    """The place of one replica in a cluster, and its actor. bundle: what it takes, ``{"GPU": 1, "CPU": 1}``."""

    def __init__(self, ray: Any, number: int, bundle: dict[str, float]) -> None:
        self.ray, self.number, self.bundle = ray, number, bundle
        self._group: Any = None
        self._actor: Any = None

    def actor(self) -> Any:
        """The actor; a new one where there is none. It may not be up yet."""
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
        """Wait until Ray has the actor up, however long that takes; returns its node's id. Raises EngineDead."""
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        saying = asyncio.get_running_loop().call_later(SAY_AFTER, self._say)
        try:
            while True:
                try:
                    return await self.actor().ping.remote()
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
        """End the actor's process, whatever it does; Ray starts another."""
        if self._actor is not None:
            with contextlib.suppress(Exception):  # it is gone already
                self.ray.kill(self._actor, no_restart=False)

    def release(self) -> None:
        """End the actor and give its place back. May be called more than once."""
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
    """An engine in the actor of ``slot``. The other arguments are EngineHandle's."""

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
        """The engine's life in its actor."""
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
        """End the engine; Ray keeps its place. ``EngineSlot.release`` gives it back."""
        self.over = True
        if gently and self._run is not None:
            self.send(ipc.encode(ipc.Shutdown()))
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._run.future())), SHUTDOWN_LIMIT)
        elif self._run is not None:
            self._end_process()
        await self._close()

    def kill(self) -> None:
        """End the actor at once and give its place back."""
        self._slot.release()

    def hide(self) -> None:
        """There is nothing on disk."""

    @property
    def where(self) -> str:
        return f"Ray node {self._node}" if self._node else "waiting for Ray"

    def _end_process(self) -> None:
        self._slot.restart()


def slots(count: int, address: str | None, device: str, ranks: int) -> list[EngineSlot]:
    """Places for ``count`` replicas with ``ranks`` GPUs each, not asked for yet. Raises ConfigError.

    device: as of ``--device``; auto takes GPUs where the cluster has any.
    """
    kind, _, index = device.partition(":")
    if index:
        raise ConfigError(f"--device {device} is one GPU of this machine; Ray chooses GPUs: give --device cuda.")
    ray = connect(address)
    gpus = kind != "cpu" and (kind == "cuda" or ray.cluster_resources().get("GPU", 0) > 0)
    bundle = {"CPU": float(ranks), **({"GPU": float(ranks)} if gpus else {})}
    return [EngineSlot(ray, i, bundle) for i in range(count)]


def launcher(slot: EngineSlot) -> Any:
    """Starts the engine of ``slot``."""
    return partial(RayHandle, slot=slot)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
