"""The choice of k by itself: against brute force, in simulated service, and what it costs to be curious."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from unisono.engine.scheduling.adaptive import PROBE_PAUSE, PROBE_SHARE, AcceptanceEstimate, AdaptiveK, RoundCosts

RATES = (0.8, 0.6, 0.45, 0.3, 0.2)
CHOICES = (0, 1, 2, 3, 5)
MANY = 99


def table(rows: int, drafts: int) -> float:
    """Rounds of a model that is bound by memory for few tokens and by arithmetic for many: milliseconds."""
    return 4.0 + 0.25 * drafts + max(0.0, 0.02 * (rows * (1 + drafts) - 64))


def tokens_of(rates: tuple[float, ...], k: int) -> float:
    """Tokens that a request's round commits on average, by adding up every way it can go."""
    total = 0.0
    for accepted in range(k + 1):
        chance = float(np.prod(rates[:accepted])) * (1 - rates[accepted] if accepted < k else 1.0)
        total += (1 + accepted) * chance
    return total


def best_of(rates: tuple[float, ...], rows: int, more: float = 0.0) -> int:
    return max(CHOICES, key=lambda k: tokens_of(rates, k) / (table(rows, k) + more))


class Service:
    """Rounds of ``rows`` requests that take table + ``more`` milliseconds; drafts are accepted with ``rates``."""

    def __init__(
        self, rows: int, rates: tuple[float, ...], more: float = 0.0, known: object = table, down: bool = False
    ) -> None:
        self.slots, self.rates, self.more, self.drafting = np.arange(rows), rates, more, 0.0
        costs = RoundCosts(known)  # type: ignore[arg-type]
        self.policy = AdaptiveK(CHOICES, AcceptanceEstimate(rows, CHOICES[-1]), costs, down)
        self.most = np.full(rows, MANY)
        self.rng, self.chosen, self.ms, self.tokens, self.pending = random.Random(rows), [], 0.0, 0, 0
        self.catch_up_ms = 0.0

    def run(self, rounds: int) -> list[int]:
        """The numbers of drafts that were chosen."""
        rows, chosen = len(self.slots), []
        self.ms, self.tokens = 0.0, 0
        for _ in range(rounds):
            k = self.policy.choose(self.slots, self.most, self.catch_up_ms if self.pending else 0.0)
            took = table(rows, k) + self.more + (self.drafting if k else 0.0)
            self.ms += took + (self.catch_up_ms if k and self.pending else 0.0)
            self.pending = 0 if k else self.pending + 1
            accepted = np.array([self._accepted(min(k, most)) for most in self.most])
            self.tokens += int(accepted.sum()) + rows
            if chosen and chosen[-1] == k:
                self.policy.costs.measured(rows, k, took)
            elif chosen and k != self.policy.drafts:
                self.policy.costs.probed(rows, k, took)
            if k:
                self.policy.acceptance.count(self.slots, np.minimum(k, self.most), accepted)
            chosen.append(k)
        return chosen

    def _accepted(self, k: int) -> int:
        return next((i for i in range(k) if self.rng.random() >= self.rates[i]), k)

    @property
    def speed(self) -> float:
        return self.tokens / self.ms


def test_expected_tokens_equal_enumeration_of_outcomes() -> None:
    acceptance = AcceptanceEstimate(2, 5)
    for _ in range(4000):  # far more trials than the prior counts for
        for slot in (0, 1):
            accepted = next((i for i in range(5) if random.random() >= RATES[i]), 5)
            acceptance.count(np.array([slot]), np.array([5]), np.array([accepted]))
    got = acceptance.expected(np.array([0, 1]), np.array([MANY, 2]))
    p = acceptance.conditional(np.array([0, 1]))
    for k in range(6):
        want = tokens_of(tuple(p[0]), k) + tokens_of(tuple(p[1]), min(k, 2))
        assert got[k] == pytest.approx(want)
    assert np.abs(p - RATES).max() < 0.25


@pytest.mark.parametrize(("budget", "limit"), [(1, 5), (3, 4), (9, 4), (10, 4), (9, 5), (99, 5)])
def test_a_shared_budget_has_the_likeliest_drafts(budget: int, limit: int) -> None:
    """Two requests of up to 5 drafts, of which the second may have ``limit``."""
    acceptance, both = AcceptanceEstimate(2, 5), np.arange(2)
    for _ in range(40):
        acceptance.count(both, np.full(2, 5), np.array([4, 1]))
    p = acceptance.conditional(both)
    reached = [float(np.prod(p[row, : place + 1])) for row, most in ((0, 5), (1, limit)) for place in range(most)]
    got = acceptance.expected(both, np.array([5, limit]), {2: budget})
    assert got[2] == pytest.approx(2 + sum(sorted(reached, reverse=True)[:budget]))


def test_slots_of_new_requests_begin_with_the_shared_average() -> None:
    acceptance, both = AcceptanceEstimate(2, 5, differ=True), np.arange(2)
    for _ in range(40):
        acceptance.count(both[:1], np.full(1, 5), np.array([1]))
    assert acceptance.conditional(both)[0, 1] < acceptance.conditional(both)[1, 1] - 0.05
    acceptance.begin(both[:1])
    first, second = acceptance.conditional(both)
    assert np.array_equal(first, second)


def test_usual_acceptance_of_first_drafts_shifts_nothing() -> None:
    """A request that had one draft a round, as often accepted as others' first drafts, is judged as an unknown one."""
    acceptance = AcceptanceEstimate(3, 5, differ=True)
    for _ in range(200):
        acceptance.count(np.array([0]), np.array([5]), np.array([1]))
    for _ in range(10):
        acceptance.count(np.array([1]), np.array([1]), np.array([1]))
    usual, unknown = acceptance.conditional(np.array([1, 2]))
    assert unknown[1] < 0.2
    assert usual[1] == pytest.approx(unknown[1], abs=0.03)


def test_late_positions_are_judged_by_the_early_ones() -> None:
    """A request that never got past its first draft is not expected to, once it does, as those that always do."""
    acceptance, both = AcceptanceEstimate(2, 5, differ=True), np.arange(2)
    for _ in range(20):
        acceptance.count(both, np.full(2, 5), np.array([5, 0]))
    high, low = acceptance.conditional(both)
    assert high.min() > 0.85
    assert low[1:].max() < 0.6
    assert np.all((low > 0) & (high < 1))


@pytest.mark.parametrize("seed", range(20))
def test_choice_equals_brute_force(seed: int) -> None:
    """Random estimates and costs, no curiosity: argmax of expected tokens over time, requests' own limits included."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 9))
    acceptance = AcceptanceEstimate(rows, 5)
    for _ in range(30):
        asked = rng.integers(1, 6, rows)
        acceptance.count(np.arange(rows), asked, np.minimum(asked, rng.integers(0, 6, rows)))
    costs = np.sort(rng.uniform(1, 4, 6))
    most = rng.integers(0, 6, rows)
    policy = AdaptiveK(CHOICES, acceptance, RoundCosts(lambda rows, k: float(costs[k])))
    policy.drafts = -1  # no number to stay at
    p = acceptance.conditional(np.arange(rows))
    rate = {k: sum(tokens_of(tuple(p[r]), min(k, most[r])) for r in range(rows)) / costs[k] for k in CHOICES}
    assert policy.choose(np.arange(rows), most, 0.0) == max(rate, key=lambda k: rate[k])


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 128, 256])
def test_never_much_slower_than_the_best(rows: int) -> None:
    """Contexts make rounds longer than the table knows; still within 1 % of none and 3 % of the best fixed number."""
    service = Service(rows, RATES, more=0.01 * rows)
    service.catch_up_ms = 0.2 + 0.01 * rows
    service.run(300)
    service.run(2000 if rows < 16 else 300)
    speeds = {k: rows * tokens_of(RATES, k) / (table(rows, k) + service.more) for k in CHOICES}
    assert service.speed > 0.97 * max(speeds.values())
    assert service.speed > 0.99 * speeds[0]


def test_batch_sizes_choose_different_draft_lengths() -> None:
    """The test above would be passed by a constant if they did not."""
    assert len({best_of(RATES, rows, 0.01 * rows) for rows in (1, 4, 16, 64, 128, 256)}) >= 3


def test_drafting_resumes_when_acceptance_rises() -> None:
    service = Service(4, (0.02,) * 5)
    assert service.run(600)[-100:].count(0) > 90
    service.rates = (0.95,) * 5
    chosen = service.run(1500)
    assert chosen[-100:].count(5) > 80


@pytest.mark.parametrize(("rows", "turnover"), [(1, True), (64, True), (4, False)])
def test_old_evidence_does_not_outlive_a_change(rows: int, turnover: bool) -> None:
    """Thousands of drafts were rejected, of these requests or of ended ones: what is accepted then has to count."""
    service = Service(rows, (0.95,) * 5)
    for _ in range(3000 // rows):
        service.policy.acceptance.count(service.slots, np.full(rows, 5), np.zeros(rows, int))
    for _ in range(50):
        for slot in service.slots if turnover else ():
            service.policy.acceptance.begin(slot)
        chosen = service.run(20)
    assert chosen.count(5) > 15


def test_probe_cost_stays_within_its_share() -> None:
    """Where drafting never pays, what probes lose stays within their share of the time."""
    for rows, catch_up in itertools.product((1, 64), (0.0, 2.0)):
        service = Service(rows, (0.05,) * 5)
        service.catch_up_ms = catch_up
        service.run(500)
        chosen = service.run(3000)
        probes = [i for i, k in enumerate(chosen) if k]
        assert probes, "nothing would be learnt"
        none = rows / table(rows, 0)
        assert service.speed > (1 - 2 * PROBE_SHARE) * none
        assert all(b - a >= PROBE_PAUSE or b - a <= 2 for a, b in itertools.pairwise(probes))


def test_draft_length_respects_request_limits() -> None:
    service = Service(8, (1.0,) * 5)
    service.most = np.zeros(8, dtype=int)
    assert set(service.run(50)) == {0}
    service.most = np.array([0] * 7 + [2])
    assert set(service.run(50)) <= {0, 1, 2}


def test_only_draft_lengths_with_graphs_are_chosen() -> None:
    service = Service(4, (1.0,) * 5, known=lambda rows, k: None if k in (3, 5) else table(rows, k))
    assert set(service.run(50)) == {2}
    nothing = AdaptiveK(CHOICES, AcceptanceEstimate(1, 5), RoundCosts(lambda rows, k: None))
    assert nothing.choose(np.array([0]), np.array([MANY]), 0.0) == 5


def test_round_costs_are_corrected_by_measurements() -> None:
    """Numbers that were not measured take the least that measured ones allow for; other texts change all alike."""
    costs = RoundCosts(lambda rows, k: 10.0 + k)
    for _ in range(9):
        costs.measured(8, 3, 17.0)
    assert costs.ms(8, 1) == pytest.approx(11.0 + 4.0 * 2 / 4), "as if all of it grew with the tokens"
    assert costs.ms(8, 5) == pytest.approx(15.0 + 4.0), "as if nothing of it did"
    for _ in range(9):
        costs.measured(8, 1, 14.0)
    assert costs.ms(8, 2) == pytest.approx(12.0 + 3.0), "not less than with fewer drafts"
    assert (costs.ms(8, 1), costs.ms(8, 3)) == (pytest.approx(14.0), pytest.approx(17.0))
    for _ in range(9):
        costs.measured(8, 1, 19.0)  # texts grew
    assert costs.ms(8, 3) == pytest.approx(22.0)
    assert costs.ms(100, 0) == 10.0, "rounds of other sizes are another matter"
    costs.interrupted()
    for _ in range(9):
        costs.measured(8, 3, 16.0)  # other texts, shorter ones: nothing is wrong with k = 3
    assert (costs.ms(8, 3), costs.ms(8, 1)) == (pytest.approx(16.0), pytest.approx(13.0))


def test_times_beyond_padding_do_not_keep_the_most_drafts() -> None:
    """16 requests of an 8B model, a block head: 15 drafts come first, and 7 bring 10 % more tokens a second."""
    choices, padding = (0, 3, 7, 11, 15), {0: 4.3, 3: 5.3, 7: 6.1, 11: 7.2, 15: 7.7}
    real = {0: 4.6, 3: 6.0, 7: 6.9, 11: 8.6, 15: 10.2}
    rates = np.full((16, 15), 0.9)
    rates[::2] = 0.4
    estimate, rng, slots, most = AcceptanceEstimate(16, 15), np.random.default_rng(0), np.arange(16), np.full(16, MANY)
    policy = AdaptiveK(choices, estimate, RoundCosts(lambda rows, k: padding[k]))
    chosen = [15] * 12
    for number in range(80):
        k = chosen[number] if number < 12 else policy.choose(slots, most, 0.0)
        accepted = (rng.random((16, 15)) < rates).cumprod(1)[:, :k].sum(1)
        if k:
            estimate.count(slots, np.full(16, k), accepted)
        if number and chosen[number - 1] == k:
            policy.costs.measured(16, k, real[k])
        chosen += [k] if number >= 12 else []
    assert chosen[20:].count(7) > 50


def test_probes_correct_round_costs() -> None:
    """A number that the table makes out to be too dear is never chosen; what its probes take sets that right."""
    costs = RoundCosts(lambda rows, k: 10.0 + 4 * k)
    costs.probed(8, 1, 10.0)
    assert costs.ms(8, 1) == 14.0, "a hint about nothing"
    for _ in range(9):
        costs.measured(8, 0, 12.0)
    costs.probed(8, 1, 13.0)
    assert costs.ms(8, 1) == pytest.approx(16.0 - 0.25 * 3.0)
    for _ in range(30):
        costs.probed(8, 1, 13.0)
    assert costs.ms(8, 1) == pytest.approx(13.0, abs=0.01)
    assert costs.ms(8, 0) == pytest.approx(12.0)


@pytest.mark.parametrize("down", [True, False])
def test_unmodelled_drafting_cost_stops_drafting(down: bool) -> None:
    """A look-up in long texts makes rounds thrice as long as on padding: two tokens a round do not pay for it."""
    service = Service(1, (0.6, 0.4, 0.2, 0.1, 0.1), down=down)
    service.drafting = 9.0
    service.run(300)
    assert (service.run(300).count(0) > 290) is down, "else it is put down to the texts, which all rounds share"
    service.drafting = 0.0  # texts that are quick to look up
    service.run(4000)
    assert service.run(300).count(0) < 150


def test_resuming_has_to_pay() -> None:
    def policy() -> AdaptiveK:
        made = AdaptiveK((0, 1), AcceptanceEstimate(1, 1), RoundCosts(lambda rows, k: 10.0 + k))
        made.drafts = 0
        return made

    assert policy().choose(np.array([0]), np.array([1]), 1.0) == 1
    assert policy().choose(np.array([0]), np.array([1]), 1e4) == 0


def test_catch_up_cost_is_charged_to_rounds_without_drafts() -> None:
    """0.7 drafts accepted of one: a round of 10 ms against one of 18 ms that brings 1.7 tokens."""

    def chosen(standby_ms: float) -> int:
        policy = AdaptiveK((0, 1), AcceptanceEstimate(1, 1), RoundCosts(lambda rows, k: 10.0 + 8.0 * k))
        policy.drafts = 0
        return policy.choose(np.array([0]), np.array([1]), 0.0, standby_ms)

    assert [chosen(ms) for ms in (0.0, 0.5, 0.7, 2.0)] == [0, 0, 1, 1]
