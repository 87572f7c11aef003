"""Each answer says why some of its steps had fewer drafts than the drafter's k."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unisono.engine.scheduling.fewer_drafts import note_drafts
from unisono.engine.sequence import Extend, Round, Rows
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig, TokenDelta
from unisono.types.acceptance import DraftCount, FewerDrafts, RequestAcceptance

HEAD = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3}
PROMPT = "2 + 3 ="


def acceptance(llm: LLM, *params: SamplingParams) -> list[RequestAcceptance]:
    outputs = llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)
    found = [output.outputs[0].acceptance for output in outputs]
    assert all(found)
    for one in found:
        assert one is not None
        short = one.num_steps_without_drafts + sum(count < 3 for count in one.per_step_drafted)
        assert sum(one.fewer_drafts.values()) == short, "each step with fewer has a reason, the others have none"
    return found  # type: ignore[return-value]


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def fixed() -> Any:
    with LLM("tiny", speculative=SpeculativeConfig.parse({**HEAD, "adaptive": False}), max_model_len=256) as llm:
        yield llm


def test_limits_of_requests(fixed: LLM) -> None:
    (whole,) = acceptance(fixed, greedy(40))
    assert whole.fewer_drafts.keys() == set()
    (limited,) = acceptance(fixed, greedy(40, max_drafts=1))
    assert limited.fewer_drafts.keys() == {"limit"}
    (none,) = acceptance(fixed, greedy(20, max_drafts=0))
    assert none.fewer_drafts == {"limit": 19}


def test_drafters_that_find_nothing() -> None:
    spec = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3, "adaptive": False})
    with LLM("tiny", speculative=spec, max_model_len=256) as llm:
        (found,) = acceptance(llm, SamplingParams(temperature=1, seed=3, max_tokens=30, ignore_eos=True))
    assert found.fewer_drafts.keys() == {"not_found"}


def test_costs_and_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny", speculative=SpeculativeConfig.parse(HEAD), max_model_len=256, max_num_seqs=4) as llm:
        llm.engine.pin_drafts(0)
        (pinned,) = acceptance(llm, greedy(20))
        assert pinned.fewer_drafts == {"pinned": 19}
        llm.engine.pin_drafts(None)
        policy = llm.engine.draft_controller.policy
        monkeypatch.setattr(policy.costs, "ms", lambda rows, drafts: 1.0 + 100.0 * drafts)
        (costly,) = acceptance(llm, greedy(30))
        assert costly.fewer_drafts["cost"] > 20
        assert costly.fewer_drafts.keys() <= {"cost", "probe", "catch_up"}


def test_reasons_survive_absorption_and_stay_with_their_tokens() -> None:
    first = TokenDelta("a", [1, 2], drafted_tokens=3, accepted_tokens=1)
    first.absorb(TokenDelta("a", [3], fewer=FewerDrafts.COST))
    first.absorb(TokenDelta("a", [4], drafted_tokens=1, fewer=FewerDrafts.LIMIT))
    assert first.rounds == [(2, 3, 1), (1, 0, 0), (1, 1, 0)]
    assert first.fewer_drafts == [0, FewerDrafts.COST, FewerDrafts.LIMIT]
    count = DraftCount()
    count.add(first.rounds, 3, first.fewer_drafts)
    assert count.result("eagle3", 3).fewer_drafts == {"cost": 1}, "the text ends before the last round"
    count.add(first.rounds, 4, first.fewer_drafts)
    assert count.result("eagle3", 3).fewer_drafts == {"cost": 2, "limit": 1}
    plain = TokenDelta("a", [1])
    plain.absorb(TokenDelta("a", [2]))
    assert plain.joined_fewer is None, "nothing more to send"


SHARED = Round(Rows.of(()), {}, 1, rates=np.ones((4, 3)))
PROGRESS: Any = SimpleNamespace(max_drafts=np.array([1 << 20, 1, 0, 1 << 20]))


@pytest.mark.parametrize(
    ("work", "drafted", "found", "why"),
    [
        (Round(Rows.of(()), {}, 3), [3, 1, 0, 2], None, ["NONE", "LIMIT", "LIMIT", "NOT_FOUND"]),
        (Round(Rows.of(()), {}, 2, fewer=FewerDrafts.PROBE), [2, 1, 0, 2], None, ["PROBE", "LIMIT", "LIMIT", "PROBE"]),
        (Round(Rows.of(()), {}, 0, fewer=FewerDrafts.COST), [], None, ["COST", "COST", "LIMIT", "COST"]),
        (SHARED, [3, 1, 0, 1], [3, 1, 0, 3], ["NONE", "LIMIT", "LIMIT", "SHARED"]),
        (SHARED, [1, 0, 0, 1], [3, 1, 0, 1], ["SHARED", "SHARED", "LIMIT", "NOT_FOUND"]),
        (Extend([], decodes=Rows.of(())), [], None, ["PROMPTS", "PROMPTS", "NONE", "NONE"]),
    ],
)
def test_reasons_of_rows(work: Any, drafted: list[int], found: list[int] | None, why: list[str]) -> None:
    """Four requests: the second has a limit of one draft, the third of none. The last two ended a prompt."""
    every = SimpleNamespace(slots=np.arange(4))
    work = replace(work, decodes=[0, 1]) if isinstance(work, Extend) else replace(work, rows=every)
    deltas = [TokenDelta(str(row), [1]) for row in range(4)]
    shared = None if found is None else np.array(found, np.int32)
    note_drafts(work, np.arange(4), deltas, np.array(drafted, np.int32), shared, np.ones(4, int), PROGRESS, 3)
    assert [FewerDrafts(delta.fewer).name for delta in deltas] == why
    assert [delta.drafted_tokens for delta in deltas] == (drafted or [0] * 4)
