"""Structured outputs on public schemas: what is accepted, and how long compiling and masks take, on one core.

    python benchmarks/structured_outputs.py [DIRECTORY]

DIRECTORY has ``suite/`` (JSON-Schema-Test-Suite 2020-12) and ``maskbench/`` (MaskBench); it is ``../shared/schemas`` by
default. The vocabulary has 151,936 tokens, as Qwen's: bytes, and pieces of words of Python's standard library.

A valid value counts as accepted if one of its texts is: as given, with its keys in the order of a ``properties`` of the
schema, and, for small objects, in any order. An invalid value counts as accepted if any of these texts is.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.text_check import CheckVocabulary, TextCheck
from unisono.structured_output.vocabulary import SPECIAL
from unisono.types import BadRequest

ROOT = Path(__file__).parents[1]
VOCABULARY = 151_936
Case = tuple[str, Any, list[tuple[Any, bool]]]


def suite(directory: Path) -> Iterator[Case]:
    """The groups of JSON-Schema-Test-Suite: (name, schema, [(value, valid)])."""
    for path in sorted((directory / "suite").glob("*.json")):
        for group in json.loads(path.read_text()):
            name = f"{path.stem}: {group['description']}"
            yield name, group["schema"], [(test["data"], test["valid"]) for test in group["tests"]]


def maskbench(directory: Path) -> Iterator[Case]:
    for path in sorted((directory / "maskbench").glob("*.json")):
        case = json.loads(path.read_text())
        yield path.name, case["schema"], [(test["data"], test["valid"]) for test in case["tests"]]


def texts(value: Any, schema: Any) -> Iterator[str]:
    """Texts of a value."""
    orders = list(_orders(schema))
    yield _dumped(value)
    yield _dumped(_sorted(value, orders))
    if isinstance(value, dict) and 1 < len(value) <= 4:
        for names in itertools.permutations(value):
            yield _dumped({name: _sorted(value[name], orders) for name in names})


def _dumped(value: Any) -> str:
    return re.sub(r"(?<=\d)\.0(?=[,\]} ]|$)", "", json.dumps(value, ensure_ascii=False))


def _orders(schema: Any) -> Iterator[list[str]]:
    if isinstance(schema, dict):
        for name, inner in schema.items():
            if name == "properties" and isinstance(inner, dict):
                yield list(inner)
            yield from _orders(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _orders(inner)


def _sorted(value: Any, orders: list[list[str]]) -> Any:
    if isinstance(value, list):
        return [_sorted(one, orders) for one in value]
    if not isinstance(value, dict):
        return value
    best = max(orders, key=lambda order: len(set(order) & set(value)) - 0.01 * len(order), default=[])
    places = {name: place for place, name in enumerate(best)}
    return {name: _sorted(value[name], orders) for name in sorted(value, key=lambda name: places.get(name, 10**6))}


def results(cases: Iterator[Case]) -> tuple[Counter[str], list[str]]:
    """Counts of schemas and values, and the invalid values that were accepted."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for name, schema, tests in cases:
        counts["schemas"] += 1
        try:
            form = TextCheck("json", schema)
        except BadRequest:
            satisfiable = any(valid for _, valid in tests)
            counts["refused" if satisfiable else "refused, no valid value"] += 1
            continue
        counts["taken"] += 1
        accepted = [any(form.accepts(text) for text in texts(value, schema)) for value, _ in tests]
        counts["valid values rejected"] += sum(
            valid and not taken for taken, (_, valid) in zip(accepted, tests, strict=True)
        )
        bad = [value for taken, (value, valid) in zip(accepted, tests, strict=True) if taken and not valid]
        counts["invalid values accepted"] += len(bad)
        wrong += [f"{name}: {json.dumps(value)[:200]}" for value in bad]
        counts["all right"] += accepted == [valid for _, valid in tests]
    return counts, wrong


def vocabulary() -> dict[str, Any]:
    """A vocabulary for :class:`TextCheck` of bytes and pieces of words."""
    found: dict[bytes, None] = dict.fromkeys(bytes([byte]) for byte in range(255))
    for path in sorted(Path(json.__file__).parents[1].glob("*/*.py")):
        if len(found) >= VOCABULARY:
            break
        for word in re.findall(r" ?\w+|[^\w\s]{1,4}|\s{1,8}", path.read_text(errors="replace")):
            data = word.encode()
            found.update(dict.fromkeys(data[:n] for n in range(2, min(len(data), 12) + 1)))
    tokens = list(found)[: VOCABULARY - 1]
    tokens += [f"~{i}".encode() for i in range(VOCABULARY - 1 - len(tokens))]
    return {
        "texts": [*tokens, SPECIAL + b"<end>"],
        "specials": [VOCABULARY - 1],
        "eos": [VOCABULARY - 1],
        "tokenizer": "",
    }


def times(cases: Iterator[Case]) -> tuple[list[float], list[float]]:
    """(milliseconds of each schema's compilation, microseconds of each mask along a valid value's text)."""
    own = CheckVocabulary(described=vocabulary())
    compiling, masks = [], []
    mask = np.empty(-(-VOCABULARY // 32), np.int32)
    for _, schema, tests in cases:
        begun = time.process_time()
        try:
            form = TextCheck("json", schema, vocabulary=own)
        except BadRequest:
            continue
        compiling.append((time.process_time() - begun) * 1e3)
        for value, valid in tests[:2]:
            matcher = form.matcher()
            for token in form.tokens(_dumped(_sorted(value, list(_orders(schema))))) if valid else ():
                begun = time.perf_counter()
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                masks.append((time.perf_counter() - begun) * 1e6)
                if not matcher.try_consume_tokens([token]):
                    break
    return compiling, masks


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared/schemas"
    for name, cases in (("suite", suite), ("maskbench", maskbench)):
        counts, wrong = results(cases(directory))
        print(name, dict(counts), *wrong, sep="\n  ")
    compiling, masks = times(maskbench(directory))
    for name, found, unit in (("compiling", compiling, "ms"), ("a mask", masks, "µs")):
        found.sort()
        print(f"{name}: median {statistics.median(found):.2f} {unit}, 95 % {found[int(len(found) * 0.95)]:.2f} {unit}")


if __name__ == "__main__":
    main()
