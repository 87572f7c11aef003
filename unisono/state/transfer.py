"""Prefixes that move between engines: offload, migration, and prefill on another machine are this act.

:func:`export_prefix` copies what the prefix tree holds of a text's tokens; :func:`import_prefix` puts it into another
engine's tree, where the next request with these tokens finds it. Both engines must serve the same model, drafter and
dtype. Nothing may be in flight on the device of the importing engine's pages; the engine sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.state.pages import OutOfPages, PagePool
from unisono.state.prefix_tree import Node, Token
from unisono.state.specs import ALL, PAGE_SIZE
from unisono.state.store import StateStore

PageState = list[torch.Tensor]
"""What :meth:`StateStore.export_page` returns."""


@dataclass(frozen=True)
class PrefixPage:
    """One page of a text. windows: by lifetime, what the tree still had. snapshot: the tails' after it, or None."""

    state: PageState
    complete: bool
    windows: dict[int, PageState]
    snapshot: list[torch.Tensor] | None


@dataclass(frozen=True)
class Prefix:
    """The state of a text's first ``len(pages) * PAGE_SIZE`` tokens, on the CPU."""

    tokens: tuple[Token, ...]
    pages: tuple[PrefixPage, ...]


def export_prefix(pool: PagePool, store: StateStore, tokens: Sequence[Token]) -> Prefix:
    """Copy the longest cached prefix of ``tokens``, in whole pages; it stays cached here."""
    path = pool.tree.match(tokens)
    return Prefix(tuple(tokens[: len(path) * PAGE_SIZE]), tuple(_exported(store, node) for node in path))


def import_prefix(pool: PagePool, store: StateStore, prefix: Prefix) -> int:
    """Put a prefix into the tree; returns how many of its tokens the tree has now.

    What the tree has already stays. Where the pool runs out of pages, the rest is left out.
    """
    parent: Node | None = None
    held: list[Node] = []
    try:
        for i, page in enumerate(prefix.pages):
            key = prefix.tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
            parent = _imported(pool, store, parent, tuple(key), page)
            pool.tree.lock(parent)  # later pages of the prefix must not evict it
            held.append(parent)
    except OutOfPages:
        pass
    for node in reversed(held):
        pool.tree.unlock(node)
    return len(held) * PAGE_SIZE


def _exported(store: StateStore, node: Node) -> PrefixPage:
    windows = {lifetime: store.export_page(lifetime, held.page) for lifetime, held in node.windows.items()}
    snapshot = store.export_snapshot(node.snapshot) if node.snapshot >= 0 else None
    return PrefixPage(store.export_page(ALL, node.page), node.complete, windows, snapshot)


def _imported(pool: PagePool, store: StateStore, parent: Node | None, key: tuple[Token, ...], page: PrefixPage) -> Node:
    """The node of one page, with everything that it lacks. Raises OutOfPages."""
    (number,) = pool.take(1)
    node = pool.tree.insert(parent, key, number, page.complete)
    if node.page != number:
        pool.free.append(number)  # the tree has these tokens
    else:
        store.import_page(ALL, number, page.state)
    for lifetime, state in page.windows.items():
        window = pool.windows[lifetime]
        if lifetime not in node.windows and window.has_spare:
            window.offer(node, window.take())
            store.import_page(lifetime, node.windows[lifetime].page, state)
            window.unlock(node)
    if page.snapshot is not None and pool.snapshots is not None and node.snapshot < 0:
        snapshot = pool.snapshots.take()
        if snapshot >= 0:
            store.import_snapshot(snapshot, page.snapshot)
            pool.snapshots.attach(node, snapshot)
    return node
