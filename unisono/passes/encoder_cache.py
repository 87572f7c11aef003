"""Index of the encoder cache: which rows hold whose embeddings. Host bookkeeping of the feature ``media``.

An entry is a frame of an image or video, identified by its digest. Entries held by no request stay until their rows are
needed, in least-recently-used order. A request holds an entry from before its first prompt token is computed until all
of them are. Requests may wait for rows. A request may hold entries only if every holder could still get its next two,
so one of them always makes progress.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np


@dataclass
class EncoderEntry:
    """An encoded frame. rows [n] int32: cache rows of its tokens. holders: number of requests that hold it."""

    rows: np.ndarray
    holders: int = 0


@dataclass
class _Claim:
    """Tokens held by a request, and tokens it must be able to hold at one time."""

    held: int
    reserve: int

    @property
    def tokens(self) -> int:
        return max(self.held, self.reserve)


class EncoderCache:
    """Encoder cache of ``capacity`` rows. ``queries`` counts entries requests started to hold, ``hits`` those already
    present."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queries = self.hits = self.evictions = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._entries: OrderedDict[bytes, EncoderEntry] = OrderedDict()
        self._claims: dict[int, _Claim] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def used(self) -> int:
        """Rows with embeddings."""
        return self.capacity - len(self._free)

    @property
    def held(self) -> int:
        """Rows of entries held by requests."""
        return sum(len(entry.rows) for entry in self._entries.values() if entry.holders)

    def allows(self, owner: int, tokens: int, reserve: int) -> bool:
        """Return True if a request may hold ``tokens`` more. reserve: tokens it must be able to hold at one time to
        make progress."""
        claim = self._claims.get(owner)
        own = max(reserve, tokens + (claim.held if claim is not None else 0))
        others = sum(claim.tokens for name, claim in self._claims.items() if name != owner)
        return own + others <= self.capacity

    def hold(self, owner: int, key: bytes, tokens: int, reserve: int) -> np.ndarray:
        """Hold an entry and return its rows. A new entry gets free rows, or rows of evicted entries.

        :meth:`allows` must have returned True.
        """
        entry = self._entries.get(key)
        self.queries += 1
        self.hits += entry is not None
        if entry is None:
            entry = self._entries[key] = EncoderEntry(self._take(tokens))
        self._entries.move_to_end(key)
        entry.holders += 1
        self._claims.setdefault(owner, _Claim(0, reserve)).held += tokens
        return entry.rows

    def release(self, owner: int, key: bytes) -> None:
        """Release the request's hold on the entry; it stays until its rows are needed."""
        entry, claim = self._entries[key], self._claims[owner]
        entry.holders -= 1
        claim.held -= len(entry.rows)
        if not claim.held:
            del self._claims[owner]

    def forget(self) -> None:
        """Forget all entries. Raises RuntimeError if a request holds one."""
        if self.held:
            raise RuntimeError(f"{self.held} rows of the encoder cache are held by requests")
        for entry in self._entries.values():
            self._free.extend(entry.rows.tolist())
        self._entries.clear()

    def _take(self, tokens: int) -> np.ndarray:
        for key in [key for key, entry in self._entries.items() if not entry.holders]:
            if len(self._free) >= tokens:
                break
            self._free.extend(self._entries.pop(key).rows.tolist())
            self.evictions += 1
        if len(self._free) < tokens:
            raise RuntimeError(f"the encoder cache has {len(self._free)} rows left, {tokens} are needed")
        return np.array([self._free.pop() for _ in range(tokens)], dtype=np.int32)
