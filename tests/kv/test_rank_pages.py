"""Page pools of DP attention: a request's pages are on one rank, its hits too; other requests go to other ranks."""

from __future__ import annotations

import pytest
import torch

from unisono.kv.pages import OutOfPages
from unisono.kv.rank_pages import RankPools, page_pool
from unisono.kv.specs import PAGE_SIZE, Paged
from unisono.types import ConfigError


def test_a_hit_stays_on_its_rank_and_the_emptiest_gets_what_is_new() -> None:
    pools = RankPools(24, 2)
    tokens = list(range(3 * PAGE_SIZE))
    first = pools.open(tokens)
    assert first.reserve(len(tokens)) == [1, 2, 3]
    first.commit(tokens)
    second = pools.open([7] * 40)
    assert set(second.reserve(40)) == {13, 14, 15}, "rank 1 has the pages from 12 on, and 12 is padding"
    pools.check_integrity()
    first.release()
    again = pools.open([*tokens, 5])
    assert again.pages == [1, 2, 3]
    assert again.cached_tokens == len(tokens)
    assert pools.cached_pages == 3
    assert pools.available == (11 - 3) + (11 - 3)
    again.release()
    second.release()
    assert pools.usage == 0
    assert pools.drop_cached() == 3
    pools.check_integrity()


def test_a_full_rank_leaves_requests_with_its_prefix_to_others() -> None:
    """A prefix that all requests share would otherwise hold them on one rank while the others are idle."""
    pools = RankPools(24, 2)
    shared = list(range(PAGE_SIZE))
    held = []
    for number in range(5):
        tokens = [*shared, *[100 + number] * (2 * PAGE_SIZE)]
        pages = pools.open(tokens)
        pages.reserve(len(tokens))
        pages.commit(tokens)
        held.append(pages)
    assert {page.pool for page in held} == set(pools.pools)
    pools.check_integrity()


def test_a_hit_outweighs_free_pages() -> None:
    pools = RankPools(24, 2)
    tokens = list(range(3 * PAGE_SIZE))
    first = pools.open(tokens)
    first.reserve(len(tokens))
    first.commit(tokens)
    assert pools.pools[0].available < pools.pools[1].available
    assert pools.open([*tokens, 5]).pool is first.pool


def test_bytes_of_a_divided_page() -> None:
    """The bytes of a page on one rank, on average, rounded up."""
    assert Paged((1, PAGE_SIZE, 6), torch.float32, ranks=4).page_bytes == PAGE_SIZE * 6
    assert Paged((1, 1, 5), torch.uint8, ranks=2).page_bytes == 3


def test_a_cached_prefix_takes_room_of_its_rank() -> None:
    """Pages of a prefix that no request holds are available until a reservation locks them."""
    pools = RankPools(24, 2)
    shared = list(range(7 * PAGE_SIZE))
    first = pools.open(shared)
    first.reserve(len(shared))
    first.commit(shared)
    first.release()
    held = pools.pools[0].open([7])
    held.reserve(PAGE_SIZE)
    tokens = [*shared, *[9] * (2 * PAGE_SIZE)]
    long = pools.open(tokens)
    assert long.pool is pools.pools[1], "rank 0 has 10 pages, 7 of the prefix: 3 more and one of headroom do not fit"
    long.reserve(len(tokens) + 1)
    pools.check_integrity()


def test_windows_are_refused_among_ranks() -> None:
    with pytest.raises(ConfigError, match="--enable-dp-attention: the drafter has layers with a window"):
        page_pool(8, 2, {16: 4}, None, True, None)


def test_a_rank_lends_no_pages() -> None:
    pools = RankPools(8, 2)
    held = pools.open([1, 2])
    with pytest.raises(OutOfPages, match="4 pages requested, 3 available of 3"):
        held.reserve(4 * PAGE_SIZE)
    assert pools.available == 6


def test_one_rank_has_the_usual_pool() -> None:
    pool = page_pool(8, 1, {}, None, True, None)
    assert not isinstance(pool, RankPools)
    assert pool.pools == (pool,)
    assert isinstance(page_pool(8, 2, {}, None, True, None), RankPools)
