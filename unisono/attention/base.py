"""Inputs of one pass of attention, and the interface of a backend.

The engine builds an AttentionInputs per pass, the backend's ``plan`` prepares it once, and each layer
calls ``forward``. Models and drafters see only this file; the engine chooses the kernel.

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
from unisono.layers.activations import Activations, InputFormat


class KV(NamedTuple):
    """Pages of a layer: keys and values, each [NP, Hkv, P, D], in the model's dtype or in e4m3.

    k_scales, v_scales [NP, Hkv, P, 1] uint8: biased exponents of the scales of e4m3 rows
    (``unisono/kernels/cache/kv_e4m3.py``). ``rope_and_cache`` writes rows. A layer's state holds these tensors in this
    order: ``KV(*state)``.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None


@dataclass(slots=True)
class AttentionInputs:
    """Positions of a pass's tokens, and the pages of their requests' keys. All int32, on the device.

    slots [R]: each row's slot, an index into ``page_table``.
    positions [T]: each token's absolute position; -1 marks a padding token, which sees nothing.
    slot_mapping [T]: cache slot of each token's key and value, page · P + offset.
    kv_len [R]: keys a row may see: its highest position + 1; 0 for a padding row.
    page_table [S, MP]: pages of each slot, in order of position.
    width: tokens per row when all rows have equally many (a round: T = R · width, row-major), else None.
    query_start [R + 1]: first token of each row when ``width`` is None (an extend pass, or a round whose rows differ).
        Tokens from ``query_start[R]`` on belong to no row and are padding.
    singles: number of leading rows of an extend pass that have one token each and are attended as a round of width 1.
    widest: most tokens of a row in a round whose rows differ: the first token of a row is committed, the others are
        drafts. 0: the pass is no such round.
    until [T]: last position that a token sees in layers that attend both ways, at least its own; all tokens up to it
        are in the pass or in the cache. None: its own.
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
    until: torch.Tensor | None = None
    plan: Any = None
    widest: int = 0

    @staticmethod
    def joined(first: AttentionInputs, rest: AttentionInputs) -> AttentionInputs:
        """Join a round of width 1 and an extend pass into one extend pass; the round's rows and tokens come first."""
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
        """Split the result of :meth:`joined`: (round of width 1, extend pass)."""
        n, starts, table = self.singles, self.query_start, self.page_table
        assert starts is not None
        slots, positions, mapping, kv_len = self.slots, self.positions, self.slot_mapping, self.kv_len
        return (
            AttentionInputs(slots[:n], positions[:n], mapping[:n], kv_len[:n], table, 1),
            AttentionInputs(slots[n:], positions[n:], mapping[n:], kv_len[n:], table, None, starts[n:] - n),
        )

    def last_tokens(self, last: torch.Tensor) -> LastTokens:
        """Last token of each of the final E rows. last [E] int32: indices into the pass's tokens."""
        slots, kv_len = self.slots[-len(last) :], self.kv_len[-len(last) :]
        return LastTokens(
            last, AttentionInputs(slots, kv_len - 1, self.slot_mapping[:0], kv_len, self.page_table, width=1)
        )


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The only tokens of a pass whose outputs are read: the last one of each row.

    The last layer writes the keys and values of all tokens, and computes the rest for these alone. Their bits are the
    same, because a token's bits do not depend on other rows.

    last [E] int32: indices into the pass's tokens. inputs: these tokens as a round of width 1, which writes nothing.
    """

    last: torch.Tensor
    inputs: AttentionInputs

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """Select these tokens' rows of x: [T, …] -> [E, …]."""
        return x.index_select(0, self.last)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Attention parameters of a layer.

    scale: factor of the scores. window: positions a token sees, itself included; 0: all; below 0: a token sees those of
    its own chunk of -window positions up to itself. first: keys at positions below
    it are invisible, and tokens there yield zeros. soft_cap > 0: scores become soft_cap · tanh(score / soft_cap) before
    they are masked. sinks [Hq] fp32: exp(sink) is added to the denominator of its head's softmax. both_ways: a token
    sees keys up to ``AttentionInputs.until``, and its window ends there too; it begins where it does otherwise.
    values > 0: the first elements of a key are its value (latent attention): KV.k and KV.v are the same pages [NP, 1,
    P, D], and outputs have this many elements a head. With KV.k_scales, KV.k has these elements in e4m3 [NP, 1, P,
    ``values``], and KV.v the rest of the keys [NP, 1, P, D - ``values``] in the model's dtype.
    """

    scale: float
    window: int = 0
    first: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    both_ways: bool = False
    values: int = 0


class AttentionBackend(Protocol):
    """An implementation of attention over the paged KV cache.

    A token sees keys at positions p ≤ its own, p ≥ first, and within its window or its chunk if it has one. Its output
    bits depend on its query and those keys alone: not on the other rows, the number of tokens in the pass, or the kind
    of pass (round or extend).
    """

    @property
    def name(self) -> str: ...

    @property
    def capturable(self) -> bool:
        """True if ``plan`` and ``forward`` can be captured; otherwise they run eagerly between captured segments."""
        ...

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """Fill ``inputs.plan``, once per pass, before the layers. A capturable backend must not synchronise with the
        host.

        window > 0 promises that each layer that uses the plan has this window, a smaller one, or chunks of its size.
        """
        ...

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """Attend. q [T, Hq, D]; kv: the layer's pages, with the pass's own keys and values. Returns [T, Hq · D] in q's
        dtype; [T, Hq · ``options.values``] where the values are a part of the keys.
        """
        ...


@runtime_checkable
class QuantisingAttention(Protocol):
    """A backend whose kernels can quantise their outputs for a consumer with e4m3 weights."""

    def quantises(self, head_dim: int, group: int) -> bool:
        """Return True if it can, for heads of this size and a consumer with one scale per ``group`` columns."""
        ...

    def forward_fp8(
        self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend and return e4m3 values and their scales (``kernels/gemm/fp8_quantize.py``).

        The bits are those of quantising the rows of :meth:`AttentionBackend.forward`.
        """
        ...


@runtime_checkable
class ProvingAttention(Protocol):
    """A backend with kernels that may run only after their bits were compared on the present GPU."""

    def rehearse(self, head_dim: int, dtype: torch.dtype) -> None:
        """Launch the kernels of :meth:`prove` and ignore the result: this compiles them ahead of time."""
        ...

    def prove(self, head_dim: int, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
        """Choose the kernel for each kind of pass: kind -> (kernel, reason). Synchronises; for the engine's start."""
        ...


@dataclass(frozen=True)
class BreakingAttention:
    """A wrapper that runs a backend between the segments of a capture.

    A backend that is not capturable always runs there; others where the capture splits. The engine wraps every backend,
    so models and drafters need not know. A mixed pass (``singles``) reaches the backend as a round and an extend pass,
    so backends need not know of mixed passes.
    """

    backend: AttentionBackend

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def capturable(self) -> bool:
        return self.backend.capturable

    def rehearse(self, head_dim: int, dtype: torch.dtype) -> None:
        """Launch the kernels of :meth:`prove` and ignore the result: this compiles them ahead of time."""
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

    def _run(self, forward: Callable[..., Any], *args: Any) -> Any:
        return (_attend_where_split if self.capturable else _attend)(forward, *args)

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
    backend: AttentionBackend, input_format: InputFormat | None, q: torch.Tensor, kv: KV, inputs: AttentionInputs,
    options: AttentionOptions,
) -> Activations:  # fmt: skip
    """Run ``backend.forward`` for a consumer with this input format. The parts of a mixed pass are joined as plain
    rows.
    """
    if (
        input_format is not None and not input_format.keep and not inputs.singles
        and isinstance(backend, QuantisingAttention) and backend.quantises(q.shape[2], input_format.group)
    ):  # fmt: skip
        return handed_on(backend.forward_fp8(q, kv, inputs, options), q, input_format.group)
    return backend.forward(q, kv, inputs, options)


def _call(forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*args)


@eager_break
def _plan(backend: AttentionBackend, inputs: AttentionInputs, window: int) -> None:
    backend.plan(inputs, window)


_attend = eager_break(_call)
_attend_where_split = eager_break(optional=True)(_call)
