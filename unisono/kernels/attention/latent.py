"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) in absorbed form: every head attends over the same rows.

Owns the ``latent_attention`` op. A page has one row per token: a latent, read as key and as value, then a rotated part
of the key. The plan, the walk over splits and their merge are those of ``kernels/attention/paged.py``, so the bits
depend on a token's own query and keys alone, in rounds, chunks and prompts alike. Called by the attention backends.

Shapes: T tokens, NP pages, P page size, Hq query heads, L latent size, R size of the rotated part.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from unisono.kernels.attention import hopper_latent
from unisono.kernels.attention.cpu import SPLIT, attention_cpu
from unisono.kernels.attention.latent_kernels import latent_kernel
from unisono.kernels.attention.paged import KEYS, AttentionPlan, _elements, _programs
from unisono.kernels.attention.triton_kernels import LOG2_E
from unisono.kernels.cache.kv_e4m3 import dequantised
from unisono.kernels.cards import KIB
from unisono.kernels.library import AotCase, Mutated, op
from unisono.kernels.overlap import overlapped
from unisono.types import ConfigError

SHARED = 194 * 1024
"""Bytes of shared memory that a block of 32 rows needs for latents of 512 elements."""


def check_shared_memory(shared: int) -> None:
    """Raise ConfigError if a GPU's blocks have too little shared memory, in bytes."""
    if shared < SHARED:
        raise ConfigError(
            f"latent attention (MLA) needs {SHARED // KIB} KiB of shared memory for a block; this GPU has "
            f"{shared // KIB}. Compute capabilities 9.0 and 10.0 have enough."
        )


GROUP = 32
"""Maximum heads of a block, and rows of a tile: two accumulators of 512 per row must fit into registers."""


def head_blocks(heads: int) -> int:
    """Number of equal blocks of at most GROUP heads, the "KV heads" of a plan for latent attention."""
    return next(count for count in range(1, heads + 1) if heads % count == 0 and heads // count <= GROUP)


FEW_TILES = 4
"""Tiles of a pass, at most, whose values are computed in pieces."""


def _pieces(tiles: int, latent: int, keys: int) -> int:
    """Number of equal parts of the values' columns, each computed by a program, in a pass that may be cut.

    Each part needs all scores, so parts are for passes that would leave the device idle. tiles: number of whole tiles.
    keys: maximum keys of a request; the number of a tile's splits must fit into a part of 32 bits.
    """
    if tiles > FEW_TILES or latent != triton.next_power_of_2(latent) or latent < 64:
        return 1
    return 4 if triton.cdiv(keys, SPLIT) < 2**8 else 2


def _geometry(
    heads: int, blocks: int, latent: int, rope: int, dtype: torch.dtype, tile_tokens: int, cut: bool, pieces: int = 1
) -> tuple[dict[str, int], dict[str, int]]:
    """Choose the kernel's compile-time sizes and launch options; only speed depends on them."""
    group, dim = heads // blocks, max(triton.next_power_of_2(latent), 16)
    fits = 16 if dtype == torch.float32 else GROUP
    rows = triton.next_power_of_2(max(min(tile_tokens * group, fits), group, 16))
    tokens = min(rows // group, tile_tokens)
    sizes = {
        "HEADS": heads, "BLOCKS": blocks, "LATENT": latent, "ROPE": rope, "DIM": dim,
        "TURNED": max(triton.next_power_of_2(rope), 16), "TOKENS": tile_tokens,
        "PARTS": triton.cdiv(tile_tokens, tokens), "ROWS": rows, "USED": triton.next_power_of_2(tokens * group),
        "PIECES": pieces, "KEYS": KEYS, "SPLIT": SPLIT, "CUT": cut,
    }  # fmt: skip
    return sizes, {"num_warps": 8, "num_stages": 3}


def launch_latent(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor, work: torch.Tensor,
    count: torch.Tensor, arrivals: torch.Tensor, partials: int, scale: float, latent: int, first: int = 0,
    turned: torch.Tensor | None = None, scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See :func:`latent_attention`."""
    (tokens, heads, width), (_, tile_tokens, blocks) = q.shape, arrivals.shape
    where, rounds = (q, cache, page_table, positions, work, count), hopper_latent.exact_latent_rounds
    plain, page, prompts = scales is None, cache.shape[2], hopper_latent.exact_latent_attention
    if plain and partials == 0 and first == 0 and hopper_latent.serves(prompts, q, cache, blocks, latent):
        return hopper_latent.launch_latent_prompt(*where, tile_tokens, blocks, scale * LOG2_E.value, KEYS)
    state = q.new_empty(partials, tile_tokens, heads, 2, dtype=torch.float32)
    acc = q.new_empty(partials, tile_tokens, heads, latent, dtype=torch.float32)
    if plain and partials > 0 and hopper_latent.serves(rounds, q, cache, blocks, latent):
        return hopper_latent.launch_latent_round(*where, arrivals, (state, acc), scale * LOG2_E.value, first, KEYS)
    out = q.new_empty(tokens, heads * latent)
    whole_tiles = triton.cdiv(tokens, tile_tokens)
    pieces = _pieces(whole_tiles * blocks, latent, page_table.shape[1] * page) if partials else 1
    sizes, launch = _geometry(heads, blocks, latent, width - latent, q.dtype, tile_tokens, partials > 0, pieces)
    items, tiles = (n * sizes["PARTS"] * blocks * pieces for n in (len(arrivals), whole_tiles))
    programs = min(_programs(q.device, tiles, launch["num_warps"]), items) if partials else items
    stride = None if turned is None else turned.stride(0)
    if scales is not None:
        cache, scales = _elements(cache, torch.int16), _elements(scales, torch.int32)
    latent_kernel[(programs,)](
        q, cache, page_table, positions, work, count, arrivals, state, acc, out, turned, scales,
        page_table.stride(0), cache.stride(0), stride, scale * LOG2_E.value,
        PAGE=page, FIRST=first, **sizes, **launch, **overlapped(q.device),
    )  # fmt: skip
    return out


@op(cuda=launch_latent, shape=lambda q, latent: (q.shape[0], q.shape[1] * latent))
def latent_attention_op(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor, work: torch.Tensor,
    count: torch.Tensor, arrivals: Mutated[torch.Tensor], partials: int, scale: float, latent: int, first: int = 0,
    turned: torch.Tensor | None = None, scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    if scales is not None and turned is not None:
        cache, page_table = _dequantised_pages(cache, turned, scales, page_table, work[: int(count)])
    where = page_table, positions, work, count, arrivals, partials
    out = attention_cpu(q, cache, cache, *where, scale, 0, first)
    return out.view(q.shape)[..., :latent].flatten(1)


def _dequantised_pages(
    cache: torch.Tensor, turned: torch.Tensor, scales: torch.Tensor, page_table: torch.Tensor, work: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of the work list's requests as rows [NP', 1, P, L + R] fp32, and a page table of them."""
    columns = -(-max([0, *work[:, 1].tolist()]) // cache.shape[2])
    slots = work[:, 0].unique().long()
    pages, places = page_table[slots, :columns].unique(return_inverse=True)
    found = dequantised(cache.view(torch.uint8)[pages].view(cache.dtype), scales[pages])
    table = torch.zeros_like(page_table)
    table[slots, :columns] = places.int()
    return torch.cat((found, turned[pages].float()), dim=-1), table


def latent_attention(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan,
    scale: float, latent: int, first: int = 0, turned: torch.Tensor | None = None, scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend the tokens of a planned pass over latent pages.

    q [T, Hq, L + R]; cache [NP, 1, P, L + R], latent first, of q's dtype; page_table [S, MP]; positions [T]; latent: L.
    plan: of :func:`head_blocks` "KV heads". A token sees keys at first ≤ p ≤ its position; one below ``first``, as at
    position -1, sees nothing and yields zeros. Returns [T, Hq · L]: each head's weighted sum of latents.

    Or cache [NP, 1, P, L] of e4m3, contiguous, P and L multiples of 4, with rotated parts in turned [NP, 1, P, R] of
    q's dtype, and exponents of scales in scales [NP, 1, P, 1] uint8 (``kernels/cache/kv_e4m3.py``).
    """
    return latent_attention_op(q, cache, page_table, positions, *plan, scale, latent, first, turned, scales)


def _case(
    heads: int, latent: int, tile_tokens: int, cut: bool, first: int = 0, pieces: int = 1, e4m3: bool = False
) -> AotCase:
    sizes, options = _geometry(heads, head_blocks(heads), latent, 64, torch.bfloat16, tile_tokens, cut, pieces)
    signature = dict.fromkeys(("q_ptr", "cache_ptr", "out_ptr"), "*bf16")
    signature |= dict.fromkeys(("table_ptr", "positions_ptr", "work_ptr", "count_ptr", "arrivals_ptr"), "*i32")
    signature |= {"state_ptr": "*fp32", "acc_ptr": "*fp32", "scale": "fp32", "max_pages": "i32", "page_stride": "i32"}
    constants: dict[str, Any] = sizes | {"PAGE": 16, "FIRST": first, "OVERLAP": True}
    more = {"rope_ptr": "*bf16", "scales_ptr": "*i32", "rope_stride": "i32"}
    signature |= more | {"cache_ptr": "*i16"} if e4m3 else {}
    constants |= {} if e4m3 else dict.fromkeys(more)
    return AotCase(latent_kernel, signature, constants, **options)


AOT = [
    *(_case(20, 512, width, cut=True) for width in (1, 4)),  # GLM-4.7-Flash: rounds
    *(_case(20, 512, width, cut=True, pieces=4) for width in (1, 4)),  # and of few requests
    _case(20, 512, 4, cut=True, first=1),  # its draft module
    _case(20, 512, 3, cut=False),  # extend passes
    *(_case(128, 512, width, cut=True) for width in (1, 4)),  # DeepSeek-V3
    _case(128, 512, 1, cut=False),
    _case(16, 512, 1, cut=True),  # a rank of eight
    _case(32, 256, 4, cut=True),  # Mistral Small 4
    *(_case(20, 512, width, cut=True, e4m3=True) for width in (1, 4)),
    _case(20, 512, 1, cut=True, pieces=4, e4m3=True),
    _case(20, 512, 4, cut=True, first=1, e4m3=True),
    _case(128, 512, 1, cut=False, e4m3=True),
    _case(32, 256, 4, cut=True, e4m3=True),
]
