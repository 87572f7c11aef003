"""Shared memory of GPUs by compute capability, and the blocking of kernels that were tuned on Hopper on smaller cards.

The number of stages of a loop and the rows of a tile change speed only, so a card with less shared memory takes fewer.
``tests/kernels/test_cards.py`` compiles every kernel for every card of :data:`SHARED`.
"""

from __future__ import annotations

import functools

import torch

KIB = 1024

SHARED = {
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (12, 0): 99 * KIB,
}
"""Bytes of shared memory that a block can have, by compute capability."""

HOPPER = SHARED[9, 0]
LEAST = min(SHARED.values())


def card_kernels(capability: tuple[int, int]) -> tuple[str, str]:
    """Return (kernels that serve a GPU of this compute capability, reason)."""
    shared = f"a block has {SHARED.get(capability, LEAST) // KIB} KiB of shared memory"
    if capability == (9, 0):
        return "Gluon (wgmma, TMA) and Triton", f"Gluon where the start finds Triton's bits; {shared}"
    if capability >= (9, 0):
        return "Triton", f"Gluon kernels are for 9.0 alone; launches overlap; {shared}"
    return "Triton", f"Gluon kernels are for 9.0 alone; launches overlap from 9.0 on; {shared}"


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block can have; HOPPER for a CPU, LEAST for a GPU that is not in SHARED."""
    if device.type != "cuda":
        return HOPPER
    return SHARED.get(torch.cuda.get_device_capability(device), LEAST)


def fitting_stages(stages: int, step: int, shared: int) -> int:
    """Largest number of stages up to ``stages`` whose buffers fit.

    step: bytes that one step of the loop loads; all stages but one have a buffer. shared: bytes of shared memory.
    """
    return max(1, min(stages, 1 + shared // step))
