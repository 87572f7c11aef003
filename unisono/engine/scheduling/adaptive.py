"""Adaptive number of drafts: the most expected tokens per second, from measured costs and acceptance.

Pure arithmetic on values that the host has read. :class:`AcceptanceEstimate` estimates, per request and draft position,
the probability of acceptance given that the drafts before it were accepted. :class:`RoundCosts` estimates the time of a
round: its graph's time on padding plus what real rounds with this number of requests took beyond. :class:`AdaptiveK`
chooses. A wrong estimate costs time and does not change the text.

Shapes: R rows of a round, K drafts at most, S slots.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

PRIOR, PRIOR_TRIALS = 0.7, 8.0
"""Prior acceptance at each position, and its weight in trials. It is high so that drafting is tried at first."""

OWN_DECAY, SHARED_DECAY = 0.98, 0.998
"""Factor by which the weight of a trial decays per later trial of the same request, and of any request."""

SHARED_TRIALS = 16.0
"""Weight of the shared estimate, in trials of one request."""

OWN_TRIALS = 4.0
"""Weight of the shared estimate in a request's acceptance over all positions, in trials."""

HYSTERESIS = 0.005
"""Least relative gain for which the number of drafts changes."""

PROBE_SHARE, PROBE_PAUSE = 0.003, 16
"""Share of the time for rounds with another number of drafts than seems best, and the least number of rounds between
two of them."""

PAYBACK_ROUNDS = 64
"""Rounds within which resuming has to pay for the drafter's catch-up."""

STEADY, WINDOW = 5, 9
"""Rounds with a constant number of drafts before their times count, and the length of the window of times."""

BELIEF = 0.25
"""Weight of a single measured round in the time of its number of drafts."""

FREE_PROBES = 4
"""Probes of fewer drafts at the start that are free of the time budget: one round each."""

MOST_CORRECTION = 4.0
"""Largest difference between what rounds with a number of drafts take and what others let expect, as a factor of the
graph's time on padding.
"""


NOTHING_SHARED: Mapping[int, int] = MappingProxyType({})


class AcceptanceEstimate:
    """Acceptance estimates for S slots and K positions: moving averages per request, shrunk towards the shared
    average.

    differ: judge a request's late positions, which it seldom reaches, by its acceptance over all positions. It tells
    requests that share drafts apart sooner.
    """

    def __init__(self, slots: int, drafts: int, differ: bool = False) -> None:
        self._places, self._differ = np.arange(drafts), differ
        self._tried, self._taken = np.zeros((slots, drafts)), np.zeros((slots, drafts))
        self._all_tried = np.full(drafts, PRIOR_TRIALS)
        self._all_taken = PRIOR * self._all_tried

    def begin(self, slots: np.ndarray | int) -> None:
        """Reset the estimates of slots that were assigned to other requests."""
        self._tried[slots] = self._taken[slots] = 0

    def count(self, slots: np.ndarray, requested: np.ndarray, accepted: np.ndarray) -> None:
        """Count a round: slots [R], requested drafts [R], accepted drafts [R]. A draft that was not found counts as
        rejected.
        """
        taken = self._places < accepted[:, None]
        tried = (self._places <= accepted[:, None]) & (self._places < requested[:, None])
        fade = np.where(tried, OWN_DECAY, 1.0)
        self._tried[slots] = self._tried[slots] * fade + tried
        self._taken[slots] = self._taken[slots] * fade + (taken & tried)
        count = tried.sum(0)
        fade = SHARED_DECAY**count
        self._all_tried = self._all_tried * fade + count
        self._all_taken = self._all_taken * fade + (taken & tried).sum(0)

    def forget(self, slots: np.ndarray, verified: np.ndarray) -> None:
        """Let the estimates of drafts that were not verified for lack of room drift to the shared average.

        slots [R]; verified [R]: drafts that were. Otherwise a request whose drafts once failed would not get any again.
        """
        fade = np.where(self._places < verified[:, None], 1.0, OWN_DECAY)
        self._tried[slots] *= fade
        self._taken[slots] *= fade

    def conditional(self, slots: np.ndarray) -> np.ndarray:
        """Return [R, K]: the probability that each position is accepted if all before it were."""
        shared, tried, taken = self._all_taken / self._all_tried, self._tried[slots], self._taken[slots]
        if self._differ:
            shared = self._moved(shared, tried, taken)
        rates: np.ndarray = (taken + SHARED_TRIALS * shared) / (tried + SHARED_TRIALS)
        return rates

    @staticmethod
    def _moved(shared: np.ndarray, tried: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """Return [R, K]: the shared rates [K], shifted in log-odds for each request.

        The shift is the difference between the request's acceptance over all its positions and the shared acceptance
        over the same positions.
        """
        trials = tried.sum(1) + OWN_TRIALS
        usual = (tried @ shared + OWN_TRIALS * shared[0]) / trials
        own = (taken.sum(1) + OWN_TRIALS * usual) / trials
        odds = _log_odds(shared) + (_log_odds(own) - _log_odds(usual))[:, None]
        moved: np.ndarray = 1 / (1 + np.exp(-odds))
        return moved

    def expected(self, slots: np.ndarray, most: np.ndarray, shared: Mapping[int, int] = NOTHING_SHARED) -> np.ndarray:
        """Return [K + 1]: expected tokens of a round of slots [R] with 0 … K drafts. ``most`` [R]: each row's limit.

        shared: by number of drafts, the drafts of all rows together, where rows share them; the likeliest are verified.
        """
        reached = np.where(self._places < most[:, None], self.conditional(slots), 0.0).cumprod(axis=1)
        tokens = len(slots) + np.concatenate(([0.0], reached.sum(0).cumsum()))
        if shared:
            likeliest = np.concatenate(([0.0], np.sort(reached, axis=None)[::-1].cumsum()))
            for drafts, budget in shared.items():
                tokens[drafts] = len(slots) + likeliest[min(budget, reached.size)]
        return tokens


def _log_odds(rates: np.ndarray) -> np.ndarray:
    """Logarithm of rates / (1 - rates), finite for rates of 0 and 1."""
    within = rates.clip(0.005, 0.995)
    odds: np.ndarray = np.log(within / (1 - within))
    return odds


@dataclass
class _Level:
    """Measurements of rounds with about this number of requests.

    beyond: by number of drafts, the milliseconds of real rounds beyond the time on padding. recent: those of rounds
    with ``drafts``, while it did not change. follows: the rounds before had another number and were equal otherwise.
    """

    beyond: dict[int, float] = field(default_factory=dict)
    drafts: int = -1
    follows: bool = False
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def expected(self, drafts: int) -> float:
        """Time beyond padding of rounds with this number of drafts: measured, or the least that others allow for.

        This is a lower bound: the time of the next smaller measured number, or that of the next larger one times
        ``(1 + drafts) / (1 + larger)`` if that is more.
        """
        if drafts in self.beyond:
            return self.beyond[drafts]
        fewer = [k for k in self.beyond if k < drafts]
        more = [k for k in self.beyond if k > drafts]
        bounds = [self.beyond[max(fewer)]] if fewer else []
        if more:
            measured = self.beyond[min(more)]
            bounds.append(measured * (1 + drafts) / (1 + min(more)) if measured > 0 else measured)
        return max(bounds, default=0.0)

    def bounded(self, drafts: int, ms: float, padding: float) -> float:
        """Limit a time beyond ``padding`` to a range around what is expected."""
        if not self.beyond:
            return ms
        expected, bound = self.expected(drafts), MOST_CORRECTION * padding
        return min(max(ms, expected - bound), expected + bound)


class RoundCosts:
    """Milliseconds of rounds. table: (rows, drafts) -> time of the graph on padding, None without a graph.

    Real rounds take longer because they read the keys and values of real texts, which is the same for any number of
    drafts, and because products of real numbers take more power than of zeros, which grows with the tokens. How much
    either is shows only where rounds with two numbers of drafts were measured. A number that was not measured is
    assumed to take the least possible time (:meth:`_Level.expected`): if it would then be best, it is tried. If
    the time changes while the number of drafts does not, the texts are others, and all numbers change alike.
    """

    def __init__(self, table: Callable[[int, int], float | None]) -> None:
        self._table = table
        self._levels: dict[int, _Level] = {}
        self._last: _Level | None = None

    def ms(self, rows: int, drafts: int) -> float | None:
        """Milliseconds of a round with this number of requests; None: it has no graph and should not be chosen."""
        padding, level = self._table(rows, drafts), self._levels.get(rows.bit_length())
        if padding is None or level is None:
            return padding
        return max(padding + level.expected(drafts), 0.25 * padding)

    def interrupted(self) -> None:
        """Discard the last time: the next rounds have other requests, so a difference is not due to the number of
        drafts.
        """
        self._last = None

    def measured(self, rows: int, drafts: int, ms: float) -> None:
        """Record the time of a round like the ones around it."""
        padding = self._table(rows, drafts)
        if padding is None:
            return
        level = self._levels.setdefault(rows.bit_length(), _Level())
        if drafts != level.drafts or level is not self._last:
            level.follows = level is self._last
            level.drafts = drafts
            level.recent.clear()
        self._last = level
        level.recent.append(ms - padding)
        if len(level.recent) < STEADY:
            return
        beyond, before = statistics.median(level.recent), level.beyond.get(drafts)
        if before is not None and not level.follows:
            level.beyond = {k: known + beyond - before for k, known in level.beyond.items()}
        level.beyond[drafts] = level.bounded(drafts, beyond, padding)
        level.follows = False

    def probed(self, rows: int, drafts: int, ms: float) -> None:
        """Record the time of a single round with another number of drafts than those around it."""
        padding, level = self._table(rows, drafts), self._levels.get(rows.bit_length())
        if padding is None or level is None or not level.beyond:
            return
        known = level.expected(drafts)
        belief = BELIEF if drafts in level.beyond or drafts else 1.0  # only probes measure zero drafts
        level.beyond[drafts] = known + belief * (level.bounded(drafts, ms - padding, padding) - known)


class AdaptiveK:
    """Choose the number of drafts of each round among ``choices``, ascending.

    ``choose`` is called for every round with the knowledge at that time. ``drafts``: the current number, probes aside.
    down: probe the fewest drafts too, for a drafter that can pause at no cost. The time of such a drafter depends on
    the text (a look-up) and shows only while it pauses.
    """

    def __init__(
        self, choices: Sequence[int], acceptance: AcceptanceEstimate, costs: RoundCosts, down: bool = False
    ) -> None:
        self.choices, self.acceptance, self.costs, self.down = tuple(choices), acceptance, costs, down
        self.drafts = self.choices[-1]
        self._budget = 0.0  # milliseconds that probes may cost
        self._since_probe = 0
        self._rung = 0  # probes so far; selects the next number to probe

    def choose(
        self,
        slots: np.ndarray,
        most: np.ndarray,
        catch_up_ms: float,
        standby_ms: float = 0.0,
        shared: Mapping[int, int] = NOTHING_SHARED,
    ) -> int:
        """Return the drafts for a round of slots [R]. ``most`` [R]: each row's limit. shared: see
        :meth:`AcceptanceEstimate.expected`.

        catch_up_ms: time the drafter needs to catch up before it can draft, 0 if nothing is pending. standby_ms: later
        cost of a round without drafts, for a paused drafter that remembers a limited number of tokens.
        """
        costs = [self.costs.ms(len(slots), k) for k in self.choices]
        ms = {k: cost for k, cost in zip(self.choices, costs, strict=True) if cost is not None}
        if not ms:
            return self.choices[-1]
        if 0 in ms:
            ms[0] += standby_ms
        tokens = self.acceptance.expected(slots, most, shared)
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
        """From time to time, return another number of drafts than seems best: otherwise it would never be measured."""
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
