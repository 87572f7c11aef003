"""Engines that note the features which each request meets, and the pairs that a test claims.

A request uses some features (an adapter, a schema, …), and events happen to it (a preemption, accepted drafts, a mixed
pass, …). A pair of features counts as exercised if one request met both in one run. ``tests/feature_pairs.toml`` claims
pairs for a test, which compares them with those that its engines exercised.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.feature_pairs import Pairs, named
from tests.engine.together import CALL, Answer
from unisono.engine.engine import Engine
from unisono.engine.sequence import Extend, FeaturePass, Verify
from unisono.engine.sequence import Sequence as Running
from unisono.types import EngineRequest, FinishReason, TokenDelta

Pair = frozenset[str]
"""Names of two features."""


def features_of(request: EngineRequest) -> set[str]:
    """The features of the table that a request names."""
    params = request.params
    used = {
        "LoRA": request.adapter is not None,
        "structured outputs": params.structured_outputs is not None,
        "tool calls": params.structured_outputs == CALL,
        "pictures": bool(request.media),
        "log-probabilities": params.logprobs is not None,
        "prompt embeddings": request.overrides is not None,
    }
    return {name for name, is_used in used.items() if is_used}


def features_of_engine(engine: Engine) -> set[str]:
    """The features of the table that hold for every request of an engine."""
    requested = engine.config.requested
    used = {
        "tensor parallel": requested.tensor_parallel_size > 1,
        "expert parallel": requested.enable_expert_parallel,
        "fp8 KV cache": requested.kv_cache_dtype == "fp8",
    }
    return {name for name, is_used in used.items() if is_used}


class Watch:
    """Observer of an engine. ``met``: the features that each request of the run meets, by request id.

    ``exercised``: pairs of which one request met both, of the runs that have ended. ``seen``: all features that they
    met.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.met = engine, defaultdict[str, set[str]](set)
        self.exercised: set[Pair] = set()
        self.seen: set[str] = set()
        self._held: set[str] = set()  # requests that waited for pages of another engine
        self._add, self._launch, self._step = engine.add, engine._launch, engine.step
        engine.add, engine._launch, engine.step = self.add, self.launch, self.step  # type: ignore[method-assign]

    def add(self, request: EngineRequest) -> None:
        """Add a request, and note its own features."""
        held = len(self.engine.arrivals)
        self._add(request)
        met = self.met[request.request_id]
        met |= features_of(request) | features_of_engine(self.engine)
        if len(self.engine.arrivals) > held:
            self._held.add(request.request_id)

    def launch(self, work: Any) -> Any:
        """Launch a pass, and note chunks, mixed passes, replays, pages from host memory and preemptions."""
        passes = self.engine.runner.planner.passes
        before = dict(passes)
        launched = self._launch(work)
        replayed = any(kind != "eager" for (_, kind, _), n in passes.items() if n != before.get((_, kind, _)))
        self._note(self._rows(work) if replayed else (), "graphs")
        active = self.engine.scheduler.active
        self._note((one for one in active if one.awaits_pages), "offload")
        self._note((one for one in active if one.preemptions), "preemption")
        return launched

    def step(self) -> list[TokenDelta]:
        """Run a step, and note prefix hits, pages of a prefill engine and accepted drafts."""
        deltas = self._step()
        for delta in deltas:
            met = self.met[delta.request_id]
            if delta.cached_tokens:
                met |= {"prefix cache", "prefill/decode"} if delta.request_id in self._held else {"prefix cache"}
            if delta.accepted_tokens:
                met |= {"speculation", "draft trees"} if self.engine.runner.paths > 1 else {"speculation"}
        return deltas

    def end_run(self, *features: str) -> None:
        """Add the pairs of this run to ``exercised``. features: also met by all of its requests."""
        for met in self.met.values():
            self.seen.update(met, features)
            self.exercised |= {frozenset(pair) for pair in itertools.combinations({*met, *features}, 2)}
        self.met.clear()
        self._held.clear()

    def note_open(self, feature: str) -> None:
        """Note a feature for all requests that have not ended."""
        self._note(self.engine._sequences.values(), feature)

    def _note(self, sequences: Iterable[Running], feature: str) -> None:
        for sequence in sequences:
            self.met[sequence.request_id].add(feature)

    def _rows(self, work: Any) -> list[Running]:
        """The requests of a pass."""
        if isinstance(work, FeaturePass):
            return []
        if not isinstance(work, Extend):
            return list((work.round if isinstance(work, Verify) else work).rows.sequences)
        rows = [chunk.sequence for chunk in work.chunks] + list(work.decodes.sequences)
        self._note((chunk.sequence for chunk in work.chunks if not chunk.last), "chunked prompts")
        self._note(rows if work.decodes else (), "mixed passes")
        return rows


def answers_of(engine: Engine, requests: Sequence[EngineRequest], *events: Event) -> dict[str, Answer]:
    """Each request's answer, by id; all are added at once. events: happen in their order, each between two steps."""
    answers, waiting = {request.request_id: Answer() for request in requests}, list(events)
    for request in requests:
        engine.add(request)
    while engine.has_work():
        if waiting and waiting[0].due(engine):
            waiting.pop(0).happen()
        for delta in engine.step():
            answers[delta.request_id].add(delta)
    assert not waiting, "the requests ended before all events"
    for request in requests:
        expected = FinishReason.LENGTH if request.params.ignore_eos else FinishReason.STOP
        assert answers[request.request_id].finish is expected, request.request_id
    return answers


def differing(answers: Mapping[str, Answer], expected: Mapping[str, Answer]) -> list[str]:
    """Ids of the requests whose answers differ."""
    return [name for name, answer in answers.items() if answer != expected[name]]


@dataclass(frozen=True)
class Event:
    """A call between two steps, as soon as a request whose id begins with ``during`` has an output token."""

    during: str
    happen: Callable[[], object]

    def due(self, engine: Engine) -> bool:
        """True if it has to happen now."""
        running = engine.scheduler.running
        return any(one.request_id.startswith(self.during) and len(one.tokens) > one.prompt_len for one in running)


def missing(node: str, exercised: set[Pair], seen: set[str]) -> list[str]:
    """Pairs that the data file claims for the test ``node`` and that did not happen; sorted.

    exercised: pairs of which one request met both. seen: features that any request of the same run met, which suffice
    for the pairs that no request can meet at once.
    """
    pairs = Pairs.read()
    entries = [each for each in pairs.together if each.test == node]
    assert entries, f"no entry of the data file names {node}"
    together = set().union(*(each.pairs() for each in entries)) - exercised
    apart = {named(name) for each in entries for name in each.apart}
    return sorted(" × ".join(sorted(pair)) for pair in together | {pair for pair in apart if not pair <= seen})
