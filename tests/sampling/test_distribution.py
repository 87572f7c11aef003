"""Samples follow the softmax of the filtered logits: chi-square against float64, and broken samplers fail it."""

import pytest
import torch

from tests.sampling.arena import arena
from unisono.kernels.sampling import sampler as sampling
from unisono.sampling.pipeline import sample_tokens

SLOTS, WIDTH, VOCAB = 250, 96, 50  # 24,000 draws: 250 seeds at 96 positions each
REJECT = 1e-4

SETTINGS = {
    "cold": {"temperature": 0.7},
    "plain": {},
    "hot": {"temperature": 1.5},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.08},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


def logits_of_a_vocabulary() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5


def reference(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """The distribution of one draw in float64, written as the definitions read."""
    p = (logits.double() / temperature).softmax(0)
    if top_k:
        p = p.where(p >= p.sort(descending=True).values[top_k - 1], 0)
    if top_p < 1:
        heaviest = p.sort(descending=True)
        before = heaviest.values.cumsum(0) - heaviest.values
        p = p.index_fill(0, heaviest.indices[before >= top_p * p.sum()], 0)
    p = p.where(p >= min_p * p.max(), 0)
    return p / p.sum()


def draw(logits: torch.Tensor, **settings: float) -> torch.Tensor:
    fields = arena(SLOTS, seed_lo=torch.arange(SLOTS) * 7919, seed_hi=torch.arange(SLOTS) % 3, **settings)
    slots = torch.arange(SLOTS, dtype=torch.int32)
    return sample_tokens(logits.expand(SLOTS * WIDTH, VOCAB), slots, WIDTH, fields)


def p_value(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's chi-square over the tokens with mass; a draw without mass is impossible."""
    counts = tokens.long().bincount(minlength=VOCAB).double()
    if counts[p == 0].any():
        return 0.0
    expected = p[p > 0] * len(tokens)
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_reference(setting):
    logits = logits_of_a_vocabulary()
    p = reference(logits, **SETTINGS[setting])
    assert p_value(draw(logits, **SETTINGS[setting]), p) > REJECT


def without_position(token, position, seed_lo, seed_hi, good=sampling.gumbel_cpu):
    return good(token, torch.zeros_like(position), seed_lo, seed_hi)


def uniform(token, position, seed_lo, seed_hi, good=sampling.gumbel_cpu):
    return torch.exp(-torch.exp(-good(token, position, seed_lo, seed_hi)))


def without_seed(token, position, seed_lo, seed_hi, good=sampling.gumbel_cpu):
    return good(token, position, torch.zeros_like(seed_lo), torch.zeros_like(seed_hi))


@pytest.mark.parametrize("broken", [without_position, without_seed, uniform])
@pytest.mark.parametrize("setting", ["plain", "all"])
def test_a_broken_sampler_fails(monkeypatch, broken, setting):
    monkeypatch.setattr(sampling, "gumbel_cpu", broken)
    logits = logits_of_a_vocabulary()
    p = reference(logits, **SETTINGS[setting])
    assert p_value(draw(logits, **SETTINGS[setting]), p) < REJECT


def test_noise_is_gumbel_to_the_far_tail():
    """Moments of a standard Gumbel, and as many large values as it has."""
    token, seed = torch.arange(500_000), torch.tensor(3)
    noise = sampling.gumbel_cpu(token, torch.tensor(11), seed, seed).double()
    assert abs(noise.mean() - 0.577216) < 0.008
    assert abs(noise.var() - torch.pi**2 / 6) < 0.03
    for level in (3.0, 6.0, 9.0):  # the upper tail, where a 24-bit uniform would be coarse
        expected = -torch.expm1(-torch.exp(torch.tensor(-level, dtype=torch.float64))) * len(token)
        assert abs((noise > level).sum() - expected) < 5 * expected**0.5


@pytest.mark.parametrize("word", [0, 1, 1000, 2**26 - 1, 2**26, 2**31, 2**32 - 1])
def test_noise_of_a_word_is_exact_to_fp32(monkeypatch, word):
    monkeypatch.setattr("unisono.kernels.sampling.noise.philox_cpu", lambda *_: (torch.tensor([word]), 0, 0, 0))
    key = torch.tensor([0])
    v = min((torch.tensor(word, dtype=torch.float64) + 0.5) * 2.0**-32, torch.tensor(1 - 2.0**-24).double())
    expected = -torch.log(-torch.log1p(-v))
    assert abs(sampling.gumbel_cpu(key, key, key, key).double() - expected) < 4e-6


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
def test_shared_noise_couples_two_distributions(spread):
    """A drafter near the target draws the target's token at least (1 - TV) / (1 + TV) of the time."""
    target = logits_of_a_vocabulary()
    drafter = target + spread * torch.randn(VOCAB, generator=torch.Generator().manual_seed(6))
    distance = (reference(target) - reference(drafter)).abs().sum() / 2
    bound = (1 - distance) / (1 + distance)
    agreement = (draw(target) == draw(drafter)).double().mean()
    assert agreement > bound - 4 * (bound * (1 - bound) / (SLOTS * WIDTH)) ** 0.5
    assert agreement < 1
