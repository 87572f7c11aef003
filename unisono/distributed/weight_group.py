"""A process group that carries weights from a trainer to the ranks of an engine.

The trainer is rank 0. It is independent of ``torch.distributed``'s default group, so that trainer and engine may have
one of their own each. An engine's rank receives what the trainer sends, in the order of names that both know.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.types import ConfigError

BACKENDS = ("gloo", "nccl")
"""gloo carries tensors on CPUs, nccl those on GPUs."""

TRAINER = 0
"""Rank that sends."""

TIMEOUT = 100.0
"""Seconds that a member waits for the others: less than an engine waits for one of its ranks."""

POLL = 0.2
"""Seconds between two tries to connect to the trainer."""


class WeightGroup:
    """One member of the group. Construction waits until all members have met.

    address, port: where rank 0 listens. rank: 0 for the trainer. world_size: members, the trainer included. timeout:
    seconds. Raises ConfigError for values without a meaning, and if the members do not meet in time.
    """

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, backend: str = "gloo", timeout: float = TIMEOUT
    ) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"backend={backend!r}: the backends are {', '.join(BACKENDS)}.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is no member of a group of {world_size}; give ranks 0 … {world_size - 1}.")
        self.rank, self._limit, deadline = rank, timedelta(seconds=timeout), time.monotonic() + timeout
        self.device = torch.device("cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}")
        try:
            if rank != TRAINER:
                _wait_for_listener(address, port, deadline)
            self._store: Any = dist.TCPStore(address, port, world_size, rank == TRAINER, _remaining(deadline))
            self._group: Any = _group(backend, self._store, rank, world_size, _remaining(deadline))
            self._broadcast(torch.zeros(1, device=self.device), _remaining(deadline))
        except (OSError, RuntimeError) as error:  # a timeout, an address in use
            where = f"{address}:{port}, rank {rank} of {world_size}"
            raise ConfigError(f"the group at {where} did not meet: {' '.join(str(error).split())[:300]}") from None

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send tensors to all other members, in the mapping's order. For rank 0."""
        for tensor in tensors.values():
            self._broadcast(tensor.detach().to(self.device).contiguous())

    def receive(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
    ) -> dict[str, torch.Tensor]:
        """Receive tensors by name, as :meth:`send` sends them. For ranks above 0. Raises ConfigError if rank 0 left."""
        found = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            try:
                self._broadcast(tensor)
            except RuntimeError as error:
                why = " ".join(str(error).split())[:300]
                raise ConfigError(f"tensor {name} did not arrive from the trainer: {why}") from None
            found[name] = tensor
        return found

    def close(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    def _broadcast(self, tensor: torch.Tensor, timeout: timedelta | None = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = TRAINER, 0, timeout or self._limit
        self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def _wait_for_listener(address: str, port: int, deadline: float) -> None:
    """Return once the trainer listens. TCPStore would try to connect for up to twice its timeout.

    Raises OSError at the deadline.
    """
    while True:
        try:
            socket.create_connection((address, port), _remaining(deadline).total_seconds()).close()
            return
        except OSError:
            if time.monotonic() + POLL > deadline:
                raise
        time.sleep(POLL)


def _remaining(deadline: float) -> timedelta:
    """Time until ``deadline``, of ``time.monotonic``; at least 0.1 s, since 0 means no limit."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.1))


def _group(backend: str, store: Any, rank: int, world_size: int, limit: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, world_size, options)
