"""The data of docs/reference/feature-pairs.md names tests and texts that exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scripts.feature_pairs import PairError, Pairs, Together

HERE = "tests/test_feature_pairs.py::test_every_entry_exists"
CHECKS = "tests/distributed/test_together.py::test_two_ranks"


def test_every_entry_exists() -> None:
    Pairs.read().check()


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"same": {"a × b": "tests/test_feature_pairs.py::test_nothing"}}, "does not exist"),
        ({"same": {"a × b": "tests/nowhere.py::test_every_entry_exists"}}, "does not exist"),
        ({"same": {"b × a": HERE}}, "no pair"),
        ({"refused": {"a × b": ["scripts/feature_pairs.py", "no such" + " text", HERE]}}, "has no text"),
        ({"refused": {"a × b": ["scripts/feature_pairs.py", "has no text", "tests/x.py::y"]}}, "does not exist"),
        ({"same": {"a × b": HERE}, "refused": {"a × b": ["", "", ""]}}, "both"),
        ({"together": [Together(CHECKS, ["a", "b"])], "refused": {"a × b": ["", "", ""]}}, "both"),
        ({"together": [Together(CHECKS, ["a", "d"])]}, "no feature"),
        ({"together": [Together(CHECKS, ["a", "b"], apart={"a × c": ""})]}, "no pair"),
        ({"together": [Together(HERE, ["a", "b"])]}, "does not call missing"),
        ({"together": [Together("tests/nowhere.py::test_it", ["a", "b"])]}, "does not exist"),
    ],
)
def test_a_wrong_entry_is_named(entries: dict[str, Any], says: str) -> None:
    pairs = replace(Pairs.read(), features=["a", "b"], **{"same": {}, "refused": {}, "together": [], **entries})
    with pytest.raises(PairError, match=says):
        pairs.check()


def cells(pairs: Pairs) -> list[list[str]]:
    """The cells of the table of features."""
    count = len(pairs.features)
    rows = [line.split(" | ")[2:] for line in pairs.tables().splitlines()[2 : 2 + count]]
    return [[cell.strip(" |") for cell in row] for row in rows]


def test_the_table_has_each_pair_once_in_both_triangles() -> None:
    assert cells(Pairs(["a", "b", "c"], {"a × c": HERE}, {})) == [["", "·", "✓1"], ["·", "", "·"], ["✓1", "·", ""]]


def test_a_test_of_many_pairs_has_those_without_one_of_their_own() -> None:
    """Pairs of ``of`` and ``features`` only, if it has both; ∥ where no request meets both."""
    features = ["a", "b", "c", "d"]
    entry = Together(CHECKS, ["a", "b", "c"], apart={"b × c": "why"})
    found = cells(Pairs(features, {"a × c": HERE}, {}, [entry]))
    assert found == [["", "✓1", "✓2", "·"], ["✓1", "", "∥1", "·"], ["✓2", "∥1", "", "·"], ["·", "·", "·", ""]]
    star = replace(entry, of=["d"], apart={}, without=["c × d"])
    assert star.pairs() == {frozenset("ad"), frozenset("bd")}
    assert "| b × c | why |" in Pairs(features, {}, {}, [entry]).tables()
