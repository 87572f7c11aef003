"""The encoder: what its cache keeps, for whom it makes room, how it shares the time between rounds, what it reports."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import counted, engine, mixed_params, note_launches
from tests.engine.pictures import Picture, Prompt, make_seeing, prompt, run, several, vision_of, words
from unisono.engine.scheduling.prompt_budget import PromptBudget
from unisono.engine.worker.commands import decode, encode
from unisono.engine.worker.runner import Runner
from unisono.entrypoints.llm import LLM
from unisono.graphs import GraphKey, PassShape
from unisono.models.vision.config import VisionConfig
from unisono.passes.encoder_cache import EncoderCache
from unisono.passes.features.base import Room, Row
from unisono.types import BadRequest, ConfigError, EngineRequest, Overrides, SamplingParams, Vectors

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0)
TOKEN_BYTES = 4 * 84 * 3
"""Of a token of the random model in float32: its embedding and two deepstack levels."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def vision(seeing: Path) -> VisionConfig:
    return vision_of(seeing)


def cache_of(llm: LLM) -> dict[str, Any]:
    return llm.engine.info()["vision"]["encoder_cache"]


def small(path: Path, tokens: int, **flags: Any) -> LLM:
    """An engine with room for this number of encoded tokens."""
    return engine(path, dtype="float32", mm_encoder_cache_gb=tokens * TOKEN_BYTES / (1 << 30), **flags)


def test_encoded_once(seeing: Path, vision: VisionConfig) -> None:
    """The same picture in other prompts is encoded once, several pictures in one pass; unlike prefixes, anywhere."""
    a, b = Picture(4, 6, 1), Picture(8, 4, 2)
    batch = [prompt(vision, words(5 + i, i), *parts) for i, parts in enumerate([(a,), (b,), (a, b), (b, a)])]
    with engine(seeing, dtype="float32") as llm:
        run(llm, batch, GREEDY)
        cache = cache_of(llm)
        assert (cache["queries"], cache["hits"], cache["used"]) == (6, 4, (24 + 32) // 4)
        assert sum(n for (program, _, _), n in counted(llm).items() if program == "encode") == 1
        names = {name: value for name, _, _, value, _ in llm.engine.metrics() if name.startswith("encoder_cache")}
        assert names["encoder_cache_queries"] == 6
        assert names["encoder_cache_hits"] == 4
        assert names["encoder_cache_usage_perc"] == cache["used"] / cache["tokens"]


@pytest.mark.parametrize("tokens", [60, pytest.param(80, marks=pytest.mark.full)])
def test_a_small_cache(seeing: Path, vision: VisionConfig, tokens: int) -> None:
    """Many requests and room for hardly two pictures: all get their turn, with the same bytes."""
    pairs = [(Picture(8, 12, 20 + i), Picture(12, 10, 30 + i)) for i in range(4)]
    prompts = [prompt(vision, words(4, i), a, words(3, i), b, words(3, i)) for i, (a, b) in enumerate(pairs)]
    prompts += several(vision)[3:6]
    with engine(seeing, dtype="float32", enforce_eager=True) as llm:
        expected = run(llm, prompts, mixed_params(7, 6))
    with small(seeing, tokens, max_num_batched_tokens=24, enforce_eager=True) as llm:
        assert run(llm, prompts, mixed_params(7, 6)) == expected
        cache = cache_of(llm)
        assert cache["tokens"] == tokens
        assert cache["held"] == 0
        assert cache["evictions"] > 0


def test_images_larger_than_the_encoder_cache_are_refused(seeing: Path, vision: VisionConfig) -> None:
    with small(seeing, 40) as llm:
        with pytest.raises(BadRequest, match=r"frame of 24 tokens; at most 20.*--mm-encoder-cache-gb"):
            run(llm, [prompt(vision, Picture(8, 12))], GREEDY)
        assert len(run(llm, [prompt(vision, Picture(8, 10))], GREEDY)[0]) == 12
    with pytest.raises(ConfigError, match="a token of a picture takes 1008 bytes"):
        small(seeing, 1)


def test_bookkeeping() -> None:
    """Drawn requests: nothing that is held is overwritten, and one request can always go on."""
    rng = random.Random(0)
    for _ in range(200):
        capacity = rng.randrange(10, 40)
        cache, rows_of = EncoderCache(capacity), dict[bytes, set[int]]()
        wanted: dict[int, list[tuple[bytes, int]]] = {}
        held: dict[int, list[bytes]] = {}
        sizes = {bytes([i]): rng.randrange(1, capacity // 2 + 1) for i in range(8)}
        for owner in range(6):
            wanted[owner] = [rng.choice(list(sizes.items())) for _ in range(rng.randrange(1, 6))]
            held[owner] = []
        for _ in range(300):
            moved = False
            for owner in rng.sample(sorted(wanted), len(wanted)):
                frames = wanted[owner]
                reserve = min(2 * max(n for _, n in frames), sum(n for _, n in frames)) if frames else 0
                if frames and len(held[owner]) < 2 and cache.allows(owner, frames[0][1], reserve):
                    key, tokens = frames.pop(0)
                    rows = set(cache.hold(owner, key, tokens, reserve).tolist())
                    others = {k for name, keys in held.items() for k in keys}
                    assert len(rows) == tokens and rows_of.get(key, rows) == rows if key in others else True
                    assert all(rows.isdisjoint(rows_of[k]) for k in others if k != key)
                    rows_of[key] = rows
                    held[owner].append(key)
                    moved = True
                elif held[owner] and (len(held[owner]) == 2 or not frames):
                    cache.release(owner, held[owner].pop(0))
                    moved = True
            if not moved:
                break
        assert not any(wanted.values())
        assert cache.held == 0


def test_the_time_between_two_rounds(seeing: Path, vision: VisionConfig) -> None:
    """A pass takes as many frames as there is time for; one at least where nothing else ran since the last round."""
    pictures = prompt(vision, *(Picture(8, 8, i) for i in range(6)))
    with engine(seeing, dtype="float32", enforce_eager=True) as llm:
        (media,) = (f for f in llm.engine.runner.request_features if f.name == "media")

        def patches(left: float, least: bool) -> int:
            """Of the pass that may run, with a millisecond for each patch."""
            state = media.begin(EngineRequest("r", pictures.ids, GREEDY, media=pictures.media))
            room = Room(lambda key: key.shape.rows, left, least)
            ahead = media.pre_pass([Row(0, state, 0, len(pictures.ids))], room)
            reach = state.reach(0, len(pictures.ids))
            encoded = 6 if left == math.inf else int(left) // 64 or least
            assert reach == ([item.positions[0] for item in pictures.media] + [len(pictures.ids)])[encoded]
            state.released()
            media.cache.__init__(media.cache.capacity)
            return 0 if ahead is None else ahead.key.shape.rows

        assert patches(math.inf, True) == 6 * 64
        assert patches(200, False) == 3 * 64
        assert patches(64, True) == 64
        assert patches(20, True) == 64, "a picture that takes too long alone"
        assert patches(20, False) == 0, "not in the time that is left after another pass"


def test_the_budget_of_passes_ahead() -> None:
    budget = PromptBudget(50.0, 64, lambda tokens: tokens)
    key = GraphKey("encode", PassShape(40))
    assert budget.room([], lambda key: 99.0).has(key)
    running: Any = [object()]
    first = budget.room(running, lambda key: 40.0)
    assert first.least
    assert first.has(key)
    budget.prepared(40.0)
    second = budget.room(running, lambda key: 40.0)
    assert not second.least
    assert not second.has(key)
    assert budget.tokens(running, []) == 0, "nothing fits in what is left, so a round comes first"
    budget.round_launched()
    assert budget.room(running, lambda key: 40.0).has(key)


def test_requests_run_on_while_others_wait(seeing: Path, vision: VisionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two rounds there is one pass of the encoder at most, where two take too long."""
    with engine(seeing, dtype="float32", max_stall_ms=20, max_num_batched_tokens=64) as llm:
        llm.engine.add(EngineRequest("running", words(9), replace(GREEDY, max_tokens=60)))
        for _ in range(3):
            llm.engine.step()
        for i in range(6):
            each = prompt(vision, words(3, i), Picture(8, 8, i))
            llm.engine.add(EngineRequest(f"seeing{i}", each.ids, GREEDY, media=each.media))
        launched: list[str] = []
        note_launches(monkeypatch, lambda key, batch: launched.append(key.program))
        while llm.engine.has_work():
            llm.engine.step()
    between = " ".join(launched).split("round")
    assert sum("encode" in each for each in between) == 6
    assert all(each.count("encode") + each.count("extend") <= 1 for each in between[:6])


def test_aborted_while_it_waits(seeing: Path, vision: VisionConfig) -> None:
    """What an aborted request held is free again."""
    with small(seeing, 66, max_num_batched_tokens=16) as llm:
        long = prompt(vision, words(3), Picture(12, 10, 1), words(40))
        llm.engine.add(EngineRequest("a", long.ids, GREEDY, media=long.media))
        for _ in range(3):
            llm.engine.step()
        assert cache_of(llm)["held"] == 30
        llm.engine.abort("a")
        assert cache_of(llm)["held"] == 0
        assert len(run(llm, [long], GREEDY)[0]) == 12


def bad(vision: VisionConfig, **changes: Any) -> EngineRequest:
    """A request whose picture is changed."""
    good = prompt(vision, words(5), Picture(4, 6))
    item = replace(good.media[0], **{name: value for name, value in changes.items() if name != "overrides"})
    return EngineRequest("r", good.ids, GREEDY, media=(item,), overrides=changes.get("overrides"))


def test_refusals(seeing: Path, vision: VisionConfig) -> None:
    """The engine's own door: what a frontend would never send."""
    row = Vectors("float32", 84, bytes(84 * 4))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"grid": (1, 3, 8)}, "multiples of 2"),
        ({"grid": (1, 4, 8)}, "6 positions; its grid has 8 tokens"),
        ({"pixels": Vectors("float32", 80, bytes(24 * 80 * 4))}, "80 numbers; the model's have 96"),
        ({"pixels": Vectors("float32", 96, bytes(20 * 96 * 4))}, "20 patches; its grid has 24"),
        ({"positions": [0, 1, 2, 3, 4, 5]}, "position 0 holds no placeholder"),
        ({"positions": [6, 7, 8, 9, 10, 99]}, "position 99 holds no placeholder"),
        ({"positions": [6, 8, 7, 9, 10, 11]}, "one run"),
        ({"overrides": Overrides([7], row)}, "another item or embedding"),
    ]
    with engine(seeing, dtype="float32", enforce_eager=True) as llm:
        for changes, says in wrong:
            with pytest.raises(BadRequest, match=says):
                llm.engine.add(bad(vision, **changes))
        assert not llm.engine.has_work()
        llm.engine.add(bad(vision))
        while llm.engine.has_work():
            llm.engine.step()


def test_models_that_see_nothing(qwen3: Path, vision: VisionConfig) -> None:
    """They have no field, no program, no slot row and no graph for it, and refuse pictures."""
    with engine(qwen3) as llm:
        assert llm.engine.info()["vision"] is None
        with pytest.raises(BadRequest, match="no vision tower"):
            llm.engine.add(bad(vision))
        worker = llm.engine.worker
        assert worker.slots.rotary_delta is None
        assert "encode" not in worker.graphs.programs
        extend = worker.graphs.programs["extend"].schema
        assert not any("media" in field.feature.extra for field in extend)


def test_other_ranks_get_it_as_bytes(seeing: Path, vision: VisionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a pass needs is in its command: another rank that executes its bytes has the same cache."""
    with engine(seeing, dtype="float32", enforce_eager=True) as llm:
        expected = run(llm, several(vision)[2:5], GREEDY)
    monkeypatch.setattr(Runner, "send", lambda self, command: self.worker.execute(decode(encode(command))))
    with engine(seeing, dtype="float32") as llm:
        assert run(llm, several(vision)[2:5], GREEDY) == expected


def test_a_text_of_a_model_that_sees(seeing: Path) -> None:
    """Prompts without pictures replay graphs without their fields."""
    with engine(seeing) as llm:
        run(llm, [Prompt(words(30, i)) for i in range(4)], GREEDY)
        launched = [g.key for g in llm.engine.runner.planner.graphs()]
        assert not any("media" in key.features.extra for key in launched)
        assert all(kind != "eager" for _, kind, _ in counted(llm))
        told = llm.engine.info()["vision"]
        assert (told["merge"], told["deepstack"], told["image_token_id"]) == (2, 2, 264)


def test_several_sequences_and_embeddings_beside_pictures(seeing: Path, vision: VisionConfig) -> None:
    """A request may have pictures and embeddings; requests of both kinds share passes."""
    with engine(seeing, dtype="float32") as llm:
        table = llm.engine.worker.model.embed.weight
        good = prompt(vision, words(20), Picture(4, 6), words(4, 1))
        expected = run(llm, [good, Prompt(words(30, 2))], GREEDY)
        ids = [-1 if i in (2, 3, 29) else t for i, t in enumerate(good.ids)]
        rows = table[[good.ids[i] for i in (2, 3, 29)]]
        soft = EngineRequest(
            "soft", ids, GREEDY, media=good.media,
            overrides=Overrides([2, 3, 29], Vectors("float32", 84, rows.numpy().tobytes())),
        )  # fmt: skip
        other = words(30, 2)
        whole = Overrides(list(range(30)), Vectors("float32", 84, table[other].numpy().tobytes()))
        llm.engine.add(soft)
        llm.engine.add(EngineRequest("whole", [-1] * 30, GREEDY, overrides=whole))
        found: dict[str, list[int]] = {"soft": [], "whole": []}
        while llm.engine.has_work():
            for delta in llm.engine.step():
                found[delta.request_id] += delta.token_ids
        assert [found["soft"], found["whole"]] == expected
