"""The data of docs/reference/feature-pairs.md names tests and texts that exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.feature_pairs import PairError, Pairs


def test_every_entry_exists() -> None:
    Pairs.read().check()


@pytest.mark.parametrize(
    ("same", "refused", "says"),
    [
        ({"a × b": "tests/test_feature_pairs.py::test_nothing"}, {}, "does not exist"),
        ({"a × b": "tests/nowhere.py::test_every_entry_exists"}, {}, "does not exist"),
        ({"b × a": "tests/test_feature_pairs.py::test_every_entry_exists"}, {}, "no pair"),
        ({}, {"a × b": ["scripts/feature_pairs.py", "no such" + " text"]}, "has no text"),
        ({"a × b": ""}, {"a × b": ["", ""]}, "both"),
    ],
)
def test_a_wrong_entry_is_named(same: dict[str, str], refused: dict[str, list[str]], says: str) -> None:
    with pytest.raises(PairError, match=says):
        replace(Pairs.read(), features=["a", "b"], same=same, refused=refused).check()


def test_the_table_has_each_pair_once_in_both_triangles() -> None:
    pairs = Pairs(["a", "b", "c"], {"a × c": "tests/test_feature_pairs.py::test_every_entry_exists"}, {})
    rows = [line.split(" | ")[2:] for line in pairs.tables().splitlines()[2:5]]
    assert [[cell.strip(" |") for cell in row] for row in rows] == [["", "·", "✓1"], ["·", "", "·"], ["✓1", "·", ""]]
