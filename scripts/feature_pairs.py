"""The table of docs/reference/feature-pairs.md, from tests/feature_pairs.toml: each pair of features, and its test."""

from __future__ import annotations

import ast
import functools
import itertools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "feature_pairs.toml"
CHECK = "missing"
"""Function of tests/engine/observed.py that compares the pairs that a test claims with those that it exercised."""


class PairError(Exception):
    """An entry of the data file names a test, a text or a feature that does not exist."""


@dataclass(frozen=True)
class Together:
    """A test that combines many features.

    It claims each pair of ``features``; with ``of``, each pair of one of ``of`` and one of ``features``. The test
    checks that one request met both features of each of these pairs. apart: reasons why no request meets both, by pair;
    different requests of one run met them. without: pairs that it does not claim.
    """

    test: str
    features: list[str]
    of: list[str] = field(default_factory=list)
    apart: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)

    def pairs(self) -> set[frozenset[str]]:
        """The pairs that one request met."""
        pairs = itertools.product(self.of, self.features) if self.of else itertools.combinations(self.features, 2)
        return {frozenset(pair) for pair in pairs} - {named(pair) for pair in (*self.apart, *self.without)}


def named(pair: str) -> frozenset[str]:
    """The features of a pair's name."""
    return frozenset(pair.split(" × "))


@dataclass(frozen=True)
class Pairs:
    """The data file.

    same: node id of a test, by pair. together: tests of many pairs. refused: (file, part of an error's text, node id of
    a test that reads it), by pair.
    """

    features: list[str]
    same: dict[str, str]
    refused: dict[str, list[str]]
    together: list[Together] = field(default_factory=list)

    @staticmethod
    def read(file: Path = DATA) -> Pairs:
        """Return the content of a data file."""
        data = tomllib.loads(file.read_text())
        return Pairs(**{**data, "together": [Together(**each) for each in data["together"]]})

    @property
    def known(self) -> list[str]:
        """All pairs, by name."""
        return [f"{one} × {other}" for one, other in itertools.combinations(self.features, 2)]

    def check(self) -> None:
        """Raise PairError naming the first entry that names something that does not exist."""
        known = set(self.known)
        for pair in (*self.same, *self.refused, *(pair for each in self.together for pair in each.apart)):
            if pair not in known:
                raise PairError(f"{pair!r} is no pair of the features, in their order.")
        for each in self.together:
            if unknown := {*each.features, *each.of}.difference(self.features):
                raise PairError(f"{each.test} names {min(unknown)!r}, which is no feature.")
            file, _, name = each.test.partition("::")
            if CHECK not in functions(ROOT / file).get(name, ()):
                raise PairError(f"{each.test} does not exist, or does not call {CHECK}().")
        for pair, node in self.tested().items():
            if pair in self.refused:
                raise PairError(f"{pair!r} cannot be both tested and refused.")
            _check_test(pair, node)
        for pair, (file, text, node) in self.refused.items():
            if not any(text in one for one in texts(ROOT / file)):
                raise PairError(f"{pair!r}: {file} has no text {text!r}.")
            _check_test(pair, node)

    def tested(self) -> dict[str, str]:
        """Node id of the test of each tested pair: its own one, or the first that combines many features."""
        found = dict(self.same)
        for each in self.together:
            pairs = each.pairs() | {named(pair) for pair in each.apart}
            for pair in self.known:
                if named(pair) in pairs:
                    found.setdefault(pair, each.test)
        return found

    def apart(self) -> dict[str, str]:
        """Reasons of the tested pairs that no request meets at once."""
        return {
            pair: why
            for each in self.together
            for pair, why in each.apart.items()
            if pair not in self.same and self.tested()[pair] == each.test
        }

    def tables(self) -> str:
        """The page's tables, Markdown."""
        self.check()
        tested, apart = self.tested(), self.apart()
        numbers = {node: number for number, node in enumerate(sorted(set(tested.values())), 1)}
        letters = dict(zip(self.refused, "abcdefghijklmnopqrstuvwxyz", strict=False))
        cells = {pair: f"{'∥' if pair in apart else '✓'}{numbers[node]}" for pair, node in tested.items()}
        cells |= {pair: f"✗{letter}" for pair, letter in letters.items()}
        rest = len(self.known) - len(cells)
        lines = [
            *self._matrix(cells),
            "",
            f"Table: {len(self.known)} pairs. ✓: {len(tested) - len(apart)} with a test that compares the bytes. ∥: "
            f"{len(apart)} with such a test, whose requests meet one of the two. ✗: {len(letters)} refused. ·: {rest} "
            "not tested as a pair.",
            "",
            "| | Test |",
            "|---|---|",
            *(f"| {number} | `{node}` |" for node, number in numbers.items()),
            "",
            "Table: tests. Run one with `pytest TEST`; `make test-all` adds the long cells.",
            "",
            "| | Pair | Text | Test |",
            "|---|---|---|---|",
            *(
                f"| ✗{letters[pair]} | {pair} | \"{text}\" (`{file}`) | `{node}` |"
                for pair, (file, text, node) in self.refused.items()
            ),
            "",
            "Table: pairs that are refused, with a part of the error's text and the test that reads it.",
        ]  # fmt: skip
        if apart:
            lines += ["", "| Pair | Why no request meets both |", "|---|---|"]
            lines += [*(f"| {pair} | {why} |" for pair, why in apart.items()), ""]
            lines += ["Table: pairs whose test has requests of both kinds in one run."]
        return "\n".join(lines) + "\n"

    def _matrix(self, cells: dict[str, str]) -> list[str]:
        """The lines of the table of features. cells: by pair."""
        columns = range(1, len(self.features) + 1)
        lines = ["| | | " + " | ".join(map(str, columns)) + " |", "|---|---|" + "---|" * len(self.features)]
        for row, one in enumerate(self.features):
            found = []
            for column, other in enumerate(self.features):
                pair = " × ".join((one, other) if row < column else (other, one))
                found.append("" if row == column else cells.get(pair, "·"))
            lines.append(f"| {row + 1} | {one} | " + " | ".join(found) + " |")
        return lines


def _check_test(pair: str, node: str) -> None:
    """Raise PairError if a test does not exist."""
    file, _, name = node.partition("::")
    if name not in functions(ROOT / file):
        raise PairError(f"{pair!r} names {node}, which does not exist.")


@functools.cache
def functions(file: Path) -> dict[str, set[str]]:
    """Names of the functions of a module, with the names that each one calls; empty if there is no such file."""
    if not file.is_file():
        return {}
    return {
        node.name: {
            call.func.id for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        }
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


@functools.cache
def texts(file: Path) -> tuple[str, ...]:
    """The string constants of a module, adjacent ones joined."""
    found = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    return tuple(value for value in found if isinstance(value, str))
