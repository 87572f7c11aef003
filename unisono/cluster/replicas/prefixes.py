"""What each replica's prefix cache is thought to have, as hashes of pages.

A page's hash covers every token before it, so a set of hashes is a radix tree: a node is known by its path. The index
is a guess. The engine alone decides what is a hit; a wrong guess costs a prompt's time and changes no text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from unisono.types import EngineRequest

PAGE_SIZE = 16
"""Tokens of a page, where an engine does not say."""


def page_hashes(request: EngineRequest, tokens: Sequence[int], page_size: int) -> list[int]:
    """The hashes of the full pages of ``tokens``, which begin with the request's prompt.

    Requests of other salts and with other pictures get other hashes; those with embeddings get none. Python's hash of
    bytes is keyed anew in each process, so nobody outside can choose tokens that collide.
    """
    if request.overrides is not None:  # token ids do not tell such prompts apart
        return []
    ids = array("q", tokens)
    whole = len(ids) // page_size
    data, size = ids[: whole * page_size].tobytes(), page_size * ids.itemsize
    pictures: dict[int, tuple[bytes, ...]] = {}
    for one in request.media:
        page = one.positions[0] // page_size if one.positions else 0
        pictures[page] = (*pictures.get(page, ()), one.digest)
    last = hash(request.cache_salt)
    hashes = []
    for page in range(whole):
        last = hash((last, data[page * size : (page + 1) * size], pictures.get(page)))
        hashes.append(last)
    return hashes


class PrefixIndex:
    """The pages of one replica, at most ``limit`` of them; those that were not used for longest are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's pages, from its first on, are there."""
        for count, one in enumerate(hashes):
            if one not in self._pages:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[int]) -> None:
        """These pages, one after another, are used now. The last one is the first to be forgotten, as in the engine."""
        for one in reversed(hashes[: self._limit]):
            self._pages[one] = None
            self._pages.move_to_end(one)
        while len(self._pages) > self._limit:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        """The replica's cache is empty."""
        self._pages.clear()
