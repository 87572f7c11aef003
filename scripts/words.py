"""Checks how the code and the docs are worded: ``python scripts/words.py``. ``make lint`` runs it.

* riddles: docstrings that open with What, Whether, Of, How, Where, Which, For, That or Who.
* classes: class names that are defined more than once in the package.
* tests: test functions whose names open with such a word. A name states the subject and its behaviour.
* lines: lines of docs/ and README.md over 200 characters, tables and links apart.

``scripts/words.json`` has the counts that are tolerated until they are mended. A count above it fails.
``--update`` lowers it to what is left.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOLERATED = Path(__file__).with_suffix(".json")
RIDDLE = re.compile(r"\s*(What|Whether|Of|How|Where|Which|For|That|Who)\b")
RIDDLE_TEST = re.compile(r"test_(what|who|how|where|which)(ever)?_|test_(whether|of|for|that)_")
LONGEST_LINE = 200


def trees(folder: str = "unisono") -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the parsed tree of each module of a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of a module, its classes and functions, and its constants."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def riddles() -> list[str]:
    return [
        f"{path}:{line}: {text.strip().splitlines()[0][:80]}"
        for path, tree in trees()
        for line, text in docstrings(tree)
        if RIDDLE.match(text)
    ]


def classes() -> list[str]:
    places = [
        (node.name, f"{path}:{node.lineno}")
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    counts = Counter(name for name, _ in places)
    return sorted(f"{place}: {name}, {counts[name]} times" for name, place in places if counts[name] > 1)


def tests() -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in trees("tests")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and RIDDLE_TEST.match(node.name)
    ]


def lines() -> list[str]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > LONGEST_LINE and not line.lstrip().startswith("|"):
                found.append(f"{path.relative_to(ROOT)}:{number}: {len(line)} characters")
    return found


CHECKS = {"riddles": riddles, "classes": classes, "tests": tests, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="lower the tolerated counts to what there is")
    parser.add_argument("--show", choices=CHECKS, help="list the places of one check")
    args = parser.parse_args()
    tolerated = json.loads(TOLERATED.read_text()) if TOLERATED.exists() else {}
    found = {name: check() for name, check in CHECKS.items()}
    if args.show:
        print("\n".join(found[args.show]))
        return
    if args.update:
        lowered = {name: min(len(places), tolerated.get(name, len(places))) for name, places in found.items()}
        TOLERATED.write_text(json.dumps(lowered, indent=4) + "\n")
        return
    wrong = False
    for name, places in found.items():
        if len(places) > tolerated[name]:
            print(f"words: {len(places)} {name}, {tolerated[name]} are tolerated. --show {name} lists them.")
            wrong = True
        elif len(places) < tolerated[name]:
            print(f"words: {len(places)} {name} left of {tolerated[name]} tolerated: --update lowers the count.")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
