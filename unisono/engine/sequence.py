"""A request on its way, and the passes that the scheduler makes of requests. Host bookkeeping only."""

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
from unisono.passes.features.base import Ahead, Feature, RequestState, Row
from unisono.types import EngineRequest, FinishReason

Growth = tuple[int, list[int]]
"""The first new column of a page table, and the pages from there on."""

RowGrowth = tuple[int, int, list[int]]
"""The row of a pass whose page table grows, and by what; see :data:`Growth`."""

States = Mapping[Feature, RequestState]
"""Of each feature that a request asks for, what it keeps of the request."""


@dataclass(eq=False)
class Sequence:
    """One request on its way. ``tokens`` is the prompt and every output token the host has read.

    reads_drafts: whether a feature needs its drafts on the host, so that its rounds are two passes. reports: whether
    the next delta has more to say than its tokens: the first one has, and each one where the request has features.
    What passes change of a request that has a slot is in ``engine/worker/progress.py``.
    """

    request: EngineRequest
    tokens: list[int]
    max_length: int
    order: int  # of arrival
    states: States = field(default_factory=dict)
    turn: int = -1  # of its client, once it is the client's next; see engine/scheduling/waiting.py
    slot: int = -1
    pages: Reservation | None = None
    extended: int = 0  # tokens whose KV is written or being written by launched prompt passes
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # (tokens, id) that are taken, not in the tree yet
    finish: FinishReason = FinishReason.RUNNING
    cached_tokens: int | None = None  # prompt tokens that the prefix cache served at first admission
    preemptions: int = 0
    added: float = field(default_factory=time.monotonic)
    queued_seconds: float | None = None  # from then to its first pass
    leader: Sequence | None = None  # of the same prompt, ahead in the queue

    reports: bool = True

    def __post_init__(self) -> None:
        self.request_id, self.prompt_len = self.request.request_id, len(self.request.prompt_token_ids)
        self.reads_drafts = any(feature.reads_drafts for feature in self.states)
        given = [state.prompt_keys for state in self.states.values()]
        self._prompt_keys = _together([keys for keys in given if keys is not None])
        for root in [state.prefix_root for state in self.states.values() if state.prefix_root is not None]:
            first, *others = self._prompt_keys or self.request.prompt_token_ids
            self._prompt_keys = [rooted(first, root), *others]
        if self.request.cache_salt is not None:
            first, *others = self._prompt_keys or self.request.prompt_token_ids
            self._prompt_keys = [salted(first, self.request.cache_salt), *others]

    @property
    def waits_for_leader(self) -> bool:
        """Whether the prefix cache will soon have the prompt: the leader is computing it."""
        leader = self.leader
        return leader is not None and leader.finish is FinishReason.RUNNING and len(leader.tokens) == leader.prompt_len

    @property
    def coming(self) -> bool:
        """Whether it waits for pages that come back from host memory."""
        return self.pages is not None and self.pages.coming

    @property
    def keys(self) -> list[Token]:
        """``tokens`` as the prefix cache knows them."""
        if self._prompt_keys is None:
            return self.tokens  # type: ignore[return-value]
        return [*self._prompt_keys, *self.tokens[self.prompt_len :]]

    @property
    def slot_values(self) -> dict[str, int]:
        """What features write into the request's slot."""
        return {name: value for state in self.states.values() for name, value in state.slot_values().items()}

    def reach(self, end: int) -> int:
        """Of a prompt pass that goes on from here to ``end``: up to where it can go now."""
        for state in self.states.values():
            end = state.reach(self.extended, end)
        return end

    def forced(self) -> Iterable[int]:
        """Token ids that must come next, as far as a feature of the request knows."""
        return next((tokens for state in self.states.values() if (tokens := state.forced())), ())

    def held_by(self) -> set[Feature]:
        """The features that keep the request from getting a slot now."""
        return {feature for feature, state in self.states.items() if not state.ready()}

    def admitted(self) -> None:
        """The request gets a slot."""
        for state in self.states.values():
            state.admitted()

    def released(self) -> None:
        """The request has given its slot back."""
        for state in self.states.values():
            state.released()

    @property
    def reusable(self) -> int:
        """Leading tokens of which the request wants nothing but their keys and values, which may be cached."""
        known = len(self.tokens)
        for state in self.states.values():
            known = min(known, state.reusable(known))
        return known


@dataclass(frozen=True, eq=False)
class Rows:
    """Requests in the order of their rows in a pass. slots, owners: int64 [rows], each request's slot and ``order``.

    Rounds of the same requests share one of these.
    """

    sequences: tuple[Sequence, ...]
    slots: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> Rows:
        """Rows of requests that have slots."""
        each = tuple(sequences)
        slots, owners = [s.slot for s in each], [s.order for s in each]
        return cls(each, np.array(slots, dtype=np.int64), np.array(owners, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.sequences)

    def where(self, chosen: np.ndarray) -> Rows:
        """Those for which ``chosen`` [rows] is true; these themselves where that is all."""
        if chosen.all():
            return self
        sequences = tuple(itertools.compress(self.sequences, chosen.tolist()))
        return Rows(sequences, self.slots[chosen], self.owners[chosen])

    @cached_property
    def asked(self) -> dict[Feature, list[Row]]:
        """The requests that ask for each feature."""
        asked: dict[Feature, list[Row]] = {}
        for index, sequence in enumerate(self.sequences):
            for feature, state in sequence.states.items():
                asked.setdefault(feature, []).append(Row(index, state))
        return asked


NO_ROWS = Rows.of(())


class Running:
    """The requests that take part in rounds, in order, and the rows of their rounds, which are made anew when another
    request comes or goes."""

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
        for name in ("rows", "reading", "others"):
            self.__dict__.pop(name, None)

    @cached_property
    def rows(self) -> Rows:
        """All of them."""
        return Rows.of(self._sequences)

    @cached_property
    def reading(self) -> Rows:
        """Those whose drafts the host reads."""
        return Rows.of(s for s in self._sequences if s.reads_drafts)

    @cached_property
    def others(self) -> Rows:
        """Those whose drafts it does not read."""
        return Rows.of(s for s in self._sequences if not s.reads_drafts) if self.reading else self.rows


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start … end`` of a sequence in a prompt pass; the ``last`` one samples."""

    sequence: Sequence
    start: int
    end: int
    last: bool


def tokens_left(sequences: Iterable[Sequence]) -> int:
    """Tokens of their prompts that no pass has."""
    return sum(len(sequence.tokens) - sequence.extended for sequence in sequences)


@dataclass(frozen=True)
class Extend:
    """A prompt pass. full: whether it has as many tokens as it may have.

    decodes: the requests that decode in it, a token each, where it is a mixed pass; growth: of these, as of a round.
    room: rows that the pass has for these, before those of the chunks. waited: running requests wait for the pass.
    """

    chunks: list[Chunk]
    full: bool = True
    decodes: Rows = NO_ROWS
    growth: Mapping[int, list[RowGrowth]] = field(default_factory=dict)
    room: int = 0
    waited: bool = False

    @cached_property
    def tokens(self) -> int:
        """Of prompts, and of those that decode."""
        return sum(chunk.end - chunk.start for chunk in self.chunks) + len(self.decodes)

    @cached_property
    def asked(self) -> dict[Feature, list[Row]]:
        """The requests that ask for each feature."""
        asked = {feature: list(rows) for feature, rows in self.decodes.asked.items()}
        first = 0
        for index, chunk in enumerate(self.chunks, self.room):
            for feature, state in chunk.sequence.states.items():
                row = Row(index, state, chunk.start, chunk.end, first, chunk.last)
                asked.setdefault(feature, []).append(row)
            first += chunk.end - chunk.start
        return asked

    @cached_property
    def committing(self) -> Rows:
        """Those that sample a token. To be asked for first while all of them have their slots."""
        ended = [chunk.sequence for chunk in self.chunks if chunk.last]
        return Rows.of((*self.decodes.sequences, *ended)) if ended else self.decodes

    @cached_property
    def places(self) -> np.ndarray:
        """The rows of the pass's outputs that are theirs."""
        ended = [row for row, chunk in enumerate(self.chunks, self.room) if chunk.last]
        return np.array([*range(len(self.decodes)), *ended], dtype=np.intp)


@dataclass(frozen=True)
class Preparation:
    """A pass of a feature's own program, which prompt passes wait for. Nothing is read of it."""

    ahead: Ahead
    committing: Rows = NO_ROWS
    places: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.intp))


@dataclass(frozen=True)
class Round:
    """A round. growth: by page lifetime, the page tables that grow. drafts: of each sequence, at most.

    catching_up: those whose drafter catches up before it. reads_drafts: whether the host reads the drafts before they
    are verified, which takes two passes. forced [rows, drafts] int32: tokens that features know to come next, -1 after
    them; None: none are known. proposes: whether the drafter runs; if not, the round is its second pass alone.
    """

    rows: Rows
    growth: Mapping[int, list[RowGrowth]]
    drafts: int
    catching_up: Rows = NO_ROWS
    reads_drafts: bool = False
    forced: np.ndarray | None = None
    proposes: bool = True

    @property
    def committing(self) -> Rows:
        """Those that sample a token: all."""
        return self.rows

    @cached_property
    def places(self) -> np.ndarray:
        """The rows of the pass's outputs that are theirs."""
        return np.arange(len(self.rows))

    @cached_property
    def plain(self) -> bool:
        """Whether it is one pass of the program whose graphs' times are known, and no other pass."""
        asks: Features = functools.reduce(operator.or_, (feature.asks for feature in self.rows.asked), NO_FEATURES)
        return asks == NO_FEATURES and not self.reads_drafts and not self.catching_up


@dataclass(frozen=True)
class Verify:
    """The second pass of a round whose drafts the host has read. drafts [rows, P, k] int32: -1 for none."""

    round: Round
    drafts: np.ndarray


@dataclass(frozen=True)
class RoundWidths:
    """Tokens of a request in the widest round: plain, and of rounds whose drafts the host reads."""

    plain: int
    reading: int


def salted(first: Token, salt: str) -> bytes:
    """What the prefix cache knows a prompt's first token by under a cache_salt.

    A path of the tree begins with it, so nothing is shared between salts, nor with requests that have none. Its size is
    no other digest's.
    """
    text = first if isinstance(first, bytes) else str(first).encode()
    return hashlib.blake2b(text, key=hashlib.blake2b(salt.encode()).digest(), digest_size=SALTED_BYTES).digest()


SALTED_BYTES = 32


def rooted(first: Token, root: bytes) -> bytes:
    """What the prefix cache knows a prompt's first token by where more than tokens decides about its keys and values.

    No salt gives the same: the digest is of another kind.
    """
    text = first if isinstance(first, bytes) else str(first).encode()
    return hashlib.blake2b(text, key=root[:64], person=b"prefix root", digest_size=SALTED_BYTES).digest()


def _together(keys: list[list[int | bytes]]) -> list[int | bytes] | None:
    """The prompt's keys from those that several features gave: a digest stands before a token id."""
    if len(keys) < 2:
        return keys[0] if keys else None
    return [next((key for key in each if isinstance(key, bytes)), each[0]) for each in zip(*keys, strict=True)]


Pass = Extend | Preparation | Round | Verify
