"""Prefixes that move from one pool and store to another."""

from __future__ import annotations

import torch

from tests.state.helpers import made, run, tokens_of
from unisono.state.pages import PagePool
from unisono.state.specs import ALL, PAGE_SIZE
from unisono.state.transfer import export_prefix, import_prefix


def test_a_prefix_moves_with_its_windows_and_snapshots() -> None:
    here, there = made(), made()
    for tensor in (*here._pages.values(), *here._snapshots):
        tensor.copy_(torch.randn(tensor.shape))
    tokens = tokens_of(1, 2, 3)
    pool, other = (PagePool(12, {32: 7}, snapshots=3) for _ in range(2))
    assert pool.snapshots is not None
    reservation = run(pool, tokens, 8)
    node = reservation.node_after(len(tokens))
    assert node is not None
    pool.snapshots.attach(node, pool.snapshots.take())
    run(other, tokens_of(9), 8).release()  # other page numbers there
    prefix = export_prefix(pool, here, [*tokens, 5])
    assert import_prefix(other, there, prefix) == len(tokens)
    other.check_integrity()
    found = other.open([*tokens, 0], {32: 3})
    assert found.cached_tokens == len(tokens)
    assert found.pages != reservation.pages
    for mine, theirs in zip(reservation.pages, found.pages, strict=True):
        assert all(map(torch.equal, here.export_page(ALL, mine), there.export_page(ALL, theirs)))
    moved = zip(reservation.windows[32].entries, found.windows[32].entries, strict=True)
    for (mine, _), (theirs, _) in moved:
        assert all(map(torch.equal, here.export_page(32, mine), there.export_page(32, theirs)))
    assert all(map(torch.equal, here.export_snapshot(node.snapshot), there.export_snapshot(found.snapshot)))


def test_what_does_not_fit_is_left_out() -> None:
    here, there = made(), made()
    tokens = tokens_of(1, 2, 3, 4)
    pool, other = PagePool(12, {32: 7}), PagePool(3, {32: 7})
    run(pool, tokens, 8)
    assert import_prefix(other, there, export_prefix(pool, here, tokens)) == 2 * PAGE_SIZE
    other.check_integrity()
    assert other.tree.pages == 2


def test_what_the_tree_has_already_stays() -> None:
    """A second import changes nothing: no page is lost, none is written."""
    here, there = made(), made()
    tokens = tokens_of(1, 2)
    pool, other = PagePool(12, {32: 7}), PagePool(12, {32: 7})
    run(pool, tokens, 8)
    prefix = export_prefix(pool, here, tokens)
    assert import_prefix(other, there, prefix) == len(tokens)
    before = [tensor.clone() for tensor in there._pages.values()]
    free = len(other.free)
    assert import_prefix(other, there, prefix) == len(tokens)
    other.check_integrity()
    assert len(other.free) == free
    assert all(map(torch.equal, before, there._pages.values()))
