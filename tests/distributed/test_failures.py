"""A rank that dies or stops ends the engine within seconds: requests end with an error, and so do all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.distributed.processes_ import SECONDS, gone, wait_until
from tests.distributed.requests_ import ROOMY
from tests.engine.helpers import engine
from tests.models.make import make_checkpoint
from unisono.types import EngineDead, EngineRequest, SamplingParams

LONG = SamplingParams(max_tokens=3000, ignore_eos=True, seed=1)
FLAGS = ROOMY | {"max_model_len": 4000, "tensor_parallel_size": 2, "enforce_eager": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", hidden_size=64, **sizes)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_in_mid_request(path: Path, sent: signal.Signals) -> None:
    llm = engine(path, **FLAGS)
    (pid,) = llm.engine.runner.team.pids
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate([[1, 2, 3]], LONG)
        except BaseException as error:
            errors.append(error)

    asking = Thread(target=ask)
    asking.start()
    wait_until(lambda: llm.engine.counters.generation_tokens > 5, 60)
    os.kill(pid, sent)
    asking.join(SECONDS)
    assert not asking.is_alive()
    (error,) = errors
    assert isinstance(error, EngineDead)
    assert f"rank 1 of the model (process {pid})" in str(error)
    wait_until(lambda: gone(pid))
    with pytest.raises(EngineDead):
        llm.generate([[1, 2, 3]], LONG)
    llm.shutdown()


def test_a_rank_that_dies_while_nothing_runs(path: Path) -> None:
    llm = engine(path, **FLAGS)
    (pid,) = llm.engine.runner.team.pids
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: llm.engine.runner.team._peers.failure is not None)
    with pytest.raises(EngineDead, match="ended with exit code -9"):
        llm.generate([[1, 2, 3]], LONG)
    llm.shutdown()


def test_rank_death_during_slot_assignment_ends_the_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no longer among those that wait and not yet among those that run; the engine ends all the same."""
    llm = engine(path, **FLAGS)
    team = llm.engine.runner.team
    (pid,) = team.pids

    def dies(*given: Any) -> None:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: team._peers.failure is not None)
        team.check()  # as sending the slot's contents may find out

    monkeypatch.setattr(llm.engine.scheduler.slots, "claim", dies)
    llm.engine.add(EngineRequest("one", [1, 2, 3], LONG))
    with pytest.raises(EngineDead, match="ended with exit code -9"):
        llm.engine.step()
    llm.shutdown()


SCRIPT = """
import sys
from unisono import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, max_num_seqs=2, max_model_len=4000, enforce_eager=True, device="cpu")
print(*llm.engine.runner.team.pids, flush=True)
llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=3900, ignore_eos=True, seed=1))
"""


def test_ranks_end_with_rank_0(path: Path) -> None:
    """Whose program has no guard around its main part."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pids = [int(pid) for pid in first.stdout.readline().split()]
        assert pids
        time.sleep(0.5)
        first.kill()
        wait_until(lambda: all(map(gone, pids)))


def test_an_engine_that_ends_leaves_nothing(path: Path) -> None:
    with engine(path, **FLAGS) as llm:
        pids = llm.engine.runner.team.pids
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5))
        descriptors: Any = len(os.listdir("/proc/self/fd"))
    assert all(map(gone, pids))
    assert len(os.listdir("/proc/self/fd")) < descriptors
