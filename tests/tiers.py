"""Sorts test modules into tiers by what they import: ``make unit`` runs those that start no engine and no program,
and no kernel in Triton's interpreter.

A module starts one if it, or a module of tests/ that it imports, imports a name of ``STARTS``. tests/conftest.py marks
the tests of all other modules with ``unit``.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent
STARTS = (
    "unisono.LLM", "unisono.AsyncLLM", "unisono.entrypoints.llm", "unisono.entrypoints.async_llm",
    "unisono.engine.engine", "unisono.cluster.engine_process", "subprocess", "multiprocessing", "tests.howto",
)  # fmt: skip
"""Modules and names: engines, servers, and programs in processes of their own."""
SLOW = ("kernels",)
"""Folders that the unit tier leaves out: without a GPU, kernels run in Triton's interpreter for many minutes."""


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
