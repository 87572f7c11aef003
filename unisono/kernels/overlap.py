"""Programmatic dependent launch (Hopper and later): a kernel is launched while the one before it still runs.

A round of an 8B model has about 330 kernels of a few microseconds, and the device would drain and fill again between
two of them. A kernel launched with ``**overlapped(device)`` may start before the previous one has ended. It calls
:func:`follow` before any read or write: the call waits until the previous kernel has ended and its writes are visible,
and allows the next kernel to start. A kernel declares exceptions where it is defined (:func:`overlapping`). A kernel
launched without these options waits as kernels always do, so both kinds can be mixed. No bit depends on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.library import COMPILED

READ_EARLY: set[str] = set()
"""Names of kernels that read, and only read, before they wait.

They read memory that the kernel before them does not write, and that was written before that kernel started: it has
itself waited for the writer before it allowed the next one to start (or leads: see :data:`LEADING`). For example,
attention of rounds reads the keys and values of tokens before the pass, which the rotary kernel just before it does not
write. Attention also reads the plan, which the kernel just before it may have written, and which ends with
:func:`publish`; such reads bypass L1.
"""

BESIDE: set[str] = set()
"""Names of kernels that run beside the one before them: neither reads what the other one writes.

The kernel before them has waited before it allowed them to start, and they wait for it before they end.
"""

LEADING: set[str] = set()
"""Names of kernels that may let the next one start before they have waited, while the kernel ahead still runs.

Attention does, other kernels if they quantise: the product that follows then loads the first parts of its weight while
the last programs of the product before it still run. Several such kernels may follow each other, but none is a product,
and products come between all others: when a kernel begins early, everything ahead of the last product has ended. Early
reads are of memory older than that, or of weights.
"""

Kernel = TypeVar("Kernel")


def overlapping(reads_early: bool = False, leads: bool = False, beside: bool = False) -> Callable[[Kernel], Kernel]:
    """Declare a kernel's exceptions from waiting before it accesses memory. Goes above ``@triton.jit``.

    The compiled code is checked for it (``tests/kernels/test_aot.py``). reads_early: see :data:`READ_EARLY`. leads: see
    :data:`LEADING`. beside: see :data:`BESIDE`.
    """

    def declare(kernel: Kernel) -> Kernel:
        name = kernel.fn.__name__  # type: ignore[attr-defined]
        for declared, names in ((reads_early, READ_EARLY), (leads, LEADING), (beside, BESIDE)):
            if declared:
                names.add(name)
        return kernel

    return declare


@triton.jit
def follow(OVERLAP: tl.constexpr, LEADS: tl.constexpr = False):
    """Wait until the writes of earlier kernels are visible. LEADS: see :data:`LEADING`."""
    if OVERLAP:
        if LEADS:
            gdc_launch_dependents()
        gdc_wait()
        if not LEADS:
            gdc_launch_dependents()


@triton.jit
def publish():
    """End a kernel whose writes are read early: make them visible to all kernels now, not only once it has ended.

    Such a kernel allows no kernel to start before its programs have ended.
    """
    if COMPILED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return True if the device supports overlap: compute capability 9.0 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins with ``follow(OVERLAP)``."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}
