"""The one thing that ranks of a model say to each other inside passes: their parts of a row, put side by side.

No sum is split across ranks, so a gather is all there is. It is an op, ``unisono::all_gather``, so that tapes and CUDA
graphs record it with the rest of a pass; what carries it is a *transport* (``shared_memory`` on a CPU, ``nccl`` with
``kernels/gather.py`` on GPUs). Every rank runs the same gathers in the same order.

Shapes: M rows, n columns of a rank, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from unisono.kernels.library import define, register


class Transport(Protocol):
    """Carries the gathers of one rank of one engine."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, n], contiguous, of any dtype -> [M, N · n], new; raises EngineDead where a rank has failed."""
        ...

    def close(self) -> None:
        """Free what it holds; every graph that has gathers must be gone."""
        ...


_transports: dict[int, Transport] = {}
"""By number: an op's arguments cannot name objects otherwise."""


@dataclass(frozen=True)
class Ranks:
    """Which part of a model a process holds. index: this rank; count: N. transport: the number of its transport.

    whole_experts: experts are whole on a rank (``--enable-expert-parallel``); else they are split like other products.
    """

    index: int = 0
    count: int = 1
    whole_experts: bool = False
    transport: int = 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, n] of each rank -> [M, N · n], in the order of ranks."""
        return x if self.count == 1 else torch.ops.unisono.all_gather(x, self.transport, self.count)

    def part(self, size: int) -> tuple[int, int]:
        """This rank's equal part of ``size`` things, which must divide: the first, and the one after the last."""
        each = size // self.count
        return self.index * each, (self.index + 1) * each

    def divides(self, size: int) -> bool:
        """Whether equal parts are possible."""
        return size % self.count == 0


ALONE = Ranks()
"""A process that holds the whole model."""


def open_transport(transport: Transport) -> int:
    """Make a transport known to the op; returns its number."""
    number = max(_transports, default=0) + 1
    _transports[number] = transport
    return number


def close_transport(number: int) -> None:
    """Close a transport and forget it."""
    transport = _transports.pop(number, None)
    if transport is not None:
        transport.close()


def described(number: int) -> tuple[str, str]:
    """(what carries a transport's gathers, why), for ``explain``."""
    transport = _transports[number]
    return transport.name, transport.why


def give_up(number: int) -> None:
    """End gathers that wait for a rank which is gone, where a transport can; from any thread."""
    end = getattr(_transports.get(number), "give_up", None)
    if end is not None:
        end()


def _all_gather(x: torch.Tensor, transport: int, ranks: int) -> torch.Tensor:
    return _transports[transport].all_gather(x.contiguous())


def _meta(x: torch.Tensor, transport: int, ranks: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], ranks * x.shape[1])


define("all_gather(Tensor x, int transport, int ranks) -> Tensor")
register("all_gather", cuda=_all_gather, cpu=_all_gather, meta=_meta)
