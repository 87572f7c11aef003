"""Prefill and decode apart, each on several ranks: each part of a page goes to its like, and no byte differs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes_ import gone, wait_until
from tests.engine.bundled import SETUPS
from tests.engine.helpers import counted, engine, mixed_params, prompts, tokens
from tests.engine.two_engines import decode_engine, prefill_engine, results, stepping
from unisono.kv.specs import PAGE_SIZE
from unisono.types import EngineDead, SamplingParams

CELLS = [
    pytest.param("tiny, eagle3", 2, 10),
    *(pytest.param(name, ranks, 100, marks=pytest.mark.full) for name in SETUPS for ranks in (2, 4)),
]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(("setup", "ranks", "count"), CELLS)
def test_same_bytes(setup: str, ranks: int, count: int, tmp_path: Path) -> None:
    model, spec = SETUPS[setup]
    batch, params = prompts(count, 250, low=3, high=170, seed=2), mixed_params(count, max_tokens=5)
    with engine(model, enforce_eager=True) as llm:
        expected = tokens(llm, batch, params)
    flags: dict[str, Any] = {"speculative": spec, "tensor_parallel_size": ranks}
    with prefill_engine(model, f"unix://{tmp_path}/prefill", **flags) as one, stepping(one):
        with decode_engine(model, one, num_pages=100 + 20 * count, **flags) as other:
            outputs = other.generate(batch, params)
            found, passes = results(other), counted(other)
            other.engine.check_integrity()
        one.engine.check_integrity()
    differ = sum(o.outputs[0].token_ids != e for o, e in zip(outputs, expected, strict=True))
    print(f"{setup}, {ranks} ranks: {differ} of {count} differ", flush=True)
    assert differ == 0
    assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // PAGE_SIZE * PAGE_SIZE for p in batch]
    assert found == {"done": sum(len(p) > PAGE_SIZE for p in batch)}
    assert all(kind != "eager" for _, kind, _ in passes)


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """Its pages are cut otherwise: prompts are computed here, with the same bytes."""
    batch = prompts(2, 250, low=60, high=100, seed=4)
    with engine("tiny", enforce_eager=True) as llm:
        expected = tokens(llm, batch, GREEDY)
    where = f"unix://{tmp_path}/prefill"
    with (
        prefill_engine("tiny", where, enforce_eager=True) as one,
        stepping(one),
        decode_engine("tiny", where, enforce_eager=True, tensor_parallel_size=2) as other,
    ):
        assert tokens(other, batch, GREEDY) == expected
        assert results(other)["refused"] >= 1


def test_a_rank_that_dies_ends_a_prefill_engine(tmp_path: Path) -> None:
    """The decode engine computes the rest by itself, whatever bytes were under way."""
    batch = prompts(3, 250, low=100, high=160, seed=4)
    with engine("tiny", enforce_eager=True) as llm:
        expected = tokens(llm, batch, GREEDY)
    one = prefill_engine("tiny", f"unix://{tmp_path}/prefill", enforce_eager=True, tensor_parallel_size=2)
    with decode_engine("tiny", one, enforce_eager=True, tensor_parallel_size=2, transfer_timeout=1.0) as other:
        assert one.engine.runner.team is not None
        (rank,) = one.engine.runner.team.pids
        os.kill(rank, signal.SIGKILL)
        dies = threading.Thread(target=_step_until_dead, args=(one,))
        dies.start()
        assert tokens(other, batch, GREEDY) == expected
        dies.join(10)
        assert not dies.is_alive()
        assert set(results(other)) <= {"connection lost", "no connection", "no peer", "failed", "timeout"}
    wait_until(lambda: gone(rank))
    one.shutdown()


def _step_until_dead(llm: Any) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if llm.engine.has_work():
                llm.engine.step()
            llm.engine.check_ranks()
        except EngineDead:
            return
        time.sleep(0.002)
