"""The table of docs/reference/feature-pairs.md, from tests/feature_pairs.toml: each pair of features, and its test."""

from __future__ import annotations

import ast
import functools
import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "feature_pairs.toml"


class PairError(Exception):
    """An entry of the data file names a test, a text or a feature that does not exist."""


@dataclass(frozen=True)
class Pairs:
    """The data file. same: node id of a test, by pair. refused: (file, part of an error's text), by pair."""

    features: list[str]
    same: dict[str, str]
    refused: dict[str, list[str]]

    @staticmethod
    def read(file: Path = DATA) -> Pairs:
        return Pairs(**tomllib.loads(file.read_text()))

    def check(self) -> None:
        """Raise PairError naming the first entry that names something that does not exist."""
        known = {f"{one} × {other}" for one, other in itertools.combinations(self.features, 2)}
        for pair in (*self.same, *self.refused):
            if pair not in known:
                raise PairError(f"{pair!r} is no pair of the features, in their order.")
            if pair in self.same and pair in self.refused:
                raise PairError(f"{pair!r} cannot be both tested and refused.")
        for pair, node in self.same.items():
            file, _, name = node.partition("::")
            if name not in functions(ROOT / file):
                raise PairError(f"{pair!r} names {node}, which does not exist.")
        for pair, (file, text) in self.refused.items():
            if not any(text in one for one in texts(ROOT / file)):
                raise PairError(f"{pair!r}: {file} has no text {text!r}.")

    def tables(self) -> str:
        """The page's tables, Markdown."""
        self.check()
        numbers = {node: number for number, node in enumerate(sorted(set(self.same.values())), 1)}
        letters = dict(zip(self.refused, "abcdefghijklmnopqrstuvwxyz", strict=False))
        columns = range(1, len(self.features) + 1)
        lines = ["| | | " + " | ".join(map(str, columns)) + " |", "|---|---|" + "---|" * len(self.features)]
        for row, one in enumerate(self.features):
            cells = []
            for column, other in enumerate(self.features):
                pair = " × ".join((one, other) if row < column else (other, one))
                if row == column:
                    cells.append("")
                elif pair in self.same:
                    cells.append(f"✓{numbers[self.same[pair]]}")
                else:
                    cells.append(f"✗{letters[pair]}" if pair in letters else "·")
            lines.append(f"| {row + 1} | {one} | " + " | ".join(cells) + " |")
        count = len(self.features) * (len(self.features) - 1) // 2
        rest = count - len(self.same) - len(self.refused)
        lines += [
            "",
            f"Table: {count} pairs. ✓: {len(self.same)} with a test that compares the bytes. ✗: {len(self.refused)} "
            f"refused. ·: {rest} not tested as a pair.",
            "",
            "| | Test |",
            "|---|---|",
            *(f"| ✓{number} | `{node}` |" for node, number in numbers.items()),
            "",
            "Table: tests. Run one with `pytest TEST`; `make test-all` adds the long cells.",
            "",
            "| | Pair | Text |",
            "|---|---|---|",
            *(f"| ✗{letters[pair]} | {pair} | \"{text}\" (`{file}`) |" for pair, (file, text) in self.refused.items()),
            "",
            "Table: pairs that are refused, with a part of the error's text.",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"


@functools.cache
def functions(file: Path) -> frozenset[str]:
    """Names of the functions of a module; empty if there is no such file."""
    if not file.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))


@functools.cache
def texts(file: Path) -> tuple[str, ...]:
    """The string constants of a module, adjacent ones joined."""
    found = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    return tuple(value for value in found if isinstance(value, str))
