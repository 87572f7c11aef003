"""Page tables of window groups and recurrent state on the device, kept in step with the requests' pages.

The scheduler calls it at each transition of a request; it sends the worker's commands. It does nothing for a model
whose state all lies in window group ALL and that has no recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.engine.sequence import Chunk, Growth
from unisono.engine.sequence import Sequence as Request
from unisono.engine.worker.commands import LoadSnapshot, ResetRecurrent, SaveSnapshot, WritePages
from unisono.engine.worker.progress import Progress
from unisono.kv.branch_points import NO_POINTS, BranchPoints
from unisono.kv.pages import PagePool, Reservation
from unisono.kv.specs import PAGE_SIZE
from unisono.kv.window_pages import WindowPool
from unisono.types import FinishReason


@dataclass(frozen=True)
class StateSizes:
    """Sizes that page quotas depend on, in tokens: of a round, of a prompt pass, of a request."""

    width: int
    max_batched_tokens: int
    max_model_len: int

    def quota(self, windows: Mapping[int, WindowPool], prompt: bool) -> dict[int, int]:
        """Return the pages of each window group that a request may need at once, during its prompt and after.

        Two passes may be in flight beyond the host's knowledge.
        """
        tokens = 2 * (self.max_batched_tokens if prompt else self.width)
        return {window_group: window.quota(tokens, self.max_model_len) for window_group, window in windows.items()}


class DeviceState:
    """Opens requests' pages with the longest cached prefix; sends commands for window pages and recurrent state.

    ``send`` executes a command. branch_points: where prompts leave snapshots.
    """

    def __init__(
        self, pool: PagePool, sizes: StateSizes, send: Callable[..., object], branch_points: BranchPoints = NO_POINTS
    ) -> None:
        self._pool, self._sizes, self._send, self._branch_points = pool, sizes, send, branch_points
        self._in_transfer: list[Request] = []  # requests whose first snapshot is on its way from host memory
        self._unsaved: Sequence[Chunk] = ()  # chunks of the last prompt pass; their snapshots are due

    def open(self, request: Request) -> Reservation | None:
        """Look up the prefix cache (``PagePool.open``): the request's pages with the longest usable prefix.

        None if its window quotas do not fit yet.
        """
        quotas = self._sizes.quota(self._pool.windows, prompt=True)
        if not self._pool.has_quotas(quotas):
            return None
        # A cached prefix has no outputs; the last token is never cached.
        pages = self._pool.open(request.keys[: request.reusable + 1], quotas)
        if self._pool.snapshots is not None and self._pool.hits and not pages.branch and pages.plan is None:
            pages.branch_points = self._branch_points.of(request.tokens, pages.cached_tokens)
        return pages

    def begin(self, request: Request, pages: Reservation) -> None:
        """Start a request in its slot: write the window pages of its cached prefix, load or reset its recurrent
        state.
        """
        for window_group, window in pages.windows.items():
            self._write(request, window_group, (window.first, [page for page, _ in window.entries]))
        if self._pool.snapshots is None:
            return
        if pages.snapshot_in_transfer:
            self._in_transfer.append(request)
        elif pages.snapshot >= 0:
            self._send(LoadSnapshot(request.slot, pages.snapshot, pages.cached_tokens))
        else:
            self._send(ResetRecurrent(request.slot))

    def arrive(self) -> None:
        """Resume requests whose prefixes have arrived from host memory."""
        if self._pool.offload is None or not self._pool.offload.arrive(self._pool):
            return
        for request in [
            one for one in self._in_transfer if one.pages is not None and not one.pages.snapshot_in_transfer
        ]:
            assert request.pages is not None
            self._in_transfer.remove(request)
            self._send(LoadSnapshot(request.slot, request.pages.snapshot, request.pages.cached_tokens))

    def finish_transfers(self) -> None:
        """Wait until all pages on their way from host memory have arrived."""
        while self._pool.offload is not None and self._pool.offload.transfers:
            self.arrive()
            self._pool.offload.pause()

    def flush(self) -> None:
        """Flush evictions: later passes may overwrite the evicted pages."""
        self._pool.flush()

    def extending(self, chunks: Sequence[Chunk]) -> None:
        """Assign window pages to the tokens of a prompt pass that is about to be launched."""
        for chunk in chunks:
            assert chunk.sequence.pages is not None
            for window_group, window in chunk.sequence.pages.windows.items():
                self._write(chunk.sequence, window_group, window.grow(chunk.end))
        self._unsaved = chunks

    def before_pass(self) -> None:
        """Take the snapshots of the last prompt pass before another pass changes the recurrent state."""
        chunks, self._unsaved = self._unsaved, ()
        if self._pool.snapshots is None:
            return
        for chunk in chunks:
            sequence, position = chunk.sequence, _aligned(chunk.end)
            if sequence.pages is None or position <= _aligned(chunk.start):
                continue
            snapshot = self._pool.snapshots.take()
            if snapshot >= 0:
                self._pool.flush()
                self._send(SaveSnapshot(sequence.slot, snapshot))
                sequence.snapshots.append((position, snapshot))

    def prompt_committed(self, chunk: Chunk) -> None:
        """Free window pages after a prompt pass was read and its full pages are in the prefix tree."""
        sequence, pages = chunk.sequence, chunk.sequence.pages
        assert pages is not None
        while self._pool.snapshots is not None and sequence.snapshots and sequence.snapshots[0][0] <= chunk.end:
            position, snapshot = sequence.snapshots.pop(0)
            node = pages.node_after(position)
            if node is None:
                self._pool.snapshots.give_back(snapshot)
            else:
                self._pool.snapshots.attach(node, snapshot, guess=position in pages.branch_points)
        for window in pages.windows.values():
            window.free_before(chunk.end)
        if chunk.last:
            for window_group, quota in self._sizes.quota(self._pool.windows, prompt=False).items():
                pages.windows[window_group].set_quota(quota)

    def grow(self, request: Request, tokens: int) -> dict[int, Growth]:
        """Hold window pages for ``tokens`` tokens in all; return the growth of each window's page tables."""
        assert request.pages is not None
        growth = {}
        offered = request.pages.committed_tokens >= _aligned(request.extended)  # the prompt's pages, to the prefix tree
        for window_group, window in request.pages.windows.items():
            if offered:
                window.free_before(len(request.tokens) - 1)
            growth[window_group] = window.grow(tokens)
        return growth

    def end(self, request: Request, pages: Reservation, progress: Progress) -> None:
        """Save the last snapshot of a request that is about to release its pages and its slot.

        The tree has its committed pages. If the host ended the request while a pass was in flight, its recurrent state
        may be ahead, so it is not saved.
        """
        pool = self._pool.snapshots
        if pool is None:
            return
        for _, snapshot in request.snapshots:
            pool.give_back(snapshot)
        request.snapshots.clear()
        if request in self._in_transfer:
            self._in_transfer.remove(request)
        ended = request.finish in (FinishReason.STOP, FinishReason.LENGTH)  # on the device, so later passes skip it
        round_start, in_flight = int(progress.round_start[request.slot]), bool(progress.in_flight[request.slot])
        seen = _aligned(max(request.extended, round_start))  # by the recurrent state: a round's drafts do not move it
        position = max(seen, pages.committed_tokens)
        node = pages.node_after(position)
        if node is None or node.snapshot >= 0 or (in_flight and not ended):
            return
        snapshot = pool.take()
        if snapshot >= 0:
            self._pool.flush()
            self._send(SaveSnapshot(request.slot, snapshot, position if position > seen else 0))
            pool.attach(node, snapshot)

    def _write(self, request: Request, window_group: int, growth: Growth) -> None:
        column, pages = growth
        if pages:
            self._send(WritePages(request.slot, window_group, column, np.asarray(pages, dtype=np.int32)))


def _aligned(tokens: int) -> int:
    return tokens - tokens % PAGE_SIZE
