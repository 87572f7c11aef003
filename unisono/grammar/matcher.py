"""Where one request stands in its grammar: masks for the positions to be sampled, and the tokens that were.

The engine keeps a matcher with each request that has a grammar, from its arrival to its end: preemption leaves it as it
is. It knows committed tokens only: what it walks over to make masks of drafts, it walks back.

Shapes: P paths of drafts (1 for a chain), k drafts each, W = 1 + k positions, words = ceil(vocabulary / 32).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from unisono.grammar.compiler import Compiled
from unisono.types import SamplingParams, UnisonoError

ALL = -1
"""A mask's word that forbids nothing."""

LONGEST_CALL = 0.5
"""Seconds of this thread's own time that following a grammar may take at once. It takes some 10 µs, a large schema's
some milliseconds; but an expression that can be read in very many ways takes ever longer, and everybody waits."""


class GrammarError(UnisonoError):
    """A request cannot go on: no token continues its grammar, or following it takes too long."""


class Matcher:
    """Follows one output through ``compiled``.

    While the output has fewer than ``params.min_tokens`` tokens, and for ever with ``params.ignore_eos``, masks forbid
    the ids that would end it, wherever that leaves another. before: tokens of the output before its grammar began.
    """

    def __init__(self, compiled: Compiled, params: SamplingParams) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled.grammar)
        self._eos, self._params = compiled.eos, params
        self._accepted = 0
        self.before = 0
        self._longest = 0.0  # seconds of one call so far

    def accept(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens.

        Raises GrammarError for one that does not continue the grammar, and where a call took longer than LONGEST_CALL.
        """
        for token in tokens:
            if self._longest > LONGEST_CALL:
                raise GrammarError(
                    f"its structured output is too ambiguous: a mask took {self._longest:.1f} s after {self._accepted} "
                    f"tokens, the limit is {LONGEST_CALL} s. Avoid repetitions within repetitions"
                )
            if not self._accept(token):
                raise GrammarError(
                    f"no token of the vocabulary that the request allows continues its structured output after "
                    f"{self._accepted} tokens"
                )
            self._accepted += 1

    def masks(self, drafts: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out [P, W, words]`` int32, contiguous, all ones, for the positions after ``drafts [P, k]`` (-1: none).

        out[p, j] is for the position after drafts[p, :j]. After a draft that the grammar refuses, or that ends the
        text, it stays all ones: the mask before forbids the one, and nothing follows the other.
        """
        flat = out.reshape(-1, out.shape[-1])
        seen: dict[tuple[int, ...], int] = {}
        for path, tokens in enumerate(drafts.tolist()):
            self._walk(tokens, flat, path * out.shape[1], seen)

    def _walk(self, drafts: list[int], flat: np.ndarray, first: int, seen: dict[tuple[int, ...], int]) -> None:
        """One path's masks, from row ``first`` on; ``seen`` has the row of each prefix of drafts so far."""
        taken = 0
        for place, draft in enumerate([*drafts, -1]):
            row, prefix = first + place, tuple(drafts[:place])
            if (same := seen.setdefault(prefix, row)) != row:
                flat[row] = flat[same]
            else:
                self._fill(flat, row, place)
            if draft < 0 or draft in self._eos or not _allows(flat[row], draft):
                break
            if not self._accept(draft):
                break
            taken += 1
        if taken:
            self._matcher.rollback(taken)

    def _accept(self, token: int) -> bool:
        with self._clocked():
            return bool(self._matcher.accept_token(token))

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self._longest = max(self._longest, time.thread_time() - started)

    def _fill(self, flat: np.ndarray, row: int, ahead: int) -> None:
        """The mask after ``ahead`` drafts that the matcher has accepted."""
        with self._clocked():
            self._matcher.fill_next_token_bitmask(flat, row)
        if not flat[row].any():  # nothing continues: the text ends here, and accept() says why
            _set(flat[row], self._eos)
        held = self._held_back(self.before + self._accepted + ahead)
        if held:
            before = flat[row].copy()
            _clear(flat[row], held)
            if not flat[row].any():
                flat[row] = before

    def _held_back(self, length: int) -> Sequence[int]:
        """The ids that may not end an output of this length if it can go on."""
        if length < self._params.min_tokens:
            return (*self._eos, *self._params.stop_token_ids)
        return self._eos if self._params.ignore_eos else ()


def _allows(mask: np.ndarray, token: int) -> bool:
    return token < 32 * len(mask) and bool(mask[token // 32] >> (token % 32) & 1)


def _set(mask: np.ndarray, tokens: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))


def _clear(mask: np.ndarray, tokens: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        if token < 32 * len(words):
            words[token // 32] &= ~np.uint32(1 << (token % 32))
