"""The prefix tree over committed pages.

::

        root ── [page 7: "You are a helpful …"] ── [page 9: " assistant. …"] ── …
                              └──────────────────── [page 4: " translator. …"]

A node holds one page of tokens, so a path from the root spells a prefix in whole pages. A node is *locked* while a
request uses its page. Unlocked leaves are evicted in least-recently-used order. The tree owns the pages of its nodes.

Besides its page of window group ALL, a node may hold a page of each other window group and a snapshot of the recurrent
state. These may be evicted before the node: ``unisono/kv/window_pages.py`` and ``unisono/kv/snapshots.py`` own them.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unisono.kv.specs import PAGE_SIZE

Token = int | bytes
"""Key of one position: a token id, or a digest of the embedding that replaces it."""
Tokens = tuple[Token, ...]


@dataclass(slots=True)
class WindowPage:
    """A node's page of one window group. locks: requests whose page table contains it."""

    page: int
    locks: int = 0


@dataclass(eq=False, slots=True)
class Node:
    """One page of tokens.

    locks: requests whose page table contains ``page``.
    used: time of the last lock or unlock.
    complete: False if the state of the page's last token may be partly missing, see :meth:`Reservation.commit`.
    windows: window group -> the node's page of that group, if it still has one.
    snapshot: id of the recurrent snapshot after the page's last token; -1 for none.
    ticket: the last transfer that writes to this node's state, see ``unisono/kv/offload/offloader.py``.
    digest: see :func:`node_digest`; empty until first computed.
    """

    page: int
    key: Tokens
    parent: Node | None
    children: dict[Tokens, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0
    complete: bool = True
    windows: dict[int, WindowPage] = field(default_factory=dict)
    snapshot: int = -1
    ticket: int = 0
    digest: bytes = b""


def page_digest(parent: bytes, key: Tokens) -> bytes:
    """Digest of a prefix: 16 bytes that depend on the page's tokens and on all tokens before. parent: digest of the
    previous page, b"" for the first."""
    try:
        tokens = b"i" + struct.pack(f"<{len(key)}q", *key)
    except struct.error:  # digests of embeddings stand among the token ids
        parts = (b"b" + token if isinstance(token, bytes) else b"i" + struct.pack("<q", token) for token in key)
        tokens = b"m" + b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return hashlib.blake2b(tokens, key=parent, digest_size=16).digest()


def node_digest(node: Node) -> bytes:
    """The :func:`page_digest` of the prefix that ends with this tree node."""
    path: list[Node] = []
    while node.parent is not None and not node.digest:
        path.append(node)
        node = node.parent
    digest = node.digest
    for each in reversed(path):
        digest = each.digest = page_digest(digest, each.key)
    return digest


class PrefixTree:
    """Longest-prefix lookup, insertion and eviction. All costs are linear in the number of pages visited.

    Unlocked leaves are kept in order of use; the leaf unlocked last comes last. Only a node whose last child was
    evicted can be older than the other leaves. ``on_evict`` is called with each removed node.
    """

    def __init__(self, on_evict: Callable[[Node], None] = lambda node: None) -> None:
        self._root = Node(page=-1, key=(), parent=None, locks=1)
        self._on_evict = on_evict
        self._clock = itertools.count(1)
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # unlocked leaves, least recently used first
        # (used, tiebreak, node) of nodes that became leaves by eviction. Nodes used since then are skipped when popped.
        self._new_leaves: list[tuple[int, int, Node]] = []
        self._tiebreak = itertools.count()
        self.pages = 0
        self.unlocked = 0

    def match(self, tokens: Sequence[Token]) -> list[Node]:
        """Nodes of the longest cached prefix of ``tokens``, in whole pages, from the root down."""
        node, path = self._root, []
        for key in page_keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def lock(self, node: Node) -> None:
        """Keep the node's page until :meth:`unlock` was called as often."""
        self.unlocked -= node.locks == 0
        node.locks += 1
        node.used = next(self._clock)
        self._leaves.pop(node, None)

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        node.locks -= 1
        self.unlocked += node.locks == 0
        node.used = next(self._clock)
        if not node.locks and not node.children:
            self._leaves[node] = None

    def insert(self, parent: Node | None, key: Tokens, page: int, complete: bool = True) -> Node:
        """Put ``page`` under ``parent``, which is locked (None: the root). Return its node, not yet locked.

        If the same tokens are already there, return their node, which keeps its own page.
        """
        parent = parent or self._root
        node = parent.children.get(key)
        if node is not None:
            return node
        node = parent.children[key] = Node(page, key, parent, used=next(self._clock), complete=complete)
        self.pages += 1
        self.unlocked += 1
        self._leaves[node] = None
        return node

    def evict(self, count: int) -> list[int]:
        """Remove up to ``count`` nodes, least recently used leaves first. Return the freed pages of window group
        ALL."""
        freed: list[int] = []
        while len(freed) < count and (node := self._least_used()) is not None:
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            freed.append(node.page)
            self._on_evict(node)
            node.parent = None
            if not parent.locks and not parent.children:
                heapq.heappush(self._new_leaves, (parent.used, next(self._tiebreak), parent))
        self.pages -= len(freed)
        self.unlocked -= len(freed)
        return freed

    def nodes(self) -> Iterator[Node]:
        """Every node, in no particular order."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _least_used(self) -> Node | None:
        """Remove and return the least recently used unlocked leaf; None if there is none."""
        while self._new_leaves:
            used, _, node = self._new_leaves[0]
            if node.used == used and not node.locks and not node.children:
                break
            heapq.heappop(self._new_leaves)
        first = next(iter(self._leaves), None)
        if self._new_leaves and (first is None or self._new_leaves[0][0] < first.used):
            return heapq.heappop(self._new_leaves)[2]
        if first is not None:
            del self._leaves[first]
        return first


def page_keys(tokens: Sequence[Token]) -> Iterator[Tokens]:
    """The tokens of each whole page."""
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        yield tuple(tokens[start : start + PAGE_SIZE])
