"""Who runs next: admission, chunked prompts, rounds, preemption. Host bookkeeping only.

Clients take turns, and a client's requests are served in the order in which they came, or by priority where the policy
says so (``waiting.py``); the same order decides whose prompt runs first. Rounds and prompts have passes of their own,
but where running requests may decode in a prompt pass (``mixing.py``); how much of prompts runs between two rounds
follows from what passes cost (``prompt_budget.py``), so neither side starves. When
pages run out the request that is last in this order gives its own back and resumes later, with the same bytes: its
noise and its keys depend on positions, not on when they are computed.

A round holds either requests whose drafts the host has to read before they are verified (``Sequence.reads_drafts``), or
the others. Where both kinds run they take turns, pass by pass: while the device runs a round of the others, the host
reads drafts and tokens of the first and computes what their next pass needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from unisono.engine.device_state import DeviceState
from unisono.engine.mixing import Mixing
from unisono.engine.prompt_budget import PromptBudget
from unisono.engine.sequence import Chunk, Extend, Growth, Pass, Preparation, Round, Sequence, Verify, tokens_left
from unisono.engine.slots import SlotPool
from unisono.engine.waiting import Waiting
from unisono.passes.features.base import Feature, Row
from unisono.program import Key
from unisono.state.pages import OutOfPages, PagePool, Reservation, pages_for
from unisono.state.specs import ALL
from unisono.types import FinishReason

MAX_PASSED = 64
"""Requests that others may pass in one step, because a feature cannot serve them yet."""


class _Wait(Exception):
    """Pages are short: the passes in flight have to be read before anybody gives pages back."""


class Scheduler:
    """Owns the queues and every sequence's pages and slot."""

    def __init__(
        self,
        pool: PagePool,
        slots: SlotPool,
        device: DeviceState,
        width: int,
        max_extend_rows: int,
        budget: PromptBudget,
        by_priority: bool = False,
        pass_ms: Callable[[Key], float] = lambda key: 0.0,
        mixing: Mixing | None = None,
        filling: Callable[[int, int], int] = lambda tokens, decodes: tokens,
    ) -> None:
        self.pool, self.slots, self.device, self.width = pool, slots, device, width
        self.max_extend_rows, self.budget, self._pass_ms = max_extend_rows, budget, pass_ms
        self.mixing, self._filling = mixing, filling
        self.waiting = Waiting(by_priority)
        self.extending: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up, and of these found
        self.prefix_hits = 0
        self._drafting: Round | None = None  # its drafts are not read yet
        self._verify: Verify | None = None  # its drafts are read
        self._turn = False  # whether the next round is of those whose drafts the host reads

    @property
    def active(self) -> list[Sequence]:
        """The requests that hold a slot."""
        return self.extending + self.running

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.extending or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self) -> Pass | None:
        """The next pass; None when there is nothing to run before the pass in flight is read."""
        self.device.before_pass()
        self.device.arrive()
        self._admit()
        self.device.arrive()
        try:
            return self._choose()
        finally:
            self.device.flush()

    def _choose(self) -> Pass | None:
        """The next pass, of the requests that have a slot."""
        if self.extending and (tokens := self.budget.tokens(self.running, self.extending[: self.max_extend_rows])):
            if (preparation := self._preparation(tokens)) is not None:
                return preparation
            if (extend := self._next_extend(*self._with_decodes(tokens))) is not None:
                self.budget.extended(extend)
                if extend.decodes:
                    self.budget.round_launched()  # it is one, too
                return extend
        reading = [s for s in self.running if s.reads_drafts]
        others = [s for s in self.running if not s.reads_drafts] if reading else self.running
        for reads_drafts in (self._turn, not self._turn):
            try:
                work = self._next_reading(reading) if reads_drafts else self._next_round(others, False)
            except _Wait:
                return self._take_verify()
            if work is not None:
                self._turn = not reads_drafts
                return work
        return None

    def drafting(self, work: Round) -> None:
        """The first pass of this round is launched."""
        self._drafting = work

    def drafted(self, drafts: np.ndarray) -> None:
        """That pass is read: drafts [rows, P, k]."""
        assert self._drafting is not None
        self._verify = Verify(self._drafting, drafts)
        self._drafting = None

    def retire(self, sequence: Sequence, finish: FinishReason) -> None:
        """End a sequence: its committed pages go to the prefix tree, its slot is free."""
        sequence.finish = finish
        queue = self._queue_of(sequence)
        self._give_back(sequence)
        queue.remove(sequence)

    def _queue_of(self, sequence: Sequence) -> Waiting | list[Sequence]:
        if sequence.pages is None:
            return self.waiting
        return self.running if sequence in self.running else self.extending

    def commit_prompt(self, chunk: Chunk) -> None:
        """A prompt pass was read: its full pages may serve other prompts from now on."""
        if chunk.sequence.pages is not None:
            chunk.sequence.pages.commit(chunk.sequence.keys[: chunk.end])
            self.device.prompt_committed(chunk)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.pages is None:
            return
        # The last token's KV is written by the round after it, which may never come.
        extending = sequence in self.extending
        written = min(sequence.extended, len(sequence.tokens) - 1) if extending else len(sequence.tokens) - 1
        # A page that the drafter has not read would be drafted from badly for good.
        written = max(0, written - sequence.unobserved)
        sequence.pages.commit(sequence.keys[:written], complete=written if extending else written - 1)
        self.device.end(sequence, sequence.pages)
        sequence.pages.release()
        self.slots.free(sequence.slot)
        sequence.released()
        sequence.pages, sequence.slot = None, -1
        sequence.extended = sequence.mapped = sequence.unobserved = sequence.round_start = 0

    def _admit(self) -> None:
        """Give slots to those who wait. Who can't have one for a feature's sake, and who wants that too, is passed."""
        passed: list[Sequence] = []
        held: set[Feature] = set()
        while self.waiting and self.slots.available and len(passed) < MAX_PASSED:
            sequence = self.waiting.first()
            if by := sequence.held_by() | (held & sequence.states.keys()):
                held |= by
                self.waiting.remove(sequence)
                passed.append(sequence)
            elif not self._admit_one(sequence):
                break
        for sequence in passed:
            self.waiting.add(sequence)

    def _admit_one(self, sequence: Sequence) -> bool:
        """Give the first of those who wait a slot; False where it has to wait."""
        if sequence.waits_for_leader:
            return False
        pages = self.device.open(sequence)
        if pages is None:
            return False
        return self._reserved(sequence, pages)

    def _reserved(self, sequence: Sequence, pages: Reservation) -> bool:
        """Start it with pages for its whole prompt; False where there are too few."""
        # One page of headroom per running request, or admission would be undone by preemption.
        headroom = len(self.active)
        # The first sampled token's page too: drafters may look one token ahead.
        tokens = min(len(sequence.tokens) + 1, sequence.max_length)
        need = pages_for(tokens) - len(pages.entries)
        if need + headroom > self.pool.available:
            pages.release()
            return False
        pages.fetch()
        pages.reserve(tokens)
        self._start(self.waiting.take(), pages)
        return True

    def _start(self, sequence: Sequence, pages: Reservation) -> None:
        request = sequence.request
        tokens = sequence.tokens
        sequence.pages, sequence.extended = pages, pages.cached_tokens
        sequence.admitted()
        sequence.slot = self.slots.claim(request, tokens, sequence.max_length, pages.pages, sequence.slot_values)
        sequence.mapped = len(pages.entries)
        self.device.begin(sequence, pages)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = pages.cached_tokens
            sequence.queued_seconds = time.monotonic() - sequence.added
            self.prefix_queries += len(tokens)
            self.prefix_hits += pages.cached_tokens
        self.extending.append(sequence)
        self.extending.sort(key=self.waiting.rank)

    def _preparation(self, budget: int) -> Preparation | None:
        """A pass that a feature wants before a prompt pass of at most ``budget`` tokens; None where none does."""
        wanted: dict[Feature, list[Row]] = {}
        prompts = self.extending[: self.max_extend_rows]
        if not any(sequence.states for sequence in prompts):
            return None
        for index, sequence in enumerate(prompts):
            start = sequence.extended
            end = min(len(sequence.tokens), start + budget)
            for feature, state in sequence.states.items():
                wanted.setdefault(feature, []).append(Row(index, state, start, end))
            budget -= end - start
        room = self.budget.room(self.running, self._pass_ms)
        for feature, rows in wanted.items():
            if (ahead := feature.pass_ahead([row for row in rows if row.start < row.end], room)) is not None:
                self.budget.prepared(self._pass_ms(ahead.key))
                return Preparation(ahead)
        return None

    def _with_decodes(self, budget: int) -> tuple[int, list[Sequence]]:
        """Prompt tokens of the next prompt pass, at most, and the running requests that decode in it, if any do."""
        prompts = self.extending[: self.max_extend_rows]
        fitting = partial(self.budget.tokens, self.running, prompts)
        if self.mixing is not None and (tokens := self.mixing.prompt_tokens(self.running, prompts, fitting)):
            with suppress(_Wait):
                return tokens, self._able(self.running)
        return self._filling(budget, 0) if self.running and tokens_left(prompts) > budget else budget, []

    def _next_extend(self, budget: int, decodes: list[Sequence]) -> Extend | None:
        """A prompt pass of at most ``budget`` tokens in which these decode; None where no prompt can go on yet."""
        chunks, waited = [], bool(self.running)
        for sequence in [s for s in self.extending if not s.coming][: self.max_extend_rows]:
            if budget == 0:
                break
            start, total = sequence.extended, len(sequence.tokens)
            end = min(total, start + budget)
            branch = sequence.pages.branch if sequence.pages is not None else 0
            if start < branch < end:
                end = branch  # a snapshot is taken where a chunk ends, and other prompts branch here too
            end = sequence.reach(end)
            if end <= start:
                continue
            chunks.append(Chunk(sequence, start, end, last=end == total))
            budget -= end - start
            sequence.extended = end
            self.waiting.served(sequence)
        if not chunks:
            return None
        growth = self._growth(decodes) if decodes else {}
        for chunk in chunks:
            if chunk.last:
                self.extending.remove(chunk.sequence)
                self.running.append(chunk.sequence)
                chunk.sequence.in_flight += 1
        self.device.extending(chunks)
        room = self.mixing.room(len(decodes)) if self.mixing is not None and decodes else 0
        return Extend(chunks, budget == 0, tuple(decodes), growth, room, waited)

    def _next_reading(self, sequences: list[Sequence]) -> Round | Verify | None:
        """The next pass of those whose drafts the host reads; None while it has to read something first."""
        if self._drafting is not None:
            return None
        if (work := self._take_verify()) is not None:
            return work
        return None if self._unread(sequences) else self._next_round(sequences, True)

    def _take_verify(self) -> Verify | None:
        """The second pass of the round whose drafts are read; None where there is none, or all its requests ended."""
        work, self._verify = self._verify, None
        if work is None or all(s.finish is not FinishReason.RUNNING for s in work.round.sequences):
            return None
        return work

    def _unread(self, sequences: list[Sequence]) -> bool:
        """Whether tokens of these are not read yet."""
        return any(s.in_flight for s in sequences)

    def _next_round(self, sequences: list[Sequence], reads_drafts: bool) -> Round | None:
        """A round of these, which are all that run of one kind. Raises _Wait."""
        able = self._able(sequences)
        if not able:
            return None
        if reads_drafts or sequences is self.running:
            self.budget.round_launched()  # where both kinds run, prompts have the time of a turn of both
        return Round(able, self._growth(able), self.width - 1, reads_drafts=reads_drafts)

    def _able(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of the sequences that may go on, with pages for the worst case. Raises _Wait."""
        # A pass in flight commits one token at least: these may go on, the others end when it is read.
        able = [s for s in sequences if len(s.tokens) + s.in_flight < s.max_length]
        for sequence in able:
            if sequence.pages is not None:
                self._grow(sequence)
        return [s for s in able if s.pages is not None]  # growing one may have preempted another

    def _growth(self, sequences: list[Sequence]) -> dict[int, list[Growth]]:
        """By page lifetime, what the page tables of these grow by in a pass that commits tokens of them."""
        growth: dict[int, list[Growth]] = {lifetime: [] for lifetime in (ALL, *self.pool.windows)}
        for sequence in sequences:
            assert sequence.pages is not None
            pages = sequence.pages.pages_from(sequence.mapped)
            growth[ALL].append((sequence.mapped, pages))
            sequence.mapped += len(pages)
            if self.pool.windows:
                for lifetime, grown in self.device.grow(sequence, self._worst(sequence)).items():
                    growth[lifetime].append(grown)
            sequence.in_flight += 1
        return growth

    def _grow(self, sequence: Sequence) -> None:
        """Reserve the worst case of one more round.

        Without a pass in flight, the last request gives its pages back until it fits; with one, this has to wait.
        """
        while sequence.pages is not None:
            try:
                sequence.pages.reserve(self._worst(sequence))
                return
            except OutOfPages:
                if any(s.in_flight for s in self.running):
                    raise _Wait from None
                self._preempt(max(self.active, key=self.waiting.rank))

    def _worst(self, sequence: Sequence) -> int:
        """Tokens of the sequence after one more round in which everything is accepted."""
        return min(len(sequence.tokens) + (sequence.in_flight + 1) * self.width, sequence.max_length)

    def _preempt(self, sequence: Sequence) -> None:
        queue = self._queue_of(sequence)
        self._give_back(sequence)
        queue.remove(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)
