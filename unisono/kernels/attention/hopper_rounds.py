"""Dispatch of few rows' attention to the Gluon kernel for Hopper, and the proof of its bits.

The kernel in ``gluon_rounds.py`` serves passes that may be cut along KV, whose tiles have up to MOST_ROWS rows, on
Hopper, for 16-bit heads of 128, without a window, a soft cap or sinks. :data:`exact_round_attention` compares its bits
with the Triton kernel's on the present GPU. Where they differ, or were not compared, the Triton kernel serves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton

from unisono.kernels.attention.cpu import SPLIT
from unisono.kernels.attention.gluon import HALF, HEAD_DIM
from unisono.kernels.attention.gluon_rounds import STAGES, round_attention_kernel
from unisono.kernels.attention.hopper import PAGE, proof_pages
from unisono.kernels.hopper import box_type, boxes
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped
from unisono.kernels.proofs import ExactKernel

MOST_ROWS = 32
"""Maximum rows of a tile: more would not fit into registers."""

REGISTERS = 128
"""Registers per thread when a program begins, so that two fit on a multiprocessor. The group that computes then gets
232.
"""

PROGRAMS_PER_PROCESSOR = 2

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


def suits(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernel can serve such heads on this device."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim == HEAD_DIM
        and heads // kv_heads <= MOST_ROWS
    )


def serves(q: torch.Tensor, k_cache: torch.Tensor, tile_tokens: int) -> bool:
    """Return True if the kernel serves a pass whose tiles may be cut. q [T, Hq, D]; k_cache [NP, Hkv, P, D]."""
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    return (
        exact_round_attention.serves((heads, kv_heads, q.shape[2], q.dtype, q.device))
        and tile_tokens * heads <= MOST_ROWS * kv_heads
        and k_cache.shape[2] == PAGE
        and k_cache.is_contiguous()
    )


def _sizes(heads: int, kv_heads: int, tile_tokens: int, keys: int, first: int) -> dict[str, int]:
    """Compile-time sizes of the kernel."""
    rows = max(8, triton.next_power_of_2(tile_tokens * heads // kv_heads))
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "PAGE": PAGE, "TOKENS": tile_tokens, "ROWS": rows, "HALF": HALF}
    return sizes | {"KEYS": keys, "SPLIT": SPLIT, "FIRST": first, "AT_ONCE": min(4, 32 // rows), "STAGES": STAGES}


def launch_round_attention(
    out: torch.Tensor,
    scales: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    work: torch.Tensor,
    count: torch.Tensor,
    arrivals: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    first: int,
    keys: int,
    per_processor: int = PROGRAMS_PER_PROCESSOR,
    registers: int = REGISTERS,
    **tuning: int,
) -> None:
    """Attend into out [T', Hq · D]; see ``paged.launch_attention``.

    scales: scales of e4m3 outputs, whose T' rows are padded. workspace: states and values of splits. scale: for powers
    of two. tuning: compile-time sizes that override the defaults.
    """
    heads, dim = q.shape[1:]
    capacity, tile_tokens, kv_heads = arrivals.shape
    cached = [boxes(c.view(-1, dim), PAGE) for c in (k_cache, v_cache)]
    programs = per_processor * torch.cuda.get_device_properties(q.device).multi_processor_count
    round_attention_kernel[(min(programs, capacity * kv_heads),)](
        q, *cached, page_table, positions, work, count, arrivals, *workspace, out,
        workspace[0] if scales is None else scales, len(q), len(out), page_table.stride(0), scale,
        **(_sizes(heads, kv_heads, tile_tokens, keys, first) | tuning), num_warps=4, maxnreg=registers,
        **overlapped(q.device),
    )  # fmt: skip


def _same_bits(
    attend: Attend, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Compare rounds of one token and of four, or as many as a tile holds, over requests of many lengths."""
    lengths, key = (37, 64, 255, 256, 257, 700, 1100, 2500), (heads, kv_heads, head_dim, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    pages = proof_pages(lengths, kv_heads, head_dim, dtype, generator)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    for width in (1, min(4, MOST_ROWS * kv_heads // heads)):
        q = torch.randn(len(lengths) * width, heads, head_dim, generator=generator, device=device).to(dtype)
        if not exact_round_attention.same_when_serving(key, partial(attend, q, *pages, kv_len, width)):
            return False
    return True


exact_round_attention = ExactKernel(
    "attention of rounds", lambda attend, *heads: (heads,) if suits(*heads) else (), _same_bits
)
"""The Gluon kernel, against the Triton kernel, by (query heads, KV heads, head size, dtype, device).

attend(q, k_cache, v_cache, page_table, kv_len, width) runs one round.
"""


def _case(heads: int, kv_heads: int, dtype: str, tile_tokens: int, first: int = 0, quantised: bool = False) -> AotCase:
    signature = {"q_ptr": f"*{dtype}", "out_ptr": "*fp8e4nv" if quantised else f"*{dtype}", "scales_ptr": "*fp32"}
    signature |= dict.fromkeys(("k_desc", "v_desc"), box_type(dtype, PAGE))
    pointers = "table_ptr", "positions_ptr", "work_ptr", "count_ptr", "arrivals_ptr"
    signature |= dict.fromkeys(pointers, "*i32") | {"state_ptr": "*fp32", "acc_ptr": "*fp32"}
    signature |= dict.fromkeys(("tokens", "padded", "max_pages"), "i32") | {"scale": "fp32"}
    sizes = _sizes(heads, kv_heads, tile_tokens, 64, first) | {"OVERLAP": True}
    return AotCase(round_attention_kernel, signature, sizes, num_warps=4, maxnreg=REGISTERS)


AOT = [
    _case(32, 8, "bf16", 1),
    _case(32, 8, "bf16", 4, first=1),
    _case(32, 8, "bf16", 6),
    _case(32, 8, "bf16", 1, quantised=True),
    _case(8, 8, "fp16", 1),
    _case(64, 8, "fp16", 4),
]
