"""Values within their limits that a request multiplies: by its prompts, its sequences, or the tokens of its prompts."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http.fake_engine import FakeConfig, FakeEngine
from tests.http.largest_ import LISTS, largest
from unisono.cluster import engine_process, ipc
from unisono.frontend.input_processor import InputProcessor, ModelFacts, PreparedPrompt
from unisono.frontend.sequence_output import SequenceOutput
from unisono.http.answers.generation import Generation, OutputPiece, Style
from unisono.http.answers.pooled import pooled_values
from unisono.http.observability.metrics import ServerMetrics
from unisono.http.openai import serving
from unisono.http.openai.protocol import CompletionRequest
from unisono.http.openai.serving import BATCH, LONG, HiddenUse, Serving
from unisono.text.tokenizer import Tokenizer
from unisono.types import BadRequest, EngineRequest, FinishReason, MediaItem, SamplingParams, TokenDelta, Vectors
from unisono.types.checks import check_copied, copied_bytes
from unisono.types.engine_request import Overrides
from unisono.types.limits import MAX_COPIED_BYTES, MAX_SEQUENCES, SAMPLING

SECONDS = 1.0
"""Processor time of the event loop for all sequences of a request; a machine that runs other tests takes longer."""
HELD_SECONDS = 0.25
"""Processor time of the event loop between two of its turns."""
HIDDEN = 6


@pytest.fixture(autouse=True)
def frozen_heap() -> Iterator[None]:
    """Exclude the heap of the tests from collections, as a server excludes its own: one would take 0.3 s here."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    facts = ModelFacts(4096, 300_000, HIDDEN, "float32", (), {}, False, True, max_logprobs=-1)
    return InputProcessor(tokenizer, facts)


IDS = [name for name in LISTS if name.endswith("token_ids")]


@pytest.mark.parametrize(("name", "alike"), [*((name, False) for name in LISTS), *((name, True) for name in IDS)])
def test_the_largest_lists_of_many_sequences_are_cheap(inputs: InputProcessor, name: str, alike: bool) -> None:
    """A million equal stop ids of 128 sequences held the event loop for 11 s, and filled the engine with 8 GiB."""
    value = largest(SAMPLING[name], many=True)
    if alike:
        value = [5] * SAMPLING[name].most  # type: ignore[attr-defined]
    if name == "logit_bias":
        value = {int(key): one for key, one in value.items()}
    begun, sent = time.process_time(), 0
    try:
        params = SamplingParams(**{name: value, "max_tokens": 5, "n": MAX_SEQUENCES})
        request = inputs.request("r", PreparedPrompt([5, 6, 7]), params)
        sent = sum(len(ipc.encode(ipc.Add(one))) for one in request.sequences())
    except BadRequest as error:
        assert error.param == name  # noqa: PT017
    assert time.process_time() - begun < SECONDS
    assert sent < 64 << 20


def vectors(size: int) -> Vectors:
    return Vectors("float32", HIDDEN, bytes(size))


COPIED: dict[str, Callable[[int], dict[str, Any]]] = {
    "embeddings": lambda size: {"overrides": Overrides([0], vectors(size))},
    "pixels": lambda size: {"media": (MediaItem("image", b"", (1, 1, 1), vectors(size), [0]),)},
}


@pytest.mark.parametrize("kind", COPIED)
@given(st.integers(1, 8 << 20), st.integers(1, MAX_SEQUENCES))
@settings(max_examples=20, deadline=None)
def test_sequences_repeat_a_limited_number_of_bytes(kind: str, size: int, n: int) -> None:
    """Eight prompts of 4 MiB of embeddings with n=128 took 4 GiB of the API process and 12 GiB of the engine."""
    request = EngineRequest("r", [1], SamplingParams(seed=0, n=n), **COPIED[kind](size))
    repeated = sum(len(ipc.encode(ipc.Add(one))) for one in request.sequences()[1:]) if n * size < 1 << 20 else 0
    total = copied_bytes(request)
    assert total >= max((n - 1) * size, repeated - 2048 * n)
    try:
        check_copied(total, n)
    except BadRequest as error:
        assert error.param == "n"  # noqa: PT017
        assert total > MAX_COPIED_BYTES
    else:
        assert (n - 1) * size <= MAX_COPIED_BYTES


def served(inputs: InputProcessor) -> Serving:
    return Serving(SimpleNamespace(), inputs, ServerMetrics("m", lambda: []))  # type: ignore[arg-type]


def longest_turn(work: Coroutine[Any, Any, Any]) -> float:
    """The most processor seconds that the event loop takes between two of its turns, while ``work`` runs."""

    async def measured() -> float:
        worst, last, done = 0.0, time.thread_time(), asyncio.ensure_future(work)
        while not done.done():
            await asyncio.sleep(0)
            worst, last = max(worst, time.thread_time() - last), time.thread_time()
        done.result()
        return worst

    return asyncio.run(measured())


@pytest.mark.parametrize("text", ["é漢 " * 330, "hello " * 170, "a"])
def test_a_thousand_short_prompts_leave_the_event_loop_its_turns(inputs: InputProcessor, text: str) -> None:
    """Each was short enough for the event loop, and all together held it for 0.9 s."""
    body = CompletionRequest(prompt=[f"{i} {text}"[: LONG - 1] for i in range(1000)], max_tokens=1)
    assert longest_turn(served(inputs).completion(body, "r")) < HELD_SECONDS


PROMPTS = st.lists(
    st.builds(lambda count: {"prompt": "a" * count}, st.integers(1, 3 * BATCH))
    | st.builds(lambda count: {"prompt_token_ids": [5] * count}, st.integers(1, 30_000))
    | st.just({"prompt_embeds": "x"}),
    max_size=40,
)


@given(PROMPTS, st.booleans())
def test_batches_of_prompts(prompts: list[dict[str, Any]], infills: bool) -> None:
    """All prompts in order; several at once only up to BATCH characters, and one with embeddings."""
    batches = serving._batches([(one, ()) for one in prompts], infills)
    assert [one for batch in batches for one, _ in batch.prompts] == prompts
    for batch in batches:
        if len(batch.prompts) > 1:
            assert sum(len(one.get("prompt", "")) for one, _ in batch.prompts) <= BATCH
            assert not infills
            assert sum("prompt_embeds" in one for one, _ in batch.prompts) <= 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": list(range(2000))}, "allowed_token_ids"),
        ({"vllm_xargs": {"a": "x" * 1_000_000}}, "n"),
        ({"prompt_logprobs": 1}, "prompt"),
        ({"return_hidden_states": True}, "prompt"),
    ],
    ids=["allowed", "extra_args", "prompt_logprobs", "hidden_states"],
)
def test_parameters_times_prompts(
    monkeypatch: pytest.MonkeyPatch, inputs: InputProcessor, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(serving, "MAX_REPORTED_NUMBERS", 50)
    for count, refused in ((2, False), (600, True)):
        body = CompletionRequest(prompt=[[5, 6, 7]] * count, max_tokens=1, **fields)
        if not refused:
            assert len(asyncio.run(served(inputs).completion(body, "r"))) == count
            continue
        with pytest.raises(BadRequest) as error:
            asyncio.run(served(inputs).completion(body, "r"))
        assert error.value.param == param


@pytest.mark.parametrize(("use", "held"), [(HiddenUse.POOLED, False), (HiddenUse.BY_TOKEN, True)])
def test_pooled_prompts_hold_no_states(
    monkeypatch: pytest.MonkeyPatch, inputs: InputProcessor, use: HiddenUse, held: bool
) -> None:
    monkeypatch.setattr(serving, "MAX_REPORTED_NUMBERS", 50)
    body = CompletionRequest(prompt=[[5, 6, 7]] * 20, max_tokens=1, return_hidden_states=True)
    work = served(inputs).completion(body, "r", use=use)
    if not held:
        assert len(asyncio.run(work)) == 20
        return
    with pytest.raises(BadRequest, match="Send fewer prompts"):
        asyncio.run(work)


def test_states_are_forgotten_when_a_prompt_is_pooled() -> None:
    """A request of 1024 prompts held the states of all: 4 GiB of a model with 256 numbers for a token."""
    outputs = [SequenceOutput(EngineRequest(str(i), [5], SamplingParams(seed=0)), None) for i in range(50)]
    held = []

    class Ended(Generation):
        async def pieces(self) -> AsyncGenerator[OutputPiece]:
            rows = np.full((1, HIDDEN), self.index, np.float32)
            states = Vectors("float32", HIDDEN, rows.tobytes())
            self._output.record(TokenDelta(str(self.index), [], FinishReason.LENGTH, prompt_hidden_states=states))
            yield OutputPiece(self.index, "", [], "length")

    def pool(states: np.ndarray, token_ids: list[int]) -> np.ndarray:
        held.append(sum(bool(one.prompt_hidden_states().data) for one in outputs))
        return states[0]

    timer: Any = SimpleNamespace()
    ended = [Ended(timer, output, timer, index, None, Style(), None) for index, output in enumerate(outputs)]
    found = asyncio.run(pooled_values(ended, pool))
    assert [value[0] for value in found] == list(range(50))
    assert held[-1] == 0
    assert not any(output.prompt_hidden_states().data for output in outputs)


def test_a_burst_of_requests_leaves_running_ones_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 requests were added before the next step: running streams waited for 0.4 s."""
    added: list[int] = []

    class Slow(FakeEngine):
        def add(self, request: EngineRequest) -> None:
            added[-1:] = [added[-1] + 1]
            time.sleep(0.002)
            super().add(request)

        def step(self) -> list[TokenDelta]:
            added.append(0)
            return super().step()

    added.append(0)
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://burst")
        theirs.connect("inproc://burst")
        for number in range(200):
            request = EngineRequest(str(number), [1, 2], SamplingParams(seed=0, max_tokens=2))
            ours.send(ipc.encode(ipc.Add(request)))
        server = engine_process.EngineServer(Slow(FakeConfig(), lambda stage, share: None), theirs)
        loop = threading.Thread(target=server.run)
        loop.start()
        ended: set[str] = set()
        while len(ended) < 200:
            assert ours.poll(10_000)
            message = ipc.decode_from_engine(ours.recv())
            if isinstance(message, ipc.Deltas):
                ended |= {delta.request_id for delta in message.deltas if delta.finish.value}
        ours.send(ipc.encode(ipc.Shutdown()))
        loop.join(10)
    assert max(added) <= 2 * engine_process.RECEIVE_SECONDS / 0.002
    assert len(added) > 10
