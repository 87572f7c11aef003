"""A model with two window groups, two head sizes and a recurrence: the same bytes in every way, with every drafter."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.make_frozen import random_weights
from tests.drafters.make_heads import make_eagle, make_eagle3
from tests.engine.helpers import counted, draw_drafts, lazy_engine, mixed_params, prompts, tokens
from tests.engine.late_pages import arrive_late
from tests.engine.matrix import TREES
from tests.kv.mixed_model import ARCHITECTURE, VOCAB, WINDOW, make_mixed, next_token, weights_of
from tests.models.make import make_checkpoint
from tests.models.make_mtp import named, random_modules, write_alone
from unisono.config import catalog
from unisono.kv.specs import PAGE_SIZE, SNAPSHOTS
from unisono.kv.transfer import Incoming, pack_pages
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import ConfigError, EngineRequest, SamplingParams, SpeculativeConfig

PROMPTS = [p if i % 2 else p[: 3 + i] * 8 for i, p in enumerate(prompts(8, VOCAB, low=3, high=70, seed=8))]
PARAMS = mixed_params(8, max_tokens=24)
FLAGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "dtype": "float32"}
SCARCE = {"max_model_len": 128, "num_pages": 13}


@pytest.fixture(scope="module", autouse=True)
def listed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(catalog.models.entries, ARCHITECTURE, "tests.kv.mixed_model:MIXED")  # type: ignore[arg-type]
        yield


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, listed: Any) -> Path:
    return make_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def plain(mixed: Path) -> list[list[int]]:
    """Each request by itself, eagerly, its prompt in one pass."""
    with lazy_engine(mixed, **{**FLAGS, "max_num_seqs": 1}, enforce_eager=True) as llm:
        return [tokens(llm, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]


def test_tokens_are_the_references(mixed: Path) -> None:
    weights, params = weights_of(mixed), SamplingParams(temperature=0, max_tokens=45, ignore_eos=True)
    with lazy_engine(mixed, **FLAGS) as llm:
        for prompt, answer in zip(PROMPTS[:4], tokens(llm, PROMPTS[:4], params), strict=True):
            ids = list(prompt)
            for token in answer:
                assert token == next_token(weights, ids)
                ids.append(token)


WAYS = {
    "batched": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 23, eager": {"max_num_batched_tokens": 23, "enforce_eager": True},
    "scarce pages": SCARCE,
}


@pytest.mark.parametrize("way", WAYS)
def test_same_bytes(way: str, mixed: Path, plain: list[list[int]]) -> None:
    with lazy_engine(mixed, **{**FLAGS, **WAYS[way]}) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        assert tokens(llm, PROMPTS, PARAMS) == plain, "after prefix hits"
        assert way == "scarce pages" or llm.engine.scheduler.prefix_hits > 0
        assert (llm.engine.scheduler.preemptions > 0) == (way == "scarce pages")
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


def test_a_window_frees_its_pages(mixed: Path) -> None:
    """A request of 100 tokens holds no more window pages than its window and two rounds reach."""
    with lazy_engine(mixed, **FLAGS) as llm:
        held: list[int] = []
        step = llm.engine.step

        def watched() -> Any:
            deltas = step()
            held.extend(len(r.windows[WINDOW].entries) for r in llm.engine.pool.open_reservations)
            return deltas

        llm.engine.step = watched  # type: ignore[method-assign]
        tokens(llm, [PROMPTS[0][:10]], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    assert 2 <= max(held) <= WINDOW // PAGE_SIZE + 4


def test_prefix_hit_resumes_from_its_snapshot(mixed: Path) -> None:
    """One token after a page's end and near it; the hit is as long as that of a model without recurrence.

    The snapshot after a prompt of whole pages serves longer prompts only: a prompt's last token is never cached.
    """
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    base = prompts(1, VOCAB, low=100, high=101, seed=2)[0]
    cuts = [base[:n] for n in (49, 50, 63, 65, 66, 95, 97)]
    with lazy_engine(mixed, **FLAGS) as llm:
        cold = []
        for cut in cuts:
            llm.engine.reset_prefix_cache()
            cold.append(tokens(llm, [cut], params)[0])
        for cut, answer in zip(cuts, cold, strict=True):
            tokens(llm, [cut], params)
            (output,) = llm.generate([cut], params)
            assert output.outputs[0].token_ids == answer
            assert output.num_cached_tokens == (len(cut) - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.mark.full
def test_a_conversation_is_cached_alike_with_drafts(mixed: Path) -> None:
    """State left by a request is found up to its last whole page, wherever its last round began."""
    params = [
        SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True, allowed_token_ids=(7, 8)) for i in range(12)
    ]
    found = {}
    for k in (0, 4):
        spec = SpeculativeConfig("ngram", num_speculative_tokens=k) if k else None
        with lazy_engine(mixed, **FLAGS, speculative=spec) as llm:
            found[k] = []
            for prompt, param in zip(prompts(12, VOCAB, low=20, high=60, seed=3), params, strict=True):
                (first,) = llm.generate([prompt], param)
                said = [*prompt, *first.outputs[0].token_ids]
                (second,) = llm.generate([[*said, 5, 6]], param)
                assert second.num_cached_tokens == (len(said) - 1) // PAGE_SIZE * PAGE_SIZE
                found[k].append((said, second.outputs[0].token_ids))
            assert k == 0 or llm.engine.counters.accepted_tokens > 100
            llm.engine.check_integrity()
    assert found[0] == found[4]


@pytest.mark.parametrize("method", [pytest.param(None, marks=pytest.mark.full), "ngram"])
def test_snapshot_is_taken_at_the_branch_of_prompts(method: str | None, mixed: Path) -> None:
    """The second prompt with the same beginning leaves a snapshot after the last page they share; the third hits it."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    base, *ends = prompts(6, VOCAB, low=70, high=71, seed=9)
    asked = [base + end[:30] for end in ends]
    flags = dict(FLAGS, speculative=SpeculativeConfig(method, num_speculative_tokens=3)) if method else FLAGS
    with lazy_engine(mixed, **flags) as llm:
        cold = []
        for prompt in asked:
            llm.engine.reset_prefix_cache()
            cold.append(tokens(llm, [prompt], params)[0])
        llm.engine.reset_prefix_cache()
        outputs = [llm.generate([prompt], params)[0] for prompt in asked]
        assert [output.outputs[0].token_ids for output in outputs] == cold
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 64, 64, 64]
        llm.engine.check_integrity()


def drafters(mixed: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Every method that drafts for this model, with random heads."""
    config = Checkpoint.open(mixed).config
    of_mtp = replace(config, layers=(replace(config.layers[-1], mixer=config.attention),))
    return {
        "ngram": {},
        "suffix": {},
        "standalone": {"model": str(make_checkpoint(folder / "draft", "qwen3"))},
        "eagle": {"model": str(make_eagle(folder / "eagle", config).path)},
        "eagle3": {"model": str(make_eagle3(folder / "eagle3", config, (2, 1, 3), aux=[2, 1, 3]).path)},
        "mtp": {"model": str(write_alone(folder / "mtp", named(random_modules(of_mtp, 2), "mimo", config.num_layers)))},
        "mtp_frozen": {"model": str(write_alone(folder / "frozen", random_weights(mixed)))},
    }


METHODS = ("ngram", "suffix", "standalone", "eagle", "eagle3", "mtp", "mtp_frozen")
USUAL = {("mtp", "scarce pages")}
CELLS = [
    pytest.param(method, way, marks=() if (method, way) in USUAL else pytest.mark.full)
    for method in METHODS
    for way in ("batched", "scarce pages")
]


@pytest.mark.parametrize(("method", "way"), CELLS)
def test_same_bytes_with_every_drafter(
    method: str, way: str, mixed: Path, plain: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of drafts changes at random, none included."""
    draw_drafts(monkeypatch)
    spec = SpeculativeConfig.parse({"method": method, "num_speculative_tokens": 3, **drafters(mixed, tmp_path)[method]})
    with lazy_engine(mixed, **{**FLAGS, **WAYS[way]}, speculative=spec, adaptive=True) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        assert tokens(llm, PROMPTS, PARAMS) == plain, "after prefix hits"
        assert all(kind != "eager" for program, kind, _ in counted(llm) if program == "round")
        llm.engine.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_same_bytes_with_trees(method: str, mixed: Path, plain: list[list[int]], tmp_path: Path) -> None:
    spec = SpeculativeConfig.parse({"method": method, **TREES["binary"], **drafters(mixed, tmp_path)[method]})
    with lazy_engine(mixed, **FLAGS, speculative=spec) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        assert tokens(llm, PROMPTS, PARAMS) == plain, "after prefix hits"
        assert llm.engine.counters.accepted_tokens > 0


@pytest.mark.full
def test_accepted_drafts_across_page_ends_update_the_state(mixed: Path) -> None:
    """A text that repeats itself, so that drafts are accepted across many page ends."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, allowed_token_ids=(7, 8))
    prompt = [7, 8] * 6
    with lazy_engine(mixed, **FLAGS) as llm:
        expected = tokens(llm, [prompt], params)
    for k in (1, 3, 5):
        with lazy_engine(mixed, **FLAGS, speculative=SpeculativeConfig("ngram", num_speculative_tokens=k)) as llm:
            assert tokens(llm, [prompt], params) == expected
            assert llm.engine.counters.accepted_tokens > 20


@pytest.mark.parametrize("method", [pytest.param(None, marks=pytest.mark.full), "eagle"])
def test_a_running_prompt_moves_to_another_engine(method: str | None, mixed: Path, tmp_path: Path) -> None:
    """Its pages, windows, snapshots and the drafter's state: the other engine goes on from there with the same
    bytes."""
    prompt = prompts(1, VOCAB, low=120, high=121, seed=4)[0]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)
    flags = {**FLAGS, "max_num_batched_tokens": 32}
    if method is not None:
        given = {"method": method, "num_speculative_tokens": 3, **drafters(mixed, tmp_path)[method]}
        flags["speculative"] = SpeculativeConfig.parse(given)
    with lazy_engine(mixed, **flags) as llm:
        expected = tokens(llm, [prompt], params)
    with lazy_engine(mixed, **flags) as one, lazy_engine(mixed, **flags) as other:
        one.engine.add(EngineRequest("moving", prompt, params))
        while not (nodes := one.engine.pool.tree.match(prompt)):
            one.engine.step()
        assert one.engine.scheduler.extending, "its prompt is still running"
        with torch.inference_mode():
            places = dict.fromkeys((*one.engine.pool.windows, SNAPSHOTS), range(len(nodes)))
            packed = pack_pages(one.engine.runner.share_pages(), nodes, 0, places)
            incoming = Incoming(other.engine.pool, other.engine.runner.share_pages(), prompt)
            incoming.put(0, packed.complete, packed.parts, b"".join(packed.state.payload()))
            incoming.close()
        other.engine.check_integrity()
        (output,) = other.generate([prompt], params)
        assert output.num_cached_tokens == len(nodes) * PAGE_SIZE > 0
        assert [output.outputs[0].token_ids] == expected


def test_all_kinds_of_state_wait_in_host_memory(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, window pages and snapshots move out and come back, with the same bytes."""
    rng = random.Random(2)
    documents = prompts(6, VOCAB, low=64, high=140, seed=5)
    batch = [rng.choice(documents) + tail for tail in prompts(16, VOCAB, low=2, high=40, seed=6)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True)
    with lazy_engine(mixed, **FLAGS, enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    arrive_late(monkeypatch)
    scarce = {**FLAGS, "num_pages": 44, "cpu_offload_ratio": 6.0}
    with lazy_engine(mixed, **scarce, speculative=SpeculativeConfig("ngram", num_speculative_tokens=3)) as llm:
        assert tokens(llm, batch, params) + tokens(llm, batch, params) == expected * 2
        llm.engine.check_integrity()
        info: Any = llm.engine.info()["kv_offload"]
    assert [row["kind"] for row in info["host"]] == ["pages", "window 21", "snapshots"]
    assert all(row["used"] for row in info["host"])
    assert info["hit_tokens"] > 0


def test_a_draft_model_with_a_recurrence_is_refused(mixed: Path) -> None:
    spec = SpeculativeConfig("standalone", model=str(mixed), num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="recurrent layers"):
        lazy_engine(mixed, **FLAGS, speculative=spec)
