"""Reads the source of the kernels as syntax trees. Imports all of them: each declares how it overlaps others."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import unisono.kernels

KERNELS = Path(unisono.kernels.__path__[0])

for module in pkgutil.walk_packages(unisono.kernels.__path__, "unisono.kernels."):
    importlib.import_module(module.name)


@functools.cache
def functions() -> dict[str, ast.FunctionDef]:
    """Every function in ``unisono/kernels``, by name."""
    return {node.name: node for tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@functools.cache
def _trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in KERNELS.rglob("*.py")]


def name_of(call: ast.Call) -> str:
    """The name of the called function or method."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def overlapped_kernels() -> set[str]:
    """Names of the kernels that are launched with ``**overlapped(…)``, also by a function that is given the kernel."""
    found: set[str] = set()
    trees = list(_trees())
    for tree in trees:
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            given = [argument.arg for argument in function.args.args]
            for launched in map(ast.unparse, _overlapped_launches(function)):
                if launched in given:
                    nodes = (node for each in trees for node in ast.walk(each) if isinstance(node, ast.Call))
                    calls = (node for node in nodes if name_of(node) == function.name)
                    found |= {ast.unparse(call.args[given.index(launched)]) for call in calls}
                else:
                    found.add(launched)
    return found


def _overlapped_launches(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What stands before the brackets of such a launch."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            options = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
            if any(option.startswith("overlapped(") for option in options):
                yield node.func.value
