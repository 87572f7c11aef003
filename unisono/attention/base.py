"""What a model needs to attend: the inputs of one pass, and the interface every backend fills.

The engine builds an AttentionInputs per pass, the backend's ``plan`` prepares it once, and each layer
calls ``forward``. Models and drafters see only this file; which kernel runs is the engine's choice.

Shapes: T tokens, R rows (requests), S slots, MP pages per request, NP pages, P page size,
Hq / Hkv query / KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch

from unisono.graphs import eager_break
from unisono.kernels.gemm.fp8_quantize import handed_on
from unisono.layers.activations import Activations, Wish


class KV(NamedTuple):
    """A layer's pages: keys and values, each [NP, Hkv, P, D], in the model's dtype.

    Or both in e4m3, with the biased exponents of their rows' scales in k_scales, v_scales [NP, Hkv, P, 1] uint8
    (``unisono/kernels/cache/kv_e4m3.py``). Rows are written by ``rope_and_cache``. A layer's state is these tensors in
    this order: ``KV(*state)``.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None


@dataclass(slots=True)
class AttentionInputs:
    """Where each token of a pass stands, and where its request's keys lie. All int32, on the device.

    slots [R]: each row's slot, an index into ``page_table``.
    positions [T]: each token's absolute position; -1 marks a padding token, which sees nothing.
    slot_mapping [T]: where each token's key and value are written, page · P + offset.
    kv_len [R]: keys a row may see: its highest position + 1; 0 for a padding row.
    page_table [S, MP]: the pages of each slot in order of position.
    width: tokens per row when all rows have equally many (a round: T = R · width, row-major), else None.
    query_start [R + 1]: where each row's tokens begin when ``width`` is None (an extend pass). Tokens from
        ``query_start[R]`` on belong to no row and are padding.
    singles: of an extend pass, how many of its first rows have one token each and are attended as a round of width 1.
    plan: filled in by the backend.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    kv_len: torch.Tensor
    page_table: torch.Tensor
    width: int | None
    query_start: torch.Tensor | None = None
    singles: int = 0
    plan: Any = None

    @staticmethod
    def joined(first: AttentionInputs, rest: AttentionInputs) -> AttentionInputs:
        """A round of width 1 and an extend pass as one extend pass, the round's rows and tokens first."""
        singles, starts = first.slots.shape[0], rest.query_start
        assert first.width == 1
        assert starts is not None
        each = torch.arange(singles, dtype=starts.dtype, device=starts.device)
        return AttentionInputs(
            torch.cat((first.slots, rest.slots)),
            torch.cat((first.positions, rest.positions)),
            torch.cat((first.slot_mapping, rest.slot_mapping)),
            torch.cat((first.kv_len, rest.kv_len)),
            rest.page_table,
            None,
            torch.cat((each, starts + singles)),
            singles,
        )

    def parts(self) -> tuple[AttentionInputs, AttentionInputs]:
        """The two that :meth:`joined` made one of."""
        n, starts, table = self.singles, self.query_start, self.page_table
        assert starts is not None
        slots, positions, mapping, kv_len = self.slots, self.positions, self.slot_mapping, self.kv_len
        return (
            AttentionInputs(slots[:n], positions[:n], mapping[:n], kv_len[:n], table, 1),
            AttentionInputs(slots[n:], positions[n:], mapping[n:], kv_len[n:], table, None, starts[n:] - n),
        )

    def last_tokens(self, last: torch.Tensor) -> LastTokens:
        """Of the pass's last E rows each one's last token; last [E] int32: where they stand among the pass's tokens."""
        slots, kv_len = self.slots[-len(last) :], self.kv_len[-len(last) :]
        return LastTokens(
            last, AttentionInputs(slots, kv_len - 1, self.slot_mapping[:0], kv_len, self.page_table, width=1)
        )


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens of a pass whose outputs are read, one of each row, where no other's are.

    The last layer writes the keys and values of all tokens, and computes the rest for these
    alone. Their bits are the same, for no token's depend on another's row.

    last [E] int32: where they stand among the pass's tokens. inputs: they alone, as a round of width 1; nothing is
    written by it.
    """

    last: torch.Tensor
    inputs: AttentionInputs

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, …] -> [E, …]."""
        return x.index_select(0, self.last)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends.

    scale: of the scores. window: how many positions a token sees, itself included; 0: all. first: keys at positions
    below it are invisible, and a token that stands there yields zeros. soft_cap > 0: scores become
    soft_cap · tanh(score / soft_cap), before they are masked. sinks [Hq] fp32: exp(sink) is added to the denominator of
    its head's softmax.
    """

    scale: float
    window: int = 0
    first: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """One way to compute attention over the paged KV cache.

    A token sees keys at positions p ≤ its own, p ≥ first, and p > its own − window where window > 0. Its output bits
    depend on its query and those keys alone: not on the other rows, on how many tokens the pass has, nor
    on whether it is a round or an extend pass.
    """

    @property
    def name(self) -> str: ...

    @property
    def capturable(self) -> bool:
        """Whether ``plan`` and ``forward`` can be captured. If not, they run eagerly between captured segments."""
        ...

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """Fill ``inputs.plan``, once per pass, before the layers. Where ``capturable``, no host sync.

        window > 0 promises that each layer that uses the plan has this window or a smaller one.
        """
        ...

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """Attend. q [T, Hq, D]; kv: the layer's pages, with the pass's own keys and values. Returns [T, Hq · D] in q's
        dtype.
        """
        ...


@runtime_checkable
class QuantisingAttention(Protocol):
    """A backend whose kernels can quantise what they return, for a layer with e4m3 weights that reads it."""

    def quantises(self, head_dim: int, group: int) -> bool:
        """Whether it does for heads of this size and a reader whose scales serve ``group`` columns."""
        ...

    def forward_fp8(
        self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`AttentionBackend.forward` as values e4m3 and their scales (``kernels/gemm/fp8_quantize.py``), with the
        bits of quantising its rows."""
        ...


@runtime_checkable
class ProvingAttention(Protocol):
    """A backend with kernels that may run only where their bits were compared on the GPU at hand."""

    def rehearse(self, head_dim: int, dtype: torch.dtype) -> None:
        """Launch what :meth:`prove` will launch and learn nothing from it."""
        ...

    def prove(self, head_dim: int, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
        """Settle what serves which passes: (what, why) by the passes' name. For the engine's start: it synchronises."""
        ...


@dataclass(frozen=True)
class BreakingAttention:
    """A backend between the segments of a capture: always if it is not capturable, else where the capture splits.

    The engine wraps every backend in it, so that models and drafters need not know. A mixed pass (``singles``) reaches
    the backend as a round and an extend pass, so backends need not know of those.
    """

    backend: AttentionBackend

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def capturable(self) -> bool:
        return self.backend.capturable

    def rehearse(self, head_dim: int, dtype: torch.dtype) -> None:
        """Launch what :meth:`prove` will launch and learn nothing from it: for compiling kernels ahead."""
        if isinstance(self.backend, ProvingAttention):
            self.backend.rehearse(head_dim, dtype)

    def prove(self, head_dim: int, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
        """See :class:`ProvingAttention`."""
        if isinstance(self.backend, ProvingAttention):
            return self.backend.prove(head_dim, dtype)
        return {"attention": ("one way", f"the backend {self.name!r} has no other")}

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """See :class:`AttentionBackend`."""
        if inputs.singles:
            inputs.plan = inputs.parts()
            for part in inputs.plan:
                self.plan(part, window)
        elif self.backend.capturable:
            self.backend.plan(inputs, window)
        else:
            _plan(self.backend, inputs, window)

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """See :class:`AttentionBackend`."""
        if n := inputs.singles:
            single, rest = inputs.plan
            return torch.cat((self.forward(q[:n], kv, single, options), self.forward(q[n:], kv, rest, options)))
        return cast(torch.Tensor, self._run(self.backend.forward, q, kv, inputs, options))

    def _run(self, forward: Callable[..., Any], *given: Any) -> Any:
        return (_attend_where_split if self.capturable else _attend)(forward, *given)

    def quantises(self, head_dim: int, group: int) -> bool:
        """See :class:`QuantisingAttention`."""
        return isinstance(self.backend, QuantisingAttention) and self.backend.quantises(head_dim, group)

    def forward_fp8(
        self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`QuantisingAttention`."""
        assert isinstance(self.backend, QuantisingAttention)
        return cast(tuple[torch.Tensor, torch.Tensor], self._run(self.backend.forward_fp8, q, kv, inputs, options))


def attended(
    backend: AttentionBackend, wish: Wish | None, q: torch.Tensor, kv: KV, inputs: AttentionInputs,
    options: AttentionOptions,
) -> Activations:  # fmt: skip
    """``backend.forward``, for a reader with this wish; the two parts of a mixed pass are joined as plain rows."""
    if (
        wish is not None and not wish.keep and not inputs.singles
        and isinstance(backend, QuantisingAttention) and backend.quantises(q.shape[2], wish.group)
    ):  # fmt: skip
        return handed_on(backend.forward_fp8(q, kv, inputs, options), q, wish.group)
    return backend.forward(q, kv, inputs, options)


def _call(forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*args)


@eager_break
def _plan(backend: AttentionBackend, inputs: AttentionInputs, window: int) -> None:
    backend.plan(inputs, window)


_attend = eager_break(_call)
_attend_where_split = eager_break(optional=True)(_call)
