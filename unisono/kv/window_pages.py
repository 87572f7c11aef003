"""Pages of window lifetimes: a request keeps those that a window still reaches, and frees the ones before.

A request is admitted with a quota of pages, its worst case, so that it never runs out of them later. Pages that the
prefix tree took over stay in their nodes until the pool needs them, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.kv.prefix_tree import Node, WindowPage
from unisono.kv.specs import PADDING_PAGE, PAGE_SIZE


def first_live_column(position: int, lifetime: int) -> int:
    """The first page-table column that the token at ``position`` may read, with a window of ``lifetime`` positions."""
    return max(0, position - lifetime + 1) // PAGE_SIZE


class WindowPool:
    """All pages of one window lifetime. on_evict: called with a node whose page gives way, which still has it."""

    def __init__(
        self, lifetime: int, num_pages: int, on_evict: Callable[[Node, int], None] = lambda node, lifetime: None
    ) -> None:
        self.lifetime, self.num_pages, self._on_evict = lifetime, num_pages, on_evict
        self.free = [p for p in range(num_pages - 1, -1, -1) if p != PADDING_PAGE]
        self.unpromised = num_pages - 1  # pages that no request's quota holds
        self._evictable: OrderedDict[Node, None] = OrderedDict()  # unlocked pages' nodes, least recently used first

    def quota(self, tokens: int, max_model_len: int) -> int:
        """Pages that a request may need at once whose passes reach ``tokens`` beyond what the host knows."""
        longest = -(-max_model_len // PAGE_SIZE)
        return min(longest, (self.lifetime + tokens) // PAGE_SIZE + 3)

    @property
    def has_spare(self) -> bool:
        """Whether a page can be taken beyond what quotas hold."""
        return self.unpromised > 0 and bool(self.free or self._evictable)

    def take(self) -> int:
        """A free page, or the page of the node that was used least recently."""
        if not self.free:
            node, _ = self._evictable.popitem(last=False)
            self._on_evict(node, self.lifetime)
            self.free.append(node.windows.pop(self.lifetime).page)
        return self.free.pop()

    def offer(self, node: Node, page: int) -> bool:
        """Hand a request's page over to the node, locked by that request; False where the node has one already."""
        if self.lifetime in node.windows:
            return False
        node.windows[self.lifetime] = WindowPage(page, locks=1)
        return True

    def lock(self, node: Node) -> int:
        """Keep the node's page; returns it."""
        held = node.windows[self.lifetime]
        held.locks += 1
        self._evictable.pop(node, None)
        return held.page

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock` or :meth:`offer`."""
        held = node.windows[self.lifetime]
        held.locks -= 1
        if not held.locks:
            self._evictable[node] = None

    def forget(self, node: Node) -> None:
        """The node left the tree: its page is free."""
        held = node.windows.pop(self.lifetime, None)
        if held is not None:
            self._evictable.pop(node, None)
            self.free.append(held.page)

    def usable(self, path: Sequence[Node], pages: int) -> bool:
        """Whether a request may go on after the first ``pages`` nodes of a path: what its window reaches is there."""
        first = first_live_column(pages * PAGE_SIZE, self.lifetime)
        return all(self.lifetime in node.windows for node in path[first:pages])


@dataclass(eq=False)
class WindowPages:
    """One request's pages of one lifetime: of the columns from ``first`` on, in order.

    An entry is (page, node): node is None where the request owns the page, else the tree does and it is locked.
    """

    pool: WindowPool
    quota: int
    first: int = 0
    entries: deque[tuple[int, Node | None]] = field(default_factory=deque)

    @property
    def end(self) -> int:
        """The column after the last one held."""
        return self.first + len(self.entries)

    def open(self, path: Sequence[Node]) -> None:
        """Begin after a cached prefix: lock the pages that the next token's window reaches."""
        self.first = first_live_column(len(path) * PAGE_SIZE, self.pool.lifetime)
        self.entries.extend((self.pool.lock(node), node) for node in path[self.first :])

    def grow(self, tokens: int) -> tuple[int, list[int]]:
        """Hold pages for ``tokens`` tokens in all; returns (the first new column, the pages added)."""
        start = self.end
        added = [self.pool.take() for _ in range(start, -(-tokens // PAGE_SIZE))]
        self.entries.extend((page, None) for page in added)
        return start, added

    def commit(self, column: int, node: Node) -> None:
        """The tree holds the tokens of this column in ``node``: offer it the page, if the request still has it."""
        at = column - self.first
        if 0 <= at < len(self.entries):
            page, owner = self.entries[at]
            if owner is None and self.pool.offer(node, page):
                self.entries[at] = page, node

    def free_before(self, position: int) -> None:
        """Give back the pages that tokens from the page of ``position`` on cannot read.

        Not just from ``position`` on: a cached prefix ends with a page, and a request that goes on from there reads
        as far back.
        """
        live = first_live_column(position - position % PAGE_SIZE, self.pool.lifetime)
        while self.entries and self.first < live:
            self._give_back(*self.entries.popleft())
            self.first += 1

    def set_quota(self, pages: int) -> None:
        """Change how many pages the request may need at once."""
        self.pool.unpromised += self.quota - pages
        self.quota = pages

    def release(self) -> None:
        """Give everything back."""
        while self.entries:
            self._give_back(*self.entries.pop())
        self.set_quota(0)

    def _give_back(self, page: int, node: Node | None) -> None:
        if node is None:
            self.pool.free.append(page)
        else:
            self.pool.unlock(node)
