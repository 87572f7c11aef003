"""Dispatch of long prompts' attention to the Gluon kernels for Hopper, and the proof of their bits.

The kernels in ``gluon.py`` and ``gluon_wide.py`` serve passes whose tiles have 128 rows and are walked whole, on
Hopper, for 16-bit heads of 128 and 256, without a window, a soft cap or sinks. :data:`exact_prompt_attention` compares
their bits with the Triton kernel's on the present GPU. Where they differ, or were not compared, the Triton kernel
serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from unisono.kernels.attention.cpu import SPLIT
from unisono.kernels.attention.gluon import HALF, HEAD_DIM, ROWS, STAGES, WARPS, prompt_attention_kernel
from unisono.kernels.attention.gluon_wide import HEAD_DIM as WIDE_DIM
from unisono.kernels.attention.gluon_wide import wide_attention_kernel, wide_sizes
from unisono.kernels.hopper import box_type, boxes
from unisono.kernels.library import AotCase
from unisono.kernels.proofs import ExactKernel

PAGE = 16
"""Tokens per page: a step of 64 keys is four pages, each read by a warp of its own."""

Attend = Callable[..., torch.Tensor]


def suits(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernel can serve such heads on this device."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (HEAD_DIM, WIDE_DIM)
        and ROWS // 2 % (heads // kv_heads) == 0
    )


def serves(q: torch.Tensor, k_cache: torch.Tensor, tile_tokens: int, window: int, first: int) -> bool:
    """Return True if the kernel serves a pass whose tiles are walked whole. q [T, Hq, D]; k_cache [NP, Hkv, P, D]."""
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    return (
        exact_prompt_attention.serves((heads, kv_heads, q.shape[2], q.dtype, q.device))
        and tile_tokens * heads == ROWS * kv_heads
        and window == 0
        and first == 0
        and k_cache.shape[2] == PAGE
        and k_cache.is_contiguous()
    )


def _sizes(heads: int, kv_heads: int, head_dim: int, keys: int) -> dict[str, int]:
    """Compile-time sizes of the kernel."""
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "PAGE": PAGE, "KEYS": keys, "SPLIT": SPLIT}
    wide = head_dim == WIDE_DIM
    return sizes | (wide_sizes(ROWS // 2) if wide else {"ROWS": ROWS, "HALF": HALF, "STAGES": STAGES})


def launch_prompt_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    work: torch.Tensor,
    count: torch.Tensor,
    scale: float,
    keys: int,
    **tuning: int,
) -> torch.Tensor:
    """Launch the kernel: see ``paged.launch_attention``. Returns [T, Hq · D].

    scale: for powers of two. tuning: compile-time sizes that override the defaults.
    """
    (tokens, heads, dim), kv_heads = q.shape, k_cache.shape[1]
    out = q.new_empty(tokens, heads * dim)
    cached = [boxes(c.view(-1, dim), PAGE) for c in (k_cache, v_cache)]
    operands = q, *cached, page_table, positions, work, count, out, page_table.stride(0), scale
    kernel, parts = (wide_attention_kernel, 2) if dim == WIDE_DIM else (prompt_attention_kernel, 1)
    kernel[(work.shape[0] * kv_heads * parts,)](
        *operands, **(_sizes(heads, kv_heads, dim, keys) | tuning), num_warps=WARPS
    )
    return out


def proof_lengths(heads: int) -> tuple[int, int]:
    """Tokens of the requests in the comparison: enough for tiles of ROWS rows on every multiprocessor."""
    more = max(1, 16 // heads)
    return 1500 * more, 391 * more


def proof_pages(
    lengths: Sequence[int], kv_heads: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make (k_cache, v_cache, page_table) of the requests in the comparison. Places that no token may see are NaN."""
    device = generator.device
    pages = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(pages), generator=generator, device=device).int()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
    for row, own in enumerate(order.split(pages)):
        table[row, : len(own)] = own
    shape = (sum(pages), kv_heads, PAGE, head_dim)
    k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    for row, length in enumerate(lengths):
        for cache in (k, v):
            cache[table[row, pages[row] - 1].long(), :, length - PAGE * (pages[row] - 1) :] = torch.nan
    return k, v, table


def _same_bits(
    attend: Attend, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Compare two requests, whole and after a prefix."""
    lengths, key = proof_lengths(heads), (heads, kv_heads, head_dim, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    pages = proof_pages(lengths, kv_heads, head_dim, dtype, generator)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    for starts in ((0, 0), (700, 13)):
        counts = [n - start for n, start in zip(lengths, starts, strict=True)]
        query_start = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(a, n, device=device) for a, n in zip(starts, lengths, strict=True)]).int()
        q = torch.randn(sum(counts), heads, head_dim, generator=generator, device=device).to(dtype)
        if not exact_prompt_attention.same_when_serving(
            key, partial(attend, q, *pages, kv_len, query_start, positions)
        ):
            return False
    return True


exact_prompt_attention = ExactKernel(
    "attention of long prompts", lambda attend, *heads: (heads,) if suits(*heads) else (), _same_bits
)
"""The Gluon kernels, against the Triton kernel, by (query heads, KV heads, head size, dtype, device).

attend(q, k_cache, v_cache, page_table, kv_len, query_start, positions) runs one pass.
"""


def _case(heads: int, kv_heads: int, dtype: str, head_dim: int = HEAD_DIM) -> AotCase:
    signature = dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}")
    signature |= dict.fromkeys(("k_desc", "v_desc"), box_type(dtype, PAGE))
    signature |= dict.fromkeys(("table_ptr", "positions_ptr", "work_ptr", "count_ptr"), "*i32")
    signature |= {"max_pages": "i32", "scale": "fp32"}
    kernel = wide_attention_kernel if head_dim == WIDE_DIM else prompt_attention_kernel
    return AotCase(kernel, signature, _sizes(heads, kv_heads, head_dim, 64), num_warps=WARPS)


AOT = [
    _case(32, 8, "bf16"), _case(8, 8, "fp16"),
    _case(16, 4, "bf16", WIDE_DIM),  # Qwen3.5-9B
    _case(16, 2, "bf16", WIDE_DIM), _case(2, 2, "fp16", WIDE_DIM),
]  # fmt: skip
