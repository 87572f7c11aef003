"""The protocol that every drafter follows. The engine knows nothing else of it.

A round is 1 + k wide. Let n be a request's committed length at its start: token n - 1 is its last token,
whose target KV the round computes.

::

    position         n-1        n          n+1        …   n+k-1
    verified token   last       draft 0    draft 1    …   draft k-1
    sampled          s 0        s 1        s 2        …   s k            the target's token for position n + j is s j
    hidden           h n-1      h n        h n+1      …   h n+k-1

Draft j is proposed for position n + j and accepted iff it equals s j. After a accepted drafts
s 0 … s a are committed. Everything here is captured inside the round's graph: device tensors at fixed
addresses, no host synchronisation. Shapes: R rows, W = 1 + k, T tokens, S slots, NP pages, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from unisono.attention.base import AttentionBackend
from unisono.attention.context import Rotary
from unisono.distributed.columns import Columns
from unisono.distributed.gather import ALONE, Ranks
from unisono.graphs import Features
from unisono.kv.specs import Tree
from unisono.kv.store import StateView
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.embedding_overrides import Overriding


@dataclass(frozen=True)
class DrafterContext:
    """What the engine lends a drafter. It is made once, after the target's weights are loaded.

    target: embedding and LM head may be shared from it.
    slots: the fields of ``engine.slots.Slots`` as attributes (length, max_length, status, last_token, history,
    page_table, sampling parameters), each [S, …]; the last slot is the padding slot.
    attention: makes a backend for (query heads, KV heads).
    sample: ``sample(logits [R, V], slots [R], offset, ids)``: the sampling rule with the request's own parameters and
    noise, for position length + offset; ``ids`` maps columns to target token ids (None: the same). Logits of the
    target's LM head may be Columns (``Linear.columns``), so that no more is gathered than the rule needs.
    best: ``best(logits [R, V], slots [R], count, ids)``: that rule's ``count`` best tokens for position length,
    [R, count], best first, -1 where there are no more.
    state: the drafter's own state, the tree of its ``state_specs()`` with tensors in place of specs; from the first
    pass on.
    target_state: the same of the target, one entry for each layer; only to be read.
    page_tables: by page lifetime, the page table of the state with that lifetime, as ``slots.page_table`` is of ALL.
    dtype, device: of weights and KV. max_model_len, page_size: of the cache that page tables index.
    progress: called with the share of the drafter's weights that is loaded, 0 … 1.
    decide: called with (name, value, reason) of each choice that the drafter made by itself; ``explain`` shows them.
    max_unobserved: tokens of a request that :meth:`PausableDrafter.resume` takes at once; 0: no drafter is ever paused.
    ranks: those among which a draft model's layers are divided; ALONE: each rank holds it whole.
    rotary: ``rotary(slots [R], positions [R · W])``: the positions by which the target turns these tokens of a round;
    None where they are the absolute ones, as in every model that sees nothing.
    """

    target: Decoder
    slots: Any
    attention: Callable[[int, int], AttentionBackend]
    sample: Callable[[torch.Tensor | Columns, torch.Tensor, int, torch.Tensor | None], torch.Tensor]
    best: Callable[[torch.Tensor | Columns, torch.Tensor, int, torch.Tensor | None], torch.Tensor]
    state: StateView
    target_state: StateView
    page_tables: Mapping[int, torch.Tensor]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    page_size: int
    progress: Callable[[float], None]
    decide: Callable[[str, object, str], None]
    max_unobserved: int = 0
    ranks: Ranks = ALONE
    rotary: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] = lambda slots, positions: None


@dataclass(frozen=True)
class SelfTest:
    """What the engine needs to know to test a drafter's acceptance at start: see ``engine/startup/self_test.py``.

    causes: what to suspect, and the way out, where hardly any draft is accepted. skip: why its drafts cannot be judged,
    such as random weights; None where they can.
    """

    causes: str
    skip: str | None = None


@dataclass(frozen=True)
class Verified:
    """The result of a round, for :meth:`Drafter.observe`.

    slots [R] int32. result [R, W + 2] int32: count, status, committed tokens (-1 after ``count``); a row that
    held no active request has count 0. sampled [R, W] int32. hidden [R·W, d] of the verified positions, as
    ``Drafter.features`` asked (None where it asked for none). ``slots.length`` is already n + count.
    """

    slots: torch.Tensor
    result: torch.Tensor
    sampled: torch.Tensor
    hidden: torch.Tensor | None


@dataclass(frozen=True)
class PromptPass:
    """One pass of prompt tokens, for :meth:`Drafter.observe_prompt`.

    slots [E], query_start [E + 1], start [E] int32: row r owns tokens query_start[r] … query_start[r + 1] of
    the pass, the first of them at absolute position start[r]; rows that are not used own none.
    token_ids [T]; next_ids [T]: the token after each (the sampled one after the prompt's last); positions [T]:
    -1 for padding. last [E]: index of each row's last token. hidden as asked: [T, d], of Hidden.LAST [E, d], or None.
    overriding: embeddings that the target reads in place of those of some token ids. rotary: the positions that it
    turns by; None where they are the absolute ones.
    """

    slots: torch.Tensor
    query_start: torch.Tensor
    start: torch.Tensor
    token_ids: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    hidden: torch.Tensor | None
    overriding: Sequence[Overriding] = ()
    rotary: Rotary | None = None

    @property
    def given(self) -> bool:
        """Whether the target knows more of some tokens than their ids and absolute positions."""
        return bool(self.overriding) or self.rotary is not None

    def of_entries(self) -> tuple[tuple[Overriding, ...], torch.Tensor | None]:
        """What the entries of :func:`unisono.kernels.speculation.catch_up.catch_up_extend` read: embeddings, rotary
        positions.

        An entry for each row, of its first token, then one for each token, of the token after it. Those after the rows'
        last tokens follow the T of the pass.
        """
        if not self.given:
            return (), None
        tokens, rows = self.token_ids.shape[0], self.slots.shape[0]
        following = torch.arange(1, tokens + 2, dtype=torch.int32, device=self.last.device)
        # A row without tokens writes to the spare place at the end.
        last = self.last.masked_fill(self.query_start.diff() == 0, tokens).long()
        after = torch.arange(tokens, tokens + rows, dtype=torch.int32, device=self.last.device)
        following = following.index_copy(0, last, after)[:tokens]
        entries = torch.cat((self.query_start[:-1], following))
        positions = None if self.rotary is None else self.rotary.of_entries(entries)
        return tuple(each.of_entries(entries) for each in self.overriding), positions


class Drafter(Protocol):
    """Proposes tokens and catches up with what the target committed.

    Made by ``DrafterClass(spec, target)`` of the :class:`unisono.types.SpeculativeConfig` and the target's
    DecoderConfig, before any weights are loaded; raises ConfigError or CheckpointError for what cannot be drafted.

    name: as in the catalog. num_drafts: k. features: what it wants captured from the target's passes.
    self_test: of a drafter with weights of its own, which may not fit the target; None without weights.
    """

    name: str
    num_drafts: int
    features: Features
    self_test: SelfTest | None

    def bind(self, context: DrafterContext) -> None:
        """Load weights, share what the checkpoint says is shared."""

    def state_specs(self) -> Tree:
        """What it keeps on the device (``unisono/kv/specs.py``). Called once, after :meth:`bind`."""

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Write ``drafts [R, k]`` int32 for the requests in ``slots [R]`` int32; -1 drafts nothing.

        k is at most ``num_drafts`` and may differ from round to round.
        """

    def observe(self, verified: Verified) -> None:
        """Catch up after verification, inside the round."""

    def observe_prompt(self, prompt: PromptPass) -> None:
        """Catch up with one pass of prompt tokens, inside the extend pass."""


@runtime_checkable
class PausableDrafter(Drafter, Protocol):
    """A drafter whose ``observe`` is dear: while rounds draft nothing it only remembers, and catches up later.

    It is one by having ``remember`` and ``resume``. Others are told to ``observe`` rounds of width 1 like any other.
    unlimited: any number of tokens may be pending; else ``context.max_unobserved`` at most.
    """

    unlimited: bool

    def remember(self, verified: Verified) -> None:
        """Instead of ``observe``, after a round of width 1: keep what is needed to catch up, at next to no cost."""

    def resume(self, slots: torch.Tensor) -> None:
        """Catch up with the first ``context.max_unobserved`` unobserved tokens of slots [R], before it drafts again.

        Its state is then what it would be had it observed every round. Rows without any, padding too, stay as they are.
        """


@runtime_checkable
class DivisibleDrafter(Drafter, Protocol):
    """A drafter whose model's layers can be divided among ``context.ranks``."""

    def divides(self, ranks: Ranks) -> bool:
        """Whether they are, unless the configuration says otherwise: where that was measured to be faster."""


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter that can also draft trees: several paths for each request, row r · P + l being path l of row r.

    It is one by having ``drafts_trees``. ``spec.paths`` has the paths, empty for a chain. In a round with paths the
    pages of each are found by a page-table row of its own, ``tables``, while ``slots`` names the request. The engine
    copies the state of the last committed positions to the paths' pages before ``propose``, and that of accepted drafts
    back before ``observe``.
    """

    drafts_trees: bool

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor | None = None) -> None:
        """Write ``drafts [R, k]`` int32 of paths: slots [R] names each one's request, tables [R] its page-table row.

        ``context.sample`` gives a path the candidate of its own digit. Drafts after a path's end are ignored.
        Without ``tables`` it is a chain's: each slot's own row, and the best candidate.
        """
