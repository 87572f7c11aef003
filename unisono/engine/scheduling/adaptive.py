"""How many drafts the next round should have: the most tokens per second, by what rounds cost and what is accepted.

Plain arithmetic over what the host has read; nothing of the device. :class:`Acceptance` estimates, for each request and
place in a draft, how often it is accepted once those before it were. :class:`RoundCosts` says what a round takes: its
graph's time on padding, and how much longer rounds with this number of requests really take.
:class:`AdaptiveK` chooses. It may be wrong about both; no choice changes a text.

Shapes: R rows of a round, K drafts at most, S slots.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

PRIOR, PRIOR_TRIALS = 0.7, 8.0
"""Acceptance at each place before anything is known, and how many trials it counts as: drafting is tried at first."""

OWN_DECAY, SHARED_DECAY = 0.98, 0.998
"""What a trial of a request's own, or of any request, still counts for after the next one."""

SHARED_TRIALS = 16.0
"""As how many of a request's own trials the estimate over all requests counts."""

HYSTERESIS = 0.005
"""Gain below which the number of drafts stays as it is."""

PROBE_SHARE, PROBE_PAUSE = 0.003, 16
"""Of the time, what may go to rounds with more drafts than seem best; and how many rounds lie between two of them."""

PAYBACK_ROUNDS = 64
"""Rounds within which resuming has to pay for the drafter's catching up."""

STEADY, WINDOW = 5, 9
"""Rounds with one number of drafts before their times are believed, and how many of them count."""

BELIEF = 0.25
"""How far what a single round took corrects what is known of its number of drafts."""

FREE_PROBES = 4
"""So many probes of fewer drafts are made at first, whatever they lose: it is a round each."""

MOST_CORRECTION = 4.0
"""Of a graph's time on padding, by how much a number of drafts may turn out to cost more or less than others."""


class Acceptance:
    """Estimates of S slots and K places: a moving average of each request's own, shrunk towards that of all."""

    def __init__(self, slots: int, drafts: int) -> None:
        self._places = np.arange(drafts)
        self._tried, self._taken = np.zeros((slots, drafts)), np.zeros((slots, drafts))
        self._all_tried = np.full(drafts, PRIOR_TRIALS)
        self._all_taken = PRIOR * self._all_tried

    def begin(self, slots: np.ndarray | int) -> None:
        """Other requests have these slots: nothing of their own is known."""
        self._tried[slots] = self._taken[slots] = 0

    def count(self, slots: np.ndarray, asked: np.ndarray, accepted: np.ndarray) -> None:
        """A round: of slots [R], drafts asked for [R] and accepted [R]. Where none was found it counts as rejected."""
        taken = self._places < accepted[:, None]
        tried = (self._places <= accepted[:, None]) & (self._places < asked[:, None])
        fade = np.where(tried, OWN_DECAY, 1.0)
        self._tried[slots] = self._tried[slots] * fade + tried
        self._taken[slots] = self._taken[slots] * fade + (taken & tried)
        count = tried.sum(0)
        fade = SHARED_DECAY**count
        self._all_tried = self._all_tried * fade + count
        self._all_taken = self._all_taken * fade + (taken & tried).sum(0)

    def conditional(self, slots: np.ndarray) -> np.ndarray:
        """[R, K]: the share in which a place's draft is accepted where those before it were."""
        shared = SHARED_TRIALS * self._all_taken / self._all_tried
        return (self._taken[slots] + shared) / (self._tried[slots] + SHARED_TRIALS)

    def expected(self, slots: np.ndarray, most: np.ndarray) -> np.ndarray:
        """[K + 1]: tokens that a round of slots [R] commits with 0 … K drafts, of which each may have ``most`` [R]."""
        reached = np.where(self._places < most[:, None], self.conditional(slots), 0.0).cumprod(axis=1)
        return len(slots) + np.concatenate(([0.0], reached.sum(0).cumsum()))


@dataclass
class _Level:
    """For rounds with about this number of requests: how much longer they take than on padding, and how much each
    number of drafts differs from the first one seen. recent: times beyond padding, of ``drafts`` without a change."""

    offset: float | None = None
    correction: dict[int, float] = field(default_factory=dict)
    drafts: int = -1
    follows: bool = False
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class RoundCosts:
    """Milliseconds of rounds. table: (rows, drafts) -> its graph's time on padding, None where there is no graph.

    Real rounds read keys and values of real texts: that takes longer, by about the same for any number of drafts. So
    what is measured of one number serves all (``offset``), and only where the number changes from one round to the
    next, all else being equal, a difference to the table is put down to it (``correction``).
    """

    def __init__(self, table: Callable[[int, int], float | None]) -> None:
        self._table = table
        self._levels: dict[int, _Level] = {}
        self._last: _Level | None = None

    def ms(self, rows: int, drafts: int) -> float | None:
        """Milliseconds of a round with this number of requests; None: it has no graph, and should not be chosen."""
        padding = self._table(rows, drafts)
        if padding is None:
            return None
        level = self._levels.get(rows.bit_length())
        if level is None:
            return padding
        more = (level.offset or 0.0) + level.correction.get(drafts, 0.0)
        return max(padding + more, 0.25 * padding)

    def interrupted(self) -> None:
        """The next rounds are of other texts: what differs then is not to be put down to their number of drafts."""
        self._last = None

    def measured(self, rows: int, drafts: int, ms: float) -> None:
        """A round with this number of requests took ``ms``, and so did those around it."""
        padding = self._table(rows, drafts)
        if padding is None:
            return
        level = self._levels.setdefault(rows.bit_length(), _Level())
        if drafts != level.drafts or level is not self._last:
            level.follows = level is self._last and level.offset is not None
            level.drafts = drafts
            level.recent.clear()
        self._last = level
        level.recent.append(ms - padding)
        if len(level.recent) < STEADY:
            return
        known = level.correction.get(drafts, 0.0)
        more = statistics.median(level.recent)
        if level.follows and level.offset is not None:
            bound = MOST_CORRECTION * padding
            level.correction[drafts] = min(max(more - level.offset, -bound), bound)
            level.follows = False
        else:
            level.offset = more - known

    def probed(self, rows: int, drafts: int, ms: float) -> None:
        """A single round with another number of drafts than those around it took so long."""
        padding, level = self._table(rows, drafts), self._levels.get(rows.bit_length())
        if padding is None or level is None or level.offset is None:
            return
        bound, known = MOST_CORRECTION * padding, level.correction.get(drafts, 0.0)
        found = min(max(ms - padding - level.offset, -bound), bound)
        belief = BELIEF if drafts in level.correction or drafts else 1.0  # of none nothing else tells
        level.correction[drafts] = known + belief * (found - known)


class AdaptiveK:
    """The number of drafts of each round, one of ``choices``, ascending.

    ``choose`` is called for every round, with what is known by then. ``drafts`` is what it stays at, probes aside.
    down: fewest drafts are probed too, for a drafter that may pause at no cost: what it takes to draft depends on the
    texts, as a look-up's time does, and is seen only where it does not.
    """

    def __init__(self, choices: Sequence[int], acceptance: Acceptance, costs: RoundCosts, down: bool = False) -> None:
        self.choices, self.acceptance, self.costs, self.down = tuple(choices), acceptance, costs, down
        self.drafts = self.choices[-1]
        self._budget = 0.0  # milliseconds that probes may lose
        self._since_probe = 0
        self._rung = 0  # which of the larger numbers is probed next

    def choose(self, slots: np.ndarray, most: np.ndarray, catch_up_ms: float, standby_ms: float = 0.0) -> int:
        """Drafts for a round of slots [R], of which each may have ``most`` [R].

        catch_up_ms: what the drafter takes to catch up before it can draft, 0 where nothing is pending. standby_ms:
        what a round without drafts costs later, for a paused drafter that can remember only so much.
        """
        costs = [self.costs.ms(len(slots), k) for k in self.choices]
        ms = {k: cost for k, cost in zip(self.choices, costs, strict=True) if cost is not None}
        if not ms:
            return self.choices[-1]
        if 0 in ms:
            ms[0] += standby_ms
        tokens = self.acceptance.expected(slots, most)
        fewest = min(ms)
        rate = {k: tokens[k] / ms[k] for k in ms if k == fewest or tokens[k] > tokens[k - 1]}
        self.drafts = self._best(rate, ms, catch_up_ms)
        return self._probe(rate, ms, tokens, catch_up_ms)

    def _best(self, rate: dict[int, float], ms: dict[int, float], catch_up_ms: float) -> int:
        best, now = max(rate, key=lambda k: (rate[k], -k)), self.drafts
        if now not in rate or rate[best] <= 0:
            return best
        if rate[best] < rate[now] * (1 + HYSTERESIS):
            return now
        if now == 0 and PAYBACK_ROUNDS * ms[best] * (1 - rate[now] / rate[best]) < catch_up_ms:
            return now
        return best

    def _probe(self, rate: dict[int, float], ms: dict[int, float], tokens: np.ndarray, catch_up_ms: float) -> int:
        """Now and then more drafts than seem best: of places that are never tried nothing would be learnt."""
        best = self.drafts
        others = [k for k in rate if k > best or (self.down and k == min(ms) < best)]
        self._since_probe += 1
        if not others:
            return best
        probed = others[self._rung % len(others)]
        loss = max(0.0, ms[probed] - tokens[probed] / rate[best]) + (catch_up_ms if best == 0 else 0.0)
        self._budget = min(self._budget + PROBE_SHARE * ms[best], loss)
        if self._since_probe < PROBE_PAUSE or (
            self._budget < loss and not (probed < best and self._rung < FREE_PROBES)
        ):
            return best
        self._budget, self._since_probe, self._rung = 0.0, 0, self._rung + 1
        return probed
