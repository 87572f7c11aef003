"""Tiles of attention on the CPU in one pass, and the rows of queries and pages that they read.

Tiles depend on positions and pages only, so all layers of a pass share them. Called by
``kernels/attention/cpu_float32.py``.

Shapes: T tokens, B query tiles, C key tiles, N pairs of both, M = ROW_TILE rows, S = KEY_TILE keys, G query heads of a
KV head, H KV heads, D head size, P tokens of a page. A row of a tile is one (token, query head of a group).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.kernels.gemm.cpu import ROW_TILE

KEY_TILE = 128
"""Keys of a product. Part of the reduction order, hence of the bits."""

FEW_TILES = 4
"""Up to this many query tiles of a request are paired with copies of its keys. More are attended key tile by key tile,
without copies."""

TILES_AT_ONCE = 64
"""Query tiles of one request attended together. Bounds the memory for the results of all key tiles."""

PAIRS_AT_ONCE = 128
"""Pairs attended together. Bounds the copies of keys and values to 2 · 128 · H · S · D floats."""

KEPT = 8
"""Capacity of the cache of reads, in passes or groups of layers of a pass."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Spans = tuple[tuple[int, int, int], ...]
"""Spans of tokens: (row of the page table, first token, end token)."""


def first_seen(position: Any, window: int) -> Any:
    """First key that a token at ``position`` may see with a window, or in its chunk (window < 0)."""
    return position // -window * -window if window < 0 else position - window + 1


class PassSizes(NamedTuple):
    """Sizes of a pass. pages: pages of the cache. window, first: as in ``attention``."""

    heads: int
    kv_heads: int
    pages: int
    page_size: int
    window: int
    first: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def unit(self) -> int:
        """Tokens of a page read together."""
        return math.gcd(self.page_size, KEY_TILE)

    def bounds(self, pos: Ints) -> Ints:
        """First key that a row at each position may see."""
        if not self.window:
            return np.full_like(pos, self.first)
        return np.maximum(first_seen(pos, self.window), self.first)


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel: the query tiles ``tiles`` with the key tile ``keys``; None: each tile with its own keys.

    mask [n, 1, M, S] fp32 is added to the scores. hidden [n, 1, M]: rows that see none of the keys; None: no row.
    place: indices of the results among [C · B]; None: they are all of them.
    """

    tiles: slice
    keys: int | None
    place: slice | torch.Tensor | None
    mask: torch.Tensor
    hidden: torch.Tensor | None


@dataclass(frozen=True)
class TileGroup:
    """Query tiles attended together.

    queries [n · H · M]: rows of q [T · Hq, D]. keys [n · H · S / unit]: rows of a cache […, unit · D]. unseen: (key
    tile, first, end) of runs of keys that no row sees. heads [B, M]: each row's head in its group.
    """

    tiles: int
    key_tiles: int
    queries: torch.Tensor
    keys: torch.Tensor
    unseen: tuple[tuple[int, int, int], ...]
    calls: tuple[KernelCall, ...]
    heads: torch.Tensor


@dataclass(frozen=True)
class AttentionReads:
    """Tile groups of a pass. out [T · Hq]: rows of all groups' results [B · H · M, D]. idle [T]: tokens that see
    nothing.
    """

    parts: tuple[TileGroup, ...]
    out: torch.Tensor
    idle: torch.Tensor | None


@dataclass(frozen=True)
class _QueryTiles:
    """Query tiles [B, M]: each row's token, head in its group, last position that it sees (-1: nothing), and its own.

    owner [B]: the tile's row of the page table.
    """

    token: Ints
    head: Ints
    pos: Ints
    at: Ints
    owner: Ints

    @classmethod
    def of(cls, shared: PassSizes, positions: tuple[Ints, Ints], spans: Ints) -> _QueryTiles:
        """Tiles of spans [E, 3] (owner, first token, end token), in order; those that see nothing are left out."""
        owner, begin, end = spans.T
        counts = _tiles_in(shared, begin, end)
        span = np.arange(len(spans)).repeat(counts)
        tile = np.arange(len(span)) - (counts.cumsum() - counts)[span]
        row = (begin[span] * shared.group + tile * ROW_TILE)[:, None] + _ROWS
        past = end[span][:, None]
        token = np.minimum(row // shared.group, past - 1)
        at, pos = (each[token] for each in positions)
        pos = np.where((row < past * shared.group) & (pos >= shared.first), pos, -1)
        found = cls(token, row % shared.group, pos, at, owner[span])
        seeing = pos.max(1) >= 0
        return found if seeing.all() else found[seeing]

    def __len__(self) -> int:
        return len(self.owner)

    def __getitem__(self, chosen: slice | Bools | Ints) -> _QueryTiles:
        fields = self.token, self.head, self.pos, self.at, self.owner
        return _QueryTiles(*(each[chosen] for each in fields))

    @classmethod
    def joined(cls, several: Sequence[_QueryTiles]) -> _QueryTiles:
        if len(several) == 1:
            return several[0]
        fields = zip(*((t.token, t.head, t.pos, t.at, t.owner) for t in several), strict=True)
        return cls(*map(np.concatenate, fields))

    def key_tiles(self, shared: PassSizes) -> tuple[Ints, Ints]:
        """(first key tile that each query tile sees [B], number of its key tiles [B])."""
        last = self.pos.max(1)
        if shared.window:
            first = shared.bounds(np.where(self.pos < 0, last[:, None], self.at)).min(1) // KEY_TILE
        else:
            first = np.full_like(last, shared.first // KEY_TILE)
        return first, last // KEY_TILE - first + 1

    def queries(self, shared: PassSizes) -> torch.Tensor:
        """See :class:`TileGroup`."""
        first = self.token * shared.heads + self.head
        return _tensor(first[:, None] + np.arange(shared.kv_heads)[:, None] * shared.group)


@dataclass(frozen=True)
class _KeptReads:
    """Cached AttentionReads and their source: the owners' rows of the page table, as far as they were read."""

    reads: AttentionReads
    owners: torch.Tensor
    table: torch.Tensor
    positions: tuple[torch.Tensor, torch.Tensor]

    def serves(self, page_table: torch.Tensor, positions: torch.Tensor, until: torch.Tensor) -> bool:
        read = page_table.index_select(0, self.owners).narrow(1, 0, self.table.shape[1])
        same = torch.equal(positions, self.positions[0]) and torch.equal(until, self.positions[1])
        return same and torch.equal(read, self.table)


_ROWS = np.arange(ROW_TILE)


def _tiles_in(shared: PassSizes, begin: Ints, end: Ints) -> Ints:
    """Query tiles of each span [E]."""
    return -(-(end - begin) * shared.group // ROW_TILE)


_kept: dict[tuple[PassSizes, Spans], _KeptReads] = {}


def reads_of(
    shared: PassSizes, page_table: torch.Tensor, positions: torch.Tensor, spans: Spans,
    until: torch.Tensor | None = None,
) -> AttentionReads:  # fmt: skip
    """Return the reads of a pass over spans, with positions [T] of its tokens. Reuses those of the layer before.

    until [T]: last position that each token sees; None: its own.
    """
    until = positions if until is None else until
    kept = _kept.get((shared, spans))
    if kept is not None and kept.serves(page_table, positions, until):
        return kept.reads
    joined = list(_joined(spans))
    owners = torch.tensor([owner for owner, *_ in joined], dtype=torch.long)
    columns = max(int(until.max()), 0) // shared.page_size + 1
    table = page_table.index_select(0, owners).narrow(1, 0, min(columns, page_table.shape[1])).clone()
    reads = _read(shared, table.long().numpy(), (positions.long().numpy(), until.long().numpy()), joined)
    if len(_kept) >= KEPT:
        _kept.clear()
    _kept[shared, spans] = _KeptReads(reads, owners, table, (positions.clone(), until.clone()))
    return reads


def _joined(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """Sort spans by token and join neighbours of one request."""
    owner, begin, end = -1, 0, 0
    for after in sorted(spans, key=lambda span: span[1]):
        if after[:2] == (owner, end):
            end = after[2]
            continue
        if end > begin:
            yield owner, begin, end
        owner, begin, end = after
    if end > begin:
        yield owner, begin, end


def _read(
    shared: PassSizes, table: Ints, positions: tuple[Ints, Ints], spans: Sequence[tuple[int, int, int]]
) -> AttentionReads:
    few, parts, computed = list[_QueryTiles](), list[TileGroup](), list[_QueryTiles]()
    numbered = np.array([(owner, begin, end) for owner, (_, begin, end) in enumerate(spans)], np.int64).reshape(-1, 3)
    if (_tiles_in(shared, *numbered[:, 1:].T) <= FEW_TILES).all():
        few.append(_QueryTiles.of(shared, positions, numbered))
        numbered = numbered[:0]
    for number in range(len(numbered)):
        tiles = _QueryTiles.of(shared, positions, numbered[number : number + 1])
        if len(tiles) <= FEW_TILES:
            few.append(tiles)
            continue
        for at in range(0, len(tiles), TILES_AT_ONCE):
            computed.append(tiles[at : at + TILES_AT_ONCE])
            parts.append(_one_request(shared, table, computed[-1]))
    for chosen, key_tiles in _cut(shared, _QueryTiles.joined(few)) if few else ():
        computed.append(chosen)
        parts.append(_pairs(shared, table, chosen, *key_tiles))
    return AttentionReads(tuple(parts), *_results(shared, len(positions[0]), computed))


def _results(
    shared: PassSizes, tokens: int, computed: Sequence[_QueryTiles]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :class:`AttentionReads`."""
    rows, idle = np.zeros((tokens, shared.kv_heads, shared.group), np.int64), np.ones(tokens, np.bool_)
    if computed:
        tiles = _QueryTiles.joined(computed)
        tile, row = (tiles.pos >= 0).nonzero()
        token = tiles.token[tile, row]
        first = tile * shared.kv_heads * ROW_TILE + row
        heads = np.arange(shared.kv_heads)
        rows[token[:, None], heads, tiles.head[tile, row][:, None]] = first[:, None] + heads * ROW_TILE
        idle[token] = False
    return _tensor(rows), torch.from_numpy(idle) if idle.any() else None


def _cut(shared: PassSizes, tiles: _QueryTiles) -> Iterator[tuple[_QueryTiles, tuple[Ints, Ints]]]:
    """Divide the tiles, in order, into runs of about PAIRS_AT_ONCE key tiles: each run and its ``key_tiles``."""
    if not len(tiles):
        return
    first, counts = tiles.key_tiles(shared)
    run = (counts.cumsum() - counts) // PAIRS_AT_ONCE
    if not run[-1]:
        yield tiles, (first, counts)
        return
    for number in range(int(run[-1]) + 1):
        if (chosen := run == number).any():
            yield tiles[chosen], (first[chosen], counts[chosen])


def _pairs(shared: PassSizes, table: Ints, tiles: _QueryTiles, first: Ints, counts: Ints) -> TileGroup:
    """Attend each tile with its own copy of the keys that it sees, in one call. first, counts [B]: its key tiles."""
    most = int(counts.max())
    number, tile = (np.arange(most)[:, None] < counts).nonzero()  # by key tile, then by query tile
    paired, place = tiles[tile], number * len(tiles) + tile
    keys = (first[tile] + number)[:, None] * KEY_TILE + np.arange(KEY_TILE)
    mask, hidden, seen = _visible(shared, paired.pos, paired.at, keys)
    whole = len(place) == most * len(tiles)
    call = KernelCall(slice(None), None, None if whole else torch.from_numpy(place), mask, hidden)
    return TileGroup(
        len(tiles), most, paired.queries(shared), _rows_of_pages(shared, table[paired.owner], keys),
        tuple(_runs(~seen)), (call,), torch.from_numpy(tiles.head),
    )  # fmt: skip


def _one_request(shared: PassSizes, table: Ints, tiles: _QueryTiles) -> TileGroup:
    """Attend many tiles of one request: a call for each key tile and run of query tiles."""
    first, counts = tiles.key_tiles(shared)
    begin, end = int(first.min()), int((first + counts).max())
    keys = np.arange(begin, end)[:, None] * KEY_TILE + np.arange(KEY_TILE)
    lowest, last = shared.bounds(tiles.at), tiles.pos
    unseen = (keys > last.max()) | (keys < lowest[last >= 0].min())
    calls = []
    for number, (low, high) in enumerate(keys[:, [0, -1]]):
        from_key, to_key = np.maximum(lowest, low), np.minimum(last, high)
        some = (from_key <= to_key).any(1)
        whole = ((from_key == low) & (to_key == high) | (last < 0)).all(1)
        for start, stop, masked in _calls_of(some, whole):
            mask, hidden = _NO_MASK, None
            if masked:
                mask, hidden, _ = _visible(shared, last[start:stop], tiles.at[start:stop], keys[number][None])
            place = number * len(tiles)
            calls.append(KernelCall(slice(start, stop), number, slice(place + start, place + stop), mask, hidden))
    return TileGroup(
        len(tiles), len(keys), tiles.queries(shared),
        _rows_of_pages(shared, table[np.full(len(keys), tiles.owner[0])], keys),
        tuple(_runs(unseen)), tuple(calls), torch.from_numpy(tiles.head),
    )  # fmt: skip


_NO_MASK = torch.zeros(1, 1, 1, KEY_TILE)


def _calls_of(some: Bools, whole: Bools) -> Iterator[tuple[int, int, bool]]:
    """Runs of tiles that see some keys: (start, stop, True if rows see only part of them)."""
    kinds = np.stack((some & ~whole, some & whole))
    yield from sorted((start, stop, kind == 0) for kind, start, stop in _runs(kinds))


def _runs(marked: Bools) -> Iterator[tuple[int, int, int]]:
    """Runs of marked columns: (row, start, stop)."""
    edged = np.zeros((len(marked), marked.shape[1] + 2), np.bool_)
    edged[:, 1:-1] = marked
    rows, edges = (edged[:, 1:] != edged[:, :-1]).nonzero()
    yield from zip(rows[::2].tolist(), edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _visible(shared: PassSizes, pos: Ints, at: Ints, keys: Ints) -> tuple[torch.Tensor, torch.Tensor | None, Bools]:
    """(mask [n, 1, M, S], hidden rows [n, 1, M] or None) of a :class:`KernelCall`, and the visible keys [n, S].

    pos, at [n, M]: last position that a row sees, and its own. keys [n or 1, S].
    """
    visible = keys[:, None] <= pos[..., None]
    if shared.window or shared.first:
        visible &= keys[:, None] >= shared.bounds(at)[..., None]
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    hidden = ~visible.any(2)
    mattering = (hidden & (pos >= 0)).any()
    seen: Bools = np.logical_or.reduce(visible, axis=1)
    return torch.from_numpy(mask)[:, None], torch.from_numpy(hidden)[:, None] if mattering else None, seen


def _rows_of_pages(shared: PassSizes, pages: Ints, keys: Ints) -> torch.Tensor:
    """See :class:`TileGroup`. pages [n, columns]: of each key tile's request; keys [n, S]: the tile's positions.

    Positions beyond the page table read any page: no row sees them.
    """
    at = keys[:, :: shared.unit]
    column = np.minimum(at // shared.page_size, pages.shape[1] - 1)
    page = np.take_along_axis(pages, column, 1).clip(0, shared.pages - 1)
    runs = shared.page_size // shared.unit
    head = page[:, None] * shared.kv_heads + np.arange(shared.kv_heads)[:, None]
    return _tensor(head * runs + (at % shared.page_size // shared.unit)[:, None])


def _tensor(values: Ints) -> torch.Tensor:
    return torch.from_numpy(values.ravel())
