"""Number and start of replicas, from flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unisono.cluster.client import HEARTBEAT_TIMEOUT
from unisono.cluster.engine_handle import EngineHandle
from unisono.cluster.replicas.client import ReplicaPlan
from unisono.cluster.replicas.devices import environments
from unisono.cluster.restarts import Restarts
from unisono.types import ConfigError

BACKENDS = ("mp", "ray")


@dataclass(frozen=True)
class ReplicaSettings:
    """The flags of these names.

    data_parallel_size: engines, each with a whole copy of the model. distributed_executor_backend: mp starts them as
    processes of this machine, ray as actors of a Ray cluster. ray_address: the cluster's, HOST:PORT; None or auto: the
    cluster of this machine. Raises ConfigError.
    """

    data_parallel_size: int = 1
    distributed_executor_backend: str = "mp"
    ray_address: str | None = None

    @classmethod
    def of(cls, data_parallel_size: int, distributed_executor_backend: str, ray_address: str | None) -> ReplicaSettings:
        """Make settings from the flags: an address implies Ray."""
        backend = {"uni": "mp"}.get(distributed_executor_backend, distributed_executor_backend)
        return cls(data_parallel_size, "ray" if ray_address is not None else backend, ray_address)

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ConfigError(f"--data-parallel-size {self.data_parallel_size}: give a whole number from 1 on.")
        if self.distributed_executor_backend not in BACKENDS:
            raise ConfigError(
                f"--distributed-executor-backend {self.distributed_executor_backend!r} is unknown; choose one of "
                f"{', '.join(BACKENDS)}."
            )

    @property
    def several(self) -> bool:
        """True if there is a router."""
        return self.data_parallel_size > 1 or self.distributed_executor_backend == "ray"


def plan(
    settings: ReplicaSettings,
    config: Any,
    restarts: Callable[[], Restarts | None] = lambda: None,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
) -> ReplicaPlan:
    """Plan the start of the replicas. config: the engine's.

    Raises ConfigError if this machine has too few GPUs, or if there is no Ray cluster.
    """
    ranks, device = getattr(config, "tensor_parallel_size", 1), getattr(config, "device", "cpu")
    count = settings.data_parallel_size
    configs = [_own_files(config, i) for i in range(count)]
    if settings.distributed_executor_backend == "ray":
        from unisono.cluster.replicas import on_ray

        places = on_ray.slots(count, settings.ray_address, device, ranks)
        launchers = [on_ray.launcher(place) for place in places]
        return ReplicaPlan(launchers, restarts, heartbeat_timeout, [place.release for place in places], configs)
    launchers = [partial(EngineHandle, environment=share) for share in environments(count, device, ranks)]
    return ReplicaPlan(launchers, restarts, heartbeat_timeout, (), configs)


def _own_files(config: Any, number: int) -> Any:
    """Return the config of one replica: a directory of pages belongs to one engine."""
    if (directory := getattr(config, "kv_offload_dir", None)) is None:
        return config
    return replace(config, kv_offload_dir=str(Path(directory) / f"engine-{number}"))
