"""An engine that is ahead of the server: no stream waits for it, none of its tokens wait for each other."""

from __future__ import annotations

import asyncio
import shutil
import threading

import pytest
import zmq

from unisono.cluster import engine_handle, ipc
from unisono.cluster.engine_handle import EngineHandle, socket_directory
from unisono.cluster.token_stream import TokenStream
from unisono.http.limits.overload import PLACES, SHORT_BODY, SHORT_PLACES, Admission, LoadLimits, Ticket
from unisono.http.observability.metrics import ServerMetrics
from unisono.http.openai.serving import LONG, Serving
from unisono.http.preparation import Preparers
from unisono.http.security.auth import ApiClient
from unisono.text.detokenizer import Detokenizer
from unisono.types import EngineRequest, FinishReason, SamplingParams, TokenDelta

MESSAGES = 200


def heard_and_turns() -> tuple[list[TokenDelta], int]:
    """What a handle delivers of MESSAGES messages that wait, and the turns that another task gets meanwhile."""

    async def work() -> tuple[list[TokenDelta], int]:
        heard: list[TokenDelta] = []
        directory = socket_directory()

        def hear(message: ipc.FromEngine) -> None:
            assert isinstance(message, ipc.Deltas)
            heard.extend(message.deltas)

        handle = EngineHandle("", None, 0, hear, lambda error: None, lambda stage, share: None)
        with zmq.Context() as context, context.socket(zmq.PAIR) as engine:
            handle._bind(f"ipc://{directory}/engine", "")
            engine.connect(f"ipc://{directory}/engine")
            for number in range(MESSAGES):
                engine.send(ipc.encode(ipc.Deltas([TokenDelta("r", [number])])))
            await asyncio.sleep(0.2)  # they have arrived
            reading, turns = asyncio.create_task(handle._read()), 0
            while len(heard) < MESSAGES:
                turns += 1
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            handle._free()
        shutil.rmtree(directory)
        return heard, turns

    return asyncio.run(asyncio.wait_for(work(), 60))


def test_messages_that_wait_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the deltas of one request leave as one event: the server catches up with the engine."""
    monkeypatch.setattr(engine_handle, "READ_LIMIT", 60.0)
    heard, turns = heard_and_turns()
    assert [delta.token_ids for delta in heard] == [[number] for number in range(MESSAGES)]
    assert turns < MESSAGES // 4


def test_messages_without_end_leave_turns_to_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_handle, "READ_LIMIT", 0.0)
    assert heard_and_turns()[1] >= MESSAGES


def test_deltas_that_pile_up_come_as_one() -> None:
    async def work() -> TokenDelta:
        stream = TokenStream(EngineRequest("r", [1], SamplingParams(seed=0)), lambda name: None)
        for number in range(3):
            stream.push(TokenDelta("r", [number], drafted_tokens=2, accepted_tokens=number))
        stream.push(TokenDelta("r", [3, 4], FinishReason.LENGTH))
        return await stream.take()

    delta = asyncio.run(work())
    assert (delta.token_ids, delta.finish) == ([0, 1, 2, 3, 4], FinishReason.LENGTH)
    assert delta.rounds == [(1, 2, 0), (1, 2, 1), (1, 2, 2), (2, 0, 0)]


def test_short_requests_do_not_take_turns_by_twos() -> None:
    """A turn ends some turns of the event loop later: two places would let few requests in while streams are full."""
    admission = Admission(LoadLimits(), 1 << 10)

    def tickets(count: int, size: int) -> list[Ticket]:
        made = [admission.enter(ApiClient()) for _ in range(count)]
        for ticket in made:
            ticket.grow(size)
        return made

    short, long = tickets(SHORT_PLACES + 1, SHORT_BODY), tickets(PLACES + 1, SHORT_BODY + 1)
    assert [ticket.take_turn() for ticket in short] == [True] * SHORT_PLACES + [False]
    assert [ticket.take_turn() for ticket in long] == [True] * PLACES + [False]
    short[0].turn_over()
    assert not long[-1].take_turn()
    long[0].turn_over()
    assert long[-1].take_turn()
    assert short[-1].take_turn()


def test_a_merged_delta_is_decoded_at_once() -> None:
    """The text is that of its tokens one by one; the tokenizer is not asked for each."""
    calls: list[list[int]] = []

    class Letters:
        appends = True

        def decode(self, ids: list[int], skip: bool = True, spaces: bool = True) -> str:
            calls.append(ids)
            return "".join(map(chr, ids))

        def is_silent(self, token_id: int, skip: bool) -> bool:
            return False

    detokenizer = Detokenizer(Letters(), SamplingParams(), [])  # type: ignore[arg-type]
    assert detokenizer.feed([*b"and so on "]) == "and so on "
    assert len(calls) <= 3
    assert detokenizer.feed([*b"and on"], FinishReason.LENGTH) == "and on"
    assert detokenizer.num_tokens == 16


def test_many_observations_at_once_count_as_many() -> None:
    metrics = ServerMetrics("m", list)
    timer = metrics.timer(EngineRequest("r", [1], SamplingParams(seed=0)))
    timer.tokens(1)
    timer.tokens(7)
    page = metrics.render().decode()
    assert 'unisono:inter_token_latency_seconds_count{engine="0",model_name="m"} 7.0' in page
    assert 'unisono:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 7.0' in page


def test_short_prompts_wait_for_no_thread() -> None:
    """A long one leaves the event loop free."""
    serving = object.__new__(Serving)

    async def threads() -> list[int]:
        return [await serving._prepared(size, threading.get_ident) for size in (LONG - 1, LONG)]

    serving._long = Preparers("long prompts", 1, 1)
    short, long = asyncio.run(threads())
    assert short == threading.get_ident() != long
