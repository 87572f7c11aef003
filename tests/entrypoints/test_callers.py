"""``LLM`` and ``AsyncLLM`` from outside: callers share one engine and get their own tokens, in any thread."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from typing import Any

import pytest

from tests.engine.helpers import engine
from tests.entrypoints.shared import GREEDY, PROMPTS, idle, ids
from unisono import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from unisono.types import BadRequest, EngineDead


def test_streams_read_by_turns_get_all_their_tokens(llm: LLM, expected: list[list[int]]) -> None:
    streams, got = [llm.stream(prompt, GREEDY) for prompt in PROMPTS], [[] for _ in PROMPTS]
    while any([got[i].extend(delta.token_ids) or True for i, s in enumerate(streams) if (delta := next(s, None))]):
        pass
    assert got == expected
    idle(llm)


def test_generate_inside_a_stream(llm: LLM, expected: list[list[int]]) -> None:
    got = []
    for delta in llm.stream(PROMPTS[0], GREEDY):
        got += delta.token_ids
        assert ids(llm.generate(PROMPTS[1:3], GREEDY)) == expected[1:3]
    assert got == expected[0]


def test_threads_in_generate(llm: LLM, expected: list[list[int]]) -> None:
    found: list[tuple[int, list[int]]] = []

    def ask(i: int) -> None:
        for _ in range(3):
            found.append((i, ids(llm.generate(PROMPTS[i], GREEDY, use_tqdm=False))[0]))

    threads = [threading.Thread(target=ask, args=(i % 4,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 24
    assert all(tokens == expected[i] for i, tokens in found)
    idle(llm)


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    idle(llm)


def test_async_and_sync_callers_share_the_engine(llm: LLM, expected: list[list[int]]) -> None:
    sync: list[list[int]] = []
    thread = threading.Thread(target=lambda: sync.extend(ids(llm.generate(PROMPTS, GREEDY))), daemon=True)

    async def ask(shared: AsyncLLM, prompt: list[int]) -> list[list[int]]:
        return [output.outputs[0].token_ids async for output in shared.generate(prompt, GREEDY, f"r{prompt[0]}")]

    async def main() -> list[list[list[int]]]:
        with AsyncLLM(llm=llm) as shared:
            thread.start()
            return await asyncio.gather(*(ask(shared, prompt) for prompt in PROMPTS))

    cumulative = asyncio.run(main())
    thread.join(60)
    assert sync == expected
    assert [each[-1] for each in cumulative] == expected
    assert all(a == b[: len(a)] for each in cumulative for a, b in itertools.pairwise(each))
    idle(llm)


def test_async_output_kinds(llm: LLM, expected: list[list[int]]) -> None:
    async def outputs(kind: RequestOutputKind) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, n=2, output_kind=kind)
        with AsyncLLM(llm=llm) as shared:
            return [output async for output in shared.generate({"prompt_token_ids": PROMPTS[0]}, params)]

    deltas = asyncio.run(outputs(RequestOutputKind.DELTA))
    (final,) = asyncio.run(outputs(RequestOutputKind.FINAL_ONLY))
    for index in range(2):
        parts = [one.outputs[index] for one in deltas]
        assert [token for part in parts for token in part.token_ids] == expected[0]
        assert [entry for part in parts for entry in part.logprobs] == final.outputs[index].logprobs
        assert "".join(part.text for part in parts) == final.outputs[index].text
    assert [one.finished for one in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(deltas) > 2


@pytest.mark.parametrize("how", ["cancel", "abort", "break"])
def test_async_requests_end_early(llm: LLM, how: str) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    seen: list[Any] = []

    async def ask(shared: AsyncLLM) -> None:
        iterator = shared.generate(PROMPTS[0], long, "mine")
        async for output in iterator:
            seen.append(output)
            if how == "abort":
                await shared.abort("mine")
            if how == "break":
                break
        await iterator.aclose()

    async def main() -> None:
        with AsyncLLM(llm=llm) as shared:
            task = asyncio.create_task(ask(shared))
            while not seen:
                await asyncio.sleep(0.001)
            if how == "cancel":
                task.cancel()
            await asyncio.wait([task], timeout=30)
            assert task.done()
            assert task.cancelled() == (how == "cancel")

    asyncio.run(main())
    assert len(seen[-1].outputs[0].token_ids) < 100
    if how == "abort":
        assert seen[-1].outputs[0].finish_reason == "abort"
    idle(llm)


def test_async_request_ids_are_unique(llm: LLM) -> None:
    async def main() -> None:
        with AsyncLLM(llm=llm) as shared:
            first = shared.generate(PROMPTS[0], GREEDY, "same")
            await anext(first)
            with pytest.raises(BadRequest, match="'same' is running already"):
                await anext(shared.generate(PROMPTS[0], GREEDY, "same"))
            await first.aclose()

    asyncio.run(main())


def test_ctrl_c_ends_generate_between_two_steps(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, whole = llm.engine.step, []

    def interrupted() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        deltas = step()
        whole.append(True)
        return deltas

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert whole == [True]  # the step was not cut off, and there was no second one
    idle(llm)
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected


def test_ctrl_c_while_another_thread_steps(llm: LLM, expected: list[list[int]]) -> None:
    long, done = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), []
    thread = threading.Thread(target=lambda: done.extend(llm.generate(PROMPTS[:2], long)), daemon=True)
    thread.start()
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[3]] * 50, GREEDY)
    thread.join(60)
    assert [len(output.outputs[0].token_ids) for output in done] == [100, 100]
    idle(llm)


def test_ctrl_c_while_a_request_waits_to_be_added(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread, which steps, adds it after the interrupt; it is aborted all the same."""
    step, adding, interrupted = llm.engine.step, threading.Event(), threading.Event()

    def slow() -> Any:
        adding.set()
        interrupted.wait(60)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow)
    thread = threading.Thread(target=llm.generate, args=(PROMPTS[0], GREEDY), daemon=True)
    thread.start()
    adding.wait(60)

    def interrupt() -> None:
        while not llm.loop._calls:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    interrupted.set()
    thread.join(60)
    idle(llm)


def test_an_engine_error_reaches_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("tiny", enforce_eager=True, max_num_seqs=4, max_model_len=64) as llm:
        step, errors, both = llm.engine.step, [], threading.Barrier(2, timeout=30)
        steps = iter(range(1000))

        def failing() -> Any:
            if next(steps) > 2 and len(llm.loop._inboxes) == 2:
                raise RuntimeError("the device is gone")
            return step()

        monkeypatch.setattr(llm.engine, "step", failing)

        def ask() -> None:
            both.wait()
            try:
                llm.generate(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
            except EngineDead as error:
                errors.append(str(error))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == ["the engine failed: RuntimeError: the device is gone"] * 2
        with pytest.raises(EngineDead, match="the device is gone"):
            llm.generate(PROMPTS[0], GREEDY)
        with pytest.raises(EngineDead, match="the device is gone"):
            asyncio.run(AsyncLLM(llm=llm).check_health())


def test_an_engine_error_reaches_an_async_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(llm: LLM) -> None:
        with AsyncLLM(llm=llm) as shared:
            async for _ in shared.generate(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True)):
                monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)

    with (
        engine("tiny", enforce_eager=True, max_num_seqs=4, max_model_len=64) as llm,
        pytest.raises(EngineDead, match="ZeroDivisionError"),
    ):
        asyncio.run(asyncio.wait_for(main(llm), 30))


def test_use_after_the_end() -> None:
    with engine("tiny", enforce_eager=True, max_num_seqs=2, max_model_len=64) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
    calls = {
        "generate": lambda: llm.generate("x"),
        "chat": lambda: llm.chat([{"role": "user", "content": "x"}]),
        "stream": lambda: list(llm.stream(PROMPTS[0])),
        "the open stream": lambda: list(stream),
        "engine": lambda: llm.engine,
        "metrics": lambda: llm.get_metrics(),
        "cache": lambda: llm.reset_prefix_cache(),
    }
    for call in calls.values():
        with pytest.raises(EngineDead, match="shut down"):
            call()
    llm.shutdown()  # a second time does nothing
