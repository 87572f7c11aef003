"""Estimate of each replica's prefix cache, as hashes of pages.

A page's hash covers every token before it, so a set of hashes is a radix tree: a node is known by its path. The engine
alone decides what is a hit; a wrong estimate costs a prompt's time and does not change the text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from unisono.types import EngineRequest

DEFAULT_PAGE_SIZE = 16
"""Default tokens of a page, for an engine that does not report it."""


def page_hashes(request: EngineRequest, tokens: Sequence[int], page_size: int) -> list[int]:
    """Return the hashes of the full pages of ``tokens``, which begin with the request's prompt.

    Requests with other salts or images get other hashes; those with embeddings get none. Python's hash of bytes has a
    new key in each process, so clients cannot choose tokens that collide.
    """
    if request.overrides is not None:  # token ids do not distinguish such prompts
        return []
    ids = array("q", tokens)
    whole = len(ids) // page_size
    data, size = ids[: whole * page_size].tobytes(), page_size * ids.itemsize
    images: dict[int, tuple[bytes, ...]] = {}
    for one in request.media:
        page = one.positions[0] // page_size if one.positions else 0
        images[page] = (*images.get(page, ()), one.digest)
    last = hash(request.cache_salt)
    hashes = []
    for page in range(whole):
        last = hash((last, data[page * size : (page + 1) * size], images.get(page)))
        hashes.append(last)
    return hashes


class PrefixIndex:
    """Pages of one replica, at most ``limit``; the least recently used are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading pages of a prompt that are present."""
        for count, one in enumerate(hashes):
            if one not in self._pages:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[int]) -> None:
        """Mark these consecutive pages as used now. The last one is the first to be forgotten, as in the engine."""
        for one in reversed(hashes[: self._limit]):
            self._pages[one] = None
            self._pages.move_to_end(one)
        while len(self._pages) > self._limit:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        """Empty the index."""
        self._pages.clear()
