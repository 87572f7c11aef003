"""An exception that one request causes ends that request; the others' bytes are as ever, and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.helpers import engine, idle, prompts
from tests.models.make import make_checkpoint
from unisono.engine.sequence import Sequence
from unisono.entrypoints.llm import LLM
from unisono.types import BadRequest, EngineRequest, FinishReason, SamplingParams, SpeculativeConfig, TokenDelta
from unisono.types.limits import SAMPLING, Real, Whole

BAD = "bad"
Inject = Callable[[pytest.MonkeyPatch, LLM, Sequence], None]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_next"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Few slots and short prompt passes, so that requests meet at all stages; drafts are on."""
    path = make_checkpoint(tmp_path_factory.mktemp("failing") / request.param, request.param)
    spec = SpeculativeConfig("ngram", num_speculative_tokens=2)
    with engine(path, speculative=spec, max_num_seqs=4, max_num_batched_tokens=64, enforce_eager=True) as llm:
        yield llm


def boom(*_: Any, **__: Any) -> Any:
    raise OverflowError("Python int too large to convert to C long")


def requests() -> list[EngineRequest]:
    """Six, the third of which is the bad one. They share a beginning, so the prefix cache has something to spoil."""
    made = []
    common = prompts(1, 256, 40, 41, seed=9)[0]
    for i, prompt in enumerate(prompts(6, 256, 20, 60, seed=4)):
        params = SamplingParams(
            seed=i,
            temperature=0.8,
            max_tokens=8,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=1 if i in (2, 3) else None,
        )
        made.append(EngineRequest(BAD if i == 2 else f"r{i}", common + prompt, params))
    return made


def run(llm: LLM, given: list[EngineRequest], after: Callable[[], None] = lambda: None) -> dict[str, TokenDelta]:
    """The whole output of each request. Those that ``add`` refuses have an error without tokens."""
    found: dict[str, TokenDelta] = {}
    for request in given:
        try:
            llm.engine.add(request)
        except Exception as error:
            found[request.request_id] = TokenDelta(request.request_id, [], FinishReason.ABORT, error=str(error))
    after()
    while llm.engine.has_work():
        for delta in llm.engine.step():
            if delta.request_id in found:
                found[delta.request_id].absorb(delta)
            else:
                found[delta.request_id] = delta
    return found


def told(delta: TokenDelta) -> Any:
    return delta.token_ids, delta.finish, delta.error, delta.logprobs, delta.prompt_logprobs


def state_of(sequence: Sequence, name: str) -> Any:
    return next(state for feature, state in sequence.states.items() if feature.name == name)


def wrong_slot(patch: pytest.MonkeyPatch, llm: LLM, sequence: Sequence) -> None:
    object.__setattr__(sequence.request.params, "top_k", 2**40)


def wrong_progress(patch: pytest.MonkeyPatch, llm: LLM, sequence: Sequence) -> None:
    begin = llm.engine.scheduler.progress.begin

    def failing(slot: int, owner: int, *rest: Any) -> None:
        begin(slot, owner, *rest)
        if owner == sequence.order:
            boom()

    patch.setattr(llm.engine.scheduler.progress, "begin", failing)


def not_ready(patch: pytest.MonkeyPatch, llm: LLM, sequence: Sequence) -> None:
    patch.setattr(state_of(sequence, "prompt_logprobs"), "ready", boom)


def no_reach(patch: pytest.MonkeyPatch, llm: LLM, sequence: Sequence) -> None:
    patch.setattr(state_of(sequence, "prompt_logprobs"), "reach", boom)


def no_fill(kind: str) -> Inject:
    def inject(patch: pytest.MonkeyPatch, llm: LLM, sequence: Sequence) -> None:
        name = "output_logprobs" if kind == "round" else "prompt_logprobs"
        [feature] = [one for one in sequence.states if one.name == name]
        fill, state = feature.fill, sequence.states[feature]

        def failing(host: Any) -> Any:
            if host.kind in (kind, "mixed") and any(row.state is state for row in host.rows):
                boom()
            return fill(host)

        patch.setattr(feature, "fill", failing)

    return inject


def no_tokens(patch: pytest.MonkeyPatch, llm: LLM, sequence: Sequence) -> None:
    """A token id that int32 does not hold."""
    sequence.tokens[50] = 2**40


def no_read(patch: pytest.MonkeyPatch, llm: LLM, sequence: Sequence) -> None:
    patch.setattr(state_of(sequence, "prompt_logprobs"), "take", boom)


def no_deliver(patch: pytest.MonkeyPatch, llm: LLM, sequence: Sequence) -> None:
    patch.setattr(state_of(sequence, "output_logprobs"), "deliver", boom)


INJECTED: dict[str, tuple[str, Inject]] = {
    "slot fill": ("slot", wrong_slot),
    "progress": ("slot", wrong_progress),
    "ready": ("slot", not_ready),
    "reach": ("batch", no_reach),
    "prompt's batch": ("batch", no_fill("extend")),
    "round's batch": ("batch", no_fill("round")),
    "tokens": ("slot", no_tokens),
    "reading a prompt pass": ("result", no_read),
    "delivering": ("result", no_deliver),
}


def quiet(llm: LLM) -> dict[str, TokenDelta]:
    llm.engine.reset_prefix_cache()
    found = run(llm, requests())
    idle(llm)
    return found


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, TokenDelta]:
    """What the requests get while nothing fails."""
    return quiet(llm)


def failures(llm: LLM) -> dict[str, float]:
    return {labels["stage"]: value for name, _, labels, value, _ in llm.engine.metrics() if name == "request_failures"}


@pytest.mark.parametrize("where", INJECTED)
def test_one_request_fails(
    llm: LLM, expected: dict[str, TokenDelta], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    stage, inject = INJECTED[where]
    before = failures(llm)
    llm.engine.reset_prefix_cache()
    free = llm.engine.pool.available
    checked: list[int] = []
    check = llm.engine.check_integrity
    monkeypatch.setattr(llm.engine, "check_integrity", lambda: (checked.append(1), check()))

    def spoil() -> None:
        inject(monkeypatch, llm, llm.engine._sequences[BAD])

    found = run(llm, requests(), spoil)
    idle(llm)
    assert found[BAD].finish is FinishReason.ABORT
    assert found[BAD].error is not None
    assert "failed on this request" not in found[BAD].error, "the edge says so"
    for name in expected.keys() - {BAD}:
        assert told(found[name]) == told(expected[name]), name
    assert checked or where == "delivering"
    after = failures(llm)
    assert {one: after[one] - before[one] for one in after if after[one] != before[one]} == {stage: 1}
    monkeypatch.undo()
    llm.engine.check_integrity()
    llm.engine.reset_prefix_cache()
    assert llm.engine.pool.available == free, "no page is lost"
    assert llm.engine.scheduler.slots.available == 4
    assert {name: told(one) for name, one in quiet(llm).items()} == {name: told(one) for name, one in expected.items()}


def test_arrival(llm: LLM, expected: dict[str, TokenDelta], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a request that ``add`` fails on."""
    before = failures(llm)
    llm.engine.reset_prefix_cache()
    [feature] = [one for one in llm.engine.runner.request_features if one.name == "prompt_logprobs"]
    begin = feature.begin
    monkeypatch.setattr(feature, "begin", lambda request: boom() if request.request_id == BAD else begin(request))
    found = run(llm, requests())
    idle(llm)
    assert "too large" in str(found[BAD].error)
    for name in expected.keys() - {BAD}:
        assert told(found[name]) == told(expected[name])
    assert failures(llm)["arrival"] == before["arrival"] + 1
    monkeypatch.undo()
    llm.engine.check_integrity()
    assert told(quiet(llm)[BAD]) == told(expected[BAD])


NUMBERS = {name: limit for name, limit in SAMPLING.items() if isinstance(limit, Whole | Real)}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_extremes_of_every_number_run(llm: LLM, name: str) -> None:
    """What a field takes fits every type on its way, such as the int64 of the engine's arrays; else it is refused."""
    limit, before = NUMBERS[name], failures(llm)
    odd = [limit.least, limit.most, limit.least + 1, limit.most - 1, 0.5, 2**31 - 1, 2**31, 2**63 - 1, 2**63]
    for value in [number for number in odd if limit.holds(number)]:
        with suppress(BadRequest):
            params = SamplingParams(**{"max_tokens": 3, "seed": 1, "ignore_eos": True, name: value})
            if params.max_tokens is not None and params.max_tokens > 3:
                params = replace(params, ignore_eos=False, stop_token_ids=(3,), logit_bias={3: 100.0})
            llm.engine.add(EngineRequest(BAD, [5, 6, 7], params, params.stop_token_ids))
            found = run(llm, [])[BAD]
            assert found.error is None, (value, found.error)
    assert failures(llm) == before
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), RuntimeError("CUDA error: an illegal memory access")]
)
def test_errors_of_the_device_end_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Nothing on the device can be trusted after them."""

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    [feature] = [one for one in llm.engine.runner.request_features if one.name == "prompt_logprobs"]
    monkeypatch.setattr(feature, "fill", failing)
    llm.engine.add(requests()[2])
    with pytest.raises(type(error)):
        run(llm, [])
    monkeypatch.undo()
    llm.engine.abort(BAD)
    idle(llm)
