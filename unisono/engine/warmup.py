"""Compiling every kernel that a start will need, at once and in parallel.

Triton compiles a kernel when it is first launched, and most of a compilation runs outside the interpreter's
lock. So passes of every size class run once on padding: one alone, for the kernels that all share, then the
others in threads, so that each compiles what is its own. What is in Triton's cache is only loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from unisono.program import Buffers, Program, Shape

THREADS = 4
"""More threads meet at the same kernel more often, and compile it twice."""


def size_classes(shapes: Sequence[Shape]) -> list[Shape]:
    """One shape for each power of two of rows: kernels choose their tiles by no finer measure."""
    return list({shape.rows.bit_length(): shape for shape in reversed(shapes)}.values())[::-1]


def compile_passes(passes: Sequence[tuple[Program, Shape]], device: torch.device) -> None:
    """Run each pass once on padding rows only, which change nothing but the padding page and the padding slot."""

    @torch.inference_mode()
    def run(program: Program, shape: Shape) -> None:
        torch.cuda.set_device(device)
        program.run(Buffers(program.schema, shape, device))

    for program, shape in passes[:1]:
        run(program, shape)
    with ThreadPoolExecutor(THREADS) as pool:
        done = [pool.submit(run, program, shape) for program, shape in passes[1:]]
    for future in done:
        future.result()
    torch.cuda.synchronize(device)
