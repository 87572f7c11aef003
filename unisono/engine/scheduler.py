"""Who runs next: admission, chunked prompts, rounds, preemption. Host bookkeeping only.

First come, first served: a waiting request is never overtaken, and running requests wait for at most
:data:`MAX_EXTEND_STREAK` prompt passes between two rounds, so neither side starves. Prompts never share
a pass with rounds. When pages run out the request that arrived last gives its own back and resumes
later, with the same bytes: its noise and its keys depend on positions, not on when they are computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from unisono.engine.hidden import HiddenStates
from unisono.engine.overrides import Embedded
from unisono.engine.slots import SlotPool
from unisono.grammar.matcher import Matcher
from unisono.state.pages import OutOfPages, PagePool, Reservation, pages_for
from unisono.state.prefix_tree import Token
from unisono.types import EngineRequest, FinishReason, TokenLogprobs

MAX_EXTEND_STREAK = 8
"""Prompt passes in a row while requests are running."""


@dataclass(eq=False)
class Sequence:
    """One request on its way. ``tokens`` is the prompt and every output token the host has read."""

    request: EngineRequest
    tokens: list[int]
    max_length: int
    order: int  # of arrival
    slot: int = -1
    pages: Reservation | None = None
    extended: int = 0  # tokens whose KV is written or being written by launched prompt passes
    mapped: int = 0  # leading pages that the slot's page table on the device holds
    in_flight: int = 0  # launched passes that commit tokens and are not read yet
    unobserved: int = 0  # its last tokens of which the drafter has only been told; see engine/draft_controller.py
    finish: FinishReason = FinishReason.RUNNING
    cached_tokens: int | None = None  # prompt tokens that the prefix cache served at first admission
    preemptions: int = 0
    leader: Sequence | None = None  # of the same prompt, ahead in the queue
    prompt_logprobs: dict[int, TokenLogprobs] | None = None  # by position, as far as they are read; None: not wanted
    hidden: HiddenStates | None = None  # as far as they are read; None: not wanted
    embedded: Embedded | None = None  # what stands in for token embeddings
    matcher: Matcher | None = None  # says what each position may sample; None: anything

    @property
    def waits_for_leader(self) -> bool:
        """Whether the prefix cache will soon have the prompt: the leader is computing it."""
        leader = self.leader
        return leader is not None and leader.finish is FinishReason.RUNNING and len(leader.tokens) == leader.prompt_len

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def keys(self) -> list[Token]:
        """``tokens`` as the prefix cache knows them."""
        if self.embedded is None:
            return self.tokens  # type: ignore[return-value]
        return [*self.embedded.keys, *self.tokens[self.prompt_len :]]

    @property
    def reusable(self) -> int:
        """Leading tokens of which the request wants nothing but their keys and values, which may be cached."""
        known = len(self.tokens)
        if self.scored:
            known = min(known, self.scored.start - 1)
        if self.hidden is not None:
            known = min(known, self.hidden.known)
        return known

    @property
    def scored(self) -> range:
        """Prompt positions whose log-probability is wanted and not reported yet."""
        if self.prompt_logprobs is None or len(self.tokens) > self.prompt_len:
            return range(0)
        return range(self.request.first_scored, self.prompt_len)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start … end`` of a sequence in a prompt pass; the ``last`` one samples."""

    sequence: Sequence
    start: int
    end: int
    last: bool

    @property
    def scored(self) -> range:
        """Positions of the chunk whose logits score the prompt token behind them."""
        wanted = self.sequence.scored
        return range(max(self.start, wanted.start - 1), min(self.end, wanted.stop - 1))

    @property
    def embedded(self) -> Embedded | None:
        return self.sequence.embedded


@dataclass(frozen=True)
class Extend:
    """A prompt pass."""

    chunks: list[Chunk]

    @property
    def scores(self) -> bool:
        """Whether a request wants log-probabilities of prompt tokens behind these."""
        return any(chunk.scored for chunk in self.chunks)

    @property
    def masked(self) -> bool:
        """Whether it samples behind the prompt of a request with a matcher."""
        return any(chunk.last and chunk.sequence.matcher is not None for chunk in self.chunks)

    @property
    def returns(self) -> bool:
        """Whether a request wants hidden states of these tokens."""
        return any(c.sequence.hidden is not None and c.end > c.sequence.hidden.known for c in self.chunks)


@dataclass(frozen=True)
class Round:
    """A round, with the pages each sequence's table grows by: ``(first column, pages)``.

    drafts: of each sequence, at most. behind: those whose drafter catches up before it.
    """

    sequences: list[Sequence]
    growth: list[tuple[int, list[int]]]
    drafts: int
    behind: tuple[Sequence, ...] = ()

    @property
    def masked(self) -> bool:
        """Whether a sequence is sampled under masks."""
        return any(sequence.matcher is not None for sequence in self.sequences)

    @property
    def returns(self) -> bool:
        """Whether a request wants hidden states."""
        return any(sequence.hidden is not None for sequence in self.sequences)


class Scheduler:
    """Owns the queues and every sequence's pages and slot."""

    def __init__(
        self, pool: PagePool, slots: SlotPool, width: int, max_batched_tokens: int, max_extend_rows: int
    ) -> None:
        self.pool, self.slots, self.width = pool, slots, width
        self.max_batched_tokens, self.max_extend_rows = max_batched_tokens, max_extend_rows
        self.waiting: deque[Sequence] = deque()
        self.extending: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up, and of these found
        self.prefix_hits = 0
        self._streak = 0

    @property
    def active(self) -> list[Sequence]:
        """The requests that hold a slot."""
        return self.extending + self.running

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.extending or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the next round can be launched only when every token before it is read: masks depend on them."""
        return any(sequence.matcher is not None for sequence in self.running)

    def schedule(self) -> Extend | Round | None:
        """The next pass; None when there is nothing to run before the pass in flight is read."""
        self._admit()
        if self.extending and (self._streak < MAX_EXTEND_STREAK or not self.running):
            self._streak += 1
            return self._next_extend()
        self._streak = 0
        return self._next_round()

    def retire(self, sequence: Sequence, finish: FinishReason) -> None:
        """End a sequence: its committed pages go to the prefix tree, its slot is free."""
        sequence.finish = finish
        queue = self._queue_of(sequence)
        self._give_back(sequence)
        queue.remove(sequence)

    def _queue_of(self, sequence: Sequence) -> deque[Sequence] | list[Sequence]:
        if sequence.pages is None:
            return self.waiting
        return self.running if sequence in self.running else self.extending

    def commit_prompt(self, chunk: Chunk) -> None:
        """A prompt pass was read: its full pages may serve other prompts from now on."""
        if chunk.sequence.pages is not None:
            chunk.sequence.pages.commit(chunk.sequence.keys[: chunk.end])

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.pages is None:
            return
        # The last token's KV is written by the round after it, which may never come.
        extending = sequence in self.extending
        written = min(sequence.extended, len(sequence.tokens) - 1) if extending else len(sequence.tokens) - 1
        # A page that the drafter has not read would be drafted from badly for good.
        written = max(0, written - sequence.unobserved)
        sequence.pages.commit(sequence.keys[:written], complete=written if extending else written - 1)
        sequence.pages.release()
        self.slots.free(sequence.slot)
        sequence.pages, sequence.slot, sequence.extended, sequence.mapped, sequence.unobserved = None, -1, 0, 0, 0

    def _admit(self) -> None:
        while self.waiting and self.slots.available:
            sequence = self.waiting[0]
            if sequence.waits_for_leader:
                return
            # A cached prefix has no logits and no hidden states; of what is opened the last is never cached.
            pages = self.pool.open(sequence.keys[: sequence.reusable + 1])
            # One page of headroom per running request, or admission would be undone by preemption.
            headroom = len(self.active)
            # The first sampled token's page too: drafters may look one token ahead.
            tokens = min(len(sequence.tokens) + 1, sequence.max_length)
            need = pages_for(tokens) - len(pages.entries)
            if need + headroom > self.pool.available:
                pages.release()
                return
            pages.reserve(tokens)
            self.waiting.popleft()
            self._start(sequence, pages)

    def _start(self, sequence: Sequence, pages: Reservation) -> None:
        request = sequence.request
        tokens = sequence.tokens
        sequence.pages, sequence.extended = pages, pages.cached_tokens
        sequence.slot = self.slots.claim(request, tokens, sequence.max_length, pages.pages)
        sequence.mapped = len(pages.entries)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = pages.cached_tokens
            self.prefix_queries += len(tokens)
            self.prefix_hits += pages.cached_tokens
        self.extending.append(sequence)

    def _next_extend(self) -> Extend:
        budget, chunks = self.max_batched_tokens, []
        for sequence in self.extending[: self.max_extend_rows]:
            if budget == 0:
                break
            start, total = sequence.extended, len(sequence.tokens)
            end = min(total, start + budget)
            chunks.append(Chunk(sequence, start, end, last=end == total))
            budget -= end - start
            sequence.extended = end
        for chunk in chunks:
            if chunk.last:
                self.extending.remove(chunk.sequence)
                self.running.append(chunk.sequence)
                chunk.sequence.in_flight += 1
        return Extend(chunks)

    def _next_round(self) -> Round | None:
        # A pass in flight commits one token at least: these may go on, the others end when it is read.
        able = [s for s in self.running if len(s.tokens) + s.in_flight < s.max_length]
        for sequence in able:
            if sequence.pages is not None and not self._grow(sequence):
                return None
        able = [s for s in able if s.pages is not None]  # growing one may have preempted another
        return Round(able, [self._map(s) for s in able], self.width - 1) if able else None

    def _grow(self, sequence: Sequence) -> bool:
        """Reserve the worst case of one more round; False when that has to wait for the pass in flight.

        Without a pass in flight, whoever arrived last gives pages back until it fits.
        """
        worst = len(sequence.tokens) + (sequence.in_flight + 1) * self.width
        while sequence.pages is not None:
            try:
                sequence.pages.reserve(min(worst, sequence.max_length))
                return True
            except OutOfPages:
                if any(s.in_flight for s in self.running):
                    return False
                self._preempt(max(self.active, key=lambda s: s.order))
        return True

    def _map(self, sequence: Sequence) -> tuple[int, list[int]]:
        """The columns and pages that this sequence's table on the device still lacks."""
        assert sequence.pages is not None
        first, pages = sequence.mapped, sequence.pages.pages
        sequence.mapped = len(pages)
        sequence.in_flight += 1
        return first, pages[first:]

    def _preempt(self, sequence: Sequence) -> None:
        queue = self._queue_of(sequence)
        self._give_back(sequence)
        queue.remove(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)  # everyone who waits arrived later
