"""Reads the source of the kernels as syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import unisono.kernels

KERNELS = Path(unisono.kernels.__path__[0])


def functions() -> dict[str, ast.FunctionDef]:
    """Every function in ``unisono/kernels``, by name."""
    trees = [ast.parse(path.read_text()) for path in KERNELS.glob("*.py")]
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def name_of(call: ast.Call) -> str:
    """The name of the called function or method."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def overlapped_kernels() -> set[str]:
    """Names of the kernels that are launched with ``**overlapped(…)``."""
    nodes = (node for function in functions().values() for node in ast.walk(function))
    launches = (n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript))
    return {
        ast.unparse(launch.func.value)
        for launch in launches
        if any(k.arg is None and ast.unparse(k.value).startswith("overlapped(") for k in launch.keywords)
    }
