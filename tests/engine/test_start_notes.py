"""Notes of earlier starts: proofs and costs that are read again, for the same machine and settings alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.config import EngineConfig, Hardware, resolve
from unisono.config.catalog import bundled
from unisono.distributed import cuda_driver
from unisono.engine.startup import start_notes
from unisono.engine.startup.memory import LIBRARY_BYTES, peak_bytes
from unisono.engine.startup.start_notes import StartNotes, shape_files
from unisono.graphs.cost import PassCost
from unisono.kernels.proofs import EXACT_KERNELS, ExactKernel, remembering, results
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SpeculativeConfig

COST = PassCost(((1, 2.5), (16, 3.0)), eager_ms=float("inf"), capture_ms=40.0, graph_bytes=1 << 20)
GPU: dict[str, Any] = {"name": "H200", "uuid": "uuid-0", "total_memory": 1 << 37, "multi_processor_count": 132}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The properties of a GPU, which a test may change."""
    gpu = dict(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**gpu))
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: gpu.get("driver", 12080))
    monkeypatch.setenv("UNISONO_START_NOTES", str(tmp_path / "notes"))
    start_notes._machine.cache_clear()
    yield gpu
    start_notes._machine.cache_clear()


@pytest.fixture(autouse=True)
def known_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that tells cuBLAS's version, which a CPU build of torch does not bring."""
    monkeypatch.setattr(start_notes, "_version", lambda name: "13.1" if name == start_notes.BLAS[0] else "")


@pytest.fixture
def kernel() -> Iterator[ExactKernel[Any]]:
    """A kernel whose comparison counts its runs."""
    compared: list[int] = []

    def same_bits(n: int) -> bool:
        compared.append(n)
        return n % 2 == 0

    found = ExactKernel("a test's kernel", lambda n: ((n, torch.float32),), same_bits)
    found.runs = compared  # type: ignore[attr-defined]
    yield found
    del EXACT_KERNELS[found.name]


def notes(ranks: int = 1, **flags: Any) -> StartNotes:
    checkpoint = Checkpoint.open("tiny")
    config = resolve(EngineConfig("tiny", device="cpu", **flags), Hardware(torch.device("cpu"), "CPU", 0), checkpoint)
    config = replace(config, device=torch.device("cuda:0"))
    start_notes._machine.cache_clear()
    return StartNotes.of(config, shape_files(config, checkpoint.path), ranks)


def test_proofs_need_a_known_cublas(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert notes().proofs is not None
    monkeypatch.setattr(start_notes, "_version", lambda name: "")
    assert notes().proofs is None
    assert notes().costs is not None


def test_costs_of_another_form_are_not_read(machine: dict[str, Any]) -> None:
    file = notes().costs
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    for text in ('{"round": {"points": 3}}', '{"round": 4}', "[]", "{"):
        file.write_text(text)
        assert notes().costs_known == {}


def test_proofs_and_bytes_of_another_form_are_not_read(machine: dict[str, Any]) -> None:
    """A text is no result: it would prove a kernel."""
    found = notes()
    assert found.proofs is not None
    assert found.memory is not None
    found.proofs.parent.mkdir(parents=True, exist_ok=True)
    found.proofs.write_text('{"a": true, "b": false, "c": "false", "d": 1}')
    for text in ('{"allocated": true}', '{"allocated": -1}', '{"allocated": "9"}'):
        found.memory.write_text(text)
        again = notes()
        assert again.known == {"a": True, "b": False}
        assert again.allocated_known is None


def test_digests_tell_parts_apart() -> None:
    assert start_notes._digest("a", "bc") != start_notes._digest("ab", "c") != start_notes._digest("abc")


def test_remembered_comparisons_are_not_run(kernel: Any) -> None:
    with remembering({"a test's kernel: ((4, torch.float32),)": True, "a test's kernel: ((6, torch.float32),)": False}):
        kernel.rehearse(4)
        assert kernel.prove(4)
        assert not kernel.prove(6), "a difference is remembered, too"
        assert not kernel.prove(5)
    assert kernel.runs == [5]
    assert kernel.serves((4, torch.float32))
    assert not kernel.serves((6, torch.float32))
    assert {name: same for name, same in results().items() if name.startswith("a test's")} == {
        "a test's kernel: ((4, torch.float32),)": True,
        "a test's kernel: ((6, torch.float32),)": False,
        "a test's kernel: ((5, torch.float32),)": False,
    }
    kernel.prove(8)
    assert kernel.runs == [5, 8], "nothing is remembered outside"


def test_a_second_start_reads_what_the_first_one_wrote(machine: dict[str, Any], kernel: Any) -> None:
    first = notes()
    assert (first.known, first.costs_known) == ({}, {})
    with first.proving():
        assert kernel.prove(4)
    first.save({"round": COST})
    kernel.compared.clear()
    second = notes()
    assert second.costs_known == {"round": COST}
    with second.proving():
        assert kernel.prove(4)
    assert kernel.runs == [4]
    assert "1 costs of passes" in second.decision()[1]


@pytest.mark.parametrize("change", [{"uuid": "uuid-1"}, {"name": "H100"}, {"driver": 13000}])
def test_another_machine_reads_nothing(machine: dict[str, Any], kernel: Any, change: dict[str, Any]) -> None:
    first = notes()
    with first.proving():
        kernel.prove(4)
    first.save({"round": COST})
    machine |= change
    assert (notes().known, notes().costs_known) == ({}, {})


def test_changed_sources_and_variables_read_nothing(
    machine: dict[str, Any], kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with notes().proving():
        kernel.prove(4)
    assert notes().known
    with monkeypatch.context() as patch:
        patch.setattr(start_notes, "sources", lambda: "others")
        assert not notes().known
    with monkeypatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        assert not notes().known
    assert notes().known


def test_costs_are_of_one_configuration(machine: dict[str, Any], kernel: Any) -> None:
    first = notes()
    with first.proving():
        kernel.prove(4)
    first.save({"round": COST})
    for other in (
        notes(max_num_seqs=3),
        notes(ranks=2),
        notes(speculative=SpeculativeConfig("eagle3", "tiny-eagle3", num_speculative_tokens=3)),
    ):
        assert not other.costs_known
    assert notes(max_num_seqs=3).known == first.known | results()
    assert not notes(ranks=2).known, "ranks compare together"


def test_a_second_start_knows_the_memory_of_the_largest_pass(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, allocated = notes(), 3 << 30
    assert first.allocated_known is None
    first.save_allocated(allocated)
    assert notes().allocated_known == allocated
    assert "the largest pass's memory" in notes().decision()[1]
    assert notes(max_num_seqs=3).allocated_known is None
    assert notes(ranks=2).allocated_known is None, "ranks compare theirs"
    for text in ('{"allocated": -3}', "[]", '{"allocated": "much"}'):
        assert first.memory is not None
        first.memory.write_text(text)
        assert notes().allocated_known is None


class Memory:
    """A GPU of 100 bytes: 60 are free, a pass takes 25 and loads libraries of 4 that stay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes, self.free, self.reserved = 0, 60, 10
        nothing = {"synchronize": None, "empty_cache": self.empty, "reset_peak_memory_stats": None}
        for name, call in nothing.items():
            monkeypatch.setattr(torch.cuda, name, call or (lambda: None))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 100))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: self.reserved)

    def run(self, buffers: object) -> None:
        self.passes += 1
        self.free, self.reserved = self.free - 29, self.reserved + 25

    def empty(self) -> None:
        self.free, self.reserved = self.free + self.reserved - 10, 10


def test_known_allocations_need_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    monkeypatch.setattr("unisono.engine.startup.memory.Buffers", lambda *args: None)
    passes: Any = [(SimpleNamespace(schema=None, run=memory.run), None)]
    used, allocated = peak_bytes(passes, torch.device("cpu"))
    assert (used, allocated) == (40 + 29, 25), "libraries take 4, which are not kept"
    again = Memory(monkeypatch)
    assert peak_bytes(passes, torch.device("cpu"), allocated) == (40 + 25 + LIBRARY_BYTES, 25)
    assert (memory.passes, again.passes) == (1, 0)


def test_damaged_notes_are_written_again(machine: dict[str, Any], kernel: Any, tmp_path: Path) -> None:
    notes().save({"round": COST})
    (file,) = (tmp_path / "notes").iterdir()
    file.write_text(file.read_text()[:-4])
    again = notes()
    assert not again.costs_known
    again.save({"round": COST})
    assert json.loads(file.read_text())
    assert notes().costs_known == {"round": COST}


def test_notes_can_be_off(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNISONO_START_NOTES", "0")
    off = notes()
    with off.proving():
        pass
    off.save({"round": COST})
    assert off == StartNotes()
    assert not (tmp_path / "notes").exists()


def test_files_of_shapes_are_those_of_target_and_draft() -> None:
    checkpoint = Checkpoint.open("tiny")
    flags = EngineConfig("tiny", device="cpu", speculative=SpeculativeConfig("eagle3", "tiny-eagle3"))
    config = resolve(flags, Hardware(torch.device("cpu"), "CPU", 0), checkpoint)
    found = shape_files(config, checkpoint.path)
    assert found == [bundled["tiny"] / "config.json", bundled["tiny-eagle3"] / "config.json"]
