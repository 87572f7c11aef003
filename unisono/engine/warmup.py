"""Compiling every kernel that a start will need, all at once.

Triton compiles a kernel when it is first launched, one after the other, which took most of a start on a machine that
has not seen the model. So passes of every size class first run dry: a launch only queues what it would have to
compile, and most of a compilation runs outside the interpreter's lock. What is in Triton's cache is only loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import KernelInterface

from unisono.program import Buffers, Program, Shape

_UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Zeros(TorchDispatchMode):
    """What kernels would have filled holds zeros, so that the indices among it are valid for the ops that do run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED or func.namespace == "unisono":  # our ops return new tensors only
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if tensor is not None:
                    tensor.zero_()
        return out


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, launching a Triton kernel queues its compilation and nothing else. Leaving waits for all of them."""

    def queue(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)

    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        AsyncCompileMode(pool),
        patch.object(KernelInterface, "__getitem__", queue),
        _Zeros(),
    ):
        yield


def size_classes(shapes: Sequence[Shape]) -> list[Shape]:
    """One shape for each power of two of rows: kernels choose their tiles by no finer measure."""
    return list({shape.rows.bit_length(): shape for shape in reversed(shapes)}.values())[::-1]


@torch.inference_mode()
def run_on_padding(passes: Sequence[tuple[Program, Shape]], device: torch.device) -> None:
    """Run each pass once on padding rows only, which change nothing but the padding page and the padding slot."""
    for program, shape in passes:
        program.run(Buffers(program.schema, shape, device))
