"""Sequences (requests in the engine) and passes (the scheduler's work units). Host bookkeeping only."""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from unisono.graphs import NO_FEATURES, Features
from unisono.kv.pages import Reservation
from unisono.kv.prefix_tree import Token
from unisono.passes.features.base import Feature, PrePass, RequestState, Row
from unisono.types import EngineRequest, FinishReason
from unisono.types.acceptance import FewerDrafts

Growth = tuple[int, list[int]]
"""First new column of a page table, and the page ids from there on."""

RowGrowth = tuple[int, int, list[int]]
"""Row of a pass whose page table grows, and its growth; see :data:`Growth`."""

States = Mapping[Feature, RequestState]
"""State of a request, by feature that it uses."""


@dataclass(eq=False)
class Sequence:
    """A request in the engine. ``tokens``: the prompt and every output token that the host has read.

    reads_drafts: True if a feature needs its drafts on the host, so that its rounds are two passes. reports: True if
    the next delta reports more than tokens: the first delta does, and every delta of a request with features. State
    that passes change while a request has a slot is in ``engine/worker/progress.py``.
    """

    request: EngineRequest
    tokens: list[int]
    max_length: int
    order: int  # order of arrival
    states: States = field(default_factory=dict)
    turn: int = -1  # fair share: the turn of its client; see engine/scheduling/waiting.py
    slot: int = -1
    pages: Reservation | None = None
    extended: int = 0  # tokens whose KV is written, or being written by launched prompt passes
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # (tokens, id) taken, not in the tree yet
    finish: FinishReason = FinishReason.RUNNING
    cached_tokens: int | None = None  # prompt tokens that the prefix cache served at first admission
    preemptions: int = 0
    added: float = field(default_factory=time.monotonic)
    queued_seconds: float | None = None  # from ``added`` to its first pass
    leader: Sequence | None = None  # an earlier request with the same prompt

    reports: bool = True

    def __post_init__(self) -> None:
        self.request_id, self.prompt_len = self.request.request_id, len(self.request.prompt_token_ids)
        self.reads_drafts = any(feature.reads_drafts for feature in self.states)
        prompt_keys = [state.prompt_keys for state in self.states.values()]
        self._prompt_keys = _merge_prompt_keys([keys for keys in prompt_keys if keys is not None])
        for root in [state.prefix_root for state in self.states.values() if state.prefix_root is not None]:
            first, *others = self._prompt_keys or self.request.prompt_token_ids
            self._prompt_keys = [rooted(first, root), *others]
        if self.request.cache_salt is not None:
            first, *others = self._prompt_keys or self.request.prompt_token_ids
            self._prompt_keys = [salted(first, self.request.cache_salt), *others]

    @property
    def waits_for_leader(self) -> bool:
        """True if the leader is computing the prompt, so that the prefix cache will soon have it."""
        leader = self.leader
        return leader is not None and leader.finish is FinishReason.RUNNING and len(leader.tokens) == leader.prompt_len

    @property
    def awaits_pages(self) -> bool:
        """True if the request waits for pages in transfer from host memory."""
        return self.pages is not None and self.pages.in_transfer

    @property
    def keys(self) -> list[Token]:
        """Keys of ``tokens`` in the prefix cache."""
        if self._prompt_keys is None:
            return self.tokens  # type: ignore[return-value]
        return [*self._prompt_keys, *self.tokens[self.prompt_len :]]

    @property
    def slot_values(self) -> dict[str, int]:
        """Return the values that features write into the request's slot."""
        return {name: value for state in self.states.values() for name, value in state.slot_values().items()}

    def reach(self, end: int) -> int:
        """Return the end of the next prompt chunk that starts here: ``end``, or less if a feature requires it."""
        for state in self.states.values():
            end = state.reach(self.extended, end)
        return end

    def least_end(self) -> int:
        """Return the least end of the next prompt chunk, beyond which a feature does not cut."""
        return max((state.least_end(self.extended) for state in self.states.values()), default=self.extended + 1)

    def forced(self) -> Iterable[int]:
        """Token ids that must come next, as far as a feature of the request knows."""
        return next((tokens for state in self.states.values() if (tokens := state.forced())), ())

    def blocked_by(self) -> set[Feature]:
        """Features that cannot give the request a slot yet."""
        return {feature for feature, state in self.states.items() if not state.ready()}

    def admitted(self) -> None:
        """Update features: the request gets a slot."""
        for state in self.states.values():
            state.admitted()

    def released(self) -> None:
        """Update features: the request has released its slot."""
        for state in self.states.values():
            state.released()

    @property
    def reusable(self) -> int:
        """Leading tokens whose only required outputs are keys and values, which may be cached."""
        known = len(self.tokens)
        for state in self.states.values():
            known = min(known, state.reusable(known))
        return known


@dataclass(frozen=True, eq=False)
class Rows:
    """Requests in the order of their rows in a pass. slots, owners: int64 [rows], each request's slot and ``order``.

    Rounds of the same requests share one instance.
    """

    sequences: tuple[Sequence, ...]
    slots: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> Rows:
        """Make rows of requests that have slots."""
        each = tuple(sequences)
        slots, owners = [s.slot for s in each], [s.order for s in each]
        return cls(each, np.array(slots, dtype=np.int64), np.array(owners, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.sequences)

    def where(self, chosen: np.ndarray) -> Rows:
        """Return the rows for which ``chosen`` [rows] is true; ``self`` if that is all of them."""
        if chosen.all():
            return self
        sequences = tuple(itertools.compress(self.sequences, chosen.tolist()))
        return Rows(sequences, self.slots[chosen], self.owners[chosen])

    @cached_property
    def feature_rows(self) -> dict[Feature, list[Row]]:
        """Rows of the requests that use each feature."""
        feature_rows: dict[Feature, list[Row]] = {}
        for index, sequence in enumerate(self.sequences):
            for feature, state in sequence.states.items():
                feature_rows.setdefault(feature, []).append(Row(index, state))
        return feature_rows


NO_ROWS = Rows.of(())


class Running:
    """The requests that take part in rounds, in order.

    The rows of their rounds are rebuilt when a request joins or leaves.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    def append(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        self._changed()

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._changed()

    def _changed(self) -> None:
        for name in ("rows", "host_drafted", "device_drafted"):
            self.__dict__.pop(name, None)

    @cached_property
    def rows(self) -> Rows:
        """All of them."""
        return Rows.of(self._sequences)

    @cached_property
    def host_drafted(self) -> Rows:
        """Rows of the requests whose drafts the host reads."""
        return Rows.of(s for s in self._sequences if s.reads_drafts)

    @cached_property
    def device_drafted(self) -> Rows:
        """Rows of the requests whose drafts the host does not read."""
        return Rows.of(s for s in self._sequences if not s.reads_drafts) if self.host_drafted else self.rows


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start … end`` of a sequence in a prompt pass; the ``last`` chunk samples."""

    sequence: Sequence
    start: int
    end: int
    last: bool


def tokens_left(sequences: Iterable[Sequence]) -> int:
    """Return the prompt tokens of these sequences that are in no pass yet."""
    return sum(len(sequence.tokens) - sequence.extended for sequence in sequences)


@dataclass(frozen=True)
class Extend:
    """A prompt pass. full: True if it has as many tokens as it may have.

    decodes: requests that decode one token each in a mixed pass; growth: their page-table growth, as of a round.
    decode_rows: rows reserved for these, before those of the chunks. waited: True if running requests wait.
    """

    chunks: list[Chunk]
    full: bool = True
    decodes: Rows = NO_ROWS
    growth: Mapping[int, list[RowGrowth]] = field(default_factory=dict)
    decode_rows: int = 0
    waited: bool = False

    @cached_property
    def tokens(self) -> int:
        """Tokens of prompts and of decoding requests."""
        return sum(chunk.end - chunk.start for chunk in self.chunks) + len(self.decodes)

    @cached_property
    def feature_rows(self) -> dict[Feature, list[Row]]:
        """Rows of the requests that use each feature."""
        feature_rows = {feature: list(rows) for feature, rows in self.decodes.feature_rows.items()}
        first = 0
        for index, chunk in enumerate(self.chunks, self.decode_rows):
            for feature, state in chunk.sequence.states.items():
                row = Row(index, state, chunk.start, chunk.end, first, chunk.last)
                feature_rows.setdefault(feature, []).append(row)
            first += chunk.end - chunk.start
        return feature_rows

    @cached_property
    def committing(self) -> Rows:
        """Rows that sample a token. First access while all of them have their slots."""
        ended = [chunk.sequence for chunk in self.chunks if chunk.last]
        return Rows.of((*self.decodes.sequences, *ended)) if ended else self.decodes

    @cached_property
    def output_rows(self) -> np.ndarray:
        """Indices of these rows in the pass's outputs."""
        ended = [row for row, chunk in enumerate(self.chunks, self.decode_rows) if chunk.last]
        return np.array([*range(len(self.decodes)), *ended], dtype=np.intp)


@dataclass(frozen=True)
class FeaturePass:
    """A pre-pass: a feature's own program, which prompt passes wait for. The host reads no output of it."""

    pre_pass: PrePass
    committing: Rows = NO_ROWS
    output_rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.intp))


@dataclass(frozen=True)
class Round:
    """A round. growth: page-table growth by window group. drafts: per sequence, at most.

    catching_up: rows whose drafter catches up before it. reads_drafts: True if the host reads the drafts before
    verification, which takes two passes. forced [rows, drafts] int32: tokens that features know in advance, padded with
    -1; None: none. proposes: False if the drafter does not run, so that the round is its second pass alone. rates
    [rows, k] float32: expected acceptance of each draft after the ones before it, if the rows share a budget of
    ``drafts`` each; None: all rows have the same width. fewer: why ``drafts`` is less than the drafter's k.
    """

    rows: Rows
    growth: Mapping[int, list[RowGrowth]]
    drafts: int
    catching_up: Rows = NO_ROWS
    reads_drafts: bool = False
    forced: np.ndarray | None = None
    proposes: bool = True
    rates: np.ndarray | None = None
    fewer: FewerDrafts = FewerDrafts.NONE

    @property
    def most(self) -> int:
        """Drafts of one request, at most."""
        return self.drafts if self.rates is None else int(self.rates.shape[1])

    @property
    def committing(self) -> Rows:
        """Rows that sample a token: all."""
        return self.rows

    @cached_property
    def output_rows(self) -> np.ndarray:
        """Indices of these rows in the pass's outputs."""
        return np.arange(len(self.rows))

    @cached_property
    def plain(self) -> bool:
        """True if it is a single pass of the program whose graphs' times are known."""
        needs: Features = functools.reduce(
            operator.or_, (feature.needs for feature in self.rows.feature_rows), NO_FEATURES
        )
        return needs == NO_FEATURES and not self.reads_drafts and not self.catching_up


@dataclass(frozen=True)
class Verify:
    """Second pass of a round whose drafts the host has read. drafts [rows, P, k] int32, padded with -1."""

    round: Round
    drafts: np.ndarray


@dataclass(frozen=True)
class RoundWidths:
    """Tokens per request of the widest round. host_drafted: of rounds whose drafts the host reads."""

    plain: int
    host_drafted: int


def salted(first: Token, salt: str) -> bytes:
    """Return the first token's key in the prefix cache under a cache_salt.

    A path of the tree begins with it, so different salts share nothing, nor do requests without one. Its size differs
    from all other digests.
    """
    text = first if isinstance(first, bytes) else str(first).encode()
    return hashlib.blake2b(text, key=hashlib.blake2b(salt.encode()).digest(), digest_size=SALTED_BYTES).digest()


SALTED_BYTES = 32


def rooted(first: Token, root: bytes) -> bytes:
    """Return the first token's key in the prefix cache if keys and values depend on more than tokens (an adapter).

    No salt gives the same key: the digest is of another kind.
    """
    text = first if isinstance(first, bytes) else str(first).encode()
    return hashlib.blake2b(text, key=root[:64], person=b"prefix root", digest_size=SALTED_BYTES).digest()


def _merge_prompt_keys(keys: list[list[int | bytes]]) -> list[int | bytes] | None:
    """Merge the prompt keys of several features: a digest takes precedence over a token id."""
    if len(keys) < 2:
        return keys[0] if keys else None
    return [next((key for key in each if isinstance(key, bytes)), each[0]) for each in zip(*keys, strict=True)]


Pass = Extend | FeaturePass | Round | Verify
