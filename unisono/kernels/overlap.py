"""Kernels that are launched while the one before them still runs (programmatic dependent launch; Hopper and later).

A round of an 8B model has about 330 kernels of a few microseconds, and the device would drain and fill again between
two of them. A kernel launched with ``**overlapped(device)`` may start before the previous one has ended. It calls
:func:`follow` before any read or write: the call waits until the previous kernel has ended and its writes are visible,
and allows the next kernel to start. :data:`READ_EARLY`, :data:`BESIDE` and :data:`LEADING` have the exceptions. A
kernel launched without these options waits as kernels always do, so both kinds can be mixed. No bit depends on it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.library import COMPILED

READ_EARLY = frozenset(
    {
        "_add_normed_kernel",
        "_prepare_kernel",
        "_rms_norm_kernel",
        "_combine_kernel",
        "_gated_norm_kernel",
        "_conv_round_kernel",
        "attention_kernel",
        "round_attention_kernel",
        "_round_kernel",
        "fp8_rows_kernel",
        "layer_tail_kernel",
        "layer_tail_fp8_kernel",
        "_adapter_shrink_kernel",
        "_adapter_expand_kernel",
        "_adapter_silu_kernel",
    }
)
"""Kernels that read, and only read, before they follow.

They read what the kernel before them neither writes nor overwrites, and what was written before that kernel: it has
itself waited for it before it allowed the next one to start (or leads: see :data:`LEADING`). Attention of rounds reads
keys and values so, those of tokens before the pass, which rotary's kernel just before it does not write. Attention also
reads what the kernel just before it may have written, the plan, which ends with :func:`publish`; such reads bypass L1.
"""


BESIDE = frozenset({"walk_kernel"})
"""Kernels that run beside the one before them: neither reads what the other one writes.

The one before them has waited for its turn before it allowed them to start, and they wait for it before they end.
"""


LEADING = frozenset(
    {
        "_rms_norm_kernel",
        "_silu_mul_kernel",
        "_sigmoid_gate_kernel",
        "_gated_norm_kernel",
        "_combine_kernel",
        "_quantize_kernel",
        "_rope_and_cache_kernel",
        "attention_kernel",
        "round_attention_kernel",
    }
)
"""Kernels that may allow the next one to start before their own turn has come, so before the kernel ahead has ended.

Those of attention do, others where they quantise: the product that follows then loads the first parts of its weight
while the last programs of the product before it still run. Several such kernels may follow each other, but none is a
product, and products come between all others: a kernel that begins early begins when all has ended that is ahead of the
last product. What kernels read early is older than that, or is a weight.
"""


@triton.jit
def follow(OVERLAP: tl.constexpr, LEADS: tl.constexpr = False):
    """Wait for what earlier kernels wrote; see the module's docstring. LEADS: see :data:`LEADING`."""
    if OVERLAP:
        if LEADS:
            gdc_launch_dependents()
        gdc_wait()
        if not LEADS:
            gdc_launch_dependents()


@triton.jit
def publish():
    """End a kernel whose writes are read early: they are seen by all kernels from now on, not only once it has ended.

    Such a kernel allows no kernel to start before its programs have ended.
    """
    if COMPILED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether the device supports it: from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel begins with ``follow(OVERLAP)``."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}
