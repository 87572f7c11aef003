"""Prefill and decode apart: pages come from another engine, and no byte of any text depends on it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.bundled import SETUPS
from tests.engine.helpers import counted, engine, mixed_params, prompts, tokens
from tests.engine.two_engines import decode_engine, prefill_engine, results, stepping
from unisono.config.env import TRANSFER_KEY
from unisono.kv.specs import PAGE_SIZE
from unisono.types import ConfigError, EngineRequest, SamplingParams

FAST = {"tiny, eagle3": "tcp", "tiny-hybrid, mtp": "unix"}
CELLS = [
    *(pytest.param(name, transport, 14) for name, transport in FAST.items()),
    *(pytest.param(name, ("tcp", "unix")[i % 2], 200, marks=pytest.mark.full) for i, name in enumerate(SETUPS)),
]
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSFER_KEY.name, "secret")


def address(transport: str, folder: Path) -> str:
    return "tcp://127.0.0.1:0" if transport == "tcp" else f"unix://{folder}/prefill"


@pytest.mark.parametrize(("setup", "transport", "count"), CELLS)
def test_same_bytes(setup: str, transport: str, count: int, tmp_path: Path) -> None:
    model, spec = SETUPS[setup]
    batch, params = prompts(count, 250, low=3, high=170, seed=2), mixed_params(count, max_tokens=5)
    with engine(model, enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    with prefill_engine(model, address(transport, tmp_path), speculative=spec) as one, stepping(one):
        with decode_engine(model, one, speculative=spec, num_pages=100 + 20 * count) as other:
            outputs = other.generate(batch, params)
            found, passes = results(other), counted(other)
            other.engine.check_integrity()
        computed = counted(one)
        one.engine.check_integrity()
        assert not one.engine.roles.service._jobs  # type: ignore[union-attr]
    differ = sum(o.outputs[0].token_ids != e for o, e in zip(outputs, expected, strict=True))
    assert differ == 0, f"{differ} of {count} answers differ"
    assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // PAGE_SIZE * PAGE_SIZE for p in batch]
    assert found == {"done": sum(len(p) > PAGE_SIZE for p in batch)}
    assert all(kind != "eager" for _, kind, _ in passes)
    assert {program for program, _, _ in computed} == {"extend"}, "a prefill engine runs prompts only"


def test_a_prefill_engine_captures_no_rounds(tmp_path: Path) -> None:
    with prefill_engine("tiny", address("unix", tmp_path), graph_capture="start") as llm:
        assert {graph.key.program for graph in llm.engine.runner.planner.graphs()} <= {"extend", "score"}
        assert len(tokens(llm, [[1, 2, 3]], PARAMS)[0]) == 6, "it still serves"


def test_pages_leave_while_the_prompt_runs(tmp_path: Path) -> None:
    prompt = prompts(1, 250, low=200, high=201, seed=4)[0]
    with (
        prefill_engine("tiny", address("unix", tmp_path), max_num_batched_tokens=32) as one,
        decode_engine("tiny", one) as other,
    ):
        other.engine.add(EngineRequest("a", prompt, PARAMS))
        seen = set()
        until = time.monotonic() + 60
        while other.engine.arrivals and time.monotonic() < until:
            if one.engine.has_work():
                one.engine.step()
            other.engine.step()
            seen.add(len(other.engine.pool.tree.match(prompt)))
            time.sleep(0.002)
        # a busy machine hands over what several prompt passes completed at once
        assert len({count for count in seen if 0 < count < 12}) >= 2, seen
        other.engine.abort("a")
        other.engine.check_integrity()


def expected_of(prompt: list[int]) -> list[int]:
    with engine("tiny", enforce_eager=True) as llm:
        return tokens(llm, [prompt], PARAMS)[0]


def test_dead_and_foreign_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is computed here, and the reason is counted: nobody there, another model, another key."""
    prompt = prompts(1, 250, low=100, high=101, seed=4)[0]
    expected = expected_of(prompt)
    with decode_engine("tiny", f"unix://{tmp_path}/nobody", enforce_eager=True) as llm:
        assert tokens(llm, [prompt], PARAMS)[0] == expected
        llm.engine.reset_prefix_cache()
        assert tokens(llm, [prompt], PARAMS)[0] == expected
        assert results(llm) == {"no connection": 1, "no peer": 1}, "it is left alone for a while"
    where = address("unix", tmp_path)
    with (
        prefill_engine("tiny", where, load_format="dummy", enforce_eager=True),
        decode_engine("tiny", where, enforce_eager=True) as llm,
    ):
        assert tokens(llm, [prompt], PARAMS)[0] == expected
        assert results(llm) == {"refused": 1}
    with prefill_engine("tiny", where, enforce_eager=True):
        monkeypatch.setenv(TRANSFER_KEY.name, "another")
        with decode_engine("tiny", where, enforce_eager=True) as llm:
            assert tokens(llm, [prompt], PARAMS)[0] == expected
            assert results(llm) == {"refused": 1}


def test_silent_and_dying_peers(tmp_path: Path) -> None:
    """A peer that stops in the middle of a prompt: what has come is used, the rest is computed here."""
    prompt = prompts(1, 250, low=200, high=201, seed=4)[0]
    expected = expected_of(prompt)
    for name in ("timeout", "connection lost"):
        one = prefill_engine("tiny", address("unix", tmp_path), max_num_batched_tokens=32, enforce_eager=True)
        with decode_engine("tiny", one, transfer_timeout=0.6, enforce_eager=True) as other:
            other.engine.add(EngineRequest("a", prompt, PARAMS))
            until = time.monotonic() + 60
            while len(other.engine.pool.tree.match(prompt)) < 4 and time.monotonic() < until:
                if one.engine.has_work():
                    one.engine.step()
                other.engine.step()
            if name == "connection lost":
                one.shutdown()
            answer: list[int] = []
            cached = 0  # which the first delta has
            while other.engine.has_work():
                for delta in other.engine.step():
                    answer += delta.token_ids
                    cached += delta.cached_tokens
            assert answer == expected
            assert 0 < cached < 192
            assert results(other) == {name: 1}
            other.engine.check_integrity()
        if name == "timeout":
            one.shutdown()


def test_aborts_are_forwarded_to_the_prefill_engine(tmp_path: Path) -> None:
    prompt = prompts(1, 250, low=200, high=201, seed=4)[0]
    with (
        prefill_engine("tiny", address("unix", tmp_path), max_num_batched_tokens=16, enforce_eager=True) as one,
        decode_engine("tiny", one, enforce_eager=True) as other,
    ):
        other.engine.add(EngineRequest("a", prompt, PARAMS))
        until = time.monotonic() + 30
        while not one.engine.scheduler.has_work and time.monotonic() < until:
            one.engine.step()
        other.engine.abort("a")
        assert results(other) == {"aborted": 1}
        assert not other.engine.has_work()
        other.engine.check_integrity()
        while one.engine.roles.service._jobs and time.monotonic() < until:  # type: ignore[union-attr]
            if one.engine.roles.service.has_requests:  # type: ignore[union-attr]
                one.engine.step()
        while one.engine.has_work():
            one.engine.step()
        assert one.engine.counters.generation_tokens == 0, "the rest of the prompt was not computed"
        one.engine.check_integrity()


def test_same_bytes_with_scarce_pages_on_both_engines(tmp_path: Path) -> None:
    """More prompts than pages on both sides, with preemption: some pages find no room, and every text is the same."""
    batch, params = prompts(10, 250, low=60, high=110, seed=7), mixed_params(10, max_tokens=12)
    with engine("tiny", enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    scarce: dict[str, Any] = {"num_pages": 18, "max_model_len": 160, "enforce_eager": True}
    with (
        prefill_engine("tiny", address("unix", tmp_path), **scarce) as one,
        stepping(one),
        decode_engine("tiny", one, **scarce) as other,
    ):
        assert tokens(other, batch, params) == expected
        assert results(other).get("no room")
        other.engine.check_integrity()


def test_salted_prompts_share_nothing(tmp_path: Path) -> None:
    prompt = prompts(1, 250, low=100, high=101, seed=4)[0]
    with (
        prefill_engine("tiny", address("unix", tmp_path), enforce_eager=True) as one,
        stepping(one),
        decode_engine("tiny", one, enforce_eager=True) as other,
    ):
        for i, (salt, pages) in enumerate([("a", 0), ("b", 0), ("a", 6)]):
            other.engine.add(EngineRequest(str(i), prompt, PARAMS, cache_salt=salt))
            known = {id(node) for node in other.engine.pool.tree.nodes()}
            assert len(known) == 6 * min(i, 2)
            cached = 0
            while other.engine.has_work():
                cached += sum(delta.cached_tokens for delta in other.engine.step())
            assert cached == 96, pages
        assert results(other) == {"done": 2}
        assert not one.engine.scheduler.prefix_hits, "nor on the prefill engine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"role": "prefill"}, "--transfer-listen"),
        ({"role": "decode"}, "--prefill-url"),
        ({"role": "prefill", "transfer_listen": "h:1", "prefill_urls": "h:2"}, "leave --prefill-url out"),
        ({"role": "decode", "prefill_urls": "h:2", "enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"role": "both", "transfer_timeout": 0.0}, "--transfer-timeout"),
        ({"role": "decode", "prefill_urls": "nixl://h:2"}, "--transfer-backend nixl"),
        ({"role": "prefill", "transfer_listen": "unix:///proc/x"}, "--transfer-listen unix:///proc/x"),
    ],
)
def test_invalid_role_flags_raise(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine("tiny", enforce_eager=True, **flags)


def test_tcp_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRANSFER_KEY.name)
    with pytest.raises(ConfigError, match=TRANSFER_KEY.name):
        engine("tiny", enforce_eager=True, role="decode", prefill_urls="tcp://localhost:1")
