"""Pages: transactions, the prefix tree, eviction, and an integrity check that finds planted breaches."""

from __future__ import annotations

import random

import pytest

from unisono.kv.pages import OutOfPages, PagePool, pages_for
from unisono.kv.specs import PADDING_PAGE, PAGE_SIZE


def prompt(*words: int) -> list[int]:
    """One page of each word."""
    return [w for w in words for _ in range(PAGE_SIZE)]


def test_reserve_is_all_or_nothing() -> None:
    pool = PagePool(5)
    a = pool.open([1])
    assert len(a.reserve(PAGE_SIZE * 3)) == 3
    b = pool.open([2])
    with pytest.raises(OutOfPages, match=r"2 pages requested, 1 available of 4"):
        b.reserve(PAGE_SIZE + 1)
    assert b.pages == []
    pool.check_integrity()
    a.release()
    assert len(b.reserve(PAGE_SIZE + 1)) == 2
    pool.check_integrity()


def test_padding_page_is_never_reserved() -> None:
    pool = PagePool(4)
    assert PADDING_PAGE not in pool.open([1]).reserve(3 * PAGE_SIZE)


def test_only_committed_pages_are_found() -> None:
    pool = PagePool(10)
    tokens = [*prompt(1, 2, 3), 9]
    a = pool.open(tokens)
    a.reserve(len(tokens))
    assert pool.open(tokens).cached_tokens == 0
    a.commit(tokens[: 2 * PAGE_SIZE + 5])
    b = pool.open(tokens)
    assert b.cached_tokens == 2 * PAGE_SIZE
    assert b.pages == a.pages[:2]
    a.release()
    b.release()
    pool.check_integrity()


def test_a_prompt_is_never_wholly_cached() -> None:
    """Its last token has to be computed, for its logits."""
    pool = PagePool(10)
    tokens = prompt(1, 2)
    a = pool.open(tokens)
    a.reserve(len(tokens))
    a.commit(tokens)
    assert pool.open(tokens).cached_tokens == PAGE_SIZE


def test_two_requests_committing_the_same_tokens() -> None:
    pool = PagePool(12)
    tokens = prompt(1, 2)
    a, b = pool.open(tokens), pool.open(tokens)
    for r in (a, b):
        r.reserve(len(tokens) + 1)
        r.commit(tokens)
    assert pool.tree.pages == 2
    b.commit([*tokens, *prompt(3)][: 3 * PAGE_SIZE])  # b goes on below a's nodes, with a page of its own
    a.release()
    pool.check_integrity()
    assert pool.available == 11 - 6 + 1, "a's private third page is free, its two cached ones are locked by b"


@pytest.mark.parametrize("meanwhile", ["nothing", "held", "gone on from", "complete"])
def test_the_page_of_a_request_that_went_on_replaces_the_end_of_one(meanwhile: str) -> None:
    """Unless another request holds it, or began behind it and so completed it."""
    pool, ending, longer = PagePool(20), prompt(1, 2), prompt(1, 2, 3)
    a, b = pool.open(longer), pool.open(longer)
    for r in (a, b):
        r.reserve(len(longer))
    theirs, ours = a.pages[:2], b.pages[:2]
    a.commit(ending, complete=None if meanwhile == "complete" else len(ending) - 1)
    if meanwhile != "held":
        a.release()
    if meanwhile == "gone on from":
        pool.open([*ending, 0]).release()
    b.commit(longer)
    pool.check_integrity()
    replaced = [theirs[0], ours[1]] if meanwhile == "nothing" else theirs
    assert pool.open([*longer, 0]).pages[:2] == replaced, "only the last page may lack a key"
    if meanwhile == "nothing":
        assert theirs[1] in pool.free


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    pool = PagePool(5)
    for word in (1, 2):
        r = pool.open(prompt(word))
        r.reserve(PAGE_SIZE)
        r.commit(prompt(word))
        r.release()
    pool.open([*prompt(1), 0]).release()  # 1 was used last
    held = pool.open([7])
    held.reserve(3 * PAGE_SIZE)
    assert pool.open([*prompt(1), 0]).cached_tokens == PAGE_SIZE
    assert pool.open([*prompt(2), 0]).cached_tokens == 0


@pytest.mark.parametrize("seed", range(5))
def test_eviction_order_equals_brute_force_lru(seed: int) -> None:
    """Against brute force: of all unlocked leaves the one that was used first."""
    rng, pool = random.Random(seed), PagePool(41)
    radix, held, evicted = pool.tree, [], 0
    for _ in range(600):
        if held and rng.random() < 0.5:
            reservation, tokens = held.pop(rng.randrange(len(held)))
            reservation.commit(tokens)
            reservation.release()
            continue
        tokens = [rng.randrange(2) for _ in range(4)] * (4 * rng.randint(1, 4))  # few texts, of 1 to 4 pages
        reservation = pool.open(tokens)
        missing = pages_for(len(tokens)) - len(reservation.entries) - len(pool.free)
        wanted = []
        while len(wanted) < missing <= pool.tree.unlocked:
            leaves = [
                n
                for n in radix.nodes()
                if not n.locks and n.children.keys() <= {w.key for w in wanted if w.parent is n}
            ]
            wanted.append(min((n for n in leaves if n not in wanted), key=lambda n: n.used))
        try:
            reservation.reserve(len(tokens))
        except OutOfPages:
            reservation.release()
            continue
        evicted += len(wanted)
        assert all(n.parent is None for n in wanted)
        held.append((reservation, tokens))
        pool.check_integrity()
    assert evicted > 50


def test_a_prefix_that_is_used_over_and_over_leaves_no_trace() -> None:
    """Records of eviction are bounded by the number of pages, not of earlier requests."""
    pool = PagePool(9)
    for i in range(500):
        tokens = list(range(64)) if i % 2 else list(range(32))
        reservation = pool.open(tokens)
        reservation.reserve(len(tokens))
        reservation.commit(tokens)
        reservation.release()
    assert len(pool.tree._leaves) + len(pool.tree._new_leaves) <= 8


def test_locked_pages_are_not_evicted() -> None:
    pool = PagePool(4)
    a = pool.open(prompt(1, 2))
    a.reserve(2 * PAGE_SIZE)
    a.commit(prompt(1, 2))
    assert pool.available == 1
    with pytest.raises(OutOfPages):
        pool.open([7]).reserve(2 * PAGE_SIZE)


def test_random_traffic_keeps_every_page_owned_once() -> None:
    rng = random.Random(0)
    pool = PagePool(40)
    live: list[tuple[object, list[int]]] = []
    for _ in range(3000):
        if live and rng.random() < 0.5:
            reservation, tokens = live.pop(rng.randrange(len(live)))
            reservation.commit(tokens[: rng.randrange(len(tokens) + 1)], complete=rng.randrange(2) or None)
            if rng.random() < 0.8:
                reservation.release()
            else:
                live.append((reservation, tokens))
        else:
            tokens = prompt(*(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
            reservation = pool.open(tokens)
            try:
                reservation.reserve(len(tokens))
                live.append((reservation, tokens))
            except OutOfPages:
                reservation.release()
        pool.check_integrity()
    for reservation, _ in live:
        reservation.release()
    pool.check_integrity()
    assert pool.available == 39


@pytest.mark.parametrize("breach", ["lost", "twice", "lock"])
def test_the_integrity_check_finds_breaches(breach: str) -> None:
    pool = PagePool(6)
    r = pool.open(prompt(1))
    r.reserve(2 * PAGE_SIZE)
    r.commit(prompt(1))
    if breach == "lost":
        pool.free.pop()
    elif breach == "twice":
        pool.free.append(r.pages[1])
    else:
        next(pool.tree.nodes()).locks += 1
    with pytest.raises(RuntimeError, match=r"without an owner|owned by both|locks"):
        pool.check_integrity()


def test_pages_for() -> None:
    assert [pages_for(n) for n in (0, 1, PAGE_SIZE, PAGE_SIZE + 1)] == [0, 1, 1, 2]
