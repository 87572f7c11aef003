"""All-gather: the only communication of ranks inside passes. It concatenates the ranks' parts of a row.

By default no sum is split across ranks: the bits of a float sum depend on its grouping, and the text must be that of
one GPU. With ``--tp-reduce ordered`` a part may be a term of a sum, and each rank adds up the gathered terms in the
order of ranks. Gathers are ops (``unisono::all_gather``, and two fused with neighbouring operations), so that tapes and
CUDA graphs record them with the rest of a pass. A *transport* carries them (``shared_memory`` on a CPU, ``nccl`` with
``kernels/comm/gather.py`` on GPUs). Every rank runs the same gathers in the same order.

Shapes: M rows, n columns of a rank, N ranks, H features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from unisono.kernels.comm.gather_fused import ordered_sum
from unisono.kernels.gemm.fp8_quantize import Quantised, empty_quantised
from unisono.kernels.library import op
from unisono.kernels.norm.activation import silu_mul
from unisono.kernels.norm.add_norm import add_rms_norm, add_rms_norm_fp8
from unisono.kernels.norm.rms_norm import SumNormed, quantised_norm, with_fp8_meta


class Transport(Protocol):
    """Carries the gathers of one rank of one engine."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, n], contiguous, of any dtype -> [M, N · n], new. Raises EngineDead if a rank has failed."""
        ...

    def close(self) -> None:
        """Free the transport's resources; every graph with gathers must be gone."""
        ...


@runtime_checkable
class FusingTransport(Transport, Protocol):
    """A transport with kernels that gather and compute at once; each returns None if it does not support such rows."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool,
        summed: bool,
    ) -> SumNormed | None:  # fmt: skip
        """See :meth:`Ranks.add_rms_norm`; (sum, norm, x8, scales)."""
        ...

    def silu(self, x: torch.Tensor) -> torch.Tensor | None:
        """See :meth:`Ranks.silu`."""
        ...


_transports: dict[int, Transport] = {}
"""Transports by number: arguments of ops cannot be objects."""


@dataclass(frozen=True)
class Ranks:
    """Part of a model that a process holds. index: this rank; count: N. transport: number of its transport.

    whole_experts: experts are whole on a rank (``--enable-expert-parallel``); otherwise they are split like other
    GEMMs. ordered: GEMMs after attention and of the MLP are split by inputs, if their format allows it, and their terms
    are added in the order of ranks (``--tp-reduce ordered``). dp_attention: each rank has all heads of latent attention
    and the pages of its own requests (``--enable-dp-attention``). placement: (path of a layer's experts, their order),
    of whole experts; see ``config/expert_placement.py``.
    """

    index: int = 0
    count: int = 1
    whole_experts: bool = False
    transport: int = 0
    ordered: bool = False
    dp_attention: bool = False
    placement: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def order_of(self, path: str) -> tuple[int, ...]:
        """Order of a layer's experts among the ranks; empty: ascending."""
        return dict(self.placement).get(path, ())

    @property
    def page_ranks(self) -> int:
        """Number of ranks among which the pages of latent attention are divided."""
        return self.count if self.dp_attention else 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, n] of each rank -> [M, N · n], in the order of ranks."""
        return x if self.count == 1 else all_gather(x, self.transport, self.count)

    def gather_tokens(self, x: torch.Tensor, token_ranks: torch.Tensor) -> torch.Tensor:
        """Gather the local tokens of all attention-DP ranks: x [M, n] of each rank -> [M, n].

        token_ranks [M] int32: the rank whose row is taken.
        """
        each = torch.arange(len(x), dtype=token_ranks.dtype, device=token_ranks.device) * self.count
        return self.gather(x).view(-1, x.shape[1]).index_select(0, each + token_ranks)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, 2 n] of each rank, columns of gate and then of up -> ``silu(gate) * up`` of all, [M, N · n]."""
        return gather_silu(x, self.transport, self.count)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [M, H], a term of each rank, in fp32 in the order of ranks, rounded once."""
        return ordered_sum(self.gather(x), self.count)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, summed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (gathered x + residual, its norm), [M, H] both, as ``kernels.add_norm`` computes them.

        x [M, H / N] of each rank; summed: [M, H], a term of each rank (:meth:`sum`).
        """
        arguments = x, residual, weight, eps, None, True, summed, self.transport, self.count
        return gather_add_rms_norm(*arguments)[:2]

    def add_rms_norm_fp8(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int, keep: bool,
        summed: bool,
    ) -> tuple[torch.Tensor, Quantised]:  # fmt: skip
        """:meth:`add_rms_norm` whose norm is quantised as ``rms_norm_fp8`` does it."""
        arguments = x, residual, weight, eps, group, keep, summed, self.transport, self.count
        total, *normed = gather_add_rms_norm(*arguments)
        return total, quantised_norm(normed, total, group, keep)

    def part(self, size: int) -> tuple[int, int]:
        """Return the range of this rank's equal part of ``size`` items, which must divide: first, and last + 1."""
        each = size // self.count
        return self.index * each, (self.index + 1) * each

    def divides(self, size: int) -> bool:
        """True if equal parts are possible."""
        return size % self.count == 0


ALONE = Ranks()
"""The only rank of an undivided model."""


def open_transport(transport: Transport) -> int:
    """Register a transport for the ops; return its number."""
    number = max(_transports, default=0) + 1
    _transports[number] = transport
    return number


def close_transport(number: int) -> None:
    """Close a transport and remove it."""
    transport = _transports.pop(number, None)
    if transport is not None:
        transport.close()


def described(number: int) -> tuple[str, str]:
    """Return (name of a transport, reason) for ``explain``."""
    transport = _transports[number]
    return transport.name, transport.why


def give_up(number: int) -> None:
    """End gathers that wait for a lost rank, if the transport supports that; from any thread."""
    end = getattr(_transports.get(number), "give_up", None)
    if end is not None:
        end()


def _gathered(x: torch.Tensor, transport: int, ranks: int) -> tuple[int, int]:
    return x.shape[0], ranks * x.shape[1]


@op(shape=_gathered)
def all_gather(x: torch.Tensor, transport: int, ranks: int) -> torch.Tensor:
    return _transports[transport].all_gather(x.contiguous())


@op(shape=lambda x, transport, ranks: (x.shape[0], ranks * x.shape[1] // 2))
def gather_silu(x: torch.Tensor, transport: int, ranks: int) -> torch.Tensor:
    carrier, x = _transports[transport], x.contiguous()
    found = carrier.silu(x) if isinstance(carrier, FusingTransport) else None
    return carrier.all_gather(silu_mul(x)) if found is None else found


def _sum_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None,
                  keep: bool, *_: object) -> SumNormed:  # fmt: skip
    return torch.empty_like(residual), *with_fp8_meta(residual, group, keep)


@op(meta=_sum_and_norm)
def gather_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, keep: bool,
    summed: bool, transport: int, ranks: int,
) -> SumNormed:  # fmt: skip
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
