"""Stop strings: one automaton per request (Aho and Corasick 1975), so that the cost per token is independent of their
number.

A state is the longest suffix of the text that is a prefix of a stop string. Automata are immutable and shared by the
sequences of a request; each sequence has its own state. ``text/detokenizer.py`` cuts the text at a match, and holds
back text that may begin one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The automaton of non-empty strings. State 0 is the start."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest = [0]  # length of the longest string that ends in a state
        for string in strings:
            self._add(string)
        self._fallback = [0] * len(self._next)
        order = list(self._next[0].values())
        for state in order:  # by depth: a state's fallback is shorter
            for char, after in self._next[state].items():
                order.append(after)
                self._fallback[after] = self._step(self._fallback[state], char)
            self._longest[state] = self._longest[state] or self._longest[self._fallback[state]]

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._longest.append(0)
            state = self._next[state][char]
        self._longest[state] = len(string)

    def _step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][char]

    def feed(self, state: int, text: str, may_stop: bool) -> tuple[int, tuple[int, int] | None]:
        """Read ``text`` from ``state`` on.

        Returns the state after it, and the first match that ends in it.

        A match is (characters of ``text`` up to its end, its length), the longest that ends there; None if there is
        none or ``may_stop`` is false.
        """
        for place, char in enumerate(text, 1):
            state = self._step(state, char)
            if may_stop and self._longest[state]:
                return state, (place, self._longest[state])
        return state, None

    def partial_length(self, state: int) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        while state and not self._next[state]:  # a complete string that is no prefix of a longer one
            state = self._fallback[state]
        return self._depth[state]


@lru_cache(64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of ``strings``."""
    return StopStrings(strings)
