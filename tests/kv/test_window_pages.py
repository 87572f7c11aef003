"""Pages of window groups and snapshots: what is freed, what a cached prefix needs, and that nothing leaks."""

from __future__ import annotations

import random

import pytest

from tests.kv.helpers import run, tokens_of
from unisono.kv.pages import OutOfPages, PagePool, Reservation, pages_for
from unisono.kv.specs import PAGE_SIZE
from unisono.kv.window_pages import WindowPages, first_live_column

WINDOW = 40  # positions: two pages and a half


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 64])
def test_the_first_live_column_is_the_page_of_the_first_visible_key(window: int) -> None:
    for position in range(200):
        visible = [p for p in range(position + 1) if p > position - window]
        assert first_live_column(position, window) == visible[0] // PAGE_SIZE


def test_a_request_holds_no_more_than_its_window() -> None:
    pool = PagePool(100, {WINDOW: 100})
    reservation = run(pool, list(range(40 * PAGE_SIZE)))
    window = reservation.windows[WINDOW]
    assert len(reservation.entries) == 40
    assert (window.first, window.end) == (first_live_column(40 * PAGE_SIZE, WINDOW), 40)
    assert len(window.entries) <= pool.windows[WINDOW].quota(2 * PAGE_SIZE, 1000)
    pool.check_integrity()
    reservation.release()
    pool.check_integrity()


def test_prefix_hit_needs_a_complete_window() -> None:
    """The pages of window group ALL are all cached; of the window's only those that were not needed elsewhere."""
    tokens = tokens_of(1, 2, 3, 4, 5, 6)
    pool = PagePool(100, {WINDOW: 9})
    run(pool, tokens).release()
    assert pool.open([*tokens, 0]).cached_tokens == len(tokens)
    for reservation in list(pool.open_reservations):
        reservation.release()
    run(pool, tokens_of(7, 8, 9, 10)).release()  # takes the oldest window pages of the first text
    missing = [not node.windows for node in pool.tree.match(tokens)]
    assert any(missing)
    assert not all(missing)
    usable = max(
        (m for m in range(7) if not any(missing[first_live_column(m * PAGE_SIZE, WINDOW) : m])),
    )
    assert 0 < pool.open([*tokens, 0]).cached_tokens == usable * PAGE_SIZE <= len(tokens)
    pool.check_integrity()


def test_a_quota_is_a_promise() -> None:
    """Requests that were admitted never run out of window pages, whatever the tree holds."""
    rng, pool = random.Random(1), PagePool(400, {WINDOW: 24, 16: 20})
    live: list[Reservation] = []
    for step in range(400):
        quotas = {w: p.quota(2 * PAGE_SIZE, 1000) for w, p in pool.windows.items()}
        if live and (rng.random() < 0.4 or not pool.has_quotas(quotas)):
            live.pop(rng.randrange(len(live))).release()
        else:
            try:
                live.append(run(pool, tokens_of(*(rng.randrange(3) for _ in range(rng.randrange(1, 12))))))
            except OutOfPages:
                pytest.fail("window_group ALL has room")
        if step % 7 == 0:
            pool.check_integrity()
    assert pool.tree.pages > 20
    pool.drop_cached()
    pool.check_integrity()


def test_admission_needs_a_window_quota() -> None:
    pool = PagePool(100, {WINDOW: 8})
    quota = {WINDOW: 5}
    first = pool.open([1], quota)
    assert not pool.has_quotas(quota)
    first.windows[WINDOW].set_quota(2)
    assert pool.has_quotas(quota)
    first.release()
    assert pool.windows[WINDOW].unpromised == 7


def test_prefix_hit_of_a_recurrent_model_needs_a_snapshot() -> None:
    tokens = tokens_of(1, 2, 3)
    pool = PagePool(20, snapshots=2)
    reservation = run(pool, tokens)
    assert pool.open([*tokens, 0]).cached_tokens == 0
    assert pool.snapshots is not None
    node, snapshot = reservation.node_after(2 * PAGE_SIZE), pool.snapshots.take()
    assert node is not None
    assert reservation.node_after(2 * PAGE_SIZE + 1) is None
    pool.snapshots.attach(node, snapshot)
    found = pool.open([*tokens, 0])
    assert (found.cached_tokens, found.snapshot) == (2 * PAGE_SIZE, snapshot)


def test_snapshots_give_way_in_order_of_use() -> None:
    pool = PagePool(20, snapshots=2)
    assert pool.snapshots is not None
    nodes = []
    for word in (1, 2, 3):
        node = run(pool, tokens_of(word)).node_after(PAGE_SIZE)
        assert node is not None
        nodes.append(node)
        pool.snapshots.attach(node, pool.snapshots.take())
        if word == 2:
            pool.open([*tokens_of(1), 0])  # uses the first
    assert [node.snapshot >= 0 for node in nodes] == [True, False, True]
    for reservation in list(pool.open_reservations):
        reservation.release()
    pool.drop_cached()
    assert sorted(pool.snapshots.free) == [0, 1]


def test_pages_are_counted_per_lifetime() -> None:
    pool = PagePool(10, {WINDOW: 8})
    reservation = run(pool, tokens_of(1, 2, 3, 4))
    pool.windows[WINDOW].free.append(reservation.windows[WINDOW].entries[0][0])
    with pytest.raises(RuntimeError, match="owned by both"):
        pool.check_integrity()
    assert pages_for(PAGE_SIZE + 1) == 2


def test_window_pages_give_way_in_order_of_use() -> None:
    pool = PagePool(100, {WINDOW: 9})
    for words in ((1, 2, 3), (4, 5, 6)):
        run(pool, tokens_of(*words)).release()
    pool.open([*tokens_of(1, 2, 3), 0]).release()  # uses the first text
    window = pool.windows[WINDOW]
    for _ in range(len(window.free) + 1):
        window.take()
    assert all(node.windows for node in pool.tree.match(tokens_of(1, 2, 3)))
    assert not all(node.windows for node in pool.tree.match(tokens_of(4, 5, 6)))


@pytest.mark.parametrize("tokens", [1, 5, 32, 100])
def test_a_request_never_holds_more_than_its_quota(tokens: int) -> None:
    """Whatever its passes' lengths are: the host knows a pass's tokens, and holds pages for those of the next."""
    pool = PagePool(200, {WINDOW: 100}).windows[WINDOW]
    rng, most = random.Random(tokens), 0
    window = WindowPages(pool, pool.quota(tokens, 100_000))
    known = 0
    while known < 1500:
        window.grow(known + tokens)
        most = max(most, len(window.entries))
        known += rng.randrange(1, tokens + 1)
        window.free_before(known)
    assert most <= window.quota <= most + 3


def test_pages_in_the_window_of_a_page_aligned_prefix_are_kept() -> None:
    """Tokens past a page's end are known before the prefix tree has that page; a hit goes on from the end."""
    pool = PagePool(200, {WINDOW: 100}).windows[WINDOW]
    for beyond in range(PAGE_SIZE):
        window = WindowPages(pool, 20)
        window.grow(10 * PAGE_SIZE + beyond)
        window.free_before(10 * PAGE_SIZE + beyond)
        assert window.first == first_live_column(10 * PAGE_SIZE, WINDOW)
