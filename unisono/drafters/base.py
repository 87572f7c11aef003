"""The protocols of drafters: all that the engine knows about them.

A round is 1 + k wide. Let n be a request's committed length at its start: token n - 1 is its last token, whose target
KV the round computes.

::

    position         n-1        n          n+1        …   n+k-1
    verified token   last       draft 0    draft 1    …   draft k-1
    sampled          s 0        s 1        s 2        …   s k            the target's token for position n + j is s j
    hidden           h n-1      h n        h n+1      …   h n+k-1

Draft j is proposed for position n + j and accepted iff it equals s j. After a accepted drafts, s 0 … s a are committed.
Everything here is captured inside the round's graph: device tensors at fixed addresses, no host synchronisation.
Shapes: R rows, W = 1 + k, T tokens, S slots, NP pages, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from unisono.attention.base import AttentionBackend
from unisono.attention.context import Rotary
from unisono.distributed.columns import Columns
from unisono.distributed.gather import ALONE, Ranks
from unisono.graphs import Features
from unisono.kernels.speculation.shared_rows import SharedInputs
from unisono.kv.specs import Tree
from unisono.kv.store import StateView
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.embedding_overrides import Overriding
from unisono.models.load.update import WeightUpdate


@dataclass(frozen=True)
class DrafterContext:
    """Engine objects available to a drafter. Built once, after the target's weights are loaded.

    target: the target model; its embedding and LM head may be shared.
    slots: fields of ``engine.slots.Slots`` as attributes (length, max_length, status, last_token, history, page_table,
        sampling parameters), each [S, …]; the last slot is the padding slot.
    attention: builds a backend for (query heads, KV heads).
    sample: ``sample(logits [R, V], slots [R], offset, ids)``: the sampling rule with the request's own parameters and
        noise, for position length + offset. ``ids`` maps columns to target token ids (None: identity). Logits of the
        target's LM head may be Columns (``Linear.columns``), so that only what the rule needs is gathered.
    sample_block: ``sample_block(logits [R · k, V], slots [R], k, ids)``: the sampling rule for positions length …
        length + k - 1 of each row at once, [R, k]. Penalties see committed tokens, not the block's earlier drafts. With
        ``places [R · k]`` the logits are [T, V], and these are their rows; below 0: nothing is sampled.
    best: ``best(logits [R, V], slots [R], count, ids)``: the ``count`` best tokens of that rule for position length,
        [R, count], best first, padded with -1.
    state: the drafter's state, the tree of its ``state_specs()`` with tensors in place of specs; available from the
        first pass on.
    target_state: the target's state, one entry per layer; read-only.
    page_tables: page table of each window group; ``slots.page_table`` is that of ALL.
    dtype, device: of weights and KV.
    max_model_len, page_size: of the cache that the page tables index.
    progress: called with the fraction of the drafter's weights that is loaded, 0 … 1.
    decide: called with (name, value, reason) of each automatic choice of the drafter; ``explain`` shows them.
    max_unobserved: tokens of a request that one call of :meth:`PausableDrafter.resume` takes; 0: drafters are never
        paused.
    ranks: ranks among which a draft model's layers are divided; ALONE: each rank holds all of it.
    rotary: ``rotary(slots [R], positions [R · W])``: the target's rotary positions for these tokens of a round; None if
        they equal the absolute ones, as in every model without vision.
    """

    target: Decoder
    slots: Any
    attention: Callable[[int, int], AttentionBackend]
    sample: Callable[[torch.Tensor | Columns, torch.Tensor, int, torch.Tensor | None], torch.Tensor]
    sample_block: Callable[..., torch.Tensor]
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


@runtime_checkable
class UpdatableDrafter(Protocol):
    """A drafter whose weights can be replaced while it is served."""

    def weight_updates(self, directory: Path) -> list[WeightUpdate]:
        """Updates from another directory, called after :meth:`Drafter.bind`; nothing is written yet.

        Raises CheckpointError unless the directory fits as the one of the start does.
        """
        ...


@dataclass(frozen=True)
class SelfTest:
    """Data for the start-up test of a drafter's acceptance: see ``engine/startup/self_test.py``.

    causes: possible causes and remedies if hardly any draft is accepted.
    skip: reason why the drafts cannot be judged, such as random weights; None if they can.
    """

    causes: str
    skip: str | None = None


@dataclass(frozen=True)
class Verified:
    """Result of a round, for :meth:`Drafter.observe`.

    slots [R] int32. result [R, W + 2] int32: count, status, committed tokens (-1 after ``count``); a row without an
    active request has count 0. sampled [R, W] int32. hidden [R·W, d]: hidden states of the verified positions, as
    selected by ``Drafter.features``; None if it selects none. ``slots.length`` is already n + count.
    """

    slots: torch.Tensor
    result: torch.Tensor
    sampled: torch.Tensor
    hidden: torch.Tensor | None


@dataclass(frozen=True)
class PromptPass:
    """One pass of prompt tokens, for :meth:`Drafter.observe_prompt`.

    slots [E], query_start [E + 1], start [E] int32: row r owns tokens query_start[r] … query_start[r + 1] of the pass;
    the first of them is at absolute position start[r]. Unused rows own none. token_ids [T]. next_ids [T]: the token
    after each (after the prompt's last, the sampled one). positions [T]: -1 for padding. last [E]: index of each row's
    last token. hidden: as selected by ``Drafter.features``: [T, d], [E, d] for Hidden.LAST, or None. overriding:
    embeddings that the target reads in place of those of some token ids. rotary: the target's rotary positions; None if
    they equal the absolute ones.
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
    def has_overrides(self) -> bool:
        """True if the target has embedding overrides or rotary positions for some tokens."""
        return bool(self.overriding) or self.rotary is not None

    def of_entries(self) -> tuple[tuple[Overriding, ...], torch.Tensor | None]:
        """Embeddings and rotary positions of the entries of
        :func:`unisono.kernels.speculation.catch_up.catch_up_extend`.

        There is one entry per row, for its first token, followed by one per token, for the token after it. The tokens
        after the rows' last ones follow the T tokens of the pass.
        """
        if not self.has_overrides:
            return (), None
        tokens, rows = self.token_ids.shape[0], self.slots.shape[0]
        following = torch.arange(1, tokens + 2, dtype=torch.int32, device=self.last.device)
        # A row without tokens writes to the spare element at the end.
        last = self.last.masked_fill(self.query_start.diff() == 0, tokens).long()
        after = torch.arange(tokens, tokens + rows, dtype=torch.int32, device=self.last.device)
        following = following.index_copy(0, last, after)[:tokens]
        entries = torch.cat((self.query_start[:-1], following))
        positions = None if self.rotary is None else self.rotary.of_entries(entries)
        return tuple(each.of_entries(entries) for each in self.overriding), positions


class Drafter(Protocol):
    """Proposes tokens and catches up with the tokens committed by the target.

    Built as ``DrafterClass(spec, target)`` from the :class:`unisono.types.SpeculativeConfig` and the target's
    DecoderConfig, before any weights are loaded. Raises ConfigError or CheckpointError if it cannot draft for the
    target.

    name: as in the catalog.
    num_drafts: k.
    features: hidden states to capture from the target's passes.
    self_test: for drafters with weights of their own, which may not fit the target; None without weights.
    """

    name: str
    num_drafts: int
    features: Features
    self_test: SelfTest | None

    def bind(self, context: DrafterContext) -> None:
        """Load weights, sharing modules with the target as the checkpoint says."""

    def state_specs(self) -> Tree:
        """Specs of the drafter's device state (``unisono/kv/specs.py``). Called once, after :meth:`bind`."""

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Write ``drafts [R, k]`` int32 for the requests in ``slots [R]`` int32; -1 is no draft.

        k is at most ``num_drafts`` and may differ from round to round.
        """

    def observe(self, verified: Verified) -> None:
        """Catch up after verification, inside the round."""

    def observe_prompt(self, prompt: PromptPass) -> None:
        """Catch up with one pass of prompt tokens, inside the extend pass."""


@runtime_checkable
class AtOnceDrafter(Drafter, Protocol):
    """A drafter that makes k drafts at about the cost of one, if ``drafts_at_once``.

    Requests share its drafts by default on a CPU, on a GPU if it is a :class:`RaggedDrafter`. In a round whose requests
    share drafts, ``propose`` is called for the most that one request may have.
    """

    drafts_at_once: bool


@runtime_checkable
class ConfidentDrafter(Drafter, Protocol):
    """A drafter whose head estimates if its drafts will be accepted, if ``confident``."""

    confident: bool

    def propose_rated(self, slots: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Write ``drafts [R, k]`` as :meth:`Drafter.propose` does. Return the probability of each [R, k] fp32 to be
        accepted if those before it are, 0 … 1.
        """


@runtime_checkable
class RaggedDrafter(Drafter, Protocol):
    """A drafter that makes each request's own number of drafts in one pass, if ``drafts_ragged``.

    Then a round whose requests share drafts chooses the places of drafts before it drafts, and the drafter's pass has
    no token more than the target's.

    placeholder: id of the token at a place that is to be drafted.
    """

    drafts_ragged: bool
    placeholder: int

    def propose_ragged(self, slots: torch.Tensor, drafts: torch.Tensor, packed: SharedInputs) -> None:
        """Fill the places of ``drafts [R, k]`` int32 that are not -1.

        packed: inputs of a pass over all rows, a row being its last token and a ``placeholder`` for each of its drafts.
        """
        ...

    def observe_ragged(self, hidden: torch.Tensor, packed: SharedInputs) -> None:
        """Catch up after verification, in place of :meth:`Drafter.observe`.

        hidden [T, d]: hidden states of the verified tokens, whose positions are those of ``packed``: each row's last
        token and its drafts. The states of rejected drafts are among them: what is stored of these is not read again.
        """
        ...


@runtime_checkable
class PausableDrafter(Drafter, Protocol):
    """A drafter with an expensive ``observe``: while rounds draft nothing it only records, and catches up later.

    A drafter is pausable if it has ``remember`` and ``resume``. Other drafters ``observe`` rounds of width 1 like any
    other. unlimited: any number of tokens may be pending; otherwise at most ``context.max_unobserved``.
    """

    unlimited: bool

    def remember(self, verified: Verified) -> None:
        """Called instead of ``observe`` after a round of width 1: record what is needed to catch up, at almost no
        cost."""

    def resume(self, slots: torch.Tensor) -> None:
        """Catch up with the first ``context.max_unobserved`` unobserved tokens of slots [R], before drafting again.

        Afterwards the state equals that of a drafter that observed every round. Rows without unobserved tokens, and
        padding, stay unchanged.
        """


@runtime_checkable
class DivisibleDrafter(Drafter, Protocol):
    """A drafter whose model's layers can be divided among ``context.ranks``."""

    def divides(self, ranks: Ranks) -> bool:
        """Return True if the layers are divided by default, because that was measured to be faster."""


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter that can also draft trees: several paths per request; row r · P + l is path l of row r.

    It drafts trees if ``drafts_trees`` is true. ``spec.paths`` has the paths, empty for a chain. In a round with paths,
    ``tables`` gives each path's own page-table row, while ``slots`` gives the request. The engine copies the state of
    the last committed positions to the paths' pages before ``propose``, and the state of accepted drafts back before
    ``observe``.
    """

    drafts_trees: bool

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor | None = None) -> None:
        """Write ``drafts [R, k]`` int32 of paths. slots [R]: request of each path; tables [R]: its page-table row.

        ``context.sample`` gives each path the candidate of its own digit. Drafts after a path's end are ignored.
        Without ``tables`` this is a chain: each slot's own row, and the best candidate.
        """
