"""The prefix tree over committed pages.

::

        root ── [page 7: "You are a helpful …"] ── [page 9: " assistant. …"] ── …
                              └──────────────────── [page 4: " translator. …"]

One node holds one page, keyed by the tokens in it, so a path from the root spells a prefix in whole
pages. A node is *locked* while a request uses its page; unlocked leaves are evicted, least recently
used first. The tree owns the pages of its nodes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from unisono.cache.kv import PAGE_SIZE

Token = int | bytes
"""What stands at a position: a token id, or a digest of the embedding there."""
Tokens = tuple[Token, ...]


@dataclass(eq=False, slots=True)
class Node:
    """One page of tokens. ``locks`` counts the requests whose page table holds ``page``.

    Not ``settled``: a drafter's keys of the page's last token may be missing, see :meth:`Reservation.commit`.
    """

    page: int
    key: Tokens
    parent: Node | None
    children: dict[Tokens, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0
    settled: bool = True


class RadixCache:
    """Longest-prefix lookup, insertion and eviction; all costs are linear in pages touched."""

    def __init__(self) -> None:
        self._root = Node(page=-1, key=(), parent=None, locks=1)
        self._clock = itertools.count(1)
        # (used, tiebreak, node) of unlocked leaves; entries go stale and are checked when popped.
        self._evictable: list[tuple[int, int, Node]] = []
        self._tiebreak = itertools.count()
        self.pages = 0
        self.unlocked = 0

    def match(self, tokens: Sequence[Token]) -> list[Node]:
        """The nodes of the longest cached prefix of ``tokens``, in whole pages, from the root down."""
        node, path = self._root, []
        for key in _page_keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def lock(self, node: Node) -> None:
        self.unlocked -= node.locks == 0
        node.locks += 1
        node.used = next(self._clock)

    def unlock(self, node: Node) -> None:
        node.locks -= 1
        self.unlocked += node.locks == 0
        node.used = next(self._clock)
        self._offer(node)

    def insert(self, parent: Node | None, key: Tokens, page: int, settled: bool = True) -> Node:
        """Put ``page`` under ``parent`` (None: the root) and return its node, not yet locked.

        When the same tokens are there already, their node is returned: it keeps its own page.
        """
        parent = parent or self._root
        node = parent.children.get(key)
        if node is not None:
            return node
        node = parent.children[key] = Node(page, key, parent, used=next(self._clock), settled=settled)
        self.pages += 1
        self.unlocked += 1
        self._offer(node)
        return node

    def evict(self, count: int) -> list[int]:
        """Remove up to ``count`` pages, least recently used leaves first; returns the freed pages."""
        freed: list[int] = []
        while len(freed) < count and self._evictable:
            used, _, node = heapq.heappop(self._evictable)
            if node.parent is None or node.locks or node.children or node.used != used:
                continue
            del node.parent.children[node.key]
            parent, node.parent = node.parent, None
            freed.append(node.page)
            self._offer(parent)
        self.pages -= len(freed)
        self.unlocked -= len(freed)
        return freed

    def nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _offer(self, node: Node) -> None:
        if not node.locks and not node.children:
            heapq.heappush(self._evictable, (node.used, next(self._tiebreak), node))


def _page_keys(tokens: Sequence[Token]) -> Iterator[Tokens]:
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        yield tuple(tokens[start : start + PAGE_SIZE])
