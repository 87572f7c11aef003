"""Page ownership as transactions: reserve, commit, release.

::

    page 0            padding: takes the writes of padding tokens, owned by no request
    free              in the pool's free list
    reserved          in one Reservation: a request's uncommitted or private pages
    cached            in the prefix tree; locked while a Reservation's page table names it

Every page is in exactly one of these; :meth:`PagePool.check_integrity` proves it. The same holds for the pages of each
window group (``unisono/kv/window_pages.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.kv.offload.offloader import FetchPlan, Offload
from unisono.kv.prefix_tree import Node, PrefixTree, Token
from unisono.kv.snapshots import SnapshotPool
from unisono.kv.specs import PADDING_PAGE, PAGE_SIZE, SNAPSHOTS
from unisono.kv.window_pages import WindowPages, WindowPool


class OutOfPages(Exception):
    """Neither free nor evictable pages are left for a reservation."""


def pages_for(tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // PAGE_SIZE)


@dataclass(slots=True)
class _Entry:
    """A page in a request's page table and, once committed, the tree node of its tokens.

    This entry locks the node. The node's page is this page, unless another request committed the same tokens first:
    then the page stays private, and the lock keeps the path to the node alive.
    """

    page: int
    node: Node | None = None

    @property
    def private(self) -> bool:
        return self.node is None or self.node.page != self.page


@dataclass(eq=False)
class Reservation:
    """The pages of one request, in order of position. Made by :meth:`PagePool.open`.

    cached_tokens: length of the prefix found in the tree.
    snapshot: id of the recurrent snapshot after that prefix; -1 for none.
    windows: the request's pages by window group.
    branch: tokens after which the prompt leaves the tree. It exceeds ``cached_tokens`` if the tree lacks a snapshot
        there, which later prompts will need; otherwise 0.
    branch_points: ends of whole pages where other prompts may branch, ascending; see ``unisono/kv/branch_points.py``.
    plan: the transfer from host memory that is possible, until :meth:`fetch` starts it.
    ticket: the last transfer to wait for.
    """

    pool: PagePool
    cached_tokens: int = 0
    snapshot: int = -1
    entries: list[_Entry] = field(default_factory=list)
    windows: dict[int, WindowPages] = field(default_factory=dict)
    branch: int = 0
    branch_points: tuple[int, ...] = ()
    plan: FetchPlan | None = None
    ticket: int = 0
    _inserted: int = 0  # leading pages offered to the tree
    _last: Node | None = None  # tree node of the inserted prefix

    @property
    def pages(self) -> list[int]:
        """The pages of window group ALL."""
        return [e.page for e in self.entries]

    @property
    def in_transfer(self) -> bool:
        """True while pages or snapshots of the cached prefix are in transfer from host memory."""
        return self.pool.offload is not None and self.ticket > self.pool.offload.arrived

    @property
    def snapshot_in_transfer(self) -> bool:
        """True while the snapshot that the request begins with is in transfer from host memory."""
        return self.pool.snapshots is not None and self._last in self.pool.snapshots.in_transfer

    def fetch(self) -> None:
        """Start the transfer of :attr:`plan`, right after the reservation was opened.

        Enough pages must be available. From then on the prefix counts as cached. :attr:`in_transfer` is True until it
        arrives.
        """
        plan, self.plan = self.plan, None
        if plan is not None and self.pool.offload is not None:
            path = self.pool.offload.fetch(self.pool, plan)
            self.begin(path)
            self.branch = 0

    def begin(self, path: list[Node]) -> None:
        """Begin after the cached prefix of these nodes, which are already locked for this reservation."""
        self.entries = [_Entry(node.page, node) for node in path]
        self.cached_tokens, self._inserted = len(path) * PAGE_SIZE, len(path)
        self.ticket = max((node.ticket for node in path), default=0)
        for window in self.windows.values():
            window.open(path)
        if path:
            last = self._last = path[-1]
            last.complete = True  # the prompt pass first computes the missing state
            if self.pool.snapshots is not None:
                self.snapshot = last.snapshot
                self.pool.snapshots.touch(last)

    def chunk_end(self, start: int, end: int) -> int:
        """Return the end of a prompt chunk from ``start``: ``end``, or an earlier position that needs a snapshot, since
        snapshots are taken where chunks end."""
        return min((at for at in (self.branch, *self.branch_points) if start < at < end), default=end)

    @property
    def committed_tokens(self) -> int:
        """Leading tokens whose pages were offered to the prefix tree."""
        return self._inserted * PAGE_SIZE

    def nodes(self) -> list[Node]:
        """Tree nodes of the leading pages offered to it."""
        return [entry.node for entry in self.entries[: self._inserted] if entry.node is not None]

    def pages_from(self, column: int) -> list[int]:
        """Pages of window group ALL, from a page-table column on."""
        return [e.page for e in self.entries[column:]]

    def reserve(self, tokens: int) -> list[int]:
        """Hold pages for ``tokens`` tokens in total and return the added pages. Raises OutOfPages and adds none if they
        do not fit."""
        added = self.pool.take(pages_for(tokens) - len(self.entries))
        self.entries.extend(_Entry(page) for page in added)
        return added

    def commit(self, tokens: Sequence[Token], complete: int | None = None) -> None:
        """Offer the full pages of ``tokens``, whose state is written, to the prefix tree.

        complete: leading tokens whose state is complete; all by default. A drafter may compute a token's state one
            round after the target, so the last token of a request's last round is incomplete. A request that continues
            from such a page completes it; a request that has the same tokens complete replaces it.
        """
        complete = len(tokens) if complete is None else complete
        for i in range(self._inserted, len(tokens) // PAGE_SIZE):
            entry, end = self.entries[i], (i + 1) * PAGE_SIZE
            key = tuple(tokens[end - PAGE_SIZE : end])
            self._last = entry.node = node = self.pool.tree.insert(self._last, key, entry.page, end <= complete)
            if end <= complete and not node.complete and not node.locks:
                self.pool.free.append(node.page)
                node.page, node.complete = entry.page, True
            self.pool.tree.lock(node)
            for window in self.windows.values():
                window.commit(i, node)
            self._inserted = i + 1

    def node_after(self, tokens: int) -> Node | None:
        """Tree node that ends with the request's ``tokens``-th token; None if the tree has none."""
        column = tokens // PAGE_SIZE - 1
        whole = tokens > 0 and tokens % PAGE_SIZE == 0 and column < self._inserted
        return self.entries[column].node if whole else None

    def release(self) -> None:
        """Return everything: free private pages, unlock the tree's pages (leaves first)."""
        for window in self.windows.values():
            window.release()
        for entry in reversed(self.entries):
            if entry.node is not None:
                self.pool.tree.unlock(entry.node)
            if entry.private:
                self.pool.free.append(entry.page)
        self.entries.clear()
        self.pool.open_reservations.discard(self)


class PagePool:
    """All pages, and the prefix tree that keeps committed pages after their request ends.

    num_pages: pages of window group ALL.
    windows: number of pages by window group.
    snapshots: number of recurrent snapshots the tree may keep; None if the model has no recurrent state, so that a
        cached prefix needs no snapshot.
    hits: False to start every reservation without cached pages.
    first: id of the first page, the padding page.
    """

    def __init__(
        self,
        num_pages: int,
        windows: Mapping[int, int] | None = None,
        snapshots: int | None = None,
        hits: bool = True,
        offload: Offload | None = None,
        first: int = 0,
    ) -> None:
        self.num_pages, self.hits, self.offload, self.first = num_pages, hits, offload, first
        self.free = [first + p for p in range(num_pages - 1, -1, -1) if p != PADDING_PAGE]
        self.tree = PrefixTree(self._forget)
        self.windows = {
            window_group: WindowPool(window_group, count, self._window_evicted)
            for window_group, count in (windows or {}).items()
        }
        self.snapshots = None if snapshots is None else SnapshotPool(snapshots, self._snapshot_evicted)
        self.open_reservations: set[Reservation] = set()

    @property
    def available(self) -> int:
        """Pages a reservation can get: free pages and pages the tree can evict."""
        return len(self.free) + self.tree.unlocked

    @property
    def pools(self) -> Sequence[PagePool]:
        """The pools in which a request's pages can lie."""
        return (self,)

    @property
    def cached_pages(self) -> int:
        """Pages in the prefix tree."""
        return self.tree.pages

    @property
    def usage(self) -> float:
        """Fraction of pages held by requests, 0 … 1."""
        return 1 - self.available / max(1, self.num_pages - 1)

    def open(self, tokens: Sequence[Token], quotas: Mapping[int, int] | None = None) -> Reservation:
        """Open a reservation that begins with the longest usable prefix of ``tokens`` (whole pages, locked).

        If host memory holds more of the prefix, the reservation has a plan and begins once that is fetched. The last
        token is never served from the cache, because its logits are needed.

        quotas: by window group, the most pages the request needs at one time; see :meth:`has_quotas`.
        """
        tokens = tokens[: len(tokens) - 1]
        known = self.tree.match(tokens) if self.hits else []
        path = self.usable(known)
        windows = {window_group: WindowPages(pool, 0) for window_group, pool in self.windows.items()}
        for window_group, window in windows.items():
            window.set_quota((quotas or {}).get(window_group, 0))
        reservation = Reservation(self, windows=windows)
        plan = self.offload.plan(self, tokens, known, len(path)) if self.offload is not None and self.hits else None
        for node in plan.path if plan is not None else path:
            self.tree.lock(node)
        if plan is not None:
            reservation.plan, reservation.entries = plan, [_Entry(node.page, node) for node in plan.path]
        else:
            reservation.begin(path)
            if self.snapshots is not None and len(known) > len(path):
                reservation.branch = len(known) * PAGE_SIZE
        self.open_reservations.add(reservation)
        return reservation

    def has_quotas(self, quotas: Mapping[int, int]) -> bool:
        """Return True if every window group can promise a request this many pages at one time."""
        return all(self.windows[window_group].unpromised >= pages for window_group, pages in quotas.items())

    def take(self, count: int) -> list[int]:
        """Remove ``count`` pages from the free list, evicting from the tree as needed; all or nothing."""
        if count <= 0:
            return []
        if count > self.available:
            raise OutOfPages(f"{count} pages requested, {self.available} available of {self.num_pages - 1}")
        if count > len(self.free):
            self.free.extend(self.tree.evict(count - len(self.free)))
        return [self.free.pop() for _ in range(count)]

    def drop_cached(self) -> int:
        """Evict every unlocked page from the prefix tree and forget the copies in host memory. Return the number of
        freed device pages."""
        if self.offload is not None:
            self.offload.forget()
        freed = self.tree.evict(self.tree.unlocked)
        self.free.extend(freed)
        if self.offload is not None:
            self.offload.discards = False
        return len(freed)

    def flush(self) -> None:
        """Copy evicted parts to host memory before anything overwrites them."""
        if self.offload is not None:
            self.offload.flush()

    def usable(self, path: list[Node]) -> list[Node]:
        """The longest prefix of a path after which every kind of state can continue."""
        pages = len(path)
        while pages and not (
            (self.snapshots is None or path[pages - 1].snapshot >= 0)
            and all(pool.usable(path, pages) for pool in self.windows.values())
        ):
            pages -= 1
        return path[:pages]

    def _window_evicted(self, node: Node, window_group: int) -> None:
        if self.offload is not None:
            self.offload.note(node, window_group, node.windows[window_group].page)

    def _snapshot_evicted(self, node: Node) -> None:
        if self.offload is not None:
            self.offload.note(node, SNAPSHOTS, node.snapshot)

    def _forget(self, node: Node) -> None:
        if self.offload is not None:
            self.offload.note_all(node)
        for pool in self.windows.values():
            pool.forget(node)
        if self.snapshots is not None:
            self.snapshots.forget(node)

    def check_integrity(self) -> None:
        """Prove that every page has one owner and every lock a holder. Raises RuntimeError naming the breach."""
        nodes = list(self.tree.nodes())
        entries = [e for r in self.open_reservations for e in r.entries]
        private = [e.page for e in entries if e.private]
        _check_owners(
            self.num_pages,
            {"the free list": self.free, "a reservation": private, "the prefix tree": [n.page for n in nodes]},
            self.first,
        )
        transfers = self.offload.transfers if self.offload is not None else []
        holders = [e.node for e in entries] + [node for transfer in transfers for node in transfer.nodes]
        _check_locks({n: n.locks for n in nodes}, holders)
        unlocked = sum(node.locks == 0 for node in nodes)
        if (self.tree.pages, self.tree.unlocked) != (len(nodes), unlocked):
            raise RuntimeError(f"tree counts {self.tree.pages}/{self.tree.unlocked}, holds {len(nodes)}/{unlocked}")
        for window_group, pool in self.windows.items():
            held = {n: n.windows[window_group] for n in nodes if window_group in n.windows}
            windows = [r.windows[window_group] for r in self.open_reservations]
            in_use = [entry for window in windows for entry in window.entries]
            own = [page for page, node in in_use if node is None]
            owners = {
                "the free list": pool.free,
                "a reservation": own,
                "the prefix tree": [h.page for h in held.values()],
            }
            _check_owners(pool.num_pages, owners)
            coming = [node for transfer in transfers for node in transfer.windows.get(window_group, ())]
            _check_locks({n: h.locks for n, h in held.items()}, [*(node for _, node in in_use), *coming])
            if pool.unpromised + sum(w.quota for w in windows) + len(coming) != pool.num_pages - 1:
                raise RuntimeError(f"quotas of window {window_group} do not add up: {pool.unpromised} are left")


def _check_owners(num_pages: int, claims: Mapping[str, Iterable[int]], start: int = 0) -> None:
    owners = ["padding" if p == PADDING_PAGE else "" for p in range(num_pages)]
    for owner, pages in claims.items():
        for page in pages:
            if owners[page - start]:
                raise RuntimeError(f"page {page} is owned by both {owners[page - start]} and {owner}")
            owners[page - start] = owner
    lost = [p for p, owner in enumerate(owners) if not owner]
    if lost:
        raise RuntimeError(f"pages without an owner: {lost}")


def _check_locks(locks: Mapping[Node, int], holders: Iterable[Node | None]) -> None:
    left = dict(locks)
    for node in holders:
        if node is not None:
            if node not in left:
                raise RuntimeError(f"page {node.page} has locks, and its node is not in the tree")
            left[node] -= 1
    wrong = next((node for node, count in left.items() if count), None)
    if wrong is not None:
        raise RuntimeError(f"page {wrong.page} has {locks[wrong]} locks, but not as many holders")
