"""The one thing that ranks of a model say to each other inside passes: their parts of a row, put side by side.

A gather is all there is, for no sum is split across ranks; with ``--tp-reduce ordered`` a part may be a term of a sum,
and each rank adds up the gathered terms in the order of ranks. Gathers are ops (``unisono::all_gather``, and two with
what happens before or after), so that tapes and CUDA graphs record them with the rest of a pass; what carries them is a
*transport* (``shared_memory`` on a CPU, ``nccl`` with ``kernels/comm/gather.py`` on GPUs). Every rank runs the same
gathers in the same order.

Shapes: M rows, n columns of a rank, N ranks, H features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from unisono.kernels.comm.gather_fused import ordered_sum
from unisono.kernels.gemm.fp8_quantize import Quantised, empty_quantised
from unisono.kernels.library import define, register
from unisono.kernels.norm.activation import silu_mul
from unisono.kernels.norm.add_norm import add_rms_norm, add_rms_norm_fp8
from unisono.kernels.norm.rms_norm import Normed, quantised_norm, with_fp8_meta


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


@runtime_checkable
class FusingTransport(Transport, Protocol):
    """One with kernels that gather and compute at once; each returns None where it has none for such rows."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool,
        summed: bool,
    ) -> tuple[torch.Tensor, *Normed] | None:  # fmt: skip
        """See :meth:`Ranks.add_rms_norm`; (sum, norm, x8, scales)."""
        ...

    def silu(self, x: torch.Tensor) -> torch.Tensor | None:
        """See :meth:`Ranks.silu`."""
        ...


_transports: dict[int, Transport] = {}
"""By number: an op's arguments cannot name objects otherwise."""


@dataclass(frozen=True)
class Ranks:
    """Which part of a model a process holds. index: this rank; count: N. transport: the number of its transport.

    whole_experts: experts are whole on a rank (``--enable-expert-parallel``); else they are split like other products.
    ordered: products after attention and of the MLP are split by inputs, where their format allows it, and their terms
    are added in the order of ranks (``--tp-reduce ordered``).
    """

    index: int = 0
    count: int = 1
    whole_experts: bool = False
    transport: int = 0
    ordered: bool = False

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, n] of each rank -> [M, N · n], in the order of ranks."""
        return x if self.count == 1 else torch.ops.unisono.all_gather(x, self.transport, self.count)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, 2 n] of each rank, columns of gate and then of up -> ``silu(gate) * up`` of all, [M, N · n]."""
        return torch.ops.unisono.gather_silu(x, self.transport, self.count)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, H], a term of each rank -> their sum, added in fp32 in the order of ranks and rounded once."""
        return ordered_sum(self.gather(x), self.count)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, summed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gathered x + residual, its norm), [M, H] both, as ``kernels.add_norm`` makes them.

        x [M, H / N] of each rank; summed: [M, H], a term of each rank (:meth:`sum`).
        """
        given = x, residual, weight, eps, None, True, summed, self.transport, self.count
        return torch.ops.unisono.gather_add_rms_norm(*given)[:2]

    def add_rms_norm_fp8(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool,
        summed: bool,
    ) -> tuple[torch.Tensor, Quantised]:  # fmt: skip
        """:meth:`add_rms_norm` whose norm is quantised as ``rms_norm_fp8`` does it."""
        given = x, residual, weight, eps, group, keep, summed, self.transport, self.count
        total, *normed = torch.ops.unisono.gather_add_rms_norm(*given)
        return total, quantised_norm(normed, total, group, keep)

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


def _silu(x: torch.Tensor, transport: int, ranks: int) -> torch.Tensor:
    carrier, x = _transports[transport], x.contiguous()
    found = carrier.silu(x) if isinstance(carrier, FusingTransport) else None
    return carrier.all_gather(silu_mul(x)) if found is None else found


def _silu_meta(x: torch.Tensor, transport: int, ranks: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], ranks * x.shape[1] // 2)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool,
    summed: bool, transport: int, ranks: int,
) -> tuple[torch.Tensor, *Normed]:  # fmt: skip
    carrier, x = _transports[transport], x.contiguous()
    if isinstance(carrier, FusingTransport):
        found = carrier.add_rms_norm(x, residual, weight, eps, group, keep, summed)
        if found is not None:
            return found
    y = carrier.all_gather(x)
    if summed:
        y = ordered_sum(y, ranks)
    if group is None:
        return *add_rms_norm(y, residual, weight, eps), *empty_quantised(y, len(y), y.shape[1], None)
    total, quantised = add_rms_norm_fp8(y, residual, weight, eps, group, keep)
    return total, y.new_empty(0) if quantised.x is None else quantised.x, quantised.x8, quantised.scales


def _add_rms_norm_meta(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool,
    summed: bool, transport: int, ranks: int,
) -> tuple[torch.Tensor, *Normed]:  # fmt: skip
    return torch.empty_like(residual), *with_fp8_meta(residual, group, keep)


define("all_gather(Tensor x, int transport, int ranks) -> Tensor")
register("all_gather", cuda=_all_gather, cpu=_all_gather, meta=_meta)
define("gather_silu(Tensor x, int transport, int ranks) -> Tensor")
register("gather_silu", cuda=_silu, cpu=_silu, meta=_silu_meta)
define(
    "gather_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, int? group, bool keep, bool summed,"
    " int transport, int ranks) -> (Tensor, Tensor, Tensor, Tensor)"
)
register("gather_add_rms_norm", cuda=_add_rms_norm, cpu=_add_rms_norm, meta=_add_rms_norm_meta)
