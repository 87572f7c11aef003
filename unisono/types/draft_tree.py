"""Draft trees as data: their form in a speculative config, and the paths from root to leaves.

A tree is fixed at start. A node is a tuple of digits, one for each step down from the root; the root is the last
committed token. Digit d takes the d-th best candidate (0 is the best) of the logits after its parent. Every round
verifies the paths from root to leaf side by side. Only ``types`` imports this module, which imports nothing of the
project. Errors are ValueErrors.
"""

from __future__ import annotations

import ast
import heapq
import math
from collections.abc import Collection

Node = tuple[int, ...]

MAX_PATHS = 32
"""Most leaves of a tree: each is a row of every round for every request."""

RIGHT, NEXT = 0.6, 0.4
"""The prior of :func:`promising`: candidate d is the right one with probability RIGHT · NEXT^d, which sums to 1."""


def parse_nodes(value: object) -> tuple[Node, ...]:
    """Parse the nodes of a tree in vLLM's form: ``"[(0,), (1,), (0, 0)]"``, or the same as lists or tuples.

    Raises ValueError for another form, for a node without its parent or elder sibling, and for too many paths.
    """
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            raise ValueError(f"{value!r} is not a list of tuples") from None
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{value!r} is not a list of tuples, one for each node but the root")
    nodes = set()
    for node in value:
        whole = isinstance(node, (list, tuple)) and all(isinstance(d, int) and not isinstance(d, bool) for d in node)
        if not whole or not node or min(node) < 0:
            raise ValueError(f"{node!r} is not a node: a tuple of whole numbers from 0 on, one for each step down")
        nodes.add(tuple(node))
    for node in sorted(nodes):
        if len(node) > 1 and node[:-1] not in nodes:
            raise ValueError(f"the node {node} has no parent; add {node[:-1]}")
        if node[-1] > 0 and (*node[:-1], node[-1] - 1) not in nodes:
            raise ValueError(f"the node {node} has no elder sibling; add {(*node[:-1], node[-1] - 1)}")
    return _checked(nodes)


def promising(children: int, budget: int, depth: int) -> tuple[Node, ...]:
    """The ``budget`` likeliest nodes of a tree with this depth and number of children per node.

    A node's probability is the product of RIGHT · NEXT^d over the digits of its path, so a parent comes before its
    children and a sibling before the next. Among equals the shallower comes first. The tree is smaller if ``children``
    and ``depth`` allow fewer nodes. Raises ValueError for too many paths.
    """
    nodes: list[Node] = []
    waiting: list[tuple[float, int, Node]] = []

    def offer(node: Node) -> None:
        surprise = -len(node) * math.log(RIGHT) - sum(node) * math.log(NEXT)
        heapq.heappush(waiting, (round(surprise, 9), len(node), node))

    offer((0,))
    most = min(budget, MAX_PATHS * depth + 1)  # more nodes have too many paths in any case
    while waiting and len(nodes) < most:
        *_, node = heapq.heappop(waiting)
        nodes.append(node)
        if node[-1] + 1 < children:
            offer((*node[:-1], node[-1] + 1))
        if len(node) < depth:
            offer((*node, 0))
    return _checked(nodes)


def _checked(nodes: Collection[Node]) -> tuple[Node, ...]:
    count = len(leaves(nodes))
    if count > MAX_PATHS:
        raise ValueError(f"it has {count} leaves, and at most {MAX_PATHS} paths are verified at once; prune it")
    return tuple(sorted(nodes, key=lambda node: (len(node), node)))


def leaves(nodes: Collection[Node]) -> tuple[Node, ...]:
    """The nodes without children, which are the paths of the tree, in the order of their digits."""
    parents = {node[:-1] for node in nodes}
    return tuple(sorted(node for node in nodes if node not in parents))
