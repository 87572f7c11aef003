"""Acceptance as one says, by place: the shares are those asked for, repeatable, and marked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.drafters.make_blocks import make_dflash
from tests.engine.helpers import engine, prompts
from tests.engine.matrix import config_of
from unisono.config import EngineConfig
from unisono.engine.startup.synthetic import uniform
from unisono.types import ConfigError, SamplingParams, SpeculativeConfig

RATES = (0.8, 0.5, 0.3)
NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=3)


def test_the_hash_is_uniform_and_independent_of_its_neighbours() -> None:
    seeds, places = torch.arange(300).int()[:, None], torch.arange(300).int()
    x = uniform(seeds, places)
    assert x.shape == (300, 300)
    assert 0 <= x.min() < 0.001 < 0.999 < x.max() < 1
    assert abs(float(x.mean()) - 0.5) < 0.005
    for a, b in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1])):
        assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 0.01


def run(path: Path) -> tuple[list[list[int]], list[int], list[int]]:
    with engine(path, speculative=NGRAM, synthetic_acceptance_rates=RATES) as llm:
        params = [SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, seed=i) for i in range(8)]
        outputs = llm.generate(prompts(8, 250, 3, 30), params)
        counters = llm.engine.counters
        assert llm.engine.info()["settings"]["synthetic_acceptance_rates"] == list(RATES)  # type: ignore[index]
        return (
            [o.outputs[0].token_ids for o in outputs],
            counters.rounds_per_position,
            counters.accepted_per_position,
        )


def test_synthetic_acceptance_matches_the_rates(qwen3: Path) -> None:
    texts, rounds, accepted = run(qwen3)
    for asked, tried, taken in zip(RATES, rounds, accepted, strict=True):
        assert abs(taken / tried - asked) < 4 * (asked * (1 - asked) / tried) ** 0.5, "four standard errors"
    assert run(qwen3) == (texts, rounds, accepted)


@pytest.mark.parametrize(
    "flags",
    [
        {"synthetic_acceptance_rates": (0.5,)},
        {"speculative": NGRAM, "synthetic_acceptance_rates": (1.5,)},
        {"speculative": NGRAM, "synthetic_acceptance_rates": (0.5, 0.6)},
        {"speculative": NGRAM, "synthetic_acceptance_rates": (0.9, (0.5,))},
        {"speculative": NGRAM, "synthetic_acceptance_rates": (0.5,), "synthetic_acceptance_length": 2.0},
    ],
    ids=["without speculation", "no share", "a later draft more often", "of some kinds", "and a mean"],
)
def test_invalid_synthetic_acceptance_raises(flags: dict) -> None:
    with pytest.raises(ConfigError, match="synthetic-acceptance-rates"):
        EngineConfig(**flags)


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_kinds_of_requests_have_rates_of_their_own(qwen3: Path, tmp_path: Path, shared: bool) -> None:
    """By the seed; where requests share drafts, only those that were verified are accepted."""
    head = make_dflash(tmp_path, config_of(qwen3), (0, 1)).path
    spec = SpeculativeConfig("dflash", str(head), 5, share_drafts=shared)
    kinds = ((0.9, 0.9, 0.9, 0.9, 0.9), (0.2,))
    with engine(qwen3, speculative=spec, adaptive=True, synthetic_acceptance_rates=kinds) as llm:
        assert bool(llm.engine.runner.shared) is shared
        llm.engine.pin_drafts(2)
        params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, seed=i) for i in range(4)]
        found = [o.outputs[0].acceptance for o in llm.generate(prompts(4, 250, 3, 30), params)]
        assert llm.engine.counters.accepted_tokens <= llm.engine.counters.drafted_tokens
    easy = min(a.mean_acceptance_length for a in found[::2])
    hard = max(a.mean_acceptance_length for a in found[1::2])
    assert easy > (3.0 if shared else 2.5), "of 3 at most, where no request has the drafts of another"
    assert hard < 2
