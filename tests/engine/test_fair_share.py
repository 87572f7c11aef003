"""Clients take turns: nobody waits longer for another's many requests than for one, and no byte depends on it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import engine, mixed_params, prompts, tokens
from unisono.engine.scheduling.waiting import Waiting
from unisono.engine.sequence import Sequence
from unisono.entrypoints.llm import LLM
from unisono.types import EngineRequest, FinishReason, SamplingParams

PROMPTS = prompts(10, 250)
PARAMS = [replace(one, max_tokens=6, min_tokens=0) for one in mixed_params(10, max_tokens=6)]


def requests(clients: str) -> list[EngineRequest]:
    return [EngineRequest(f"{c}{i}", PROMPTS[i], PARAMS[i], client=c) for i, c in enumerate(clients)]


def run(llm: LLM, first: list[EngineRequest], later: list[EngineRequest]) -> tuple[dict[str, list[int]], list[str]]:
    """Tokens of each request, and the order in which they ended. later: come after three steps."""
    found: dict[str, list[int]] = {one.request_id: [] for one in (*first, *later)}
    ended: list[str] = []
    for one in first:
        llm.engine.add(one)
    for step in range(10_000):
        if step == 3:
            for one in later:
                llm.engine.add(one)
        for delta in llm.engine.step() if llm.engine.has_work() else []:
            found[delta.request_id] += delta.token_ids
            if delta.finish is not FinishReason.RUNNING:
                ended.append(delta.request_id)
        if len(ended) == len(found):
            return found, ended
    raise AssertionError(f"only {ended} ended")


def test_clients_take_turns(qwen3: Path) -> None:
    everyone = requests("aaaaaabbbc")
    with engine(qwen3, max_num_seqs=1) as llm:
        expected = {one.request_id: ids for one, ids in zip(everyone, tokens(llm, PROMPTS, PARAMS), strict=True)}
        found, ended = run(llm, everyone, [])
        assert found == expected
        assert "".join(name[0] for name in ended) == "abcababaaa"
        assert [name for name in ended if name[0] == "a"] == [f"a{i}" for i in range(6)], "in the order of arrival"
        found, ended = run(llm, everyone[:9], everyone[9:])
        assert found == expected
        assert ended.index("c9") <= 2, "who comes later waits for those that run and a turn"
        llm.engine.check_integrity()


def test_prompts_take_turns_too(qwen3: Path) -> None:
    """All have slots, and each prompt pass has room for one prompt: the newcomer's is not the last."""
    everyone = requests("aaaaaaaaab")
    with engine(qwen3, max_num_seqs=16, max_num_batched_tokens=16) as llm:
        started: list[str] = []
        extend = llm.engine.scheduler._next_extend

        def spy(*given: Any) -> Any:
            work = extend(*given)
            started.extend(chunk.sequence.request.request_id for chunk in work.chunks if chunk.last)
            return work

        llm.engine.scheduler._next_extend = spy  # type: ignore[method-assign]
        _, ended = run(llm, everyone[:9], everyone[9:])
        assert len(ended) == 10
        assert started.index("b9") <= 4, started
        llm.engine.check_integrity()


def waiting_sequence(order: int, client: str, priority: int = 0) -> Sequence:
    request = EngineRequest(str(order), [1], SamplingParams(seed=0), client=client, priority=priority)
    return Sequence(request, [1], 9, order)


@pytest.mark.parametrize("by_priority", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_between_two_turns_of_a_waiting_client_no_other_has_three(seed: int, by_priority: bool) -> None:
    """Random arrivals, departures and preemptions, with equal priorities: each client that waits gets its turn."""
    chance, queue = random.Random(seed), Waiting(by_priority)
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    since: dict[str, dict[str, int]] = {}  # of each client that waits, the others' turns since it waits or had one
    for order in range(600):
        for _ in range(chance.choice([0, 1, 2])):
            client = chance.choice("aaaaaaaaabc") if order % 7 else f"new{order}"
            waiting.append(waiting_sequence(order * 10 + len(waiting) % 10, client))
            queue.add(waiting[-1])
            since.setdefault(client, {})
        if waiting and chance.random() < 0.1:  # a client leaves
            gone = waiting.pop(chance.randrange(len(waiting)))
            queue.remove(gone)
        if running and chance.random() < 0.1:  # one gives its pages back
            back = max(running, key=queue.rank)
            running.remove(back)
            waiting.append(back)
            queue.add(back)
        since = {c: turns for c, turns in since.items() if any(w.request.client == c for w in waiting)}
        assert len(queue) == len(waiting)
        if not waiting:
            continue
        taken, again = queue.first(), queue.first().slot == 0
        assert queue.take() is taken
        taken.slot = 0
        queue.served(taken)
        waiting.remove(taken)
        running = [*running, taken][-4:]
        if again:  # it has had its turn
            continue
        client = taken.request.client
        since.pop(client, None)
        for other in {w.request.client for w in waiting} - {client}:
            turns = since.setdefault(other, {})
            turns[client] = turns.get(client, 0) + 1
            assert turns[client] <= 3, f"{client} had {turns[client]} turns while {other} waited"
        if any(w.request.client == client for w in waiting):
            since[client] = {}
    assert len(queue._next) < 200


def test_cancelled_requests_do_not_delay_their_client() -> None:
    """10,000 requests that are taken back cost their client nothing afterwards."""
    queue = Waiting()
    flood = [waiting_sequence(i, "a") for i in range(10_000)]
    for one in flood:
        queue.add(one)
    for one in flood:
        queue.remove(one)
    for order, client in enumerate("bba"):
        queue.add(waiting_sequence(10_000 + order, client))
    assert [queue.take().request.client for _ in range(3)] == ["b", "a", "b"]
    assert len(queue) == 0
