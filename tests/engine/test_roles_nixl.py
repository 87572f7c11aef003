"""Prefill and decode apart with NIXL between them: the text is that of one engine, whatever becomes of the peer."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from tests.engine.bundled import SETUPS
from tests.engine.helpers import engine, mixed_params, prompts, tokens
from tests.engine.two_engines import decode_engine, prefill_engine, results, stepping
from tests.transport.nixl_library import LIBRARIES, NEEDS_NIXL, use_library, without_library
from unisono.config.env import TRANSFER_KEY
from unisono.engine.disaggregation import roles
from unisono.entrypoints.llm import LLM
from unisono.kv.specs import PAGE_SIZE
from unisono.models.load.checkpoint import Checkpoint
from unisono.transport import nixl_channel
from unisono.transport.nixl_agent import Reading
from unisono.transport.nixl_channel import LandingChannel
from unisono.types import ConfigError, EngineRequest, SamplingParams

WHERE = "tcp://127.0.0.1:0"
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)
CELLS = [
    *(
        pytest.param("tiny-hybrid, mtp", 5, which, marks=marks)
        for which, marks in (("imitated", ()), ("real", NEEDS_NIXL))
    ),
    pytest.param("tiny, eagle3", 200, "imitated", marks=pytest.mark.full),
    *(pytest.param(name, 200, "real", marks=[pytest.mark.full, NEEDS_NIXL]) for name in SETUPS),
]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSFER_KEY.name, "secret")
    monkeypatch.setattr(nixl_channel, "SEGMENT", 8192)  # of the bundled models a page has a few KiB


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_library(request.param, monkeypatch)


def counts(llm: LLM, name: str) -> dict[str, float]:
    """A metric by transport."""
    return {
        labels["transport"]: value for found, _, labels, value, _ in roles.metrics(llm.engine.roles) if found == name
    }


@pytest.mark.parametrize(("setup", "count", "library"), CELLS)
def test_same_bytes(setup: str, count: int, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imitation, (model, spec) = use_library(library, monkeypatch), SETUPS[setup]
    batch, params = prompts(count, 250, low=3, high=170, seed=2), mixed_params(count, max_tokens=5)
    with engine(model, enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    flags: dict[str, Any] = {"speculative": spec, "transfer_backend": "nixl", "enforce_eager": True}
    with prefill_engine(model, WHERE, **flags) as one, stepping(one):
        with decode_engine(model, one, num_pages=100 + 20 * count, **flags) as other:
            outputs = other.generate(batch, params)
            found, told = results(other), roles.info(other.engine.roles)["client"]
            received = counts(other, "kv_transfer_bytes_received")
            other.engine.check_integrity()
        sent = counts(one, "kv_transfer_bytes_sent")
        one.engine.check_integrity()
    differ = sum(o.outputs[0].token_ids != e for o, e in zip(outputs, expected, strict=True))
    assert differ == 0, f"{differ} of {count} answers differ"
    assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // PAGE_SIZE * PAGE_SIZE for p in batch]
    assert found == {"done": sum(len(p) > PAGE_SIZE for p in batch)}
    assert received == sent == {"nixl": sent["nixl"], "tcp": 0}
    assert told["bytes_by_transport"] == {"nixl": sent["nixl"]}  # type: ignore[index]
    assert set(told["peers"].values()) == {"nixl"}  # type: ignore[index]
    until = time.monotonic() + 30  # a connection's thread sees a moment later that its peer is gone
    while imitation.agents and time.monotonic() < until:
        time.sleep(0.01)
    assert not imitation.agents, "engines that ended leave nothing registered"


def expected_of(prompt: list[int]) -> list[int]:
    with engine("tiny", enforce_eager=True) as llm:
        return tokens(llm, [prompt], PARAMS)[0]


def stop_to_answer(after: int, patch: pytest.MonkeyPatch) -> threading.Event:
    """Let this number of payloads be read, and nothing from then on; the event says that a read hangs."""
    stuck, payloads = threading.Event(), itertools.count()
    receive, done = LandingChannel._receive_payload, Reading.done

    def count(channel: LandingChannel, size: int) -> Any:
        if size and next(payloads) >= after:
            stuck.set()
        return receive(channel, size)

    patch.setattr(LandingChannel, "_receive_payload", count)
    patch.setattr(Reading, "done", lambda reading: not stuck.is_set() and done(reading))
    return stuck


def test_stalled_peer_memory_falls_back_to_local_prefill(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a prompt. The engine steps on, uses what has come and computes the rest."""
    prompt = prompts(1, 250, low=200, high=201, seed=4)[0]
    expected = expected_of(prompt)
    flags: dict[str, Any] = {"transfer_backend": "nixl", "enforce_eager": True}
    with (
        prefill_engine("tiny", WHERE, max_num_batched_tokens=32, **flags) as one,
        decode_engine("tiny", one, **flags) as other,
    ):
        stuck = stop_to_answer(after=2, patch=monkeypatch)
        other.engine.add(EngineRequest("a", prompt, PARAMS))
        (waiting,) = other.engine.roles.client._open  # type: ignore[union-attr]
        answer: list[int] = []
        steps = cached = 0  # steps: while the read hangs; cached: the first delta has it
        while other.engine.has_work():
            if one.engine.has_work():
                one.engine.step()
            for delta in other.engine.step():
                answer += delta.token_ids
                cached += delta.cached_tokens
            steps += stuck.is_set()
            if steps == 5:
                assert other.engine.arrivals, "no step waits for the peer"
                assert not answer
                waiting._timeout = 0.0
            time.sleep(0.001)
        assert answer == expected
        assert 0 < cached < 192
        assert results(other) == {"timeout": 1}
        other.engine.check_integrity()


def test_auto_falls_back_and_nixl_does_not(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A prefill engine that takes TCP only: ``auto`` says what carries its pages, ``nixl`` computes here."""
    use_library("imitated", monkeypatch)
    prompt = prompts(1, 250, low=100, high=101, seed=4)[0]
    expected = expected_of(prompt)
    with prefill_engine("tiny", WHERE, enforce_eager=True) as one, stepping(one):
        for backend, result in (("auto", "done"), ("nixl", "refused")):
            with decode_engine("tiny", one, transfer_backend=backend, enforce_eager=True) as other:
                assert tokens(other, [prompt], PARAMS)[0] == expected
                assert results(other) == {result: 1}
                carried = counts(other, "kv_transfer_bytes_received")
                assert (carried["tcp"] > 0) == (result == "done")
                assert "nixl" not in carried
    assert "come over TCP" in caplog.text
    assert "one end takes tcp" in caplog.text


@pytest.mark.parametrize("flags", [{"prefill_urls": "h:2", "role": "decode"}, {"transfer_listen": WHERE}])
def test_without_the_package(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the model is read."""
    without_library(monkeypatch)
    monkeypatch.setattr(Checkpoint, "open", lambda *_: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=r"pip install 'unisono\[nixl\]'"):
        engine("tiny", enforce_eager=True, transfer_backend="nixl", **flags)


def test_a_unix_socket_has_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_library("imitated", monkeypatch)
    with pytest.raises(ConfigError, match="shared memory"):
        engine("tiny", enforce_eager=True, transfer_backend="nixl", role="decode", prefill_urls="unix:///x")
    with pytest.raises(ConfigError, match="--transfer-backend 'mooncake'"):
        engine("tiny", enforce_eager=True, transfer_backend="mooncake")
