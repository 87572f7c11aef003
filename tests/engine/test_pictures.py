"""Pictures: the same bytes however they are computed. On a GPU this runs in bfloat16, on a CPU in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drafters.make_frozen import random_weights
from tests.drafters.make_heads import make_eagle, make_eagle3
from tests.engine.helpers import counted, draw_drafts, idle, lazy_engine, mixed_params
from tests.engine.matrix import CUDA, GRAPH, Checkpoints, config_of, drafting, drafting_tree, with_modules
from tests.engine.pictures import (
    Picture,
    Prompt,
    make_seeing,
    prompt,
    run,
    several,
    stepped,
    vision_of,
    words,
)
from tests.models.make_mtp import write_alone
from unisono.entrypoints.llm import LLM
from unisono.models.vision.config import VisionConfig
from unisono.types import SamplingParams, StructuredOutputs

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=0)
NARROW = tuple(range(40, 44))
"""Few allowed tokens, so that every drafter is right sometimes."""


def params(count: int, **changes: Any) -> list[SamplingParams]:
    """Greedy and sampled requests, every third under a grammar, the others with few allowed tokens."""
    form = StructuredOutputs(regex="([a-d]{2}-){3,9}")
    made = []
    for i, each in enumerate(mixed_params(count, 14)):
        kind: dict[str, Any] = {"structured_outputs": form} if i % 3 == 2 else {"allowed_token_ids": NARROW}
        made.append(replace(each, **kind, **changes))
    return made


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def vision(seeing: Path) -> VisionConfig:
    return vision_of(seeing)


def batch(llm: LLM, vision: VisionConfig) -> list[Prompt]:
    return several(vision, llm.engine.config.dtype)


@pytest.fixture(scope="module")
def alone(seeing: Path, vision: VisionConfig) -> list[list[int]]:
    """Each request by itself: eager, its whole prompt in one pass, an empty prefix cache."""
    with lazy_engine(seeing, max_num_seqs=1, enforce_eager=True) as llm:
        prompts = batch(llm, vision)
        return [run(llm, [p], [q])[0] for p, q in zip(prompts, mixed_params(len(prompts)), strict=True)]


WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "three at once": {"max_num_seqs": 3},
    "eager, chunks of 16": {"max_num_batched_tokens": 16, "enforce_eager": True},
    "chunks of 37, segmented": {"max_num_batched_tokens": 37, "graphs": "segmented"},
    "chunks of 21, full": {"max_num_batched_tokens": 21, "graphs": "full"},
    "compiled": {"compile": True, "max_num_batched_tokens": 50},
    "planned on the host": {"attention_backend": "torch", "max_num_batched_tokens": 50},
}


SLOW = ("compiled", "batched", "three at once", "chunks of 21, full")


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.full) if way in SLOW else way for way in WAYS])
def test_same_bytes(seeing: Path, vision: VisionConfig, alone: list[list[int]], way: str) -> None:
    if way == "planned on the host" and CUDA:
        pytest.skip("on a GPU the two backends have other bits")
    with lazy_engine(seeing, **WAYS[way]) as llm:
        prompts, how = batch(llm, vision), mixed_params(8)
        assert run(llm, prompts, how) == alone
        idle(llm)
        llm.engine.runner.planner.reset_counts()
        assert run(llm, prompts, how) == alone, "after prefix hits, with the graphs that were missing"
        assert llm.engine.scheduler.prefix_hits > 0
        if "enforce_eager" not in WAYS[way]:
            eager = {key: count for key, count in counted(llm).items() if key[1] == "eager"}
            assert not eager
        cache = llm.engine.info()["vision"]["encoder_cache"]
        assert cache["held"] == 0
        assert cache["hits"] > 0
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0


@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.full), "qwen3_5"])
def test_other_families(family: str, tmp_path: Path) -> None:
    path = make_seeing(tmp_path, family)
    vision = vision_of(path)
    with lazy_engine(path, max_num_seqs=1, enforce_eager=True) as llm:
        prompts, how = batch(llm, vision), mixed_params(8)
        expected = [run(llm, [p], [q])[0] for p, q in zip(prompts, how, strict=True)]
    with lazy_engine(path, max_num_batched_tokens=19) as llm:
        assert run(llm, prompts, how) == expected
        assert run(llm, prompts, how) == expected
        assert llm.engine.scheduler.prefix_hits > 0


def test_image_changes_the_text(seeing: Path, vision: VisionConfig, alone: list[list[int]]) -> None:
    """The comparisons above can fail: other pixels, or another shape of as many tokens, give another text."""
    with lazy_engine(seeing) as llm:
        dtype = llm.engine.config.dtype
        plain = prompt(vision, words(7, 3), Picture(8, 4, 2), dtype=dtype)
        assert run(llm, [plain], mixed_params(3)[2:])[0] == alone[2]
        for other in (Picture(8, 4, 99), Picture(4, 8, 2)):
            assert run(llm, [prompt(vision, words(7, 3), other, dtype=dtype)], mixed_params(3)[2:])[0] != alone[2]


def test_prefix_cache_keys_include_images(seeing: Path, vision: VisionConfig) -> None:
    """A hit may end in the middle of a picture; another picture in its place is none."""
    with lazy_engine(seeing) as llm:
        dtype = llm.engine.config.dtype

        def cached(*parts: Any) -> int:
            return stepped(llm, [prompt(vision, *parts, dtype=dtype)], GREEDY)[0][0].cached_tokens

        picture = Picture(8, 12, 7)  # 24 tokens, from position 11 to 34
        assert cached(words(10, 1), picture, words(3, 2)) == 0
        assert cached(words(10, 1), picture, words(30, 3)) == 32, "up to a page's end within the picture"
        assert cached(words(10, 1), picture, words(30, 3)) == 64
        assert cached(words(10, 1), replace(picture, seed=8), words(30, 3)) == 0
        assert cached(words(11, 1)[1:], picture, words(30, 3)) == 0
        expected = run(llm, [prompt(vision, words(10, 1), picture, words(8, 4), dtype=dtype)], GREEDY)
    with lazy_engine(seeing, enable_prefix_caching=False) as llm:
        assert run(llm, [prompt(vision, words(10, 1), picture, words(8, 4), dtype=dtype)], GREEDY) == expected


def test_preempted(seeing: Path, vision: VisionConfig) -> None:
    how = mixed_params(5, max_tokens=50)
    with lazy_engine(seeing, max_num_seqs=1, enforce_eager=True) as llm:
        prompts = batch(llm, vision)[3:]
        expected = [run(llm, [p], [q])[0] for p, q in zip(prompts, how, strict=True)]
    with lazy_engine(seeing, max_model_len=144, num_pages=1 + 9, max_num_batched_tokens=24) as llm:
        assert run(llm, prompts, how) == expected
        assert llm.engine.scheduler.preemptions >= 2
        llm.engine.check_integrity()
        assert llm.engine.pool.usage == 0
        assert llm.engine.info()["vision"]["encoder_cache"]["held"] == 0


# ---- drafts -----------------------------------------------------------------------------------------

SECTIONS = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 3, 3], "mrope_interleaved": True}}

DRAFTERS: dict[str, Callable[[Path, Path], Checkpoints]] = {
    "eagle": lambda target, folder: (target, make_eagle(folder, config_of(target)).path),
    "eagle3": lambda target, folder: (
        target,
        make_eagle3(folder, config_of(target), (2, 1, 3), aux=[2, 1, 3], draft_vocab=150, **SECTIONS).path,
    ),
    "mtp": lambda target, folder: (with_modules(target, folder / "target"), None),
    "mtp_frozen": lambda target, folder: (target, write_alone(folder, random_weights(target))),
    "ngram": lambda target, folder: (target, None),
    "standalone": lambda target, folder: (target, target),
}


def some(llm: LLM, vision: VisionConfig) -> list[Prompt]:
    """A picture last, three between text, one twice, a video, a large one."""
    return batch(llm, vision)[2:7]


@pytest.fixture(scope="module")
def undrafted(seeing: Path, vision: VisionConfig) -> list[list[int]]:
    with lazy_engine(seeing) as llm:
        return run(llm, some(llm, vision), params(5))


@pytest.mark.parametrize(
    "method", [m if m in ("eagle3", "mtp_frozen") else pytest.param(m, marks=pytest.mark.full) for m in DRAFTERS]
)
def test_drafted(method: str, seeing: Path, vision: VisionConfig, undrafted: list[list[int]], tmp_path: Path) -> None:
    with drafting(method, DRAFTERS[method](seeing, tmp_path), 3, max_num_batched_tokens=40) as llm:
        prompts = some(llm, vision)
        assert run(llm, prompts, params(5)) == undrafted
        assert run(llm, prompts, params(5)) == undrafted, "after prefix hits"
        assert llm.engine.counters.accepted_tokens > 0
        assert any(program == "round" and kind == GRAPH for program, kind, _ in counted(llm))
        llm.engine.check_integrity()


@pytest.mark.parametrize("method", ["eagle3", pytest.param("ngram", marks=pytest.mark.full)])
def test_trees(method: str, seeing: Path, vision: VisionConfig, undrafted: list[list[int]], tmp_path: Path) -> None:
    tree = {"topk": 2, "num_draft_tokens": 6}
    with drafting_tree(method, DRAFTERS[method](seeing, tmp_path), tree) as llm:
        assert run(llm, some(llm, vision), params(5)) == undrafted
        assert llm.engine.counters.accepted_tokens > 0


def test_adaptive(
    seeing: Path, vision: VisionConfig, undrafted: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused drafter catches up after pictures."""
    draw_drafts(monkeypatch, lambda rng, choices: rng.choice((0, 0, choices[-1])))
    with drafting("eagle3", DRAFTERS["eagle3"](seeing, tmp_path), 3, adaptive=True) as llm:
        assert run(llm, some(llm, vision), params(5)) == undrafted
        assert any(program == "catch_up" for program, _, _ in counted(llm))
