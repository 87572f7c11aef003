"""Dispatch of latent attention to the Gluon kernels for Hopper, and the proofs of their bits.

On Hopper, for 16-bit latents of 512 with 64 elements that rotate, where the proofs found the bits of the Triton kernel
on the present GPU: the kernel in ``gluon_latent.py`` serves passes whose tiles are walked whole, as in long prompts
(:data:`exact_latent_attention`), and the one in ``gluon_latent_rounds.py`` passes whose tiles may be cut, as in rounds
(:data:`exact_latent_rounds`). Everything else runs on the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from unisono.kernels.attention.cpu import SPLIT
from unisono.kernels.attention.gluon_latent import CHUNK, ROWS, STAGES, VALUES, WARPS, latent_prompt_kernel
from unisono.kernels.attention.gluon_latent_rounds import latent_round_kernel
from unisono.kernels.attention.hopper import PAGE, proof_lengths, proof_pages
from unisono.kernels.hopper import box_type, boxes
from unisono.kernels.library import AotCase, ints
from unisono.kernels.overlap import overlapped
from unisono.kernels.proofs import ExactKernel

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE

REGISTERS = {"ADDS": 176, "WEIGHS": 136}
"""Registers of a thread of the groups that add up values, and of the one that computes weights: no loop spills."""

Attend = Callable[..., torch.Tensor]


def suits(heads: int, blocks: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernel can serve such heads, in so many blocks, over rows of ``width`` on this device."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and width == WIDTH
        and heads // blocks <= ROWS
    )


def serves(
    exact: ExactKernel[Any], q: torch.Tensor, cache: torch.Tensor, blocks: int, latent: int
) -> bool:  # fmt: skip
    """Return True if a kernel serves such a pass. exact: its proof; q [T, Hq, L + R]; cache [NP, 1, P, L + R]; latent:
    L.
    """
    return (
        exact.serves((q.shape[1], blocks, q.shape[2], q.dtype, q.device))
        and latent == LATENT
        and cache.shape[2] == PAGE
        and cache.is_contiguous()
    )


def _sizes(heads: int, blocks: int, tile_tokens: int, keys: int) -> dict[str, int]:
    """Compile-time sizes of both kernels."""
    parts = triton.cdiv(tile_tokens, ROWS // (heads // blocks))
    sizes = {"HEADS": heads, "BLOCKS": blocks, "LATENT": LATENT, "ROPE": ROPE, "PAGE": PAGE, "PARTS": parts}
    sizes |= {"KEYS": keys, "SPLIT": SPLIT, "ROWS": ROWS, "CHUNK": CHUNK, "VALUES": VALUES, "STAGES": STAGES}
    return sizes | REGISTERS


def launch_latent_prompt(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor, work: torch.Tensor,
    count: torch.Tensor, tile_tokens: int, blocks: int, scale: float, keys: int, **tuning: int,
) -> torch.Tensor:  # fmt: skip
    """Attend with the kernel for whole tiles: see ``latent.launch_latent``. Returns [T, Hq · L].

    scale: for powers of two. tuning: compile-time sizes that override the defaults.
    """
    tokens, heads, width = q.shape
    out = q.new_empty(tokens, heads * LATENT)
    sizes = _sizes(heads, blocks, tile_tokens, keys) | tuning
    pieces = LATENT // (sizes["VALUES"] * CHUNK)
    latent_prompt_kernel[(len(work) * sizes["PARTS"] * blocks * pieces,)](
        q, boxes(cache.view(-1, width), PAGE), page_table, positions, work, count, out, page_table.stride(0), scale,
        **sizes, num_warps=WARPS,
    )  # fmt: skip
    return out


def launch_latent_round(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor, work: torch.Tensor,
    count: torch.Tensor, arrivals: torch.Tensor, workspace: tuple[torch.Tensor, torch.Tensor], scale: float,
    first: int, keys: int,
) -> torch.Tensor:  # fmt: skip
    """Attend with the kernel for tiles that may be cut: see ``latent.launch_latent``. Returns [T, Hq · L].

    workspace: states and values of splits. scale: for powers of two.
    """
    (tokens, heads, width), (capacity, tile_tokens, blocks) = q.shape, arrivals.shape
    out = q.new_empty(tokens, heads * LATENT)
    sizes = _sizes(heads, blocks, tile_tokens, keys) | _of_rounds(tile_tokens, first)
    pieces = LATENT // (VALUES * CHUNK)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    programs = min(processors // pieces, capacity * sizes["PARTS"] * blocks) * pieces
    latent_round_kernel[(programs,)](
        q, boxes(cache.view(-1, width), PAGE), page_table, positions, work, count, arrivals, *workspace, out, tokens,
        page_table.stride(0), scale, **sizes, num_warps=WARPS, **overlapped(q.device),
    )  # fmt: skip
    return out


def _of_rounds(tile_tokens: int, first: int) -> dict[str, int]:
    """Compile-time sizes of the kernel for rounds alone."""
    return {"TOKENS": tile_tokens, "FIRST": first}


def _same_bits(
    attend: Attend, heads: int, blocks: int, width: int, dtype: torch.dtype, device: torch.device
) -> bool:  # fmt: skip
    """Compare two requests, whole and after a prefix."""
    lengths, key = proof_lengths(heads), (heads, blocks, width, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    cache, _, table = proof_pages(lengths, 1, width, dtype, generator)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    for starts in ((0, 0), (700, 13)):
        counts = [n - start for n, start in zip(lengths, starts, strict=True)]
        query_start = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(a, n, device=device) for a, n in zip(starts, lengths, strict=True)]).int()
        q = torch.randn(sum(counts), heads, width, generator=generator, device=device).to(dtype)
        run = partial(attend, q, cache, table, kv_len, query_start, positions)
        if not exact_latent_attention.same_when_serving(key, run):
            return False
    return True


def _same_rounds(
    attend: Attend, heads: int, blocks: int, width: int, dtype: torch.dtype, device: torch.device
) -> bool:  # fmt: skip
    """Compare rounds of one token and of four over requests of many lengths."""
    lengths, key = (37, 64, 255, 256, 257, 700, 1100, 2500), (heads, blocks, width, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    cache, _, table = proof_pages(lengths, 1, width, dtype, generator)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    for tokens in (1, 4):
        q = torch.randn(len(lengths) * tokens, heads, width, generator=generator, device=device).to(dtype)
        if not exact_latent_rounds.same_when_serving(key, partial(attend, q, cache, table, kv_len, tokens)):
            return False
    return True


exact_latent_attention = ExactKernel(
    "latent attention of long prompts", lambda attend, *heads: (heads,) if suits(*heads) else (), _same_bits
)
"""The Gluon kernel, against the Triton kernel, by (query heads, blocks of heads, width of a row, dtype, device).

attend(q, cache, page_table, kv_len, query_start, positions) runs one pass.
"""

exact_latent_rounds = ExactKernel(
    "latent attention of rounds", lambda attend, *heads: (heads,) if suits(*heads) else (), _same_rounds
)
"""The Gluon kernel of rounds, against the Triton kernel, by the same. attend(q, cache, page_table, kv_len, width) runs
one round.
"""


def _case(heads: int, blocks: int, tile_tokens: int, dtype: str, first: int | None = None) -> AotCase:
    """first: of the kernel for rounds; None: the kernel for prompts."""
    signature = dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}") | {"desc": box_type(dtype, PAGE)}
    signature |= ints("table_ptr positions_ptr work_ptr count_ptr", "max_pages") | {"scale": "fp32"}
    sizes = _sizes(heads, blocks, tile_tokens, 64)
    if first is None:
        return AotCase(latent_prompt_kernel, signature, sizes, num_warps=WARPS)
    signature |= ints("arrivals_ptr", "tokens") | {"state_ptr": "*fp32", "acc_ptr": "*fp32"}
    sizes |= _of_rounds(tile_tokens, first) | {"OVERLAP": True}
    return AotCase(latent_round_kernel, signature, sizes, num_warps=WARPS)


AOT = [
    _case(20, 1, 6, "bf16"),  # GLM-4.7-Flash
    _case(128, 4, 4, "bf16"),  # DeepSeek-V3
    _case(16, 1, 8, "fp16"),  # a rank of eight
    *(_case(20, 1, width, "bf16", first=0) for width in (1, 4)),
    _case(20, 1, 4, "bf16", first=1),  # GLM's draft module
    _case(128, 4, 1, "fp16", first=0),
]
