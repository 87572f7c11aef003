"""Parallel compilation of all kernels that a start needs.

Triton compiles a kernel at its first launch, one after the other, which took most of the first start with a model.
Here, passes of every size class first run in a mode in which a launch only queues its compilation. Threads do the part
of a compilation that runs without the GIL, and processes the rest (``compile_processes.py``). Kernels in Triton's cache
are only loaded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel, active_mode
from triton.runtime.jit import KernelInterface

from unisono.engine.startup.capture_candidates import usual_name
from unisono.engine.startup.compile_processes import CompileProcesses
from unisono.engine.startup.repeated_layers import skipping_repeated_layers
from unisono.graphs import Buffers, Features, PassShape, Program
from unisono.graphs.buckets import Buckets

SMALL = 128
"""Number of tokens up to which kernel tiles vary within an octave."""

_ZEROED = {
    (torch, "empty"): torch.zeros,
    (torch, "empty_like"): torch.zeros_like,
    (torch.Tensor, "new_empty"): torch.Tensor.new_zeros,
}
"""Replace uninitialised memory by zeros, so that indices in it are valid for the ops that do run."""


class _Ahead(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Send queued compilations to processes first."""

    def __init__(self, pool: ThreadPoolExecutor, processes: CompileProcesses) -> None:
        super().__init__(pool)
        self._processes = processes

    def submit(self, key: str, compile_fn: Any, finalize_fn: Any) -> Any:
        return super().submit(key, self._processes.ahead(key, compile_fn), finalize_fn)


@contextmanager
def compiling_only(device: torch.device, processes: CompileProcesses) -> Iterator[None]:
    """Within this context, a launch of a Triton kernel only queues its compilation. Leaving it waits until all are
    loaded.
    """
    kernels: dict[int, Any] = {}

    def queue(kernel: Any, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            queued = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            if isinstance(queued, FutureKernel) and queued.future.done():
                queued = queued.result()  # Triton now knows it, so the next launch is not hashed again
            kernels[id(queued)] = queued

        return run

    def load(kernel: Any) -> None:
        torch.cuda.set_device(device)
        (kernel.result() if isinstance(kernel, FutureKernel) else kernel)._init_handles()  # builds the launcher too

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) + processes.count) as pool:
        with ExitStack() as undo:
            undo.callback(active_mode.set, None)  # Triton leaves it set if a kernel does not compile
            undo.enter_context(_Ahead(pool, processes))
            undo.enter_context(patch.object(KernelInterface, "__getitem__", queue))
            for (owner, name), zeros in _ZEROED.items():
                undo.enter_context(patch.object(owner, name, zeros))
            yield
        for loaded in [pool.submit(load, kernel) for kernel in kernels.values()]:
            loaded.result()


def size_classes(shapes: Sequence[PassShape]) -> list[PassShape]:
    """Return every shape of up to SMALL tokens, since their kernels differ, and one shape of each larger octave."""
    small = [shape for shape in shapes if shape.rows * shape.width <= SMALL]
    large = {(shape.rows * shape.width).bit_length(): shape for shape in shapes if shape not in small}
    return [*small, *large.values()]


def warmup_passes(
    plan: Sequence[Buckets], features: Collection[Features], own: Collection[str] = ()
) -> list[tuple[Program, PassShape]]:
    """Return the passes that together need every kernel: each program's small shapes and one of each larger size class.

    features: those of most passes. One pass suffices for others, since only one kernel has a variant for masks. own:
    names of programs that features bring along.
    """
    passes: list[tuple[Program, PassShape]] = []
    for b in plan:
        common = b.features in features and usual_name(b.program.name) in ("round", "extend", "catch_up")
        common = common or b.program.name in own
        shapes = size_classes(b.shapes) if common else b.shapes[:1]
        passes += [(b.program.of(b.features), shape) for shape in shapes]
    return passes


@torch.inference_mode()
def run_on_padding(passes: Sequence[tuple[Program, PassShape]], device: torch.device) -> None:
    """Run each pass once on padding rows, which change only the padding page and the padding slot."""
    for program, shape in passes:
        program.run(Buffers(program.schema, shape, device))


def run_kinds_on_padding(passes: Sequence[tuple[Program, PassShape]], device: torch.device) -> None:
    """Like :func:`run_on_padding`, with one decoder layer of each kind: enough for the kernels, not for results."""
    with skipping_repeated_layers() as repeated:
        for each in passes:
            run_on_padding([each], device)
            repeated.end_pass()
