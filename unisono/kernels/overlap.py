"""Kernels that are launched while the one before them still runs (programmatic dependent launch; Hopper and later).

A round of an 8B model is some 330 kernels of a few microseconds, and between two of them the device would empty and
fill again. A kernel launched with ``**overlapped(device)`` may be on the device before its turn. It begins with
:func:`follow`, in front of everything that it reads or writes: there it waits until the kernel before it is done and
what that wrote can be seen, and lets the next one come. A kernel launched without waits as kernels always do, so the
two kinds mix freely. No bit depends on any of it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait for what earlier kernels wrote; see the module's docstring."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether the device can: from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel begins with ``follow(OVERLAP)``."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}
