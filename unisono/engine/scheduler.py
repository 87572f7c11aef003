"""Who runs next: admission, chunked prompts, rounds, preemption. Host bookkeeping only.

First come, first served: a waiting request is never overtaken, and running requests wait for at most
:data:`MAX_EXTEND_STREAK` prompt passes between two rounds, so neither side starves. Prompts never share
a pass with rounds. When pages run out the request that arrived last gives its own back and resumes
later, with the same bytes: its noise and its keys depend on positions, not on when they are computed.
"""

from __future__ import annotations

from collections import deque

from unisono.cache.pages import OutOfPages, PagePool, Reservation, pages_for
from unisono.engine.sequence import Chunk, Extend, Round, Sequence
from unisono.engine.slots import Slots
from unisono.types import FinishReason

MAX_EXTEND_STREAK = 8
"""Prompt passes in a row while requests are running."""


class Scheduler:
    """Owns the queues and every sequence's pages and slot."""

    def __init__(self, pool: PagePool, slots: Slots, width: int, max_batched_tokens: int, max_extend_rows: int) -> None:
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
        """Whether the next round can be launched only when every token before it is read."""
        return any(sequence.reads_drafts for sequence in self.running)

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
        sequence.pages.commit(sequence.keys[:written], settled=extending)
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
        sequence.slot = self.slots.claim(request, tokens, sequence.max_length)
        self.slots.write_pages(sequence.slot, pages.pages)
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
        if not able:
            return None
        reads_drafts = any(s.reads_drafts for s in able)
        return Round(able, [self._map(s) for s in able], self.width - 1, reads_drafts=reads_drafts)

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
        first, entries = sequence.mapped, sequence.pages.entries
        sequence.mapped = len(entries)
        sequence.in_flight += 1
        return first, [entry.page for entry in entries[first:]]

    def _preempt(self, sequence: Sequence) -> None:
        queue = self._queue_of(sequence)
        self._give_back(sequence)
        queue.remove(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)  # everyone who waits arrived later
