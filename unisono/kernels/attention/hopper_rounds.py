"""Dispatch of few rows' attention to the Gluon kernels for Hopper, and the proof of their bits.

The kernel in ``gluon_rounds.py`` serves passes that may be cut along KV, on Hopper, for 16-bit heads of 128 without a
window, a soft cap or sinks, in tiles of up to MOST_ROWS rows. The kernel in ``gluon_wide_rounds.py`` serves heads of
256 and 512, with a window or without.
:data:`exact_round_attention` compares the bits with the Triton kernel's on the present GPU. Where they differ, or were
not compared, the Triton kernel serves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import triton

from unisono.kernels.attention.cpu import SPLIT
from unisono.kernels.attention.gluon import HALF, HEAD_DIM
from unisono.kernels.attention.gluon_rounds import STAGES, round_attention_kernel
from unisono.kernels.attention.gluon_wide_rounds import wide_round_attention_kernel
from unisono.kernels.attention.hopper import PAGE, proof_pages
from unisono.kernels.hopper import box_type, boxes
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped
from unisono.kernels.proofs import ExactKernel

MOST_ROWS = 32
"""Maximum rows of a tile: more would not fit into registers."""

WIDE_ROWS = {256: 32, 512: 16}
"""Maximum rows of one program for wide heads, by head size; two programs may share a tile of twice as many."""

SHARED_TILES = 66
"""Most tiles × KV heads of a pass whose tiles two programs share, each of which reads all keys: one program for each
multiprocessor. With 128 tiles of 32 rows of heads of 512 the Triton kernel takes 98 µs, this one 121; with 32 tiles 59
and 50 (H200, 1,100 keys).
"""

REGISTERS = 128
"""Registers per thread when a program begins, so that two fit on a multiprocessor. The group that computes then gets
232.
"""

PROGRAMS_PER_PROCESSOR = 2

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]


def suits(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernel can serve such heads on this device."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (HEAD_DIM, *WIDE_ROWS)
        and heads // kv_heads <= WIDE_ROWS.get(head_dim, MOST_ROWS)
    )


def serves(q: torch.Tensor, k_cache: torch.Tensor, tile_tokens: int, window: int, first: int) -> bool:
    """Return True if a kernel serves a pass whose tiles may be cut. q [T, Hq, D]; k_cache [NP, Hkv, P, D]."""
    heads, kv_heads, head_dim = q.shape[1], k_cache.shape[1], q.shape[2]
    wide = head_dim in WIDE_ROWS
    return (
        exact_round_attention.serves((heads, kv_heads, head_dim, q.dtype, q.device))
        and (window >= 0 and first == 0 if wide else window == 0)
        and tile_tokens * heads <= (2 * WIDE_ROWS[head_dim] if wide else MOST_ROWS) * kv_heads
        and (
            not wide
            or len(q) * kv_heads <= SHARED_TILES * tile_tokens
            or _whole(heads, kv_heads, head_dim, tile_tokens)
        )
        and k_cache.shape[2] == PAGE
        and k_cache.is_contiguous()
    )


def _whole(heads: int, kv_heads: int, head_dim: int, tile_tokens: int) -> bool:
    """Return True if one program holds the rows of a tile of wide heads."""
    return tile_tokens * heads <= WIDE_ROWS[head_dim] * kv_heads


def wide_sizes(heads: int, kv_heads: int, head_dim: int, tile_tokens: int, keys: int) -> dict[str, int]:
    """Compile-time sizes of the kernel for wide heads. Its stages take 192 KiB."""
    group, most = heads // kv_heads, WIDE_ROWS[head_dim]
    rows = min(max(8, triton.next_power_of_2(tile_tokens * group)), most)
    parts = triton.cdiv(tile_tokens, rows // group)
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "PAGE": PAGE, "TOKENS": tile_tokens, "ROWS": rows, "PARTS": parts}
    sizes |= {"PIECES": head_dim // HALF, "PIECE": HALF, "KEYS": keys, "SPLIT": SPLIT}
    return sizes | {"AT_ONCE": max(1, min(4, 2**13 // (rows * head_dim))), "STAGES": 1536 // head_dim}


def _sizes(heads: int, kv_heads: int, tile_tokens: int, keys: int, first: int) -> dict[str, int]:
    """Compile-time sizes of the kernel for heads of 128."""
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
    window: int,
    first: int,
    keys: int,
    per_processor: int = PROGRAMS_PER_PROCESSOR,
    registers: int = REGISTERS,
    merge: bool = True,
    **tuning: int,
) -> None:
    """Attend into out [T', Hq · D]; see ``paged.launch_attention``.

    scales: scales of e4m3 outputs, whose T' rows are padded. workspace: states and values of splits. scale: for powers
    of two. merge: cut tiles are merged here; the kernel for wide heads can leave them to ``merge.launch_merge``.
    tuning: compile-time sizes that override the defaults.
    """
    heads, dim = q.shape[1:]
    capacity, tile_tokens, kv_heads = arrivals.shape
    cached = [boxes(c.view(-1, dim), PAGE) for c in (k_cache, v_cache)]
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    if dim in WIDE_ROWS:
        sizes = wide_sizes(heads, kv_heads, dim, tile_tokens, keys) | tuning
        wide_round_attention_kernel[(min(processors, capacity * kv_heads * sizes["PARTS"]),)](
            q, *cached, page_table, positions, work, count, arrivals, *workspace, out,
            workspace[0] if scales is None else scales, len(q), len(out), page_table.stride(0), window or None, scale,
            MERGE=merge, **sizes, num_warps=4, maxnreg=registers, **overlapped(q.device),
        )  # fmt: skip
        return
    programs = per_processor * processors
    round_attention_kernel[(min(programs, capacity * kv_heads),)](
        q, *cached, page_table, positions, work, count, arrivals, *workspace, out,
        workspace[0] if scales is None else scales, len(q), len(out), page_table.stride(0), scale,
        **(_sizes(heads, kv_heads, tile_tokens, keys, first) | tuning), num_warps=4, maxnreg=registers,
        **overlapped(q.device),
    )  # fmt: skip


def _same_bits(
    attend: Attend, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Compare rounds of one token and of four, or as many as a tile holds, over requests of many lengths, and for wide
    heads with a window, too."""
    lengths: tuple[int, ...] = (1100, 37, 257, 2500, 64, 255, 256, 700)
    key = heads, kv_heads, head_dim, dtype, device
    if head_dim in WIDE_ROWS:
        lengths = lengths[: max(1, SHARED_TILES // kv_heads)]  # as many as the kernel serves
    generator = torch.Generator(device).manual_seed(0)
    pages = proof_pages(lengths, kv_heads, head_dim, dtype, generator)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    most = 2 * WIDE_ROWS[head_dim] if head_dim in WIDE_ROWS else MOST_ROWS
    for width, window in itertools.product((1, min(4, most * kv_heads // heads)), (0, 300)):
        if window and head_dim not in WIDE_ROWS:
            continue
        q = torch.randn(len(lengths) * width, heads, head_dim, generator=generator, device=device).to(dtype)
        if not exact_round_attention.same_when_serving(key, partial(attend, q, *pages, kv_len, width, window)):
            return False
    return True


exact_round_attention = ExactKernel(
    "attention of rounds", lambda attend, *heads: (heads,) if suits(*heads) else (), _same_bits
)
"""The Gluon kernels, against the Triton kernel, by (query heads, KV heads, head size, dtype, device).

attend(q, k_cache, v_cache, page_table, kv_len, width, window) runs one round.
"""


def _case(
    heads: int, kv_heads: int, dtype: str, tile_tokens: int, first: int = 0, quantised: bool = False,
    head_dim: int = HEAD_DIM, window: bool = False, merge: bool = True,
) -> AotCase:  # fmt: skip
    signature = {"q_ptr": f"*{dtype}", "out_ptr": "*fp8e4nv" if quantised else f"*{dtype}", "scales_ptr": "*fp32"}
    signature |= dict.fromkeys(("k_desc", "v_desc"), box_type(dtype, PAGE))
    pointers = "table_ptr", "positions_ptr", "work_ptr", "count_ptr", "arrivals_ptr"
    signature |= dict.fromkeys(pointers, "*i32") | {"state_ptr": "*fp32", "acc_ptr": "*fp32"}
    signature |= dict.fromkeys(("tokens", "padded", "max_pages"), "i32") | {"scale": "fp32"}
    if head_dim in WIDE_ROWS:
        sizes: dict[str, object] = {
            **wide_sizes(heads, kv_heads, head_dim, tile_tokens, 64),
            "OVERLAP": True,
            "MERGE": merge,
        }
        signature, sizes = (signature | {"window": "i32"}, sizes) if window else (signature, sizes | {"window": None})
        return AotCase(wide_round_attention_kernel, signature, sizes, num_warps=4, maxnreg=REGISTERS)
    sizes = {**_sizes(heads, kv_heads, tile_tokens, 64, first), "OVERLAP": True}
    return AotCase(round_attention_kernel, signature, sizes, num_warps=4, maxnreg=REGISTERS)


AOT = [
    _case(32, 8, "bf16", 1),
    _case(32, 8, "bf16", 4, first=1),
    _case(32, 8, "bf16", 6),
    _case(32, 8, "bf16", 1, quantised=True),
    _case(8, 8, "fp16", 1),
    _case(64, 8, "fp16", 4),
    _case(16, 8, "bf16", 1, head_dim=256, window=True, merge=False),  # Gemma 4 26B-A4B
    _case(16, 8, "bf16", 4, head_dim=256, window=True, quantised=True),
    _case(16, 2, "bf16", 1, head_dim=512),
    _case(16, 2, "fp16", 4, head_dim=512, quantised=True),
]
