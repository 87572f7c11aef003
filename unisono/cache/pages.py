"""Page ownership as transactions: reserve, commit, release.

::

    page 0            padding: takes the writes of padding tokens, owned by nobody
    free              in the pool's free list
    reserved          in one Reservation: a request's uncommitted or private pages
    cached            in the radix tree; locked while a Reservation's page table names it

Every page is in exactly one of these; :meth:`PagePool.check_integrity` proves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.cache.kv import PADDING_PAGE, PAGE_SIZE
from unisono.cache.radix import Node, RadixCache, Token


class OutOfPages(Exception):
    """Neither free nor evictable pages are left for a reservation."""


def pages_for(tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // PAGE_SIZE)


@dataclass(slots=True)
class _Entry:
    """A page in a request's page table, and the tree node that spells its tokens, once committed.

    The node is locked by this entry. Its page is this one, unless another request committed the same
    tokens first: then the page stays private, and the lock keeps the path below the node evictable last.
    """

    page: int
    node: Node | None = None

    @property
    def private(self) -> bool:
        return self.node is None or self.node.page != self.page


@dataclass(eq=False)
class Reservation:
    """The pages of one request, in order of position. Made by :meth:`PagePool.open`."""

    pool: PagePool
    cached_tokens: int = 0
    entries: list[_Entry] = field(default_factory=list)
    _inserted: int = 0  # leading pages that the tree has seen
    _tail: Node | None = None  # tree node that spells the inserted prefix

    @property
    def pages(self) -> list[int]:
        return [e.page for e in self.entries]

    def reserve(self, tokens: int) -> list[int]:
        """Hold pages for ``tokens`` tokens in all; returns the pages added. Raises OutOfPages, adding none."""
        added = self.pool.take(pages_for(tokens) - len(self.entries))
        self.entries.extend(_Entry(page) for page in added)
        return added

    def commit(self, tokens: Sequence[Token], settled: bool = True) -> None:
        """Offer to the prefix tree the full pages of ``tokens``: those whose keys and values are written.

        Not ``settled``: the last of them were written by a round that no other follows, and a drafter may compute a
        token's keys one round later than the target. Whoever goes on from such a page completes it; whoever has the
        same tokens and did go on replaces it, lest it be passed over for good.
        """
        for i in range(self._inserted, len(tokens) // PAGE_SIZE):
            entry, end = self.entries[i], (i + 1) * PAGE_SIZE
            known = settled or end < len(tokens)
            key = tuple(tokens[end - PAGE_SIZE : end])
            self._tail = entry.node = node = self.pool.radix.insert(self._tail, key, entry.page, known)
            if known and not node.settled and not node.locks:
                self.pool.free.append(node.page)
                node.page, node.settled = entry.page, True
            self.pool.radix.lock(entry.node)
            self._inserted = i + 1

    def release(self) -> None:
        """Give everything back: private pages become free, the tree's are unlocked (leaves first)."""
        for entry in reversed(self.entries):
            if entry.node is not None:
                self.pool.radix.unlock(entry.node)
            if entry.private:
                self.pool.free.append(entry.page)
        self.entries.clear()
        self.pool.open_reservations.discard(self)


class PagePool:
    """All pages, and the prefix tree that keeps committed ones after their request ends."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = [p for p in range(num_pages - 1, -1, -1) if p != PADDING_PAGE]
        self.radix = RadixCache()
        self.open_reservations: set[Reservation] = set()

    @property
    def available(self) -> int:
        """Pages that a reservation could get: free ones and those the tree can evict."""
        return len(self.free) + self.radix.unlocked

    @property
    def usage(self) -> float:
        """Share of pages held by requests, 0 … 1."""
        return 1 - self.available / max(1, self.num_pages - 1)

    def open(self, tokens: Sequence[Token]) -> Reservation:
        """A reservation that begins with the longest cached prefix of ``tokens`` (whole pages, locked).

        The last token is never served from the cache: its logits are needed.
        """
        path = self.radix.match(tokens[: len(tokens) - 1])
        for node in path:
            self.radix.lock(node)
        if path:
            path[-1].settled = True  # the prompt pass begins with what is missing there
        entries = [_Entry(node.page, node) for node in path]
        tail = path[-1] if path else None
        reservation = Reservation(self, len(path) * PAGE_SIZE, entries, len(path), tail)
        self.open_reservations.add(reservation)
        return reservation

    def take(self, count: int) -> list[int]:
        """Remove ``count`` pages from the free list, evicting from the tree as needed; all or nothing."""
        if count <= 0:
            return []
        if count > self.available:
            raise OutOfPages(f"{count} pages asked for, {self.available} available of {self.num_pages - 1}")
        if count > len(self.free):
            self.free.extend(self.radix.evict(count - len(self.free)))
        return [self.free.pop() for _ in range(count)]

    def drop_cached(self) -> int:
        """Evict every unlocked page from the prefix tree; returns how many."""
        freed = self.radix.evict(self.radix.unlocked)
        self.free.extend(freed)
        return len(freed)

    def check_integrity(self) -> None:
        """Prove that every page has one owner and every lock a holder. Raises RuntimeError naming the breach."""
        owners = ["padding" if p == PADDING_PAGE else "" for p in range(self.num_pages)]
        locks: dict[Node, int] = {}

        def claim(page: int, owner: str) -> None:
            if owners[page]:
                raise RuntimeError(f"page {page} is owned by both {owners[page]} and {owner}")
            owners[page] = owner

        for page in self.free:
            claim(page, "the free list")
        for reservation in self.open_reservations:
            for entry in reservation.entries:
                if entry.private:
                    claim(entry.page, "a reservation")
                if entry.node is not None:
                    locks[entry.node] = locks.get(entry.node, 0) + 1
        nodes = list(self.radix.nodes())
        for node in nodes:
            claim(node.page, "the prefix tree")
            if node.locks != locks.pop(node, 0):
                raise RuntimeError(f"page {node.page} has {node.locks} locks, but not as many holders")
        lost = [p for p, owner in enumerate(owners) if not owner]
        if lost or locks:
            raise RuntimeError(f"pages without an owner: {lost}; locked nodes outside the tree: {len(locks)}")
        unlocked = sum(node.locks == 0 for node in nodes)
        if (self.radix.pages, self.radix.unlocked) != (len(nodes), unlocked):
            raise RuntimeError(f"tree counts {self.radix.pages}/{self.radix.unlocked}, holds {len(nodes)}/{unlocked}")
