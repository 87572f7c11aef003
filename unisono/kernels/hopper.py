"""Shared parts of the Gluon kernels for Hopper: boxes of rows, barriers of stages.

A row of a box is 128 bytes, the widest swizzle of shared memory, for any dtype.
"""

from __future__ import annotations

import torch
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

WIDTH = gl.constexpr(128)
"""Bytes of a row of a box."""

block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


def boxes(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of a contiguous tensor [N, K], loaded in boxes of ``rows`` rows."""
    size = x.element_size()
    return TensorDescriptor.from_tensor(x, [rows, WIDTH.value // size], _layout(size))


def box_type(kind: str, rows: int) -> str:
    """Type of :func:`boxes` in an AotCase's signature. kind: Triton's name of the dtype, of 8 or 16 bits."""
    size = 1 if kind in ("fp8e4nv", "i8") else 2
    return f"tensordesc<{kind}[{rows}, {WIDTH.value // size}],{_layout(size)!r}>"


def _layout(size: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(WIDTH.value, 8 * size, 2)


@gluon.jit
def stage_barriers(STAGES: gl.constexpr, FULL: gl.constexpr, FREE: gl.constexpr):
    """Allocate barriers (full, free) of each stage in shared memory, completed by FULL and FREE arrivals."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(free.index(i), count=FREE)
    return full, free


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Next stage and its phase, 0 or 1, without the division that an item's number would need."""
    last = stage + 1 == STAGES
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def next_group(tile, group, groups):
    """Next group in the order in which a program loads its tiles: (tile, number of the group in it)."""
    last = group + 1 == groups
    return gl.where(last, tile + gl.num_programs(0), tile), gl.where(last, 0, group + 1)


@gluon.jit
def order_loads():
    """Order this thread's accesses to memory with those of the tensor memory accelerator, both ways."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
