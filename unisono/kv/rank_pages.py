"""Page pools of DP attention (``--enable-dp-attention``): one pool and one prefix tree for each rank.

Page ids count through all ranks: with P pages a rank, rank r has the ids from r · P on, and the first of them is its
padding page. A reservation belongs to one pool, so a request's pages are all on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.kv.offload.offloader import Offload
from unisono.kv.pages import PagePool, Reservation, pages_for
from unisono.kv.prefix_tree import Token
from unisono.types import ConfigError


class RankPools(PagePool):
    """A pool for each rank, as one. num_pages: of all ranks; their number divides it."""

    def __init__(self, num_pages: int, ranks: int, hits: bool = True) -> None:
        super().__init__(0, hits=hits)
        self.num_pages, each = num_pages, num_pages // ranks
        self._pools = tuple(PagePool(each, hits=hits, first=rank * each) for rank in range(ranks))

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """One for each rank."""
        return self._pools

    def open(self, tokens: Sequence[Token], quotas: Mapping[int, int] | None = None) -> Reservation:
        """Open a reservation on the rank with the longest cached prefix, among the ranks that have room for the tokens.

        Ties go to the rank with the most available pages. If no rank has room, that rank is chosen, too. Room includes
        one page for each request that the rank has, as admission requires.
        """

        def preference(pool: PagePool) -> tuple[bool, int, int]:
            path = pool.tree.match(tokens[: len(tokens) - 1]) if self.hits else []
            idle = sum(node.locks == 0 for node in path)  # the reservation will lock them, so they are not available
            need = pages_for(len(tokens) + 1) - len(path) + len(pool.open_reservations)
            fits = need <= pool.available - idle
            return fits, len(path) if fits else 0, pool.available

        return max(self.pools, key=preference).open(tokens, quotas)

    @property
    def available(self) -> int:
        """Pages that reservations can get, on all ranks."""
        return sum(pool.available for pool in self.pools)

    @property
    def usage(self) -> float:
        """Fraction of pages held by requests, 0 … 1."""
        return sum(pool.usage for pool in self.pools) / len(self.pools)

    @property
    def cached_pages(self) -> int:
        """Pages in the prefix trees."""
        return sum(pool.cached_pages for pool in self.pools)

    def drop_cached(self) -> int:
        """See :meth:`PagePool.drop_cached`."""
        return sum(pool.drop_cached() for pool in self.pools)

    def check_integrity(self) -> None:
        """See :meth:`PagePool.check_integrity`."""
        for pool in self.pools:
            pool.check_integrity()


def page_pool(
    num_pages: int, ranks: int, windows: Mapping[int, int], snapshots: int | None, hits: bool, offload: Offload | None
) -> PagePool:
    """Make the pool of an engine whose pages are divided among ``ranks``; the other arguments are a PagePool's.

    Raises ConfigError for windows, snapshots or an offload with several ranks.
    """
    if ranks > 1:
        if windows or snapshots is not None or offload is not None:
            raise ConfigError(
                "--enable-dp-attention: the drafter has layers with a window or a recurrence; use another one, or "
                "leave the flag out."
            )
        return RankPools(num_pages, ranks, hits)
    return PagePool(num_pages, windows, snapshots, hits, offload)
