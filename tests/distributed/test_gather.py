"""Gathers through shared memory: every rank's part, in order, at any size; a rank that gives up frees the others."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from unisono.distributed import gather, shared_memory
from unisono.distributed.gather import Ranks
from unisono.distributed.shared_memory import SharedMemory, make_memory
from unisono.graphs import Buffers, BufferSchema, Field, GraphKey, PassShape, Program
from unisono.graphs.tape import Tape
from unisono.types import EngineDead

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> list[SharedMemory]:
    """Four ranks, as four mappings of one memory."""
    descriptor = make_memory(4)
    made = [SharedMemory(descriptor, index, 4) for index in range(4)]
    os.close(descriptor)
    return made


def everywhere(ranks: list[SharedMemory], call) -> list:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [done.result(60) for done in [pool.submit(call, rank) for rank in ranks]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (0, 4), (64, 100), (7, 300_001)])
def test_parts_come_together_in_order(
    ranks: list[SharedMemory], rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(rows * columns * 4).view(rows, 4 * columns).to(dtype)

    def three_times(rank: SharedMemory) -> list[torch.Tensor]:
        part = whole[:, rank.index * columns : (rank.index + 1) * columns].contiguous()
        return [rank.all_gather(part + 0), rank.all_gather(part), rank.all_gather(part)]

    for found in everywhere(ranks, three_times):
        assert all(torch.equal(each, whole) for each in found)


def test_a_waiting_rank_raises_when_another_gives_up(ranks: list[SharedMemory]) -> None:
    def call(rank: SharedMemory) -> str:
        if rank.index == 3:
            rank.give_up()
            return "gave up"
        with pytest.raises(EngineDead):
            rank.all_gather(torch.zeros(2, 2))
        return "raised"

    assert everywhere(ranks, call) == ["raised"] * 3 + ["gave up"]


def test_a_tape_replays_gathers(ranks: list[SharedMemory]) -> None:
    """The op is recorded once and asks the other ranks at every replay."""
    numbers = [gather.open_transport(rank) for rank in ranks[:]]
    schema = BufferSchema((Field("x", torch.float32, ("rows", 2)), Field("y", torch.float32, ("rows", 8), output=True)))

    def call(rank: SharedMemory) -> list[list[float]]:
        mine = Ranks(rank.index, 4, transport=numbers[rank.index])
        with torch.inference_mode():
            program = Program("p", schema, lambda b: b.y.copy_(mine.gather(b.x * 2)))
            tape = Tape(program, GraphKey("p", PassShape(1)), Buffers(schema, PassShape(1), torch.device("cpu")))
            assert [op for op in tape.ops if "all_gather" in op] == ["unisono.all_gather.default"]
            seen = []
            for turn in range(3):
                tape.buffers.load({"x": [[rank.index, turn]]})
                tape.replay()
                seen.append(tape.buffers.fetch().wait()["y"][0].tolist())
        return seen

    expected = [[v for rank in range(4) for v in (2.0 * rank, 2.0 * turn)] for turn in range(3)]
    assert everywhere(ranks, call) == [expected] * 4
    for number in numbers:
        gather.close_transport(number)


def test_few_bytes_at_once_go_in_turns(ranks: list[SharedMemory]) -> None:
    x = torch.randn(3, shared_memory.PLACE // 4)
    for found in everywhere(ranks, lambda rank: rank.all_gather(x)):
        assert torch.equal(found, x.repeat(1, 4))


@pytest.mark.parametrize(
    ("before", "what"),
    [
        (2**31 - 3, "words"),
        (-3, "fused"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((-3, "words"), (-1, "words"), (2**31 - 5, "fused"))),
    ],
)
def test_the_kernels_between_gpus_in_the_interpreter(before: int, what: str) -> None:
    """Two processes, counters that overflow and pass 0, rows of one program and of several turns of all; norms and SiLU
    in the same launch, between gathers of words alone."""
    subprocess.run(
        [sys.executable, "-m", "tests.distributed.interpreted_gather", str(before), what],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        check=True,
        timeout=240,
    )
