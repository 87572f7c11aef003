"""Sizes of passes that may be captured: a product's tiles are full at some of them."""

from unisono.engine.buckets import tile_edges


def test_rows_at_which_tiles_are_full() -> None:
    assert sorted(tile_edges(1, 256)) == [16, 32, 64, 128, 256]
    assert sorted(tile_edges(4, 256)) == [4, 8, 16, 32, 64, 128, 256]
    assert sorted(tile_edges(6, 64)) == [2, 5, 10, 21, 42]
    assert sorted(tile_edges(17, 4)) == [1, 3]
