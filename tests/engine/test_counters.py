"""What the engine counts of speculation: drafts that there were, and where the accepted ones stood."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.ledger import play
from tests.engine.helpers import engine, prompts
from unisono.passes import round as rounds
from unisono.types import FinishReason, SamplingParams, SpeculativeConfig

K = 4
MAX_DRAFTS = (None, 0, 2, None)
PROMPTS = [p[: 3 + i] * (1 + 3 * (i % 2)) for i, p in enumerate(prompts(8, 250, low=20, high=30))]
PARAMS = [
    SamplingParams(temperature=0.7, seed=i, max_tokens=20 + i, ignore_eos=True, max_drafts=MAX_DRAFTS[i % 4],
                   allowed_token_ids=tuple(range(40, 44)))
    for i in range(8)
]  # fmt: skip


def drafting(path: Path, **flags: Any) -> Any:
    """N-gram drafts: now all k of them, now fewer, now none."""
    options = {"prompt_lookup_min": 2}
    return engine(path, speculative=SpeculativeConfig("ngram", num_speculative_tokens=K, options=options), **flags)


def test_counters_exclude_padding_drafts(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []  # (most that the row might have had, drafts) of each active row and round

    def watched(
        drafts: torch.Tensor, slots: torch.Tensor, most: torch.Tensor, drafted: torch.Tensor,
        real: Any = rounds.limit_drafts,
    ) -> None:  # fmt: skip
        real(drafts, slots, most, drafted)
        running = llm.engine.worker.slots.status[slots.long()] == FinishReason.RUNNING
        seen.extend(zip(most[slots.long()][running].tolist(), (drafts >= 0).sum(1)[running].tolist(), strict=True))

    with drafting(qwen3, enforce_eager=True) as llm:
        monkeypatch.setattr(rounds, "limit_drafts", watched)
        entries = play(llm, PROMPTS, PARAMS)
        counters = llm.engine.counters
    drafted = [count for most, count in seen if most > 0]
    assert 0 < drafted.count(0) < len(drafted), "a drafter that always or never drafts proves nothing"
    assert counters.draft_rounds == len(drafted)
    assert counters.drafts == len(drafted) - drafted.count(0)
    assert counters.drafted_tokens == sum(drafted) < K * counters.drafts
    accepted = [count - 1 for entry in entries if entry.params.max_drafts != 0 for count in entry.rounds]
    assert counters.accepted_tokens == sum(accepted) > 0
    assert counters.accepted_per_position == [sum(count > place for count in accepted) for place in range(K)]
    assert counters.accept_length == 1 + sum(accepted) / len(accepted)


def test_graphs_count_the_same(qwen3: Path) -> None:
    counted = []
    for eager in (False, True):
        with drafting(qwen3, enforce_eager=eager) as llm:
            play(llm, PROMPTS, PARAMS)
            counted.append(asdict(llm.engine.counters))
    assert counted[0] == counted[1]


def test_deltas_count_drafted_and_accepted_tokens_per_request(qwen3: Path) -> None:
    with drafting(qwen3) as llm:
        totals = []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            deltas = list(llm.stream(prompt, params))
            totals.append((sum(d.drafted_tokens for d in deltas), sum(d.accepted_tokens for d in deltas)))
        counters = llm.engine.counters
        assert [sum(column) for column in zip(*totals, strict=True)] == [
            counters.drafted_tokens, counters.accepted_tokens,
        ]  # fmt: skip
        assert [total for total, params in zip(totals, PARAMS, strict=True) if params.max_drafts == 0] == [(0, 0)] * 2


def test_info_and_metrics_report_acceptance(qwen3: Path) -> None:
    with drafting(qwen3) as llm:
        llm.generate(PROMPTS, [replace(p, max_drafts=None) for p in PARAMS])
        c, told = llm.engine.counters, llm.engine.info()["speculation"]
        samples = [(labels["position"], value) for name, _, labels, value, _ in llm.engine.metrics()
                   if name == "spec_decode_num_accepted_tokens_per_pos"]  # fmt: skip
        assert samples == [(str(place), count) for place, count in enumerate(c.accepted_per_position)]
        assert told["acceptance_per_position"] == [round(n / c.drafts, 4) for n in c.accepted_per_position]
        assert told["avg_spec_accept_length"] == round(c.accept_length, 4) > 1


def test_without_a_drafter_nothing_is_drafted(qwen3: Path) -> None:
    with engine(qwen3) as llm:
        llm.generate(PROMPTS, PARAMS)
        c = llm.engine.counters
        assert (c.draft_rounds, c.drafts, c.drafted_tokens) == (0, 0, 0)
        assert llm.engine.info()["speculation"]["acceptance_per_position"] == []
