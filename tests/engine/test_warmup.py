"""Passes run dry at a start: kernels are queued for compilation, nothing is launched, nothing reads garbage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import KernelInterface

from unisono.engine.startup.compile_processes import CompileProcesses
from unisono.engine.startup.warmup import compiling_only, run_on_padding
from unisono.engine.worker.build import Build
from unisono.entrypoints.llm import LLM
from unisono.types import SamplingParams, SpeculativeConfig

CPU = torch.device("cpu")


class Compiled:
    """What a compilation makes; it is loaded before the start goes on."""

    loaded = 0

    def _init_handles(self) -> None:
        self.loaded += 1


class Kernel(KernelInterface):
    """Compiles as a JITFunction does: through the mode that is active."""

    def __init__(self) -> None:
        self.runs: list[tuple[tuple, bool]] = []
        self.compiled: list[Compiled] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.runs.append((grid, warmup))
        mode = active_mode.get()
        return None if mode is None else mode.submit(args, Compiled, self.compiled.append)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_launch_while_compiling_only_queues_its_kernel() -> None:
    kernel = Kernel()
    with compiling_only(CPU, CompileProcesses(0)):
        kernel[(3,)](1)
        kernel[(4,)](1)
        kernel[(3,)](2)
    assert kernel.runs == [((3,), True), ((4,), True), ((3,), True)]
    assert [c.loaded for c in kernel.compiled] == [1, 1]  # of each specialisation one
    kernel[(5,)](1)
    assert kernel.runs[-1] == ((5,), False)


def test_empty_tensors_are_zeroed_while_only_compiling() -> None:
    table = torch.arange(4)
    empty, new = torch.empty, torch.Tensor.new_empty
    with torch.inference_mode(), compiling_only(CPU, CompileProcesses(0)):
        dirty = [
            torch.empty(64),
            table.new_empty(64),
            torch.empty_like(table),
            table.new_empty((2, 3), dtype=torch.int32),
        ]
        assert not any(tensor.any() for tensor in dirty)
        assert table.index_select(0, dirty[1]).tolist() == [0] * 64
    assert (torch.empty, torch.Tensor.new_empty) == (empty, new)


def test_a_kernel_that_does_not_compile_stops_the_start() -> None:
    class Broken(Kernel):
        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            def fails() -> None:
                raise ValueError("no such instruction")

            return active_mode.get().submit(args, fails, self.compiled.append)  # type: ignore[union-attr]

    with pytest.raises(ValueError, match="no such instruction"), compiling_only(CPU, CompileProcesses(0)):
        Broken()[(1,)](1)
    assert active_mode.get() is None, "the next engine of this process would not start"


SPECULATION = {
    "none": None,
    "widths": {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 5},
    "tree": {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3, "topk": 2, "num_draft_tokens": 6},
}


@pytest.mark.parametrize("given", SPECULATION.values(), ids=SPECULATION)
def test_every_pass_that_is_compiled_at_start_runs_on_padding(
    given: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the start runs them dry; what they would do wrong is seen there first, or here.

    Those that are measured after that are among them, with masks, or their kernels would be compiled one by one.
    """
    size, seen = Build._size, []

    def compiled_first(build: Build) -> None:
        programs = build._programs()
        passes = build._needing_every_kernel(programs)
        run_on_padding(passes, build.config.device)
        assert {program.name for program, _ in passes} >= {"round", "extend", "verify"}
        kinds = {(program.name, program.schema.features, shape) for program, shape in passes}
        measured = {(program.name, program.schema.features, shape) for program, shape in build._largest(programs)}
        assert measured <= kinds
        assert any(features.masks for _, features, _ in measured)
        seen.append(len(measured))
        size(build)

    monkeypatch.setattr(Build, "_size", compiled_first)
    spec = None if given is None else SpeculativeConfig.parse(given)
    with LLM("tiny", speculative=spec, max_num_seqs=4, max_model_len=256) as llm:
        assert seen
        assert llm.generate(["2 + 3 ="], SamplingParams(max_tokens=4))[0].outputs[0].token_ids
