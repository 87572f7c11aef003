"""The standalone drafter. Drafts never change text, so what is tested is how many are accepted.

A draft model that is the target itself drafts with the target's noise and the target's bits, so every draft of
every request must be accepted, whatever its parameters, its batch, its chunks, its prefix hits.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drafters.ledger import acceptance, assert_every_draft_accepted, play
from tests.drafters.noisy import noisy, resized
from tests.engine.helpers import counted, lazy_engine, mixed_params, prompts, tokens
from tests.models.make import make_checkpoint
from unisono.entrypoints.llm import LLM
from unisono.graphs import NO_FEATURES
from unisono.sampling.pipeline import DraftSampler
from unisono.types import CheckpointError, ConfigError, SamplingParams, SpeculativeConfig

PROMPTS = prompts(8, 250)
PARAMS = mixed_params(8)
SAMPLED = [SamplingParams(temperature=1, seed=i, max_tokens=32, ignore_eos=True) for i in range(8)]


def drafting(target: Path, draft: Path, k: int = 3, options: dict[str, Any] | None = None, **flags: Any) -> LLM:
    return lazy_engine(target, speculative=SpeculativeConfig("standalone", str(draft), k, options or {}), **flags)


@pytest.fixture(scope="module")
def expected(qwen3: Path) -> list[list[int]]:
    with lazy_engine(qwen3) as llm:
        return tokens(llm, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def nearly(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise: right some of the time."""
    return noisy(qwen3, tmp_path_factory.mktemp("nearly") / "draft", 0.05)


# ---- the target as its own draft model --------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "flags"),
    [
        (1, {}),
        (3, {"max_num_batched_tokens": 16, "max_num_seqs": 3}),
        (5, {}),
        (3, {"enforce_eager": True, "max_num_seqs": 5}),
    ],
    ids=["one draft", "chunks of 16", "five drafts", "eager"],
)
def test_a_perfect_draft_is_accepted(qwen3: Path, expected: list[list[int]], k: int, flags: dict) -> None:
    with drafting(qwen3, qwen3, k, **flags) as llm:
        entries = play(llm, PROMPTS, PARAMS)
        assert [e.tokens for e in entries] == expected
        assert_every_draft_accepted(llm, entries)


FULL = pytest.mark.full
FAMILIES = ["mistral", pytest.param("llama", marks=FULL), pytest.param("qwen2", marks=FULL)]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_family(checkpoints: dict[str, Path], family: str) -> None:
    """Mistral's window is 19 positions: the draft model has its own."""
    with drafting(checkpoints[family], checkpoints[family]) as llm:
        assert_every_draft_accepted(llm, play(llm, PROMPTS, PARAMS))


def test_prompts_of_one_token(qwen3: Path) -> None:
    with drafting(qwen3, qwen3) as llm:
        entries = play(llm, [[t] for t in range(8)], SAMPLED)
        assert_every_draft_accepted(llm, entries)
        assert sum(len(e.tokens) for e in entries) == 8 * 32


def test_prefix_hits_bring_the_draft_model_along(qwen3: Path, expected: list[list[int]]) -> None:
    with drafting(qwen3, qwen3) as llm:
        play(llm, PROMPTS, PARAMS)
        entries = play(llm, PROMPTS, PARAMS)
        assert llm.engine.scheduler.prefix_hits >= 16 * len(PROMPTS)
        assert [e.tokens for e in entries] == expected
        assert_every_draft_accepted(llm, entries)


def test_a_page_that_ended_with_its_request_is_completed(qwen3: Path) -> None:
    """The last round is fully accepted and fills a page, so the draft model never saw the page's last token."""
    first = [replace(p, max_tokens=13) for p in SAMPLED]  # 20 + 1 + 3 rounds of 4: 33, of which 32 are cached
    asked = prompts(8, 250, low=20, high=21)
    with drafting(qwen3, qwen3) as llm:
        answers = play(llm, asked, first)
        assert all(e.rounds == [4, 4, 4] for e in answers)
        turns = [p + e.tokens + [9, 8, 7] for p, e in zip(asked, answers, strict=True)]
        hits = llm.engine.scheduler.prefix_hits
        assert_every_draft_accepted(llm, play(llm, turns, SAMPLED))
        assert llm.engine.scheduler.prefix_hits - hits == 8 * 32


def test_a_page_that_ended_with_its_request_is_replaced_by_one_that_went_on(qwen3: Path) -> None:
    """If two requests have the same tokens, the shorter one ends as above and gives its page to the tree first."""
    longer = [replace(p, max_tokens=37) for p in SAMPLED[:4]]
    shorter = [replace(p, max_tokens=13) for p in longer]  # 20 + 1 + 3 rounds of 4: its second page lacks a key
    asked = prompts(4, 250, low=20, high=21)
    with drafting(qwen3, qwen3) as llm:
        answers = play(llm, asked + asked, shorter + longer)
        assert [e.tokens for e in answers[4:]] != [e.tokens for e in answers[:4]]
        assert [e.tokens[:13] for e in answers[4:]] == [e.tokens for e in answers[:4]]
        assert_every_draft_accepted(llm, answers)
        turns = [p + e.tokens for p, e in zip(asked, answers[4:], strict=True)]  # 57 tokens, of which 48 are cached
        hits = llm.engine.scheduler.prefix_hits
        assert_every_draft_accepted(llm, play(llm, turns, SAMPLED[:4]))
        assert llm.engine.scheduler.prefix_hits - hits == 4 * 48
        llm.engine.check_integrity()


def test_preemption(qwen3: Path) -> None:
    params = mixed_params(8, max_tokens=60)
    with lazy_engine(qwen3) as llm:
        unhurried = tokens(llm, PROMPTS, params)
    with drafting(qwen3, qwen3, max_model_len=144, num_pages=1 + 14) as llm:
        entries = play(llm, PROMPTS, params)
        assert llm.engine.scheduler.preemptions >= 3
        assert [e.tokens for e in entries] == unhurried
        assert_every_draft_accepted(llm, entries)
        llm.engine.check_integrity()


def test_up_to_the_end_of_the_context(qwen3: Path) -> None:
    """Drafts beyond the limit have no page of their own, and disturb nobody."""
    params = [replace(p, max_tokens=None) for p in SAMPLED]
    batch = prompts(8, 250, low=50, high=62)
    with drafting(qwen3, qwen3, 5, max_model_len=64) as llm:
        entries = play(llm, batch, params)
        assert [len(p) + len(e.tokens) for p, e in zip(batch, entries, strict=True)] == [64] * 8
        assert_every_draft_accepted(llm, entries)
        llm.engine.check_integrity()


# ---- other draft models -----------------------------------------------------------------------------


def test_noise_costs_some_acceptance(qwen3: Path, nearly: Path, expected: list[list[int]]) -> None:
    with drafting(qwen3, nearly) as llm:
        assert [e.tokens for e in play(llm, PROMPTS, PARAMS)] == expected
        assert 0.25 < acceptance(llm) < 0.9


def test_sampled_drafts_are_accepted_because_of_shared_noise(
    qwen3: Path, nearly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: drafts drawn with the noise of another position are as good a sample, and rarely the target's."""
    rates, sample = [], DraftSampler.__call__
    for shift in (0, 10_000):
        monkeypatch.setattr(
            DraftSampler, "__call__", lambda self, *a, at=shift: sample(self, a[0], a[1], a[2] + at, a[3])
        )
        with drafting(qwen3, nearly) as llm:
            play(llm, PROMPTS, SAMPLED)
            rates.append(acceptance(llm))
    coupled, uncoupled = rates
    assert coupled > 2 * uncoupled
    assert coupled > 0.25


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_family_are_the_draft_models_own(
    checkpoints: dict[str, Path], expected: list[list[int]], family: str
) -> None:
    with drafting(checkpoints["qwen3"], checkpoints[family]) as llm:
        assert [e.tokens for e in play(llm, PROMPTS, PARAMS)] == expected
        passes = counted(llm)
        assert {kind for program, kind, _ in passes if program == "round"} <= {"tape", "full"}


def test_random_weights_need_config_only(qwen3: Path, expected: list[list[int]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((qwen3 / "config.json").read_bytes())
    with drafting(qwen3, tmp_path, options={"load_format": "dummy"}) as llm:
        assert [e.tokens for e in play(llm, PROMPTS, PARAMS)] == expected


def test_a_shorter_context_is_warned_of(
    qwen3: Path, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = make_checkpoint(tmp_path / "short", "llama", max_position_embeddings=40)
    with caplog.at_level(logging.WARNING), drafting(qwen3, short) as llm:
        assert [e.tokens for e in play(llm, PROMPTS, PARAMS)] == expected
    assert "trained for 40 positions, the engine serves 256" in caplog.text


# ---- the vocabulary ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [261, 300])
def test_vocabularies_may_differ_by_padding(qwen3: Path, tmp_path: Path, vocab_size: int) -> None:
    """The tokenizer makes 261 ids, the target knows 263: the draft model may know fewer or more."""
    draft = resized(qwen3, tmp_path / "draft", vocab_size)
    with lazy_engine(qwen3) as llm:
        batch = [*PROMPTS[:6], [262, 261] * 9]
        params = [*SAMPLED[:6], replace(SAMPLED[6], temperature=0)]
        plain = tokens(llm, batch, params)
    with drafting(qwen3, draft) as llm:
        entries = play(llm, batch, params)
        assert [e.tokens for e in entries] == plain
        unpadded = [e for e in entries if max(e.tokens) < 261]
        assert len(unpadded) >= 1
        if vocab_size > 263:
            assert_every_draft_accepted(llm, entries)


def test_another_vocabulary_is_refused(qwen3: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(qwen3, tmp_path / "draft")
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["A"], ids["B"] = ids["B"], ids["A"]
    file.write_text(json.dumps(tokenizer))
    words = rf"token id {ids['B']} is 'B' there and 'A' here, and 1 more ids differ"
    with pytest.raises(ConfigError, match=words):
        drafting(qwen3, draft)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer in .* cannot be loaded"):
        drafting(qwen3, draft)


def test_a_vocabulary_that_ends_early_is_refused(qwen3: Path, tmp_path: Path) -> None:
    draft = resized(qwen3, tmp_path / "draft", 259)
    with pytest.raises(ConfigError, match=r"token id 259 is None there and '<\|user\|>' here, and 1 more"):
        drafting(qwen3, draft)


def test_without_tokenizers_the_sizes_must_be_equal(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "qwen3", tokenizer=False)
    same = make_checkpoint(tmp_path / "same", "llama", tokenizer=False)
    other = make_checkpoint(tmp_path / "other", "llama", tokenizer=False, vocab_size=264)
    with drafting(target, same) as llm:
        play(llm, PROMPTS[:2], PARAMS[:2])
    with pytest.raises(ConfigError, match="has 264 token ids, the target 263, and without a tokenizer"):
        drafting(target, other)


# ---- what is refused --------------------------------------------------------------------------------


@pytest.fixture
def refused(qwen3: Path) -> Iterator[Any]:
    def ask(error: type[Exception], words: str, model: str | None = "", **options: Any) -> None:
        spec = SpeculativeConfig("standalone", str(qwen3) if model == "" else model, 3, options)
        with pytest.raises(error, match=words):
            lazy_engine(qwen3, speculative=spec)

    return ask


def test_invalid_draft_model_options_raise(refused: Any, tmp_path: Path) -> None:
    refused(ConfigError, 'needs "model"', model=None)
    refused(ConfigError, "no option 'topk'", topk=4)
    refused(ConfigError, "load_format='gguf' of the method 'standalone': choose one of auto, dummy", load_format="gguf")
    refused(CheckpointError, "does not exist", model=str(tmp_path / "nowhere"))


def test_draft_model_needs_no_hidden_states(qwen3: Path) -> None:
    with drafting(qwen3, qwen3) as llm:
        assert llm.engine.runner.features == NO_FEATURES
