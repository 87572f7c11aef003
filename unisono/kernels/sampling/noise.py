"""Counter-based Gumbel noise: one fixed draw per (seed, position, token id).

Owns the generator, not an op. Kernels that draw with this noise, such as those of ``sampler.py``, call :func:`gumbel`
in Triton and :func:`gumbel_cpu` in their twins. The noise of a token depends on its three keys alone, so drafter and
target draw the same in any batch and at any width.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11):
key (seed_lo, seed_hi), counter (token id, position, 0, 0), first output word. Both sides give the same
32-bit words; the Gumbel value of a word may differ in the last bit of a logarithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

SERIES_BELOW = tl.constexpr(2.0**-6)
"""Threshold below which ``1 - v`` loses bits of v; -log(1 - v) is summed as a series there."""
LARGEST = tl.constexpr(1.0 - 2.0**-24)
"""Largest fp32 below 1: keeps -log(1 - v) finite."""


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Compute Philox-4x32-10 of a counter (c0 … c3) under a key (k0, k1), all uint32: four uint32 words."""
    for _ in tl.static_range(10):
        high0, high2 = tl.umulhi(c0, 0xD2511F53), tl.umulhi(c2, 0xCD9E8D57)
        low0 = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        low2 = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def gumbel(token, position, seed_lo, seed_hi):
    """Draw Gumbel noise, fp32, in [-2.9, 22.9]. All arguments int32; ``token`` is a block, the rest scalars."""
    c0 = token.to(tl.uint32, bitcast=True)
    c1 = position.to(tl.uint32, bitcast=True) + tl.zeros_like(c0)
    zero = tl.zeros_like(c0)
    k0 = seed_lo.to(tl.uint32, bitcast=True)
    k1 = seed_hi.to(tl.uint32, bitcast=True)
    word, _, _, _ = philox(c0, c1, zero, zero, k0, k1)
    # -log(-log(u)) with u = 1 - v: a large value comes from a small v, which fp32 holds to 24 bits, whereas
    # a u near 1 would be a multiple of 2^-24 and end the upper tail at 16.6.
    v = tl.minimum((word.to(tl.float32) + 0.5) * (2.0**-32), LARGEST)
    series = v * (1.0 + v * (1.0 / 2 + v * (1.0 / 3 + v * (1.0 / 4))))
    return -tl.log(tl.where(v < SERIES_BELOW, series, -tl.log(1.0 - v)))


Words = Any
"""Unsigned 32-bit words: an int64 tensor, a uint64 array or an int."""


def philox_cpu(c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words) -> tuple[Words, ...]:
    """Compute :func:`philox` on words that broadcast together, all tensors, all arrays or all ints."""
    for _ in range(ROUNDS):
        # A product may wrap; its low 64 bits, which are both words, are still right. c1 and c3 are only xored,
        # so they may carry a high word until it is masked.
        p0, p2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p2 >> 32) ^ c1 ^ k0) & WORD, p2, ((p0 >> 32) ^ c3 ^ k1) & WORD, p0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def gumbel_cpu(token: Tensor, position: Tensor, seed_lo: Tensor, seed_hi: Tensor) -> Tensor:
    """Compute :func:`gumbel` on the CPU, for four integer tensors that broadcast together: fp32 of that shape.

    The words are computed by numpy, which starts an operation on few elements in less time than torch does.
    """
    keys = [(key.long() & WORD).numpy().view(np.uint64) for key in (token, position, seed_lo, seed_hi)]
    word = torch.as_tensor(philox_cpu(keys[0], keys[1], 0, 0, keys[2], keys[3])[0]).view(torch.int64)
    v = ((word.float() + 0.5) * 2.0**-32).clamp_max_(LARGEST.value)
    series = v * (1.0 + v * (1.0 / 2 + v * (1.0 / 3 + v * (1.0 / 4))))
    return -torch.log(torch.where(v < SERIES_BELOW.value, series, -torch.log(1.0 - v)))
