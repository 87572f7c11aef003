"""KV offload: parts evicted from the prefix tree are kept in host memory and come back when a prompt matches them.

This is rank 0's bookkeeping. A part of a prefix is a page of one window group or a recurrent snapshot, named by the
digest of the tokens up to its end. An evicted part is noted, and moved out before the next pass may overwrite it. If
host memory has more of a request's prompt than the device, the request takes pages for the rest, in tree nodes that
carry the *ticket* of their transfer, and waits until that ticket has arrived; others run meanwhile. A transfer locks
its nodes until it has arrived, even if the request ends. Host memory keeps the parts that came back, so evicting them
again copies nothing.

``Mover`` sends commands to the workers' ``HostPages``; every rank executes them in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from unisono.kv.offload.host_index import HostEntry, HostIndex, Part
from unisono.kv.offload.host_pages import Move
from unisono.kv.offload.page_files import PageFiles, Read
from unisono.kv.prefix_tree import Node, PrefixTree, Token, Tokens, node_digest, page_digest, page_keys
from unisono.kv.snapshots import SnapshotPool
from unisono.kv.specs import ALL, PAGE_SIZE, SNAPSHOTS
from unisono.kv.window_pages import WindowPool, first_live_column

PAUSE_SECONDS = 2e-4
"""Sleep of an idle engine between two polls for transfers in flight."""


class Mover(Protocol):
    """Sends transfers to every rank and reports this rank's progress. See ``HostPages``."""

    def move_out(self, moves: Sequence[Move]) -> None: ...
    def move_in(self, ticket: int, moves: Sequence[Move]) -> None: ...
    def poll(self) -> int: ...
    def arrived(self, ticket: int) -> None: ...


class Pool(Protocol):
    """The part of ``PagePool`` used by this module."""

    tree: PrefixTree
    windows: dict[int, WindowPool]
    snapshots: SnapshotPool | None

    def take(self, count: int) -> list[int]: ...


@dataclass(frozen=True)
class FetchPlan:
    """A prefix that a request can begin with after a transfer.

    path: its nodes already on the device.
    rest: keys and digests of the pages to fetch.
    pages: number of pages of both.
    windows: by window group, the columns whose window pages are fetched.
    snapshot: True if the recurrent snapshot is fetched.
    usable: pages that the request could begin with without a transfer.
    """

    path: list[Node]
    rest: list[tuple[Tokens, bytes]]
    windows: dict[int, list[int]]
    snapshot: bool
    usable: int

    @property
    def pages(self) -> int:
        return len(self.path) + len(self.rest)


@dataclass
class Transfer:
    """Parts in flight to the device.

    nodes: nodes locked by it.
    windows: by window group, the nodes whose window page is fetched.
    snapshot: the node whose snapshot is fetched.
    """

    ticket: int
    nodes: list[Node] = field(default_factory=list)
    windows: dict[int, list[Node]] = field(default_factory=dict)
    snapshot: Node | None = None


@dataclass
class OffloadCounters:
    """Counters of offload. parts: pages and snapshots. requests: requests that waited for parts. hits: prompt tokens
    fetched."""

    parts_out: int = 0
    parts_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    refused: int = 0  # evicted parts for which no slot could be freed
    requests: int = 0  # requests that waited for parts
    hits: int = 0


class Offload:
    """Offload state of an engine. part_bytes: bytes of one part, by kind. files: optional second level on disk."""

    def __init__(
        self,
        index: HostIndex,
        part_bytes: dict[int, int],
        mover: Mover,
        files: PageFiles | None = None,
    ) -> None:
        self.index, self.part_bytes, self._mover, self.files = index, part_bytes, mover, files
        self.counters = OffloadCounters()
        self.sent = self.arrived = 0  # tickets
        self.transfers: list[Transfer] = []
        self._noted: dict[Part, tuple[int, bool]] = {}  # evicted, not yet moved out: device page, complete
        self.discards = False  # True: drop evicted parts

    # ---- out ----------------------------------------------------------------------------------

    def note(self, node: Node, kind: int, page: int) -> None:
        """Note an evicted part of a node, to be moved out unless host memory already has it."""
        if self.discards:
            return
        part = kind, node_digest(node)
        held = self.index.find(part)
        if held is None or (node.complete and not held.complete and kind == ALL):
            self._noted[part] = page, node.complete

    def note_all(self, node: Node) -> None:
        """Note every part of an evicted node."""
        self.note(node, ALL, node.page)
        for window_group, held in node.windows.items():
            self.note(node, window_group, held.page)
        if node.snapshot >= 0:
            self.note(node, SNAPSHOTS, node.snapshot)

    def read_ahead(self, pool: Pool, tokens: Sequence[Token]) -> Read | None:
        """Start reading from files the parts of a prompt that neither device nor host memory has; None if there are
        none."""
        if self.files is None:
            return None
        tokens = tokens[: len(tokens) - 1]
        known = pool.tree.match(tokens)
        chain = [node_digest(node) for node in known]
        for key in page_keys(tokens[len(known) * PAGE_SIZE :]):
            digest = page_digest(chain[-1] if chain else b"", key)
            if not self._waits((ALL, digest)):
                break
            chain.append(digest)
        pages = len(chain)
        if pool.snapshots is not None:
            ends = (
                i for i in range(pages, 0, -1)
                if (i <= len(known) and known[i - 1].snapshot >= 0) or self._waits((SNAPSHOTS, chain[i - 1]))
            )  # fmt: skip
            pages = next(ends, 0)
        parts: list[Part] = [(ALL, digest) for digest in chain[len(known) : pages]]
        for window_group in pool.windows:
            parts += [
                (window_group, digest) for digest in chain[first_live_column(pages * PAGE_SIZE, window_group) : pages]
            ]
        parts += [(SNAPSHOTS, digest) for digest in chain[pages - 1 : pages] if pool.snapshots is not None]
        read = Read()
        read.parts.update(p for p in parts if self.index.find(p) is None and self.files.fetch(p, read))
        return read if read.parts else None

    def _waits(self, part: Part) -> bool:
        return part in self.index or (self.files is not None and part in self.files)

    def poll_files(self) -> None:
        """Process finished writes and reads of files."""
        if self.files is not None:
            self.files.poll()

    def close(self) -> None:
        """Finish writing files."""
        if self.files is not None:
            self.files.close()

    def forget(self) -> None:
        """Forget all parts. Parts evicted from now on are dropped until ``discards`` is False again."""
        self.index.clear()
        if self.files is not None:
            self.files.clear()
        self._noted.clear()
        self.discards = True

    def flush(self) -> None:
        """Move out the noted parts. Call it before anything overwrites them on the device."""
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
        moves: dict[int, list[tuple[int, int]]] = {}
        put: list[tuple[Part, HostEntry]] = []
        for part, (page, complete) in noted.items():
            kind = part[0]
            slot = self.index.take(kind)
            if slot < 0:
                self.counters.refused += 1
                continue
            moves.setdefault(kind, []).append((page, slot))
            put.append((part, self.index.put(part, slot, complete)))
            self.counters.parts_out += 1
            self.counters.bytes_out += self.part_bytes[kind]
        if moves:
            self._mover.move_out(_arrays(moves))
        if self.files is not None:
            for part, held in put:
                self.files.keep(part, held)

    # ---- in -----------------------------------------------------------------------------------

    def plan(self, pool: Pool, tokens: Sequence[Token], known: list[Node], usable: int) -> FetchPlan | None:
        """Plan a transfer that lets a request begin after more of ``tokens`` than the ``usable`` pages on the device.

        known: tree nodes of the tokens. Returns None if a transfer gains nothing.
        """
        self.flush()  # parts evicted just now may be needed at once
        keys = list(page_keys(tokens[len(known) * PAGE_SIZE :]))
        digest = node_digest(known[-1]) if known else b""
        rest: list[tuple[Tokens, bytes]] = []
        for key in keys:
            digest = page_digest(digest, key)
            if (ALL, digest) not in self.index:
                break
            rest.append((key, digest))
        for pages in range(len(known) + len(rest), usable, -1):
            digests = rest[: max(0, pages - len(known))]
            end = digests[-1][1] if digests else node_digest(known[pages - 1])
            snapshot = pool.snapshots is not None and (pages > len(known) or known[pages - 1].snapshot < 0)
            if snapshot and not self._has_snapshot(pool, end):
                continue
            windows = {
                window_group: self._missing(window, known, rest, pages) for window_group, window in pool.windows.items()
            }
            if any(columns is None for columns in windows.values()):
                continue
            found = {window_group: columns for window_group, columns in windows.items() if columns}
            return FetchPlan(known[: min(pages, len(known))], digests, found, snapshot, usable)
        return None

    def _has_snapshot(self, pool: Pool, digest: bytes) -> bool:
        return (SNAPSHOTS, digest) in self.index and pool.snapshots is not None and pool.snapshots.has_spare

    def _missing(
        self, window: WindowPool, known: list[Node], rest: list[tuple[Tokens, bytes]], pages: int
    ) -> list[int] | None:
        """Columns whose window pages must be fetched for ``pages`` pages; None if some are unavailable."""
        missing = []
        for column in range(first_live_column(pages * PAGE_SIZE, window.window_group), pages):
            if column < len(known) and window.window_group in known[column].windows:
                continue
            digest = rest[column - len(known)][1] if column >= len(known) else node_digest(known[column])
            if (window.window_group, digest) not in self.index:
                return None
            missing.append(column)
        return missing if len(missing) <= window.unpromised else None

    def fetch(self, pool: Pool, plan: FetchPlan) -> list[Node]:
        """Start the transfer of a plan made in this step. Return all its nodes, each locked once more.

        plan.path is locked, and enough pages are available.
        """
        parts = self._pinned(plan)
        self.sent += 1
        transfer = Transfer(self.sent)
        moves: dict[int, list[tuple[int, int]]] = {}
        path, touched = list(plan.path), set[Node]()
        for (key, digest), page in zip(plan.rest, pool.take(len(plan.rest)), strict=True):
            held = parts[ALL, digest]
            node = pool.tree.insert(path[-1] if path else None, key, page, held.complete)
            node.digest = digest
            pool.tree.lock(node)
            path.append(node)
            touched.add(node)
            moves.setdefault(ALL, []).append((page, held.slot))
        for window_group, columns in plan.windows.items():
            window, coming = pool.windows[window_group], [path[column] for column in columns]
            reach = [
                n for n in path[first_live_column(len(path) * PAGE_SIZE, window_group) :] if window_group in n.windows
            ]
            for node in reach:
                window.lock(node)  # so that none is evicted for another
            window.unpromised -= len(coming)  # they stay locked even if the request ends
            for node in coming:
                window.offer(node, window.take())
                slot = parts[window_group, node_digest(node)].slot
                moves.setdefault(window_group, []).append((node.windows[window_group].page, slot))
            for node in reach:
                window.unlock(node)
            transfer.windows[window_group] = coming
            touched.update(coming)
        if plan.snapshot and pool.snapshots is not None:
            last = transfer.snapshot = path[-1]
            pool.snapshots.expect(last)
            moves.setdefault(SNAPSHOTS, []).append((last.snapshot, parts[SNAPSHOTS, node_digest(last)].slot))
            touched.add(last)
        transfer.nodes = [node for node in path if node in touched]
        for node in transfer.nodes:
            node.ticket = transfer.ticket
            pool.tree.lock(node)
        self.flush()  # saves parts evicted to make room
        self._mover.move_in(transfer.ticket, _arrays(moves))
        self.transfers.append(transfer)
        for held in parts.values():
            held.pins -= 1
        self._count(plan, moves)
        return path

    def _pinned(self, plan: FetchPlan) -> dict[Part, HostEntry]:
        """Pin the host slots of everything in the plan, so that they are not evicted meanwhile."""
        parts: list[Part] = [(ALL, digest) for _, digest in plan.rest]
        for window_group, columns in plan.windows.items():
            parts += [(window_group, self._digest(plan, column)) for column in columns]
        if plan.snapshot:
            parts.append((SNAPSHOTS, self._digest(plan, plan.pages - 1)))
        pinned: dict[Part, HostEntry] = {}
        for part in reversed(parts):  # so that the end of a prefix is evicted first
            held = self.index.find(part)
            assert held is not None
            held.pins += 1
            pinned[part] = held
        return pinned

    def _digest(self, plan: FetchPlan, column: int) -> bytes:
        known = len(plan.path)
        return node_digest(plan.path[column]) if column < known else plan.rest[column - known][1]

    def _count(self, plan: FetchPlan, moves: dict[int, list[tuple[int, int]]]) -> None:
        counters = self.counters
        counters.requests += 1
        counters.hits += (plan.pages - plan.usable) * PAGE_SIZE
        counters.parts_in += sum(map(len, moves.values()))
        counters.bytes_in += sum(len(pairs) * self.part_bytes[kind] for kind, pairs in moves.items())

    def arrive(self, pool: Pool) -> bool:
        """Process finished transfers. Return True if any has arrived."""
        if not self.transfers or (done := self._mover.poll()) <= self.arrived:
            return False
        self._mover.arrived(done)
        self.arrived = done
        while self.transfers and self.transfers[0].ticket <= done:
            transfer = self.transfers.pop(0)
            for window_group, nodes in transfer.windows.items():
                window = pool.windows[window_group]
                for node in nodes:
                    window.unlock(node)
                window.unpromised += len(nodes)
            if transfer.snapshot is not None and pool.snapshots is not None:
                pool.snapshots.arrived(transfer.snapshot)
            for node in reversed(transfer.nodes):
                pool.tree.unlock(node)
        return True

    def pause(self) -> None:
        """Sleep briefly while transfers are in flight and nothing can be launched."""
        if self.transfers or (self.files is not None and self.files.busy):
            time.sleep(PAUSE_SECONDS)


def _arrays(moves: dict[int, list[tuple[int, int]]]) -> list[Move]:
    return [(kind, *_columns(pairs)) for kind, pairs in moves.items()]


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pages, slots = zip(*pairs, strict=True)
    return np.asarray(pages, dtype=np.int32), np.asarray(slots, dtype=np.int32)
