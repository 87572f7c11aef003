"""Transfer of cached pages between engines: packed to bytes here, written to another engine's prefix tree there.

:func:`pack_pages` reads the state of a tree path; an :class:`Incoming` puts it into another tree, where the next
request with these tokens finds it. Both engines must serve the same model, drafter and dtype. ``StateStore.parts``
defines the state of a page; with several ranks each holds a part of it (``engine/disaggregation/page_bytes.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from unisono.kv.pages import PagePool
from unisono.kv.prefix_tree import Node, Token, page_keys
from unisono.kv.specs import ALL, SNAPSHOTS
from unisono.kv.store import StateStore

Buffer = bytes | bytearray | memoryview

Parts = list[tuple[int, list[int]]]
"""Kind, and the page indices within the text that have it."""

Named = list[tuple[int, np.ndarray]]
"""Kind, and device page or snapshot ids, int32."""


@dataclass(frozen=True)
class Packing:
    """State of pages on its way to the host.

    tensors: this rank's part.
    done: event after which ``tensors`` are complete; None if they are.
    others: bytes of the other ranks, which follow these in order.
    """

    tensors: Sequence[torch.Tensor]
    done: torch.cuda.Event | None
    others: Sequence[Future[Buffer]] = ()

    def payload(self) -> list[Buffer]:
        """Wait for the bytes and return them. Thread-safe. Raises the error of a rank that fails to send."""
        if self.done is not None:
            self.done.synchronize()
        own = [tensor.view(torch.uint8).reshape(-1).numpy().data for tensor in self.tensors]
        return [*own, *(other.result() for other in self.others)]


def pack(store: StateStore, parts: Named) -> Packing:
    """Read pages: for each kind, from each of its tensors (``StateStore.parts``), the pages in this order."""
    tensors = []
    for kind, ids in parts:
        places = torch.from_numpy(ids.astype(np.int64)).to(store.device)
        tensors += [_to_host(part.index_select(0, places)) for part in store.parts(kind)]
    done = None
    if store.device.type == "cuda":
        done = torch.cuda.Event()
        done.record()
    return Packing(tensors, done)


def unpack(store: StateStore, parts: Named, payload: Buffer) -> None:
    """Write the bytes made by :func:`pack` to as many pages; an id of -1 skips its bytes."""
    at, whole = 0, memoryview(payload)
    for kind, ids in parts:
        kept = torch.from_numpy((ids >= 0).nonzero()[0])
        places = torch.from_numpy(ids[ids >= 0].astype(np.int64)).to(store.device)
        for tensor in store.parts(kind):
            size = len(ids) * tensor[0].numel() * tensor.element_size()
            raw = torch.frombuffer(bytearray(whole[at : at + size]), dtype=tensor.dtype)
            at += size
            tensor.index_copy_(0, places, raw.view(len(ids), *tensor.shape[1:])[kept].to(store.device))


class Bytes(Protocol):
    """Pages as bytes, on all ranks that hold them (``engine/disaggregation/page_bytes.py``)."""

    def pack(self, parts: Named) -> Packing:
        """See :func:`pack`."""
        ...

    def unpack(self, parts: Named, payload: Buffer) -> None:
        """See :func:`unpack`. Raises ValueError if the payload size does not match the pages."""
        ...

    def nbytes(self, parts: Named) -> int:
        """Bytes of the pages' state, over all ranks."""
        ...


def check_size(pages: Bytes, parts: Named, payload: Buffer) -> None:
    """Raise ValueError unless the payload size matches the pages."""
    if len(payload) != pages.nbytes(parts):
        raise ValueError(f"{len(payload)} bytes are not the state of these pages")


def pack_pages(pages: Bytes, nodes: Sequence[Node], first: int, columns: Mapping[int, Collection[int]]) -> Packed:
    """Pack the state of a path's nodes from ``first`` on: gathered on the device, copying to the host.

    columns: by kind, the pages to include if the nodes have them. Pages of window group ALL are always included.
    """
    parts: Parts = [(ALL, list(range(first, len(nodes))))]
    named: Named = [(ALL, _ids([node.page for node in nodes[first:]]))]
    for kind, places in columns.items():
        held = [(p, _held(nodes[p], kind)) for p in sorted(places) if p < len(nodes) and _held(nodes[p], kind) >= 0]
        if held:
            parts.append((kind, [page for page, _ in held]))
            named.append((kind, _ids([number for _, number in held])))
    return Packed(first, [node.complete for node in nodes[first:]], parts, pages.pack(named), pages.nbytes(named))


@dataclass(frozen=True)
class Packed:
    """Packed pages of a text, from page ``first`` on. nbytes: size of their state."""

    first: int
    complete: list[bool]
    parts: Parts
    state: Packing
    nbytes: int


class Incoming:
    """A text's pages as they arrive, in order. Their nodes stay locked until :meth:`close`.

    tokens: tokens of the whole pages that may arrive. ``path``: the nodes present so far; the first ``first`` of them
        were already cached.
    """

    def __init__(self, pool: PagePool, pages: Bytes, tokens: Sequence[Token]) -> None:
        self._pool, self._pages = pool, pages
        self.keys = list(page_keys(tokens))
        usable = pool.usable(pool.tree.match(tokens))
        self.first = len(usable)
        self.path = list(usable)
        for node in usable:
            pool.tree.lock(node)

    def put(self, first: int, complete: Sequence[bool], parts: Parts, payload: Buffer) -> None:
        """Write pages into the tree. Raises OutOfPages, or ValueError if the payload is not the state of the next
        pages."""
        if first > len(self.path) or first + len(complete) > len(self.keys):
            raise ValueError(f"pages {first} … came after {len(self.path)} of {len(self.keys)}")
        if any(not first <= page < first + len(complete) for _, pages in parts for page in pages):
            raise ValueError("a part belongs to none of the pages")
        check_size(self._pages, [(kind, _ids(pages)) for kind, pages in parts], payload)  # before any page is taken
        fresh = self._nodes(first, complete)
        placed = [(kind, pages, [self._place(kind, page, fresh) for page in pages]) for kind, pages in parts]
        self._pool.flush()  # saves parts evicted to make room
        self._pages.unpack([(kind, _ids(ids)) for kind, _, ids in placed], payload)
        for kind, pages, ids in placed:
            self._finish(kind, pages, ids)

    def close(self) -> None:
        """Unlock everything; received pages stay cached."""
        for node in reversed(self.path):
            self._pool.tree.unlock(node)
        self.path.clear()

    def _nodes(self, first: int, complete: Sequence[bool]) -> set[int]:
        """Append nodes for these pages. Return the pages whose state is not on the device yet."""
        fresh = set()
        new = range(max(first, len(self.path)), first + len(complete))
        for page, number in zip(new, self._pool.take(len(new)), strict=True):  # takes all or none
            parent = self.path[-1] if self.path else None
            node = self._pool.tree.insert(parent, self.keys[page], number, complete[page - first])
            if node.page != number:
                self._pool.free.append(number)  # the tree already has these tokens
            else:
                fresh.add(page)
            self._pool.tree.lock(node)
            self.path.append(node)
        return fresh

    def _place(self, kind: int, page: int, fresh: set[int]) -> int:
        """Device page or snapshot id for a part; -1 to skip it."""
        node, pool = self.path[page], self._pool
        if kind == ALL:
            return node.page if page in fresh else -1
        if kind == SNAPSHOTS:
            return pool.snapshots.take() if pool.snapshots is not None and node.snapshot < 0 else -1
        window = pool.windows[kind]
        if kind in node.windows or not window.has_spare:
            return -1
        window.offer(node, window.take())
        return node.windows[kind].page

    def _finish(self, kind: int, pages: Sequence[int], ids: Sequence[int]) -> None:
        """Mark the parts as written, so that the tree may serve them."""
        for page, number in zip(pages, ids, strict=True):
            if number < 0 or kind == ALL:
                continue
            if kind == SNAPSHOTS:
                assert self._pool.snapshots is not None
                self._pool.snapshots.attach(self.path[page], number)
            else:
                self._pool.windows[kind].unlock(self.path[page])


def _ids(numbers: Sequence[int]) -> np.ndarray:
    return np.asarray(numbers, np.int32)


def _held(node: Node, kind: int) -> int:
    """Device page or snapshot id of this kind; -1 for none."""
    if kind == SNAPSHOTS:
        return node.snapshot
    return node.windows[kind].page if kind in node.windows else -1


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the host; asynchronous from a GPU."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
