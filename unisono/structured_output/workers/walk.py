"""Masks of one output's compiled grammar, in the process of its lane.

Does not import llguidance: it receives matchers. Its state has committed tokens only: it rolls back the drafts after
making their masks.

Shapes: P paths of drafts (1 for a chain), k drafts each, W = 1 + k positions, words = ceil(vocabulary / 32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FORCED = 32
"""Most forced tokens in one answer."""

DEAD_END = "NoExtensionBias"
"""The error of an LLMatcher after which no token continues. Other errors are exceeded limits."""


@dataclass(frozen=True)
class EndRules:
    """The end of an output.

    eos: the ids that may end it. late: the ids that may not before ``least`` tokens. never: EOS is forbidden while the
    output can continue.
    """

    eos: Sequence[int]
    late: Sequence[int] = ()
    least: int = 0
    never: bool = False

    def held_back(self, length: int) -> Sequence[int]:
        """The ids that must not end an output of this length if it can continue."""
        if length < self.least:
            return self.late
        return self.eos if self.never else ()


class Unfollowable(Exception):
    """A grammar that exceeded a limit of llguidance."""


class Walk:
    """The grammar state of one output.

    begin: makes an LLMatcher at the start of the grammar. length: output tokens.

    canonical: llguidance tokenizes text as the checkpoint does, so that it can compute forced tokens.
    """

    def __init__(self, begin: Callable[[], Any], ends: EndRules, canonical: bool) -> None:
        self._begin, self._ends, self._canonical = begin, ends, canonical
        self._matcher = begin()
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    def accept(self, tokens: Sequence[int]) -> int:
        """Advance by committed tokens; returns how many the grammar accepted. Raises Unfollowable."""
        taken = self._consume(list(tokens))
        if taken < len(tokens):
            self._check_limits()
        self._tokens += tokens[:taken]
        return taken

    def _consume(self, tokens: list[int]) -> int:
        """Advance by tokens; returns how many were accepted. A complete text that cannot continue ends with any EOS."""
        taken = int(self._matcher.try_consume_tokens(tokens))
        ends = taken < len(tokens) and tokens[taken] in self._ends.eos
        return taken + (ends and self._matcher.stop_reason() == "NoExtension")

    def forced(self) -> list[int]:
        """The tokens that the grammar forces next, in the checkpoint's tokenization; at most FORCED."""
        if self._tokens and self._tokens[-1] in self._ends.eos:
            return []
        if not self._canonical or self._matcher.is_stopped():
            return self._end() if self._matcher.stop_reason() == "NoExtension" else []
        tokens = list(self._matcher.compute_ff_tokens())[:FORCED]
        tokens = tokens[: self._matcher.validate_tokens(tokens)] if tokens else []
        if tokens and len(tokens) < FORCED:
            self._matcher.consume_tokens(tokens)
            more = self._end() if self._matcher.stop_reason() == "NoExtension" else []
            self._matcher.rollback(len(tokens))
            tokens += more
        return tokens

    def _end(self) -> list[int]:
        return list(self._ends.eos) if len(self._ends.eos) == 1 else []

    def masks(self, drafts: Sequence[Sequence[int]], out: np.ndarray) -> list[int]:
        """Fill ``out [P, W, words]`` int32, contiguous, for the positions after ``drafts [P, k]`` (-1: none).

        out[p, j] is for the position after drafts[p, :j]. After a draft that the grammar refuses, or that ends the
        text, it is all ones: the mask before it forbids the former, and nothing follows the latter. Returns the rows,
        of P · W, after which no token continues: they allow EOS. Raises Unfollowable.
        """
        self._dead: list[int] = []
        out.fill(-1)
        flat = out.reshape(-1, out.shape[-1])
        seen: dict[tuple[int, ...], int] = {}
        for path, tokens in enumerate(drafts):
            self._walk(list(tokens), flat, path * out.shape[1], seen)
        return self._dead

    def _walk(self, drafts: list[int], flat: np.ndarray, first: int, seen: dict[tuple[int, ...], int]) -> None:
        """Fill one path's masks, from row ``first`` on. seen: the row of each prefix of drafts so far."""
        taken = 0
        for place, draft in enumerate([*drafts, -1]):
            row, prefix = first + place, tuple(drafts[:place])
            if (same := seen.setdefault(prefix, row)) != row:
                flat[row] = flat[same]
                self._dead += [row] if same in self._dead else []
            else:
                self._fill(flat, row, place)
            if draft < 0 or draft in self._ends.eos or row in self._dead or not allows(flat[row], draft):
                break
            if not self._matcher.try_consume_tokens([draft]):
                break
            taken += 1
        if self._matcher.is_error():
            self._restart()
        elif taken:
            self._matcher.rollback(taken)

    def _restart(self) -> None:
        """Replace a matcher after a dead end by a new one at the committed tokens."""
        self._matcher = self._begin()
        if self._consume(self._tokens) != len(self._tokens):
            raise Unfollowable("its committed tokens are not taken once more")

    def _check_limits(self) -> None:
        """Raise Unfollowable if the matcher has met a limit of llguidance; a dead end of the grammar is none."""
        error = self._matcher.get_error() if self._matcher.is_error() else ""
        if error and not error.startswith(DEAD_END):
            raise Unfollowable(f"it meets a limit of the grammar engine ({error.splitlines()[0]})")

    def _fill(self, flat: np.ndarray, row: int, ahead: int) -> None:
        """Fill the mask after ``ahead`` drafts that the matcher has accepted."""
        mask = flat[row]
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self._check_limits()
            mask.fill(0)  # nothing continues: the text ends here; accept() refuses the token
            allow(mask, self._ends.eos)
            self._dead.append(row)
        held = self._ends.held_back(self.length + ahead)
        if held:
            before = mask.copy()
            forbid(mask, held)
            if not mask.any():
                mask[:] = before


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
