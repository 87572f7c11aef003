"""Values at the limits of sampling parameters."""

from __future__ import annotations

from typing import Any

from unisono.types.limits import SAMPLING, Both, Chars, Entries, Items, Limit, Real, Whole

MOST_ENTRIES, MOST_CHARS = 100_000, 10_000
"""Of the values that are tried, where a limit allows more."""
LISTS = [name for name, limit in SAMPLING.items() if not isinstance(limit, (Whole, Real))]


def largest(limit: Limit | None, many: bool) -> Any:
    """A value at the limit: with as many entries as it takes (short ones), or few of the longest."""
    match limit:
        case Chars(most):
            return "zq " * (min(most, MOST_CHARS) // 3)
        case Items(most, each):
            if each is None or isinstance(each, (Whole, Real)):
                return list(range(min(most, MOST_ENTRIES)))
            longest = largest(each, many)
            short = [f"zq{i}"[: len(longest)] for i in range(min(most, MOST_ENTRIES))]
            return short if many else [f"{longest[:-6]}{i:06}" for i in range(min(most, 1000))]
        case Entries(most, each, _):
            return {str(i): 1.0 for i in range(min(most, MOST_ENTRIES))}
        case Both(limits):
            return largest(limits[0], many)
    raise NotImplementedError(limit)
