"""Pages of window groups: a request keeps the pages its attention window still reaches and frees those before.

A request is admitted with a quota of pages, its worst case, so that it never runs out of them later. Pages taken over
by the prefix tree stay in their nodes until the pool needs them, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.kv.prefix_tree import Node, WindowPage
from unisono.kv.specs import PADDING_PAGE, PAGE_SIZE


def first_live_column(position: int, window: int) -> int:
    """First page-table column readable by the token at ``position``, for a window of ``window`` positions."""
    return max(0, position - window + 1) // PAGE_SIZE


class WindowPool:
    """All pages of one window group. on_evict: called with the node of an evicted page, before it is removed."""

    def __init__(
        self, window_group: int, num_pages: int, on_evict: Callable[[Node, int], None] = lambda node, window_group: None
    ) -> None:
        self.window_group, self.num_pages, self._on_evict = window_group, num_pages, on_evict
        self.free = [p for p in range(num_pages - 1, -1, -1) if p != PADDING_PAGE]
        self.unpromised = num_pages - 1  # pages outside every request's quota
        self._evictable: OrderedDict[Node, None] = OrderedDict()  # unlocked pages' nodes, least recently used first

    def quota(self, tokens: int, max_model_len: int) -> int:
        """Most pages a request needs at one time if its passes reach ``tokens`` beyond the position known to the
        host."""
        longest = -(-max_model_len // PAGE_SIZE)
        return min(longest, (self.window_group + tokens) // PAGE_SIZE + 3)

    @property
    def has_spare(self) -> bool:
        """True if a page can be taken beyond all quotas."""
        return self.unpromised > 0 and bool(self.free or self._evictable)

    def take(self) -> int:
        """Return a free page, or evict the least recently used node's page."""
        if not self.free:
            node, _ = self._evictable.popitem(last=False)
            self._on_evict(node, self.window_group)
            self.free.append(node.windows.pop(self.window_group).page)
        return self.free.pop()

    def offer(self, node: Node, page: int) -> bool:
        """Hand a request's page over to the node, locked by that request. Return False if the node already has one."""
        if self.window_group in node.windows:
            return False
        node.windows[self.window_group] = WindowPage(page, locks=1)
        return True

    def lock(self, node: Node) -> int:
        """Lock the node's page and return it."""
        held = node.windows[self.window_group]
        held.locks += 1
        self._evictable.pop(node, None)
        return held.page

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock` or :meth:`offer`."""
        held = node.windows[self.window_group]
        held.locks -= 1
        if not held.locks:
            self._evictable[node] = None

    def forget(self, node: Node) -> None:
        """Free the page of a node that left the tree."""
        held = node.windows.pop(self.window_group, None)
        if held is not None:
            self._evictable.pop(node, None)
            self.free.append(held.page)

    def usable(self, path: Sequence[Node], pages: int) -> bool:
        """Return True if a request can continue after the first ``pages`` nodes of a path: every page its window
        reaches is present."""
        first = first_live_column(pages * PAGE_SIZE, self.window_group)
        return all(self.window_group in node.windows for node in path[first:pages])


@dataclass(eq=False)
class WindowPages:
    """One request's pages of one window group, for the columns from ``first`` on, in order.

    An entry is (page, node). node is None if the request owns the page; otherwise the tree owns it and it is locked.
    """

    pool: WindowPool
    quota: int
    first: int = 0
    entries: deque[tuple[int, Node | None]] = field(default_factory=deque)

    @property
    def end(self) -> int:
        """Column after the last one held."""
        return self.first + len(self.entries)

    def open(self, path: Sequence[Node]) -> None:
        """Begin after a cached prefix: lock the pages that the next token's window reaches."""
        self.first = first_live_column(len(path) * PAGE_SIZE, self.pool.window_group)
        self.entries.extend((self.pool.lock(node), node) for node in path[self.first :])

    def grow(self, tokens: int) -> tuple[int, list[int]]:
        """Hold pages for ``tokens`` tokens in total. Return (first new column, added pages)."""
        start = self.end
        added = [self.pool.take() for _ in range(start, -(-tokens // PAGE_SIZE))]
        self.entries.extend((page, None) for page in added)
        return start, added

    def commit(self, column: int, node: Node) -> None:
        """Offer the request's page of this column, if still held, to the tree node with its tokens."""
        at = column - self.first
        if 0 <= at < len(self.entries):
            page, owner = self.entries[at]
            if owner is None and self.pool.offer(node, page):
                self.entries[at] = page, node

    def free_before(self, position: int) -> None:
        """Free the pages that tokens from the page of ``position`` on cannot read.

        The bound is the page start, not ``position``: a cached prefix ends with a page, and a request that continues
        from there reads as far back.
        """
        live = first_live_column(position - position % PAGE_SIZE, self.pool.window_group)
        while self.entries and self.first < live:
            self._give_back(*self.entries.popleft())
            self.first += 1

    def set_quota(self, pages: int) -> None:
        """Change the number of pages the request may need at one time."""
        self.pool.unpromised += self.quota - pages
        self.quota = pages

    def release(self) -> None:
        """Return all pages and the quota."""
        while self.entries:
            self._give_back(*self.entries.pop())
        self.set_quota(0)

    def _give_back(self, page: int, node: Node | None) -> None:
        if node is None:
            self.pool.free.append(page)
        else:
            self.pool.unlock(node)
