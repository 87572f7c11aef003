"""Engines in which nearly all features of the table happen at once write the bytes of a plain one.

Two ranks with whole experts, an e4m3 cache, draft trees, chunks, mixed passes, preemption and offload serve requests
with adapters, pictures, embeddings, schemas, tool calls and log-probabilities. ``docs/reference/feature-pairs.md``
lists the pairs; each test fails if a pair that it claims was not exercised (``tests/engine/observed.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.changed_weights import other
from tests.engine.helpers import draw_pauses, lazy_engine
from tests.engine.late_pages import arrive_late
from tests.engine.observed import Event, Watch, answers_of, differing, missing
from tests.engine.together import ALONE, CROWDED, TEXT, TREE, Answer, Model, calls_of
from tests.engine.two_engines import decode_engine, prefill_engine, results, stepping
from unisono.cluster.engines import Placement
from unisono.cluster.replicas.client import ReplicaClient
from unisono.cluster.replicas.plan import ReplicaSettings, plan
from unisono.config import EngineConfig
from unisono.config.env import TRANSFER_KEY
from unisono.engine.scheduling.mixing import Mixing
from unisono.types import EngineRequest, FinishReason

HERE = "tests/distributed/test_together.py"
ROOM: dict[str, Any] = {"num_pages": 1 + 20}
"""Pages for prompts that arrive from a prefill engine beside running requests."""
TURNS = 5
"""Runs of two engines until all pairs were exercised; when pages arrive differs from run to run."""
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@dataclass(frozen=True)
class Setup:
    """A model, its other weights, and the answers of an engine that runs each request by itself, with both."""

    model: Model
    new: Path
    old_answers: dict[str, Answer]
    new_answers: dict[str, Answer]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """The answers are complete tool calls, and adapters, pictures, embeddings and weights change them."""
    folder = tmp_path_factory.mktemp("together")
    model = Model.make(folder)
    new = other(model.path, folder / "new")
    found = []
    for path, bare in ((model.path, model.bare(6, 34)), (new, [])):
        with lazy_engine(path, **ALONE) as llm:
            model.load_adapters(llm)
            answers = answers_of(llm.engine, [*requests(model), *bare])
            for name in ("call1", "call3"):
                ((called, arguments),) = calls_of(llm, answers[name])
                assert called == "f"
                assert '"b": [' in arguments
            found.append(answers)
            if path == model.path:
                others = answers_of(llm.engine, variants(model))
                assert all(other.logprobs != answers["rich0"].logprobs for other in others.values())
    assert all(found[0][name].tokens != answer.tokens for name, answer in found[1].items() if name.startswith("free"))
    return Setup(model, new, *found)


def requests(model: Model) -> list[EngineRequest]:
    """Requests for mixed passes, then requests that use everything."""
    return [*model.free(4, 30), *model.rich(4, 24)]


def variants(model: Model) -> list[EngineRequest]:
    """A request of :func:`requests` without its adapter, with another picture, and with other embeddings."""
    one, other = model.rich(2, 24)
    assert other.overrides is not None
    return [
        replace(one, request_id="no adapter", adapter=None),
        replace(one, request_id="picture", media=(replace(other.media[0], positions=one.media[0].positions),)),
        replace(one, request_id="embeddings", overrides=other.overrides),
    ]


def batches(model: Model) -> tuple[list[EngineRequest], list[EngineRequest]]:
    """Requests for mixed passes, and requests with a schema, which these do not take."""
    bare = model.bare(6, 34)
    return [*model.free(2, 30), *bare[:3]], [*bare[3:], *model.rich(1, 24)]


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds often draft nothing, passes are mixed whenever they can be, and pages of host memory arrive late."""
    draw_pauses(monkeypatch)
    monkeypatch.setattr(Mixing, "pays", lambda *_: True)
    arrive_late(monkeypatch)
    monkeypatch.setenv(TRANSFER_KEY.name, "secret")


def test_two_ranks(setup: Setup) -> None:
    """Cold; with two sleeps that drop the weights; then with other weights, cold and with prefix hits."""
    model = setup.model
    with lazy_engine(model.path, **CROWDED, **RANKS, speculative=TREE, enable_sleep_mode=True) as llm:
        model.load_adapters(llm)
        watch = Watch(llm.engine)

        def nap() -> None:
            watch.note_open("sleep")
            assert llm.sleep(2)["recomputed_requests"] > 0
            llm.wake_up()

        assert not differing(answers_of(llm.engine, requests(model)), setup.old_answers)
        watch.end_run()
        assert not differing(
            answers_of(llm.engine, requests(model), Event("free", nap), Event("call", nap)), setup.old_answers
        )
        watch.end_run()
        llm.update_weights(str(setup.new))
        assert not differing(answers_of(llm.engine, requests(model)), setup.new_answers)
        assert not any("prefix cache" in met for met in watch.met.values()), "keys and values of the old weights"
        watch.end_run("weight updates")
        assert not differing(answers_of(llm.engine, requests(model)), setup.new_answers)
        watch.end_run("weight updates")
        llm.engine.check_integrity()
        assert llm.engine.scheduler.mixing.apart["a feature"] > 0, "rounds for requests that mixed passes do not take"
    assert not missing(f"{HERE}::test_two_ranks", watch.exercised, watch.seen)


def test_prefill_and_decode_apart(setup: Setup, tmp_path: Path) -> None:
    """Prompts of token ids come from a prefill engine, those with adapters, pictures or embeddings do not."""
    model = setup.model
    flags: dict[str, Any] = {**RANKS, "speculative": TREE}
    node = f"{HERE}::test_prefill_and_decode_apart"
    with (
        prefill_engine(str(model.path), f"unix://{tmp_path}/prefill", **TEXT, **flags) as one,
        stepping(one),
        decode_engine(str(model.path), one, **{**CROWDED, **flags, **ROOM}) as llm,
    ):
        model.load_adapters(llm)
        watch = Watch(llm.engine)
        for _ in range(TURNS):
            for batch in batches(model):
                assert not differing(answers_of(llm.engine, batch), setup.old_answers)
                watch.end_run()
                llm.engine.reset_prefix_cache()
            if not missing(node, watch.exercised, watch.seen):
                break
        assert results(llm)["done"]
        llm.engine.check_integrity()
    assert not missing(node, watch.exercised, watch.seen)


def test_replicas_that_decode(setup: Setup, tmp_path: Path) -> None:
    """Two replicas, whose prompts come from one prefill engine, answer the same requests alike."""
    model, node = setup.model, f"{HERE}::test_replicas_that_decode"
    where = f"unix://{tmp_path}/prefill"
    roles = {"role": "decode", "prefill_urls": where, "transfer_timeout": 60.0}
    config = EngineConfig(str(model.path), speculative=TREE, **replica_flags(model), **roles)
    with prefill_engine(str(model.path), where, speculative=TREE, **TEXT) as one, stepping(one):
        exercised, seen = asyncio.run(through_replicas(config, model, setup.old_answers, node))
    assert not missing(node, exercised, seen)


@pytest.mark.full
def test_replicas_of_two_ranks(setup: Setup) -> None:
    """Two replicas of two ranks each with whole experts."""
    model, node = setup.model, f"{HERE}::test_replicas_of_two_ranks"
    config = EngineConfig(str(model.path), speculative=TREE, **replica_flags(model), **RANKS)
    exercised, seen = asyncio.run(through_replicas(config, model, setup.old_answers, node))
    assert not missing(node, exercised, seen)


def replica_flags(model: Model) -> dict[str, Any]:
    """Flags of a replica's engine."""
    flags = {name: value for name, value in {**CROWDED, **ROOM}.items() if name != "adaptive"}
    adapters = tuple((name, str(path)) for name, path in model.adapters.items())
    return {**flags, "graph_capture": "lazy", "lora_modules": adapters}


async def through_replicas(
    config: EngineConfig, model: Model, expected: dict[str, Answer], node: str
) -> tuple[set[frozenset[str]], set[str]]:
    """The pairs that the requests of two replicas met, and the features."""
    factory = "tests.distributed.observed_engine:ObservedEngine"
    client = ReplicaClient(factory, None, plan(ReplicaSettings(2), config, heartbeat_timeout=0))
    client.start()
    exercised: set[frozenset[str]] = set()
    seen: set[str] = set()
    try:
        await client.ready()
        for _ in range(TURNS):
            for batch in batches(model):
                for answers in await asyncio.gather(*(asked(client, batch, rank) for rank in range(2))):
                    assert not differing(answers, expected)
            for one in client.clients:
                pairs, features = await one.call("observed", 60)
                exercised |= {frozenset(pair) for pair in pairs}
                seen.update(features)
            if not missing(node, exercised, seen):
                break
            await client.call("reset_prefix_cache", 60)
    finally:
        await client.shutdown()
    return exercised, seen


async def asked(client: ReplicaClient, batch: Sequence[EngineRequest], rank: int) -> dict[str, Answer]:
    """The answers of one replica to requests that it gets at once."""
    streams = {
        request.request_id: await client.submit(
            replace(request, request_id=f"{request.request_id}-{rank}"), Placement(rank=rank)
        )
        for request in batch
    }
    answers = {name: Answer() for name in streams}
    for name, stream in streams.items():
        while answers[name].finish is FinishReason.RUNNING:
            answers[name].add(await stream.take())
    return answers
