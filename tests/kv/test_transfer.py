"""Prefixes that move from one pool and store to another, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.kv.helpers import made, run, tokens_of
from unisono.engine.disaggregation.page_bytes import PageBytes, SharedPages
from unisono.kv.pages import OutOfPages, PagePool
from unisono.kv.prefix_tree import Token
from unisono.kv.specs import ALL, SNAPSHOTS
from unisono.kv.store import StateStore
from unisono.kv.transfer import Incoming, Packed, pack_pages


def whole(store: StateStore) -> SharedPages:
    """Pages as bytes where one process has all of them, as engines make them."""
    own = PageBytes(store)
    return SharedPages(store, own, own.execute, ())


def filled() -> StateStore:
    store = made()
    for tensor in (*store._pages.values(), *store._snapshots):
        tensor.copy_(torch.randn(tensor.shape))
    return store


def packed_of(pool: PagePool, store: StateStore, tokens: Sequence[Token]) -> tuple[Packed, bytes]:
    """All that the tree has of a text."""
    nodes = pool.tree.match(tokens)
    pages = range(len(nodes))
    packed = pack_pages(whole(store), nodes, 0, {32: pages, SNAPSHOTS: pages})
    payload = b"".join(packed.state.payload())
    assert packed.nbytes == len(payload)
    return packed, payload


def put(pool: PagePool, store: StateStore, tokens: Sequence[Token], packed: Packed, payload: bytes) -> int:
    """Pages that another tree has then."""
    incoming = Incoming(pool, whole(store), tokens)
    try:
        incoming.put(0, packed.complete, packed.parts, payload)
        return len(incoming.path)
    finally:
        incoming.close()
        pool.check_integrity()


def same(kind: int, mine: int, theirs: int, here: StateStore, there: StateStore) -> bool:
    return all(torch.equal(a[mine], b[theirs]) for a, b in zip(here.parts(kind), there.parts(kind), strict=True))


def test_a_prefix_moves_with_its_windows_and_snapshots() -> None:
    here, there, tokens = filled(), filled(), tokens_of(1, 2, 3)
    pool, other = (PagePool(12, {32: 7}, snapshots=3) for _ in range(2))
    assert pool.snapshots is not None
    reservation = run(pool, tokens, 8)
    node = reservation.node_after(len(tokens))
    assert node is not None
    pool.snapshots.attach(node, pool.snapshots.take())
    run(other, tokens_of(9), 8).release()  # other page numbers there
    assert put(other, there, tokens, *packed_of(pool, here, tokens)) == 3
    found = other.open([*tokens, 0], {32: 3})
    assert found.cached_tokens == len(tokens)
    assert found.pages != reservation.pages
    assert all(same(ALL, *pair, here, there) for pair in zip(reservation.pages, found.pages, strict=True))
    moved = zip(reservation.windows[32].entries, found.windows[32].entries, strict=True)
    assert all(same(32, mine, theirs, here, there) for (mine, _), (theirs, _) in moved)
    assert same(SNAPSHOTS, node.snapshot, found.snapshot, here, there)


def test_transfer_without_free_pages_changes_nothing() -> None:
    here, there, tokens = filled(), filled(), tokens_of(1, 2, 3, 4)
    pool, other = PagePool(12, {32: 7}), PagePool(3, {32: 7})
    run(pool, tokens, 8)
    before = [tensor.clone() for tensor in there._pages.values()]
    with pytest.raises(OutOfPages):
        put(other, there, tokens, *packed_of(pool, here, tokens))
    assert other.tree.pages == 0
    assert all(map(torch.equal, before, there._pages.values()))


def test_repeated_transfer_keeps_cached_pages() -> None:
    """Parts that arrive a second time change nothing: no page is lost, none is written."""
    here, there, tokens = filled(), filled(), tokens_of(1, 2)
    pool, other = PagePool(12, {32: 7}), PagePool(12, {32: 7})
    run(pool, tokens, 8)
    packed, payload = packed_of(pool, here, tokens)
    assert put(other, there, tokens, packed, payload) == 2
    before, free = [tensor.clone() for tensor in there._pages.values()], len(other.free)
    assert put(other, there, tokens, packed, bytes(len(payload))) == 2
    assert len(other.free) == free
    assert all(map(torch.equal, before, there._pages.values()))


@pytest.mark.parametrize(
    ("first", "pages", "missing", "says"),
    [
        (0, 2, 1, "are not the state of these pages"),
        (1, 1, 0, "came after 0 of 2"),
        (0, 1, 0, "belongs to none"),
    ],
)
def test_out_of_order_transfers_are_refused(first: int, pages: int, missing: int, says: str) -> None:
    here, there, tokens = filled(), filled(), tokens_of(1, 2)
    pool, other = PagePool(12, {32: 7}), PagePool(12, {32: 7})
    run(pool, tokens, 8)
    packed, payload = packed_of(pool, here, tokens)
    incoming = Incoming(other, whole(there), tokens)
    with pytest.raises(ValueError, match=says):
        incoming.put(first, packed.complete[:pages], packed.parts, payload[: len(payload) - missing])
    incoming.close()
    other.check_integrity()
    assert other.tree.pages == 0
