"""One output's way through a compiled grammar, in the process that follows it: masks for what may be sampled next.

Imports nothing of xgrammar by itself: it is given a matcher. It knows committed tokens only: what it walks over to make
masks of drafts, it walks back.

Shapes: P paths of drafts (1 for a chain), k drafts each, W = 1 + k positions, words = ceil(vocabulary / 32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Ends:
    """What may end an output. eos: the ids that may. late: the ids that may not before ``least`` tokens. never: whether
    EOS may not end it at all while it can go on."""

    eos: Sequence[int]
    late: Sequence[int] = ()
    least: int = 0
    never: bool = False

    def held_back(self, length: int) -> Sequence[int]:
        """The ids that may not end an output of this length if it can go on."""
        if length < self.least:
            return self.late
        return self.eos if self.never else ()


class Walk:
    """Follows one output. ``matcher``: xgrammar's GrammarMatcher. length: of the output so far, in tokens."""

    def __init__(self, matcher: Any, ends: Ends) -> None:
        self._matcher, self._ends = matcher, ends
        self.length = 0

    def accept(self, tokens: Sequence[int]) -> int:
        """Take in committed tokens; returns how many the grammar took."""
        for count, token in enumerate(tokens):
            if not self._matcher.accept_token(token):
                return count
            self.length += 1
        return len(tokens)

    def masks(self, drafts: Sequence[Sequence[int]], out: np.ndarray) -> list[int]:
        """Fill ``out [P, W, words]`` int32, contiguous, for the positions after ``drafts [P, k]`` (-1: none).

        out[p, j] is for the position after drafts[p, :j]. After a draft that the grammar refuses, or that ends the
        text, it is all ones: the mask before forbids the one, and nothing follows the other. Returns the
        rows, of P · W, after which no token continues: they allow EOS.
        """
        self._dead: list[int] = []
        out.fill(-1)
        flat = out.reshape(-1, out.shape[-1])
        seen: dict[tuple[int, ...], int] = {}
        for path, tokens in enumerate(drafts):
            self._walk(list(tokens), flat, path * out.shape[1], seen)
        return self._dead

    def _walk(self, drafts: list[int], flat: np.ndarray, first: int, seen: dict[tuple[int, ...], int]) -> None:
        """One path's masks, from row ``first`` on; ``seen`` has the row of each prefix of drafts so far."""
        taken = 0
        for place, draft in enumerate([*drafts, -1]):
            row, prefix = first + place, tuple(drafts[:place])
            if (same := seen.setdefault(prefix, row)) != row:
                flat[row] = flat[same]
                self._dead += [row] if same in self._dead else []
            else:
                self._fill(flat, row, place)
            if draft < 0 or draft in self._ends.eos or not allows(flat[row], draft):
                break
            if not self._matcher.accept_token(draft):
                break
            taken += 1
        if taken:
            self._matcher.rollback(taken)

    def _fill(self, flat: np.ndarray, row: int, ahead: int) -> None:
        """The mask after ``ahead`` drafts that the matcher has accepted."""
        self._matcher.fill_next_token_bitmask(flat, row)
        if not flat[row].any():  # nothing continues: the text ends here; the token is refused when it is accepted
            allow(flat[row], self._ends.eos)
            self._dead.append(row)
        held = self._ends.held_back(self.length + ahead)
        if held:
            before = flat[row].copy()
            forbid(flat[row], held)
            if not flat[row].any():
                flat[row] = before


def allows(mask: np.ndarray, token: int) -> bool:
    return 0 <= token < 32 * len(mask) and bool(mask[token // 32] >> (token % 32) & 1)


def allow(mask: np.ndarray, tokens: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))


def forbid(mask: np.ndarray, tokens: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        if token < 32 * len(words):
            words[token // 32] &= ~np.uint32(1 << (token % 32))
