"""Sizes of passes that may be captured: a product's tiles are full at some of them."""

from pathlib import Path

import pytest
import torch

from tests.engine.helpers import engine
from unisono.engine.startup.capture_candidates import _sparse, tile_edges
from unisono.graphs import BufferSchema, PassShape, Program
from unisono.graphs.buckets import Buckets


def test_rows_at_which_tiles_are_full() -> None:
    assert sorted(tile_edges(1, 256)) == [16, 32, 64, 128, 256]
    assert sorted(tile_edges(4, 256)) == [4, 8, 16, 32, 64, 128, 256]
    assert sorted(tile_edges(6, 64)) == [2, 5, 10, 21, 42]
    assert sorted(tile_edges(17, 4)) == [1, 3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="threads are settled on a CPU only")
def test_choosing_graphs_keeps_earlier_decisions(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        with engine(qwen3, max_num_seqs=1) as llm:
            names = [decision.name for decision in llm.engine.config.decisions]
    finally:
        torch.set_num_threads(threads)
    assert {"threads", "graphs"} <= set(names)


def test_sparse_buckets_keep_few_sizes() -> None:
    buckets = Buckets(Program("p", BufferSchema(()), lambda b: None), tuple(PassShape(n) for n in range(1, 101)))
    assert [shape.rows for shape in _sparse(buckets, 100).shapes] == [1, 4, 16, 32, 64, 100]
    assert [shape.rows for shape in _sparse(buckets, 64).shapes] == [1, 4, 16, 32, 64]
