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
from collections import OrderedDict
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
    """Longest-prefix lookup, insertion and eviction; all costs are linear in pages touched.

    What may be evicted is known in order of use, without a look at the rest: an unlocked leaf was used when it was
    unlocked, so it goes behind those that are there. Only a node whose last child is evicted may be older than others.
    """

    def __init__(self) -> None:
        self._root = Node(page=-1, key=(), parent=None, locks=1)
        self._clock = itertools.count(1)
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # unlocked ones, least recently used first
        # (used, tiebreak, node) of nodes that evictions made leaves; those used since are passed over when popped.
        self._bared: list[tuple[int, int, Node]] = []
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
        self._leaves.pop(node, None)

    def unlock(self, node: Node) -> None:
        node.locks -= 1
        self.unlocked += node.locks == 0
        node.used = next(self._clock)
        if not node.locks and not node.children:
            self._leaves[node] = None

    def insert(self, parent: Node | None, key: Tokens, page: int, settled: bool = True) -> Node:
        """Put ``page`` under ``parent``, which is locked (None: the root), and return its node, not yet locked.

        When the same tokens are there already, their node is returned: it keeps its own page.
        """
        parent = parent or self._root
        node = parent.children.get(key)
        if node is not None:
            return node
        node = parent.children[key] = Node(page, key, parent, used=next(self._clock), settled=settled)
        self.pages += 1
        self.unlocked += 1
        self._leaves[node] = None
        return node

    def evict(self, count: int) -> list[int]:
        """Remove up to ``count`` pages, least recently used leaves first; returns the freed pages."""
        freed: list[int] = []
        while len(freed) < count and (node := self._least_used()) is not None:
            parent, node.parent = node.parent, None
            assert parent is not None
            del parent.children[node.key]
            freed.append(node.page)
            if not parent.locks and not parent.children:
                heapq.heappush(self._bared, (parent.used, next(self._tiebreak), parent))
        self.pages -= len(freed)
        self.unlocked -= len(freed)
        return freed

    def nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _least_used(self) -> Node | None:
        """Take the unlocked leaf that was used first; None where there is none."""
        while self._bared:
            used, _, node = self._bared[0]
            if node.used == used and not node.locks and not node.children:
                break
            heapq.heappop(self._bared)
        first = next(iter(self._leaves), None)
        if self._bared and (first is None or self._bared[0][0] < first.used):
            return heapq.heappop(self._bared)[2]
        if first is not None:
            del self._leaves[first]
        return first


def _page_keys(tokens: Sequence[Token]) -> Iterator[Tokens]:
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        yield tuple(tokens[start : start + PAGE_SIZE])
