"""Passes run dry at a start: kernels are queued for compilation, nothing is launched, nothing reads garbage."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import KernelInterface

from unisono.engine.warmup import compiling_only, size_classes
from unisono.kernels.library import define, register
from unisono.program import Shape


class Kernel(KernelInterface):
    """Compiles as a JITFunction does: through the mode that is active."""

    def __init__(self) -> None:
        self.runs: list[tuple[tuple, bool]] = []
        self.compiled: list[int] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.runs.append((grid, warmup))
        mode, number = active_mode.get(), len(self.runs)
        if mode is not None:
            mode.submit(number, lambda: number, self.compiled.append)


def test_a_launch_only_queues_its_compilation() -> None:
    kernel = Kernel()
    with compiling_only():
        kernel[(3,)](1)
        kernel[(4,)](1)
    assert kernel.runs == [((3,), True), ((4,), True)]
    assert sorted(kernel.compiled) == [1, 2]  # all done on leaving
    kernel[(5,)](1)
    assert kernel.runs[-1] == ((5,), False)


def test_what_kernels_would_have_filled_is_zero() -> None:
    define("warmup_test(Tensor x) -> (Tensor, Tensor)")

    def garbage(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(x, 1 << 30), torch.full_like(x, -7)

    register("warmup_test", cuda=garbage, cpu=garbage, meta=garbage)
    table = torch.arange(4)
    with torch.inference_mode(), compiling_only():
        indices, others = torch.ops.unisono.warmup_test(torch.ones(3, dtype=torch.int64))
        assert table.index_select(0, indices).tolist() == others.tolist() == [0, 0, 0]
        for tensor in (torch.empty(64), table.new_empty(64), torch.empty_like(table)):
            assert not tensor.any()


def test_one_shape_for_each_power_of_two() -> None:
    shapes = [Shape(rows) for rows in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)]
    assert [s.rows for s in size_classes(shapes)] == [1, 2, 4, 8, 16, 32, 64]
