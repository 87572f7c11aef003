"""KV offload: what the prefix tree evicts waits in host memory, and comes back when a prompt matches it.

Rank 0's bookkeeping. A part of a prefix is a page of one lifetime or a snapshot of the tails, named by the digest of
the tokens up to its end. An evicted part is noted, and moved out before the next pass may overwrite it. A request
whose prompt goes on beyond what the device has takes pages for the rest, in nodes of the tree that carry the *ticket*
of their transfer, and waits until that ticket has arrived; others run meanwhile. A transfer locks its nodes until it
has arrived, whatever becomes of the request. Host memory keeps what came back: evicting it again copies nothing.

``Mover`` is the way to the workers' ``HostPages``: commands of rank 0, which every rank executes in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from unisono.kv.offload.host_index import Held, HostIndex, Part
from unisono.kv.offload.host_pages import Move
from unisono.kv.offload.page_files import PageFiles, Read
from unisono.kv.prefix_tree import Node, PrefixTree, Token, Tokens, node_digest, page_digest, page_keys
from unisono.kv.snapshots import SnapshotPool
from unisono.kv.specs import ALL, PAGE_SIZE, TAILS
from unisono.kv.window_pages import WindowPool, first_live_column

PAUSE_SECONDS = 2e-4
"""How long an engine that has nothing to launch sleeps before it asks again for pages that are coming back."""


class Mover(Protocol):
    """Sends transfers to every rank, and tells how far this one is. See ``HostPages``."""

    def move_out(self, moves: Sequence[Move]) -> None: ...
    def move_in(self, ticket: int, moves: Sequence[Move]) -> None: ...
    def poll(self) -> int: ...
    def arrived(self, ticket: int) -> None: ...


class Pool(Protocol):
    """What this module uses of the device's pages. See ``PagePool``."""

    tree: PrefixTree
    windows: dict[int, WindowPool]
    snapshots: SnapshotPool | None

    def take(self, count: int) -> list[int]: ...


@dataclass(frozen=True)
class Plan:
    """What a request may begin with once transfers have arrived.

    path: nodes that the device has of it. rest: keys and digests of the pages that come back. pages: of both.
    windows: by lifetime, the columns whose window pages come back. snapshot: whether the tails' snapshot does. usable:
    pages that the request could begin with otherwise.
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
    """Parts on their way to the device. nodes: locked by it. windows: of these, the nodes with a coming window page.

    snapshot: the node whose snapshot comes.
    """

    ticket: int
    nodes: list[Node] = field(default_factory=list)
    windows: dict[int, list[Node]] = field(default_factory=dict)
    snapshot: Node | None = None


@dataclass
class OffloadCounters:
    """parts: pages and snapshots. queries, hits: prompt tokens beyond the device's prefix, and those that came back."""

    parts_out: int = 0
    parts_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    refused: int = 0  # evicted parts for which no slot could be freed
    requests: int = 0  # that waited for parts
    hits: int = 0


class Offload:
    """See the module. part_bytes: by kind, of one part. files: where parts are written too; None: nowhere."""

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
        self._noted: dict[Part, tuple[int, bool]] = {}  # evicted and not moved out yet: device page, complete
        self.discards = False  # evicted parts are not kept

    # ---- out ----------------------------------------------------------------------------------

    def note(self, node: Node, kind: int, page: int) -> None:
        """A part of a node leaves the device: keep its bytes, unless host memory has them."""
        if self.discards:
            return
        part = kind, node_digest(node)
        held = self.index.find(part)
        if held is None or (node.complete and not held.complete and kind == ALL):
            self._noted[part] = page, node.complete

    def note_all(self, node: Node) -> None:
        """The same for everything that a node has."""
        self.note(node, ALL, node.page)
        for lifetime, held in node.windows.items():
            self.note(node, lifetime, held.page)
        if node.snapshot >= 0:
            self.note(node, TAILS, node.snapshot)

    def read_ahead(self, pool: Pool, tokens: Sequence[Token]) -> Read | None:
        """Begin to read what files have of a prompt beyond device and host memory; None where that is nothing."""
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
                if (i <= len(known) and known[i - 1].snapshot >= 0) or self._waits((TAILS, chain[i - 1]))
            )  # fmt: skip
            pages = next(ends, 0)
        wanted: list[Part] = [(ALL, digest) for digest in chain[len(known) : pages]]
        for lifetime in pool.windows:
            wanted += [(lifetime, digest) for digest in chain[first_live_column(pages * PAGE_SIZE, lifetime) : pages]]
        wanted += [(TAILS, digest) for digest in chain[pages - 1 : pages] if pool.snapshots is not None]
        read = Read()
        read.parts.update(p for p in wanted if self.index.find(p) is None and self.files.fetch(p, read))
        return read if read.parts else None

    def _waits(self, part: Part) -> bool:
        return part in self.index or (self.files is not None and part in self.files)

    def poll_files(self) -> None:
        """Note what has been written and read."""
        if self.files is not None:
            self.files.poll()

    def close(self) -> None:
        """Finish writing files."""
        if self.files is not None:
            self.files.close()

    def forget(self) -> None:
        """Forget what waits here. What is evicted from now on is not kept, until ``discards`` is False again."""
        self.index.clear()
        if self.files is not None:
            self.files.clear()
        self._noted.clear()
        self.discards = True

    def flush(self) -> None:
        """Move out what was noted. To be called before anything overwrites it on the device."""
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
        moves: dict[int, list[tuple[int, int]]] = {}
        put: list[tuple[Part, Held]] = []
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

    def plan(self, pool: Pool, tokens: Sequence[Token], known: list[Node], usable: int) -> Plan | None:
        """How to begin after more of ``tokens`` than the ``usable`` pages that the device's own parts allow.

        known: the nodes that the tree has of them. None where nothing is gained.
        """
        self.flush()  # what has just been evicted may be wanted at once
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
            windows = {lifetime: self._missing(window, known, rest, pages) for lifetime, window in pool.windows.items()}
            if any(columns is None for columns in windows.values()):
                continue
            found = {lifetime: columns for lifetime, columns in windows.items() if columns}
            return Plan(known[: min(pages, len(known))], digests, found, snapshot, usable)
        return None

    def _has_snapshot(self, pool: Pool, digest: bytes) -> bool:
        return (TAILS, digest) in self.index and pool.snapshots is not None and pool.snapshots.has_spare

    def _missing(
        self, window: WindowPool, known: list[Node], rest: list[tuple[Tokens, bytes]], pages: int
    ) -> list[int] | None:
        """The columns whose window pages have to come back for ``pages`` pages; None where they cannot."""
        missing = []
        for column in range(first_live_column(pages * PAGE_SIZE, window.lifetime), pages):
            if column < len(known) and window.lifetime in known[column].windows:
                continue
            digest = rest[column - len(known)][1] if column >= len(known) else node_digest(known[column])
            if (window.lifetime, digest) not in self.index:
                return None
            missing.append(column)
        return missing if len(missing) <= window.unpromised else None

    def fetch(self, pool: Pool, plan: Plan) -> list[Node]:
        """Begin the transfer of a plan that was made in this turn; returns all nodes, each locked once more.

        plan.path is locked. There are as many pages available as come back.
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
        for lifetime, columns in plan.windows.items():
            window, coming = pool.windows[lifetime], [path[column] for column in columns]
            reach = [n for n in path[first_live_column(len(path) * PAGE_SIZE, lifetime) :] if lifetime in n.windows]
            for node in reach:
                window.lock(node)  # so that none gives way to another of them
            window.unpromised -= len(coming)  # they stay locked even if the request goes
            for node in coming:
                window.offer(node, window.take())
                slot = parts[lifetime, node_digest(node)].slot
                moves.setdefault(lifetime, []).append((node.windows[lifetime].page, slot))
            for node in reach:
                window.unlock(node)
            transfer.windows[lifetime] = coming
            touched.update(coming)
        if plan.snapshot and pool.snapshots is not None:
            last = transfer.snapshot = path[-1]
            pool.snapshots.expect(last)
            moves.setdefault(TAILS, []).append((last.snapshot, parts[TAILS, node_digest(last)].slot))
            touched.add(last)
        transfer.nodes = [node for node in path if node in touched]
        for node in transfer.nodes:
            node.ticket = transfer.ticket
            pool.tree.lock(node)
        self.flush()  # what gave way for them
        self._mover.move_in(transfer.ticket, _arrays(moves))
        self.transfers.append(transfer)
        for held in parts.values():
            held.pins -= 1
        self._count(plan, moves)
        return path

    def _pinned(self, plan: Plan) -> dict[Part, Held]:
        """The host slots of everything that comes back; they cannot give way meanwhile."""
        wanted: list[Part] = [(ALL, digest) for _, digest in plan.rest]
        for lifetime, columns in plan.windows.items():
            wanted += [(lifetime, self._digest(plan, column)) for column in columns]
        if plan.snapshot:
            wanted.append((TAILS, self._digest(plan, plan.pages - 1)))
        parts = {}
        for part in reversed(wanted):  # so that a prefix's end is the first to give way
            held = self.index.find(part)
            assert held is not None
            held.pins += 1
            parts[part] = held
        return parts

    def _digest(self, plan: Plan, column: int) -> bytes:
        known = len(plan.path)
        return node_digest(plan.path[column]) if column < known else plan.rest[column - known][1]

    def _count(self, plan: Plan, moves: dict[int, list[tuple[int, int]]]) -> None:
        counters = self.counters
        counters.requests += 1
        counters.hits += (plan.pages - plan.usable) * PAGE_SIZE
        counters.parts_in += sum(map(len, moves.values()))
        counters.bytes_in += sum(len(pairs) * self.part_bytes[kind] for kind, pairs in moves.items())

    def arrive(self, pool: Pool) -> bool:
        """Note which transfers have arrived; whether any has."""
        if not self.transfers or (done := self._mover.poll()) <= self.arrived:
            return False
        self._mover.arrived(done)
        self.arrived = done
        while self.transfers and self.transfers[0].ticket <= done:
            transfer = self.transfers.pop(0)
            for lifetime, nodes in transfer.windows.items():
                window = pool.windows[lifetime]
                for node in nodes:
                    window.unlock(node)
                window.unpromised += len(nodes)
            if transfer.snapshot is not None and pool.snapshots is not None:
                pool.snapshots.arrived(transfer.snapshot)
            for node in reversed(transfer.nodes):
                pool.tree.unlock(node)
        return True

    def pause(self) -> None:
        """Nothing can be launched: wait a moment for what is coming."""
        if self.transfers or (self.files is not None and self.files.busy):
            time.sleep(PAUSE_SECONDS)


def _arrays(moves: dict[int, list[tuple[int, int]]]) -> list[Move]:
    return [(kind, *_columns(pairs)) for kind, pairs in moves.items()]


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pages, slots = zip(*pairs, strict=True)
    return np.asarray(pages, dtype=np.int32), np.asarray(slots, dtype=np.int32)
