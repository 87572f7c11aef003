"""Stop strings: one automaton for all of a request (Aho and Corasick 1975), so that their number costs nothing a token.

A state is the longest end of the text that some stop string begins with. Automata are immutable and shared by the
sequences of a request; each sequence has a state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The automaton of some strings, none of them empty. State 0 is the first."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest = [0]  # characters of the longest string that ends in a state
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
        """Read ``text`` from ``state`` on. Returns the state after it, and the first match that ends in it.

        A match is (characters of ``text`` up to its end, its length): of those that end there it is the longest. It
        is None where there is none or ``may_stop`` is false.
        """
        for place, char in enumerate(text, 1):
            state = self._step(state, char)
            if may_stop and self._longest[state]:
                return state, (place, self._longest[state])
        return state, None

    def begun(self, state: int) -> int:
        """Characters at the text's end that may be the beginning of a string."""
        while state and not self._next[state]:  # it is a whole string, and no longer one begins so
            state = self._fallback[state]
        return self._depth[state]


@lru_cache(64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of ``strings``."""
    return StopStrings(strings)
