"""Source lines of kernels for Triton, which reads those of every function under ``@triton.jit`` when it is defined.

``inspect.getsourcelines`` finds the end of a function with a tokenizer in Python: 3 ms for a kernel, 1.3 s for the 437
functions that a start imports. :func:`source_lines` finds it by indentation. :func:`install` gives it to Triton.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton.runtime.jit

_INDENT = re.compile(r"\s*")


def source_lines(function: Any) -> tuple[list[str], int]:
    """Return the lines of a function, decorators first, and the number of the first one, as ``inspect`` does.

    A function ends before the first line that is indented no more than its decorator or ``def``. The search begins at
    the last line with code, so brackets and strings within do not matter. Raises OSError without a source.
    """
    if type(function) is not FunctionType:
        return inspect.getsourcelines(function)
    code = function.__code__
    lines, first = linecache.getlines(code.co_filename, function.__globals__), code.co_firstlineno
    last = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    if not first <= last <= len(lines) or not lines[first - 1].lstrip().startswith(("@", "def ")):
        return inspect.getsourcelines(function)
    indent = _indent(lines[first - 1])
    end = last
    for number in range(last, len(lines)):
        if lines[number].strip():
            if _indent(lines[number]) <= indent:
                break
            end = number + 1
    return lines[first - 1 : end], first


def _indent(line: str) -> int:
    found = _INDENT.match(line)
    return 0 if found is None else found.end()


class _Inspect:
    """The module ``inspect`` with :func:`source_lines`."""

    getsourcelines: Callable[[Any], tuple[list[str], int]] = staticmethod(source_lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


def install() -> None:
    """Have Triton read source lines with :func:`source_lines`."""
    triton.runtime.jit.inspect = _Inspect()
