"""Tests of tests/tiers.py: the cells of the default suite have every pair of values."""

from __future__ import annotations

import ast
import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.nightly import KEPT, left_to_night
from tests.tiers import ROOT, pairwise

NAMES = "abcd"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sets(st.integers(0, 255), max_size=20))
def test_pairwise_selection_covers_all_pairs(sizes: list[int], holes: set[int]) -> None:
    cells = [
        dict(zip(NAMES, values, strict=False))
        for place, values in enumerate(itertools.product(*map(range, sizes)))
        if place not in holes
    ] or [dict.fromkeys(NAMES[: len(sizes)], 0)]
    chosen = pairwise(cells)

    def pairs(of: list[dict[str, int]]) -> set[object]:
        return {pair for cell in of for pair in itertools.combinations(cell.items(), 2)}

    assert pairs([cells[index] for index in chosen]) == pairs(cells)
    if len(sizes) < 3:
        assert len(chosen) == len(cells)


def test_few_cells_are_left_of_a_product() -> None:
    """Five shapes, two groups, two dtypes and a flag: ten cells have all pairs, of 40."""
    values = [object() for _ in range(5)], (128, 0), (True, False), ("float32", "float16")
    cells = [dict(zip(NAMES, cell, strict=True)) for cell in itertools.product(*values)]
    assert len(pairwise(cells)) == 10


def test_entries_of_the_long_matrix_name_tests() -> None:
    for test, kept in KEPT.items():
        path, name = test.split("::")
        functions = {node.name for node in ast.walk(ast.parse((ROOT / "tests" / path).read_text()))
                     if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert name in functions, test
        assert kept.cells, f"{test}: the default suite has at least one cell"
        assert kept.covered_by, test


def test_cells_without_an_entry_stay() -> None:
    assert not left_to_night("engine/test_engine.py::test_x", "anything")
    test = "graphs/test_matrix.py::test_larger_than_the_largest_bucket"
    assert left_to_night(test, "mtp-full")
    assert not left_to_night(test, "eagle3-segmented")
