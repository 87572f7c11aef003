"""Hybrids through the engine: greedy tokens are transformers', and the bytes do not depend on how they came about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.proposals import record
from tests.engine.helpers import counted, draw_drafts, lazy_engine, mixed_params, prompts, tokens
from tests.models.hybrid_mtp import with_module
from tests.models.hybrids import CASES, FULL, LINEAR, reference
from tests.models.make import make_checkpoint
from unisono.kv.specs import PAGE_SIZE
from unisono.types import EngineRequest, SamplingParams, SpeculativeConfig

FLAGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)
PROMPTS = prompts(8, 256, low=3, high=80, seed=5)

GRAPH = "full" if torch.cuda.is_available() else "tape"

FAST = ("qwen3_5-heads-3x",)


def only_fast(names: Any) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in names]


# ---- tokens are transformers' ------------------------------------------------------------------------


@pytest.fixture(scope="module", params=only_fast(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = CASES[request.param]
    return make_checkpoint(tmp_path_factory.mktemp(family), family, tokenizer=False, **overrides)


@torch.no_grad()
def test_greedy_tokens_are_transformers(checkpoint: Path) -> None:
    """In one batch, alone, in chunks, and after cached prefixes."""
    model = reference(checkpoint)
    with lazy_engine(checkpoint, **FLAGS) as llm:
        answers = tokens(llm, PROMPTS, GREEDY)
        assert tokens(llm, PROMPTS, GREEDY) == answers
        assert llm.engine.scheduler.prefix_hits > 0
        llm.engine.check_integrity()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == GREEDY.max_tokens
        theirs = model(torch.tensor([prompt + answer])).logits[0].argmax(-1)
        assert theirs[len(prompt) - 1 : -1].tolist() == answer
    for flags in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 23}):
        with lazy_engine(checkpoint, **{**FLAGS, **flags}, enforce_eager=True) as llm:
            assert tokens(llm, PROMPTS, GREEDY) == answers


# ---- the same bytes ----------------------------------------------------------------------------------

FAMILIES = ["qwen3_5_text", pytest.param("qwen3_5_moe", marks=pytest.mark.full)]
LONG = prompts(4, 256, low=3, high=70, seed=8)
MIXED = [p if i % 2 else p[: 3 + i] * 6 for i, p in enumerate(LONG)]
PARAMS = mixed_params(len(MIXED), max_tokens=56)


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a random MTP module."""
    layers = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
    path = make_checkpoint(tmp_path_factory.mktemp(request.param) / "target", request.param, tokenizer=False, **layers)
    return with_module(path).path


@pytest.fixture(scope="module")
def plain(hybrid: Path) -> list[list[int]]:
    """Each request by itself, eagerly, its prompt in one pass."""
    with lazy_engine(hybrid, **{**FLAGS, "max_num_seqs": 1}, enforce_eager=True) as llm:
        return [tokens(llm, [p], [q])[0] for p, q in zip(MIXED, PARAMS, strict=True)]


def drafting(method: str, k: int) -> dict[str, Any]:
    return {} if method == "none" else {"speculative": SpeculativeConfig(method, num_speculative_tokens=k)}


SCARCE = "chunks of 23, scarce pages"
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    SCARCE: {"max_num_batched_tokens": 23, "max_model_len": 144, "num_pages": 14},
}
QUICK = (("none", 0, SCARCE), ("mtp", 3, SCARCE), ("ngram", 3, "batched"))
MATRIX = [
    pytest.param(method, k, way, marks=() if (method, k, way) in QUICK else pytest.mark.full)
    for method, k in (("none", 0), ("ngram", 1), ("ngram", 3), ("suffix", 3), ("mtp", 1), ("mtp", 3))
    for way in WAYS
]


@pytest.mark.parametrize(("method", "k", "way"), MATRIX)
def test_same_bytes(method: str, k: int, way: str, hybrid: Path, plain: list[list[int]]) -> None:
    with lazy_engine(hybrid, **{**FLAGS, **WAYS[way]}, **drafting(method, k)) as llm:
        assert tokens(llm, MIXED, PARAMS) == plain
        assert tokens(llm, MIXED, PARAMS) == plain, "after prefix hits"
        assert (llm.engine.scheduler.preemptions > 0) == ("num_pages" in WAYS[way])
        assert way != "batched" or llm.engine.scheduler.prefix_hits > 0
        assert all(kind != "eager" for program, kind, _ in counted(llm) if program == "round")
        llm.engine.check_integrity()


def test_same_bytes_with_drafts_that_come_and_go(
    hybrid: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of drafts changes at random, none included."""
    draw_drafts(monkeypatch)
    with lazy_engine(hybrid, **FLAGS, **drafting("mtp", 3), adaptive=True) as llm:
        assert tokens(llm, MIXED, PARAMS) == plain
        assert tokens(llm, MIXED, PARAMS) == plain, "after prefix hits"


@pytest.mark.parametrize("method", ["ngram", pytest.param("mtp", marks=pytest.mark.full)])
def test_same_bytes_with_drafts_that_requests_share(
    method: str, hybrid: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a round have widths of their own, and only their first tokens move the recurrent state."""
    draw_drafts(monkeypatch, lambda rng, choices: rng.choice((*choices[1:-1], *choices)))
    spec = SpeculativeConfig(method, num_speculative_tokens=5, share_drafts=True)
    with lazy_engine(hybrid, **FLAGS, speculative=spec, adaptive=True) as llm:
        assert llm.engine.runner.shared == (1, 2, 3)
        assert tokens(llm, MIXED, PARAMS) == plain
        assert tokens(llm, MIXED, PARAMS) == plain, "after prefix hits"
        assert {kind for program, kind, _ in counted(llm) if program.startswith("shared_round_")} == {GRAPH}
        assert llm.engine.counters.accepted_tokens > 0
        llm.engine.check_integrity()


def test_drafts_are_accepted_by_any_number_at_any_position(hybrid: Path, plain: list[list[int]]) -> None:
    """The drafter is told the right tokens: 0, 1, … k of them, by the committed length."""
    with lazy_engine(hybrid, **FLAGS, **drafting("mtp", 4), enforce_eager=True) as llm:
        record(llm, [p + t for p, t in zip(MIXED, plain, strict=True)])
        assert tokens(llm, MIXED, PARAMS) == plain
        assert llm.engine.counters.accept_length > 2
        assert tokens(llm, MIXED, PARAMS) == plain, "after prefix hits"


@pytest.mark.parametrize("method", ["mtp", pytest.param("ngram", marks=pytest.mark.full)])
def test_a_prefix_hit_near_a_page_end(method: str, hybrid: Path) -> None:
    """The hit is as long as that of a model without recurrence; the text goes on as without it."""
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=8, ignore_eos=True)
    base = prompts(1, 256, low=100, high=101, seed=2)[0]
    cuts = [base[:n] for n in (31, 32, 33, 48, 49, 64)]
    with lazy_engine(hybrid, **FLAGS, **drafting(method, 3)) as llm:
        cold = []
        for cut in cuts:
            llm.engine.reset_prefix_cache()
            cold.append(tokens(llm, [cut], params)[0])
        for cut, answer in zip(cuts, cold, strict=True):
            tokens(llm, [cut], params)
            (output,) = llm.generate([cut], params)
            assert output.outputs[0].token_ids == answer
            assert output.num_cached_tokens == (len(cut) - 1) // PAGE_SIZE * PAGE_SIZE
    with lazy_engine(hybrid, **FLAGS) as llm:
        assert tokens(llm, cuts, params) == cold


@pytest.mark.parametrize("method", ["mtp", pytest.param("ngram", marks=pytest.mark.full)])
def test_aborts_free_state_and_pages(method: str, hybrid: Path, plain: list[list[int]]) -> None:
    """Requests that are aborted in their prompts and in their rounds; those that come after have the same bytes."""
    with lazy_engine(hybrid, **{**FLAGS, "max_num_batched_tokens": 23}, **drafting(method, 3)) as llm:
        for steps in (1, 2, 5, 17, 33):
            for i, (prompt, params) in enumerate(zip(MIXED, PARAMS, strict=True)):
                llm.engine.add(EngineRequest(f"{steps}-{i}", list(prompt), params))
            for _ in range(steps):
                llm.engine.step()
            for i in range(len(MIXED)):
                llm.engine.abort(f"{steps}-{i}")
        assert tokens(llm, MIXED, PARAMS) == plain
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


def test_accepted_drafts_across_page_ends_update_the_state(hybrid: Path) -> None:
    """A text that repeats itself, so that drafts are accepted across many page ends."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, allowed_token_ids=(7, 8))
    with lazy_engine(hybrid, **FLAGS) as llm:
        expected = tokens(llm, [[7, 8] * 6], params)
    for k in (1, 5):
        with lazy_engine(hybrid, **FLAGS, **drafting("ngram", k)) as llm:
            assert tokens(llm, [[7, 8] * 6], params) == expected
            assert llm.engine.counters.accepted_tokens > 20
