"""Source lines that Triton gets of kernels: those of ``inspect``, found faster. A kernel's digest is made of them."""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import walk_packages
from types import FunctionType
from typing import Any

import pytest
import triton.runtime.jit
from triton.runtime.jit import JITCallable

from unisono import kernels
from unisono.kernels.sources import source_lines


def functions() -> list[FunctionType]:
    """Every function under ``@triton.jit`` of the package."""
    found: dict[int, FunctionType] = {}
    for place in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(import_module(place.name)).values():
            function = getattr(value, "fn", None)
            if isinstance(function, FunctionType):
                found[id(function)] = function
    return list(found.values())


def test_kernels_have_the_lines_that_inspect_finds() -> None:
    every = functions()
    assert len(every) > 400
    for function in every:
        assert source_lines(function) == inspect.getsourcelines(function), function


def decorated(function: Any) -> Any:
    return function


# fmt: off
@decorated
def ends_with_brackets(x):
    if x:
        return (
            x,
        )
    return [
        x
    ]


def ends_with_a_comment(x):
    return x
    # a comment of its body


def _one_line(x): return x
# a comment that belongs to nothing


def has_text_at_the_margin(x):
    text = """
at the margin
"""
    return text + x
# fmt: on


def nested() -> Any:
    @decorated
    def inner(x: int) -> int:
        return x

    return inner


@pytest.mark.parametrize(
    "function", [ends_with_brackets, ends_with_a_comment, _one_line, has_text_at_the_margin, nested, nested()]
)
def test_ends_of_functions(function: Any) -> None:
    assert source_lines(function) == inspect.getsourcelines(function)


def test_functions_without_a_source_are_refused() -> None:
    names: dict[str, Any] = {}
    exec("def made(x): return x", names)
    with pytest.raises(OSError, match="source"):
        source_lines(names["made"])


def test_triton_reads_them() -> None:
    assert triton.runtime.jit.inspect.getsourcelines is source_lines
    assert triton.runtime.jit.inspect.signature is inspect.signature
    assert JITCallable(ends_with_brackets).raw_src[0] == "@decorated\n"
