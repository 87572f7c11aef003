"""Scheduler: admission, chunked prompts, rounds, preemption. Host bookkeeping only.

Clients take turns; a client's requests run in order of arrival, or by priority if the policy says so (``waiting.py``).
The same order chooses the prompt that runs first. Prompt passes and rounds are separate, except mixed passes
(``mixing.py``). The cost of passes bounds the prompt tokens between two rounds (``prompt_budget.py``), so neither side
starves. When pages run out, the last request in this order frees its pages and resumes later with the same bytes,
because its noise and keys depend on positions only.

A round holds either requests whose drafts the host reads before verification (``Sequence.reads_drafts``), or the
others. If both kinds run they alternate pass by pass: while the device runs a round of one kind, the host reads drafts
and tokens of the other and computes the inputs of its next pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from unisono.engine.failures import is_engine_error
from unisono.engine.scheduling.draft_controller import DraftController
from unisono.engine.scheduling.forced_drafts import merged
from unisono.engine.scheduling.mixing import Mixing
from unisono.engine.scheduling.prompt_budget import PromptBudget
from unisono.engine.scheduling.waiting import Waiting
from unisono.engine.sequence import (
    NO_ROWS,
    Chunk,
    Extend,
    FeaturePass,
    Pass,
    Round,
    RoundWidths,
    RowGrowth,
    Rows,
    Running,
    Sequence,
    Verify,
    tokens_left,
)
from unisono.engine.worker.device_state import DeviceState
from unisono.engine.worker.progress import NOBODY
from unisono.engine.worker.slots import SlotPool
from unisono.graphs import GraphKey
from unisono.kv.pages import OutOfPages, PagePool, Reservation, pages_for
from unisono.kv.specs import ALL
from unisono.passes.features.base import Feature, PrePass, Room, Row
from unisono.types import FinishReason

MAX_SKIPPED = 64
"""Maximum requests per step that are skipped because a feature cannot serve them yet."""


def _raise(sequence: Sequence, stage: str, error: Exception) -> None:
    raise error


class _Wait(Exception):
    """Pages are short: the passes in flight have to be read before a request is preempted."""


class Scheduler:
    """Own the queues and every sequence's pages and slot."""

    def __init__(
        self,
        pool: PagePool,
        slots: SlotPool,
        device: DeviceState,
        widths: RoundWidths,
        max_extend_rows: int,
        budget: PromptBudget,
        by_priority: bool = False,
        pass_ms: Callable[[GraphKey], float] = lambda key: 0.0,
        mixing: Mixing | None = None,
        filling: Callable[[int, int], int] = lambda tokens, decodes: tokens,
        failed: Callable[[Sequence, str, Exception], None] = _raise,
        drafts: DraftController | None = None,
    ) -> None:
        """failed: called with a request that ends because of an error of its own, and the stage. drafts: chooses the
        number of drafts of each round; None: the most.
        """
        self.pool, self.slots, self.device, self.widths = pool, slots, device, widths
        self.max_extend_rows, self.budget, self._pass_ms = max_extend_rows, budget, pass_ms
        self.mixing, self._filling, self._failed, self._drafts = mixing, filling, failed, drafts
        self.waiting = Waiting(by_priority)
        self.extending: list[Sequence] = []
        self.running = Running()
        self.progress = slots.progress
        self.started: list[str] = []  # ids that got their first slot since the caller last looked
        self.preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up, and tokens found
        self.prefix_hits = 0
        self._drafting: Round | None = None  # its drafts are not read yet
        self._verify: Verify | None = None  # its drafts are read
        self._host_drafts_next = False  # True if the next round is one whose drafts the host reads

    @property
    def active(self) -> list[Sequence]:
        """The requests that hold a slot."""
        return [*self.extending, *self.running]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.extending or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self) -> Pass | None:
        """Return the next pass, a round with its drafts; None if nothing can run before the pass in flight is read."""
        work = self._scheduled() if self.has_work else None
        return work if self._drafts is None else self._drafts.launching(work)

    def _scheduled(self) -> Pass | None:
        """Admit requests and return the next pass. A round has the most drafts."""
        self.device.before_pass()
        self.device.arrive()
        self._admit()
        self.device.arrive()
        try:
            return self._choose()
        finally:
            self.device.flush()

    def _choose(self) -> Pass | None:
        """Return the next pass of the requests that have slots."""
        if self.extending and (tokens := self.budget.tokens(self.running, self.extending[: self.max_extend_rows])):
            if (preparation := self._feature_pass(tokens)) is not None:
                return preparation
            if (extend := self._next_extend(*self._with_decodes(tokens))) is not None:
                self.budget.extended(extend)
                if extend.decodes:
                    self.budget.round_launched()  # it counts as a round, too
                return extend
        for reads_drafts in (self._host_drafts_next, not self._host_drafts_next):
            try:
                others = self.running.device_drafted
                work = self._next_host_drafted() if reads_drafts else self._next_round(others, False)
            except _Wait:
                return self._take_verify()
            if work is not None:
                self._host_drafts_next = not reads_drafts
                return work
        return None

    def drafting(self, work: Round) -> None:
        """Note that the first pass of this round was launched."""
        self._drafting = work

    def drafted(self, drafts: np.ndarray) -> None:
        """Take the drafts of the pass that was read: [rows or more, P, k]; padding rows are last."""
        work = self._drafting
        assert work is not None
        self._verify = Verify(work, merged(drafts[: len(work.rows)], work.forced))
        self._drafting = None

    def committed(self, rows: Rows, counts: np.ndarray, running: np.ndarray) -> np.ndarray:
        """Update ``progress`` after a pass that committed ``counts`` [rows] tokens. Return the indices of the rows that
        count.

        running: bool [rows], False for an ended request. A request whose prompt fills the context ends without a token.
        Rows of requests that had ended before this pass are left out. The caller adds the tokens to the sequences.
        """
        progress, live = self.progress, self.progress.owned(rows.slots, rows.owners)
        some = counts > 0
        if live.all():
            progress.read(rows.slots, counts, some)
        else:
            progress.read(rows.slots[live], counts[live], some[live])
            some &= live
        return np.flatnonzero(some | (live & ~running))

    def retire(self, sequence: Sequence, finish: FinishReason, keep: bool = True) -> None:
        """End a sequence: free its slot, and commit its pages to the prefix tree if ``keep``."""
        sequence.finish = finish
        queue = self._queue_of(sequence)
        self._release(sequence, keep)
        queue.remove(sequence)

    def fail(self, sequence: Sequence, stage: str, error: Exception) -> None:
        """End a sequence because of an error of its own. Tokens that its last pass was to compute are discarded."""
        self._failed(sequence, stage, error)
        self.retire(sequence, FinishReason.ABORT, keep=False)

    def check_integrity(self) -> None:
        """Check that ``progress`` belongs to the requests that hold slots. Raises RuntimeError naming the breach."""
        progress = self.progress
        for sequence in self.active:
            slot, known = sequence.slot, (sequence.order, len(sequence.tokens))
            if (mirror := (int(progress.owner[slot]), int(progress.length[slot]))) != known:
                raise RuntimeError(
                    f"slot {slot}: the host mirror has request and length {mirror}, the sequence {known}"
                )
        owned = int(np.count_nonzero(progress.owner != NOBODY))
        if owned != len(self.active):
            raise RuntimeError(f"{owned} slots have an owner, {len(self.active)} requests hold one")

    def _queue_of(self, sequence: Sequence) -> Waiting | Running | list[Sequence]:
        if sequence.pages is None:
            return self.waiting
        return self.running if sequence in self.running else self.extending

    def commit_prompt(self, chunk: Chunk) -> None:
        """Commit a prompt chunk that was read: its full pages can serve other prompts."""
        if chunk.sequence.pages is not None:
            chunk.sequence.pages.commit(chunk.sequence.keys[: chunk.end])
            self.device.prompt_committed(chunk)

    def _release(self, sequence: Sequence, keep: bool = True) -> None:
        """Free a request's slot and pages. keep: its computed whole pages stay in the prefix tree, evictable."""
        if sequence.pages is None:
            return
        if keep:
            self._commit_pages(sequence, sequence.pages)
        self.device.end(sequence, sequence.pages, self.progress)
        sequence.pages.release()
        self.slots.free(sequence.slot)
        sequence.released()
        sequence.pages, sequence.slot, sequence.extended = None, -1, 0

    def _commit_pages(self, sequence: Sequence, pages: Reservation) -> None:
        """Commit the pages whose tokens are computed to the prefix tree."""
        # The last token's KV is written by the next round, which may never run.
        extending = sequence in self.extending
        written = min(sequence.extended, len(sequence.tokens) - 1) if extending else len(sequence.tokens) - 1
        # A page that the drafter has not read would keep poor drafts for good.
        written = max(0, written - int(self.progress.unobserved[sequence.slot]))
        pages.commit(sequence.keys[:written], complete=written if extending else written - 1)

    def _admit(self) -> None:
        """Admit waiting requests. Skip a request whose feature is not ready, and later ones that need the same
        feature.
        """
        skipped: list[Sequence] = []
        blocked: set[Feature] = set()
        while self.waiting and self.slots.available and len(skipped) < MAX_SKIPPED:
            sequence = self.waiting.first()
            try:
                by = sequence.blocked_by() | (blocked & sequence.states.keys())
                admitted = not by and self._admit_one(sequence)
            except Exception as error:
                self.fail(sequence, "slot", error)
                continue
            if by:
                blocked |= by
                self.waiting.remove(sequence)
                skipped.append(sequence)
            elif not admitted:
                break
        for sequence in skipped:
            self.waiting.add(sequence)

    def _admit_one(self, sequence: Sequence) -> bool:
        """Give the first waiting request a slot; False if it has to wait."""
        if sequence.waits_for_leader:
            return False
        pages = self.device.open(sequence)
        if pages is None:
            return False
        return self._reserved(sequence, pages)

    def _reserved(self, sequence: Sequence, pages: Reservation) -> bool:
        """Reserve pages for the whole prompt; False if there are too few."""
        # One page of headroom per running request, or admission would be undone by preemption.
        headroom = len(self._active_in(pages.pool))
        # Include the first sampled token's page: drafters may look one token ahead.
        tokens = min(len(sequence.tokens) + 1, sequence.max_length)
        need = pages_for(tokens) - len(pages.entries)
        if need + headroom > pages.pool.available:
            pages.release()
            return False
        pages.fetch()
        pages.reserve(tokens)
        self._start(sequence, pages)
        return True

    def _active_in(self, pool: PagePool) -> list[Sequence]:
        """Requests that hold pages of a pool."""
        return [each for each in self.active if each.pages is not None and each.pages.pool is pool]

    def _start(self, sequence: Sequence, pages: Reservation) -> None:
        request, tokens, held = sequence.request, sequence.tokens, pages.pages
        try:
            sequence.admitted()
            slot = self.slots.claim(request, tokens, sequence.max_length, held, sequence.slot_values)
            try:
                most = request.params.max_drafts
                self.progress.begin(slot, sequence.order, len(tokens), sequence.max_length, most, len(held))
            except Exception:
                self.slots.free(slot)
                raise
        except Exception:
            sequence.released()
            pages.release()
            raise
        self.waiting.take()
        sequence.slot, sequence.pages, sequence.extended = slot, pages, pages.cached_tokens
        self.device.begin(sequence, pages)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = pages.cached_tokens
            sequence.queued_seconds = time.monotonic() - sequence.added
            self.prefix_queries += len(tokens)
            self.prefix_hits += pages.cached_tokens
            self.started.append(sequence.request_id)
        self.extending.append(sequence)
        self.extending.sort(key=self.waiting.rank)

    def _feature_pass(self, budget: int) -> FeaturePass | None:
        """Return a pre-pass that a feature needs before a prompt pass of at most ``budget`` tokens; None if none
        does.
        """
        feature_rows: dict[Feature, list[Row]] = {}
        prompts = self.extending[: self.max_extend_rows]
        if not any(sequence.states for sequence in prompts):
            return None
        for index, sequence in enumerate(prompts):
            start = sequence.extended
            end = min(len(sequence.tokens), start + budget)
            for feature, state in sequence.states.items():
                feature_rows.setdefault(feature, []).append(Row(index, state, start, end))
            budget -= end - start
        room = self.budget.room(self.running, self._pass_ms)
        for feature, rows in feature_rows.items():
            if (pre_pass := self._pre_pass(feature, [row for row in rows if row.start < row.end], room)) is not None:
                self.budget.prepared(self._pass_ms(pre_pass.key))
                return FeaturePass(pre_pass)
        return None

    def _pre_pass(self, feature: Feature, rows: list[Row], room: Room) -> PrePass | None:
        """Return the pre-pass that the feature needs before these prompts can go on. If it fails, try them one by
        one.
        """
        try:
            return feature.pre_pass(rows, room)
        except Exception as error:
            if is_engine_error(error):
                raise
        owners = {id(state): sequence for sequence in self.extending for state in sequence.states.values()}
        for row in rows:
            try:
                if (pre_pass := feature.pre_pass([row], room)) is not None:
                    return pre_pass
            except Exception as error:
                self.fail(owners[id(row.state)], "batch", error)
        return None

    def _with_decodes(self, budget: int) -> tuple[int, Rows]:
        """Return the most prompt tokens of the next prompt pass, and the running requests that decode in it."""
        prompts = self.extending[: self.max_extend_rows]
        fitting = partial(self.budget.tokens, self.running, prompts)
        if self.mixing is not None and (tokens := self.mixing.prompt_tokens(self.running, prompts, fitting)):
            with suppress(_Wait):
                return tokens, self._with_pages(self.running.rows, self.widths.plain)
        return self._filling(budget, 0) if self.running and tokens_left(prompts) > budget else budget, NO_ROWS

    def _next_extend(self, budget: int, decodes: Rows) -> Extend | None:
        """Return a prompt pass of at most ``budget`` tokens in which ``decodes`` decode; None if no prompt can go on
        yet.
        """
        chunks, waited, capacity = [], bool(self.running), self.budget.most
        for sequence in [s for s in self.extending if not s.awaits_pages][: self.max_extend_rows]:
            if budget <= 0:
                break
            start, total = sequence.extended, len(sequence.tokens)
            end = min(total, start + budget)
            if sequence.pages is not None:
                end = sequence.pages.chunk_end(start, end)
            try:
                least = sequence.least_end()
                if end < least <= min(total, start + capacity):
                    end = least  # more than the budget, where a smaller chunk would never be enough
                end = sequence.reach(end)
            except Exception as error:
                self.fail(sequence, "batch", error)
                continue
            if end <= start:
                continue
            chunks.append(Chunk(sequence, start, end, last=end == total))
            budget -= end - start
            capacity -= end - start
            sequence.extended = end
            self.waiting.served(sequence)
        if not chunks:
            return None
        growth = self._growth(decodes, self.widths.plain) if decodes else {}
        for chunk in chunks:
            if chunk.last:
                self.extending.remove(chunk.sequence)
                self.running.append(chunk.sequence)
        self.device.extending(chunks)
        decode_rows = self.mixing.decode_capacity(len(decodes)) if self.mixing is not None and decodes else 0
        work = Extend(chunks, budget <= 0, decodes, growth, decode_rows, waited)
        self.progress.launched(work.committing.slots)
        return work

    def _next_host_drafted(self) -> Round | Verify | None:
        """Next pass for requests whose drafts the host reads. None until the previous pass has been read."""
        if self._drafting is not None:
            return None
        if (work := self._take_verify()) is not None:
            return work
        rows = self.running.host_drafted
        return None if self._unread(rows) else self._next_round(rows, True)

    def _take_verify(self) -> Verify | None:
        """Second pass of the round whose drafts are read; None if there is none, or all its requests ended."""
        work, self._verify = self._verify, None
        if work is None or not self.progress.owned(work.round.rows.slots, work.round.rows.owners).any():
            return None
        return work

    def _unread(self, rows: Rows) -> bool:
        """True if any of these rows has unread output."""
        return bool(self.progress.in_flight[rows.slots].any())

    def _next_round(self, rows: Rows, reads_drafts: bool) -> Round | None:
        """Return a round of these, which are all running requests of one kind. Raises _Wait."""
        width = self.widths.host_drafted if reads_drafts else self.widths.plain
        ready = self._with_pages(rows, width)
        if not ready:
            return None
        if reads_drafts or rows is self.running.rows:
            self.budget.round_launched()  # if both kinds run, one budget covers a round of each
        growth = self._growth(ready, width)
        self.progress.launched(ready.slots)
        return Round(ready, growth, self.widths.plain - 1, reads_drafts=reads_drafts)

    def _with_pages(self, rows: Rows, width: int) -> Rows:
        """Return the rows that may continue, with pages for the worst case of ``width`` tokens. Raises _Wait."""
        ready, preemptions = rows.where(self.progress.going_on(rows.slots)), self.preemptions
        worst = self.progress.worst(ready.slots, width)
        for row in self.progress.outgrown(ready.slots, worst):
            self._grow(ready.sequences[row], int(worst[row]))
        if self.preemptions == preemptions:
            return ready
        return ready.where(self.progress.owned(ready.slots, ready.owners))  # growing one may have preempted another

    def _growth(self, rows: Rows, width: int) -> dict[int, list[RowGrowth]]:
        """Return the growth of page tables by window group, for a pass that commits up to ``width`` tokens of each
        row.
        """
        progress = self.progress
        worst = progress.worst(rows.slots, width)
        growth: dict[int, list[RowGrowth]] = {window_group: [] for window_group in (ALL, *self.pool.windows)}
        for row in progress.outgrown(rows.slots, worst):
            sequence = rows.sequences[row]
            assert sequence.pages is not None
            first = int(progress.mapped[sequence.slot])
            pages = sequence.pages.pages_from(first)
            progress.mapped[sequence.slot] += len(pages)
            growth[ALL].append((row, first, pages))
        if self.pool.windows:
            for row, (sequence, tokens) in enumerate(zip(rows.sequences, worst.tolist(), strict=True)):
                for window_group, (first, pages) in self.device.grow(sequence, tokens).items():
                    if pages:
                        growth[window_group].append((row, first, pages))
        return growth

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Reserve pages for ``tokens``, the worst case of one more round.

        Without a pass in flight, preempt the last request until it fits; with one in flight, raise _Wait.
        """
        while sequence.pages is not None:
            try:
                sequence.pages.reserve(tokens)
                return
            except OutOfPages:
                if self._unread(self.running.rows):
                    raise _Wait from None
                self._preempt(max(self._active_in(sequence.pages.pool), key=self.waiting.rank))

    def recompute(self) -> int:
        """Queue all requests that hold a slot again, without keeping their pages. Return their number.

        No pass may be in flight. Called before the weights change or memory is freed: the requests keep their tokens.
        Waits for pages on their way from host memory, whose tree nodes are locked until they arrive.
        """
        self._drafting = self._verify = None
        active = self.active
        for sequence in active:
            self._preempt(sequence, keep=False)
        self.device.finish_transfers()
        return len(active)

    def _preempt(self, sequence: Sequence, keep: bool = True) -> None:
        """Free a running request's slot and pages (:meth:`_release`), and queue it again."""
        queue = self._queue_of(sequence)
        self._release(sequence, keep)
        queue.remove(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)
