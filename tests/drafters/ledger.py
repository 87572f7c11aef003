"""Tokens of each request by round: a drafter is proven by acceptance, not by text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.engine.sequence import Round
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams


@dataclass
class Entry:
    """One request: its output tokens, and how many of them each of its rounds committed."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


def play(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Entry]:
    """Run the requests together, step by step; one Entry each, in order."""
    engine = llm.engine
    entries = {}
    for prompt, asked in zip(prompts, params, strict=True):
        request = llm._request(list(prompt), asked)
        engine.add(request)
        entries[request.request_id] = Entry(asked)
    while engine.has_work():
        in_flight = engine._in_flight
        for delta in engine.step():
            entry = entries[delta.request_id]
            entry.tokens += delta.token_ids
            if in_flight is not None and isinstance(in_flight.work, Round):
                entry.rounds.append(len(delta.token_ids))
    return list(entries.values())


def assert_every_draft_accepted(llm: LLM, entries: Sequence[Entry]) -> None:
    """Each round of a request committed all it could: its drafts and one more, but for the last round's end."""
    for number, entry in enumerate(entries):
        most = llm.engine.runner.width - 1
        most = most if entry.params.max_drafts is None else min(most, entry.params.max_drafts)
        assert set(entry.rounds[:-1]) <= {most + 1}, f"request {number} committed {entry.rounds}"
        assert max(entry.rounds, default=0) <= most + 1


def acceptance(llm: LLM) -> float:
    """Share of drafted tokens that were accepted since the engine started."""
    counters = llm.engine.counters
    return counters.accepted_tokens / counters.drafted_tokens
