"""Drafter × program × kind of graph × feature: the bytes of eager, and every pass accounted for.

Each cell runs the same requests on two engines, one without graphs. Tokens, log-probabilities to the bit and accepted
drafts have to agree, both engines have to launch the same passes in the same order, and each of them has to be a
replay of the kind in question, or to name the reason that this page works out for itself. On a CPU whatever a pass
made is filled with garbage before the next one runs.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.helpers import counted, engine, idle, note_launches
from tests.engine.matrix import DRAFTERS, Checkpoints
from tests.graphs.kinds import KINDS, Kind, say, text
from tests.graphs.programs import FULL, poison
from unisono.entrypoints.llm import LLM
from unisono.graphs import GraphKey, Hidden, PassShape
from unisono.graphs.graph_set import GraphSet
from unisono.graphs.tape import Tape
from unisono.types import SpeculativeConfig, StructuredOutputs

CUDA = torch.cuda.is_available()
METHODS = ("none", *DRAFTERS)


FLAGS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256, "max_num_batched_tokens": 48}
SCARCE: dict[str, Any] = {**FLAGS, "max_model_len": 80, "num_pages": 1 + 5}

# ---- the requests -----------------------------------------------------------------------------------

Run = Callable[[LLM], list[Any]]


def embedded(llm: LLM, ids: list[int], *positions: int) -> dict[str, Any]:
    """A prompt with the embeddings of its ids at these positions; at none: all of it is embeddings."""
    rows = llm.engine.worker.model.embed.weight.cpu()[ids]
    if not positions:
        return {"prompt_embeds": rows}
    return {"prompt_token_ids": ids, "embedding_overrides": {p: 0.5 * rows[p] for p in positions}}


FORM = {"structured_outputs": StructuredOutputs(regex="([a-d]{2}-){3,9}"), "logprobs": 2}

FEATURES: dict[str, Run] = {
    "mixed lengths": lambda llm: say(llm, [text(n, n) for n in (3, 40, 9, 25, 14)]),
    "edges of prompt buckets": lambda llm: [say(llm, [text(n, n)], max_tokens=2) for n in (15, 16, 17, 31, 32, 33, 48)],
    "edges of round buckets": lambda llm: [say(llm, [text(5, i) for i in range(n)]) for n in (1, 2, 3, 4, 5, 6)],
    "chunks": lambda llm: say(llm, [text(100, 1), text(49, 2)]),
    "more than run at once": lambda llm: say(llm, [text(4 + i, i) for i in range(9)]),
    "long answers": lambda llm: say(llm, [text(12 + i, i) for i in range(6)], max_tokens=40),
    "a prefix hit": lambda llm: say(llm, [text(60, 3)] * 2) + say(llm, [text(60, 3)] * 2),
    "penalties": lambda llm: say(llm, [text(20, i) for i in range(3)], repetition_penalty=1.3, logit_bias={9: 4.0}),
    "logprobs": lambda llm: say(llm, [text(20, i) for i in range(3)], logprobs=3),
    "grammar": lambda llm: say(llm, [text(20 + 9 * i, i) for i in range(4)], max_tokens=14, **FORM),
    "prompt logprobs": lambda llm: say(llm, [text(n, n) for n in (30, 70)], prompt_logprobs=2, logprobs=1),
    "selected logits": lambda llm: say(llm, [text(n, n) for n in (30, 70)], prompt_logprobs=2, logprob_start_len=26),
    "embeddings": lambda llm: say(llm, [embedded(llm, text(n, n)) if n % 2 else text(n, n) for n in (61, 30, 35)]),
    "overrides": lambda llm: say(llm, [embedded(llm, text(n, n), 1, n - 9, n - 1) for n in (30, 61, 18)]),
    "embeddings, scored": lambda llm: say(
        llm, [embedded(llm, text(n, n), 0, 5) for n in (30, 61)], prompt_logprobs=1, logprob_start_len=6
    ),
    "hidden states": lambda llm: [
        say(llm, [text(n, n) for n in (50, 9, 20)], return_hidden_states=True), say(llm, [text(50, 50)]),
        say(llm, [embedded(llm, text(50, 50), 3)], return_hidden_states=True, prompt_logprobs=1, logprob_start_len=5),
    ],
    "everything": lambda llm: say(
        llm, [embedded(llm, text(n, n), 0, 5) for n in (30, 61)], max_tokens=14, return_hidden_states=True,
        prompt_logprobs=1, logprob_start_len=6, **FORM,
    ),
}  # fmt: skip
LAZY = ("embeddings", "overrides", "embeddings, scored", "hidden states", "everything")
"""Features whose graphs are captured when the engine is idle: they run before it is, and after."""

# ---- the engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints_of(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Checkpoints]:
    makers = {**DRAFTERS, "none": lambda targets, folder: (targets["qwen3"], None)}
    return functools.cache(lambda method: makers[method](checkpoints, tmp_path_factory.mktemp(method)))


def opened(method: str, checkpoints: Checkpoints, **flags: Any) -> LLM:
    target, model = checkpoints
    spec = None if method == "none" else SpeculativeConfig(method, None if model is None else str(model), 3)
    return engine(target, speculative=spec, **flags)


@dataclass
class Ran:
    """Result of a run.

    outputs by feature, the keys of its passes in order (None: it was idle), how they were counted, accepted drafts.
    sizes: shapes that may be captured for each program and width, with masks or without.
    """

    outputs: dict[str, Any]
    keys: list[GraphKey | None]
    passes: dict[tuple[str, str, str], int]
    accepted: int
    preemptions: int
    sizes: dict[tuple[str, int, bool], list[int]]


def run(llm: LLM, features: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> Ran:
    keys: list[GraphKey | None] = []
    outputs = {}
    with monkeypatch.context() as patched:
        note_launches(patched, lambda key, batch: keys.append(key))
        for name, feature in features.items():
            outputs[name] = feature(llm)
            if name in LAZY:
                keys.append(None)
                idle(llm)
                outputs[name] = outputs[name], feature(llm)
    llm.engine.check_integrity()
    counters, scheduler = llm.engine.counters, llm.engine.scheduler
    planned = llm.engine.runner.planner._programs.items()
    sizes = {
        (*name, b.features.masks): [shape.rows for shape in b.shapes] for name, buckets in planned for b in buckets
    }
    return Ran(outputs, keys, counted(llm), counters.accepted_tokens, scheduler.preemptions, sizes)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever a tape made is garbage when the next one begins; counts the tensors."""
    last: list[Tape] = []
    poisonings: list[int] = []

    def replay(self: Tape, real: Callable[[Tape], None] = Tape.replay) -> None:
        if last:
            poisonings.append(poison(last.pop()))
        real(self)
        last.append(self)

    monkeypatch.setattr(Tape, "replay", replay)
    return poisonings


@functools.cache
def eager(method: str, checkpoints: Checkpoints, backend: str, scarce: bool, features: tuple[str, ...]) -> Ran:
    flags = {**(SCARCE if scarce else FLAGS), "attention_backend": backend, "graphs": "off"}
    with opened(method, checkpoints, **flags) as llm, pytest.MonkeyPatch.context() as monkeypatch:
        ran = run(llm, {name: FEATURES[name] for name in features}, monkeypatch)
    assert {(kind, reason) for _, kind, reason in ran.passes} == {("eager", "DISABLED")}
    return ran


def check(
    method: str,
    kind: Kind,
    checkpoints: Checkpoints,
    features: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    scarce: bool = False,
    largest: int | None = None,
) -> Ran:
    """Run a cell. ``largest``: captures of more rows than this run out of memory."""
    expected = eager(method, checkpoints, kind.backend, scarce, features)
    if largest is not None:
        out_of_memory_above(largest, monkeypatch)
    flags = {**(SCARCE if scarce else FLAGS), "attention_backend": kind.backend, **kind.flags}
    with opened(method, checkpoints, **flags) as llm:
        ran = run(llm, {name: FEATURES[name] for name in features}, monkeypatch)
    for name in features:
        assert ran.outputs[name] == expected.outputs[name], name
    assert ran.accepted == expected.accepted, "drafts were lost"
    assert ran.keys == expected.keys, "other passes than without graphs"
    assert ran.passes == Counter(accounts(ran, kind, method, largest))
    return ran


def accounts(ran: Ran, kind: Kind, method: str, largest: int | None) -> list[tuple[str, str, str]]:
    """:func:`account` of each pass; what was missing has a graph from the next time on that the engine is idle.

    But what needs masks, too, is captured for the first pass that wants it.
    """
    told: list[tuple[str, str, str]] = []
    captured: list[GraphKey] = []
    missing: list[GraphKey] = []
    for key in ran.keys:
        if key is None:
            captured += missing
            missing.clear()
            continue
        told.append(account(key, kind, method, largest))
        rich = key.features.embeddings or key.features.returned
        if rich and told[-1][1] != "eager" and not any(graph.covers(key) for graph in captured):
            sizes = ran.sizes[key.program, key.shape.width, key.features.masks]
            graph = replace(key, shape=PassShape(min(n for n in sizes if n >= key.shape.rows), key.shape.width))
            if key.features.masks:
                captured.append(graph)
            else:
                told[-1] = key.program, "eager", "NOT_CAPTURED"
                missing.append(graph)
    return told


def account(key: GraphKey, kind: Kind, method: str, largest: int | None) -> tuple[str, str, str]:
    """(program, kind, reason) of a pass whose needs are those of the start, as it has to be counted."""
    if kind.of(key.program, method) == "eager":
        return key.program, "eager", "DISABLED"
    if largest is not None and key.shape.rows > largest:
        return key.program, "eager", "NO_MEMORY"
    return key.program, kind.of(key.program, method), ""


def out_of_memory_above(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = GraphSet._capture

    def capture(self: GraphSet, key: GraphKey, splits: bool) -> Any:
        if key.shape.rows > rows:
            raise torch.OutOfMemoryError("no room")
        return real(self, key, splits)

    monkeypatch.setattr(GraphSet, "_capture", capture)


# ---- the cells --------------------------------------------------------------------------------------

ALL = tuple(FEATURES)
SOME = ("mixed lengths", "a prefix hit", "prompt logprobs")
FAST = [("eagle3", "full", ALL), ("none", "full", ("everything", *SOME))]
FAST += [(method, "segmented", SOME) for method in METHODS if method not in ("none", "eagle3", "mtp", "standalone")]
FAST += [("dflash", "full", ("mixed lengths", "chunks", "penalties", "prompt logprobs"))]
FAST += [("standalone", "mixed", ("everything", *SOME))]
FAST += [("mtp", "planned on the host", SOME)]
FAST += [("standalone", kind, SOME) for kind in ("compiled segments", "only rounds")]


@pytest.mark.parametrize(("method", "kind", "features"), FAST, ids=lambda v: v if isinstance(v, str) else str(len(v)))
def test_cells(
    method: str,
    kind: str,
    features: tuple[str, ...],
    checkpoints_of: Any,
    poisoned: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = check(method, KINDS[kind], checkpoints_of(method), features, monkeypatch)
    assert {"extend", "round", "score"} <= {key.program for key in ran.keys if key is not None}
    masked = {"grammar", "everything"}.intersection(features)
    assert any(key.features.masks for key in ran.keys if key is not None) == bool(masked)
    assert CUDA or sum(poisoned) > 1000
    assert method == "none" or ran.accepted > 0, "where no draft is accepted, none can be lost"


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("method", "kind"), itertools.product(METHODS, KINDS))
def test_every_cell(
    method: str, kind: str, feature: str, checkpoints_of: Any, poisoned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(method, KINDS[kind], checkpoints_of(method), (feature,), monkeypatch)


FASTER = (("mtp", "full"), ("eagle3", "segmented"))


def sliced(fast: tuple[str, ...]) -> list[Any]:
    """Every drafter, those that are not in ``fast`` in the long matrix only."""
    return [method if method in fast else pytest.param(method, marks=pytest.mark.full) for method in METHODS]


@pytest.mark.parametrize("kind", ["full", "segmented"])
@pytest.mark.parametrize("method", sliced(("eagle3",)))
def test_preempted(
    method: str, kind: str, checkpoints_of: Any, poisoned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = ("mixed lengths", "long answers")
    ran = check(method, KINDS[kind], checkpoints_of(method), features, monkeypatch, scarce=True)
    assert ran.preemptions > 0


LARGER = [
    pytest.param(method, kind, marks=() if (method, kind) in FASTER else pytest.mark.full)
    for method, kind in itertools.product(METHODS, ("full", "segmented"))
]


@pytest.mark.parametrize(("method", "kind"), LARGER)
def test_larger_than_the_largest_bucket(
    method: str, kind: str, checkpoints_of: Any, poisoned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays and eager passes by turns: a drafter reads the hidden states of the pass that ran."""
    features = ("mixed lengths", "edges of round buckets", "chunks")
    ran = check(method, KINDS[kind], checkpoints_of(method), features, monkeypatch, largest=4)
    reasons = {(program, reason) for program, _, reason in ran.passes}
    assert {("round", ""), ("round", "NO_MEMORY"), ("extend", "NO_MEMORY")} <= reasons


@pytest.mark.parametrize("method", [m for m in METHODS if m != "none"])
def test_a_drafters_needs_cost_prompt_passes_no_graph(
    method: str, checkpoints_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default flags. Other engines run prompt passes eagerly where a drafter wants the target's hidden states."""
    with opened(method, checkpoints_of(method), **FLAGS) as llm:
        features, planner = llm.engine.runner.features, llm.engine.runner.planner
        ran = run(llm, {"chunks": FEATURES["chunks"]}, monkeypatch)
    extends = [key for key in ran.keys if key is not None and key.program == "extend"]
    assert len(extends) >= 4
    assert all(key.features == features for key in extends)
    assert all(graph.key.features.covers(features) for graph in planner.graphs())
    assert (features.hidden is not Hidden.NULL) == (
        method in ("combined", "dflash", "dspark", "eagle", "eagle3", "mtp", "mtp_frozen")
    )
    assert {(k, r): n for (p, k, r), n in ran.passes.items() if p == "extend"} == {(FULL, ""): len(extends)}


@pytest.mark.parametrize("broken", ["outputs", "accepted", "keys", "passes"])
def test_a_cell_can_fail(broken: str, checkpoints_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: another text, a lost draft, a pass too few and one that is counted wrong are all seen."""
    checkpoints = checkpoints_of("ngram")
    expected = eager("ngram", checkpoints, "auto", False, ("penalties",))
    other = {
        "outputs": {"penalties": expected.outputs["penalties"][::-1]},
        "accepted": expected.accepted + 1,
        "keys": expected.keys[:-1],
        "passes": {},
    }
    if broken == "passes":
        monkeypatch.setattr("tests.graphs.test_matrix.counted", lambda llm: other["passes"])
    else:
        doctored = replace(expected, **{broken: other[broken]})
        monkeypatch.setattr("tests.graphs.test_matrix.eager", lambda *args: doctored)
    with pytest.raises(AssertionError):
        check("ngram", KINDS["full"], checkpoints, ("penalties",), monkeypatch)
