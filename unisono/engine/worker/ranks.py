"""Rank 0's side of a model in several processes: start them, and send every command to all.

``runner.py`` owns it. A model of one rank has none of this.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.config import ResolvedConfig
from unisono.config.expert_placement import read_placement
from unisono.distributed.gather import Ranks, close_transport, open_transport
from unisono.distributed.group import Group, first_error
from unisono.distributed.processes import CAPTURE_LAG, LAG, RankProcesses
from unisono.distributed.shared_memory import SharedMemory
from unisono.engine.worker.commands import ANSWERED, Command, FileOutcomes, Measure, encode
from unisono.engine.worker.worker import Worker
from unisono.graphs import PendingOutputs
from unisono.models.blocks.latent_attention import LatentSpec
from unisono.models.config import DecoderConfig
from unisono.types import ConfigError, EngineDead, UnisonoError

MODULE = "unisono.engine.worker.rank"


def ranks_of(config: ResolvedConfig, model: DecoderConfig) -> Ranks:
    """Return rank 0's place among the configured ranks. Raises ConfigError if the model cannot be divided so."""
    requested = config.requested
    count = requested.tensor_parallel_size
    if requested.enable_expert_parallel and not any(
        hasattr(layer.feed_forward, "num_experts") for layer in model.layers
    ):
        raise ConfigError(f"--enable-expert-parallel: a {model.architecture} has no experts; leave it out.")
    if requested.tp_reduce == "ordered" and requested.enable_lora:
        raise ConfigError("--tp-reduce ordered with --enable-lora: adapters read whole rows; leave one of them out.")
    divided = config.speculative.draft_tensor_parallel_size if config.speculative else None
    if divided not in (None, 1, count):
        raise ConfigError(
            f"draft_tensor_parallel_size={divided}: give 1, or as many ranks as the target has "
            f"(--tensor-parallel-size {count})."
        )
    together = count > 1
    if not together and (requested.enable_dp_attention or requested.expert_placement):
        raise ConfigError(
            "--enable-dp-attention and --expert-placement divide a model among GPUs: give --tensor-parallel-size."
        )
    if requested.expert_placement and not requested.enable_expert_parallel:
        raise ConfigError("--expert-placement places whole experts: add --enable-expert-parallel.")
    if requested.enable_dp_attention:
        _check_dp_attention(config, model)
    ranks = Ranks(
        0, count, whole_experts=requested.enable_expert_parallel and together,
        ordered=requested.tp_reduce == "ordered" and together,
        dp_attention=requested.enable_dp_attention and together,
        placement=read_placement(requested.expert_placement) if requested.expert_placement and together else (),
    )  # fmt: skip
    model.check_divides(ranks)
    return ranks


def _check_dp_attention(config: ResolvedConfig, model: DecoderConfig) -> None:
    """Raise ConfigError for options that --enable-dp-attention does not support."""
    requested, spec = config.requested, config.speculative
    if not all(isinstance(layer.mixer, LatentSpec) for layer in model.layers):
        raise ConfigError(
            f"--enable-dp-attention: a {model.architecture} has layers without latent attention (MLA); leave it out."
        )
    if (requested.num_pages or 0) % requested.tensor_parallel_size:
        raise ConfigError(
            f"--num-pages {requested.num_pages} cannot be divided among {requested.tensor_parallel_size} ranks "
            "(--enable-dp-attention): give a multiple."
        )
    refused = {
        "--cpu-offload-gb": requested.offloads,
        f"--role {requested.role}": requested.exchanges_pages,
        "--enable-lora": requested.enable_lora,
        "draft trees": spec is not None and spec.paths,
    }
    for option, is_set in refused.items():
        if is_set:
            raise ConfigError(f"--enable-dp-attention cannot be combined with {option} yet: leave one of them out.")


class Team:
    """All ranks, including rank 0's own worker; a :class:`unisono.distributed.group.Group` while they build."""

    def __init__(self, config: ResolvedConfig, ranks: Ranks) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="unisono-ranks-")
        store = str(Path(self._directory.name) / "store")
        first = {
            index: {"config": _on(config, index), "ranks": replace(ranks, index=index), "store": store}
            for index in range(1, ranks.count)
        }
        self._peers = RankProcesses(MODULE, first, ranks)
        self.ranks = ranks
        try:
            open_carrying(self, self._peers.memory, config.device, store)
        except BaseException:
            self._peers.close()
            raise
        self._peers.on_failure(lambda: give_up_carrying(self))

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks."""
        return self._peers.pids

    @property
    def pages(self) -> list[socket.socket]:
        """A socket to each of the other ranks, for bytes of pages."""
        return self._peers.pages

    @property
    def failed(self) -> int:
        """File descriptor that becomes readable once a rank has failed."""
        return self._peers.failed

    def exchange(self, value: Any) -> list[Any]:
        """See :class:`unisono.distributed.group.Group`."""
        return self._peers.exchange(value)

    def send(self, command: Command, worker: Worker) -> PendingOutputs | None:
        """Have all ranks execute a command, rank 0 without waiting for the others; return its outputs.

        Raises EngineDead if a rank has failed, torch.OutOfMemoryError if a capture does not fit on one of them,
        CheckpointError if one of them cannot read an adapter or new weights.
        """
        peers = self._peers
        with self._busy():
            peers.lag = CAPTURE_LAG if isinstance(command, (*ANSWERED, Measure)) else LAG
            peers.send(encode(command))
            fits, pending, own = True, None, None
            try:
                pending = worker.execute(command)
            except torch.OutOfMemoryError:
                fits = False
            except UnisonoError as refusal:
                if not isinstance(command, ANSWERED):
                    raise
                own = refusal
            peers.memory.executed()
            if isinstance(command, ANSWERED):
                replies = peers.replies()
                if (error := own or first_error([None, *replies])) is not None:
                    raise error
                fits = all(replies) and fits
            if not fits:
                raise torch.OutOfMemoryError("a rank has no room for this graph")
        return None if pending is None else Guarded(**vars(pending), team=self)

    def ask(self, command: FileOutcomes, worker: Worker) -> list[list[int]]:
        """Return every rank's answer to a query. Raises EngineDead if a rank has failed."""
        peers = self._peers
        with self._busy():
            peers.lag = LAG
            peers.send(encode(command))
            own = worker.answer(command)
            peers.memory.executed()
            replies = peers.replies()
        if (error := first_error([None, *replies])) is not None:
            raise error
        return [own, *replies]

    def check(self) -> None:
        """Raise EngineDead if a rank has failed."""
        if self._peers.failure is not None:
            raise EngineDead(self._peers.failure)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Mark a period in which rank 0's thread may wait for others."""
        self._peers.busy = True
        try:
            yield
        except EngineDead:
            self.check()
            raise
        finally:
            self._peers.busy = False

    def begin_closing(self) -> None:
        """Have the other ranks free their memory, graphs first."""
        self._peers.begin_closing()

    def close(self) -> None:
        """Close the transports of gathers, once rank 0's graphs are gone too, and wait for the other processes."""
        close_carrying(self)
        self._peers.close()
        self._directory.cleanup()


@dataclass
class Guarded(PendingOutputs):
    """Outputs that never arrive if another rank has failed."""

    team: Team

    def wait(self) -> dict[str, np.ndarray]:
        """See :meth:`PendingOutputs.wait`; raises EngineDead."""
        with self.team._busy():
            found = super().wait()
        self.team.check()
        return found


def _on(config: ResolvedConfig, index: int) -> ResolvedConfig:
    """Return the configuration of another rank, with its device."""
    device = config.device
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + index)
    return replace(config, device=device)


def open_carrying(group: Group, memory: SharedMemory, device: torch.device, store: str) -> None:
    """Open the transports of this rank's gathers. store: a path that all ranks of a GPU share."""
    if device.type == "cuda":
        from unisono.distributed.nccl import Nccl

        torch.cuda.set_device(device)
        number = open_transport(Nccl(group.ranks, device, store))
    else:
        number = open_transport(memory)
    group.ranks = replace(group.ranks, transport=number)


def close_carrying(group: Group) -> None:
    """Close the transports of this rank's gathers."""
    close_transport(group.ranks.transport)


def give_up_carrying(group: Group) -> None:
    """End passes on this rank's GPU that wait for a lost rank; their results are void."""
    from unisono.distributed.gather import give_up

    give_up(group.ranks.transport)
