"""Sorts tests into tiers: ``unit``, the default suite, and the long matrix (``full``), which runs at night.

``make unit`` runs the modules that start no engine and no program, and no kernel in Triton's interpreter. A module
starts one if it, or a module of tests/ that it imports, imports a name of ``STARTS``. tests/conftest.py marks the
tests of all other modules with ``unit``.

Of a test with three parameters or more, the default suite runs cells that have every pair of values of two parameters;
the long matrix runs all cells. A test with two parameters keeps all of its cells.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STARTS = (
    "unisono.LLM", "unisono.AsyncLLM", "unisono.entrypoints.llm", "unisono.entrypoints.async_llm",
    "unisono.engine.engine", "unisono.cluster.engine_process", "subprocess", "multiprocessing", "tests.howto",
)  # fmt: skip
"""Modules and names: engines, servers, and programs in processes of their own."""
SLOW = ("kernels",)
"""Folders that the unit tier leaves out: without a GPU, kernels run in Triton's interpreter for many minutes."""
PAIRWISE = ("distributed", "kernels", "sampling", "structured_output")
"""Folders in which the default suite runs the cells of :func:`pairwise`."""


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of everything that a file imports, lazy imports included. ``from a import b`` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@functools.cache
def reached(path: Path) -> frozenset[str]:
    """Names that a test module and the modules of tests/ that it imports import."""
    found: set[str] = set()
    waiting, seen = [path], {path}
    while waiting:
        names = imports(waiting.pop())
        found |= names
        for name in names:
            if name.startswith("tests."):
                file = ROOT / (name.replace(".", "/") + ".py")
                if file.exists() and file not in seen:
                    seen.add(file)
                    waiting.append(file)
    return frozenset(found)


def in_unit_tier(path: Path) -> bool:
    """True if a test module starts no engine and no program, and is not one of a slow folder."""
    return path.parent.name not in SLOW and not reached(path).intersection(STARTS)


def pairwise(cells: Sequence[Mapping[str, Any]]) -> set[int]:
    """Indices of cells that together have every pair of values of two parameters that any cell has; greedily chosen.

    cells: parameter name to value, the same names in each.
    """
    pairs = [set(itertools.combinations([(n, _identity(v)) for n, v in cell.items()], 2)) for cell in cells]
    if min(map(len, cells)) < 3:
        return set(range(len(cells)))
    left, chosen = set().union(*pairs), set[int]()
    while left:
        best = max(range(len(cells)), key=lambda index: len(pairs[index] & left))  # the first of equal ones
        chosen.add(best)
        left -= pairs[best]
    return chosen


def _identity(value: Any) -> Hashable:
    """Equal for the same value: those of a ``parametrize`` are the same objects in all cells."""
    return (type(value), value) if isinstance(value, bool | int | float | str) else id(value)
