"""Attention of float32 models on the CPU, with torch's fused kernel. Called by ``kernels/attention/cpu.py``.

The kernel attends tiles of exactly ROW_TILE query rows and KEY_TILE keys, each on one thread. A query tile's results
over its key tiles are merged in the order of positions, by their log-sum-exp. Every product has the same shape, so a
row's bits depend on its own query and keys alone: a key tile that no row sees has weight zero and changes no bit.

Shapes: T tokens, B query tiles, C key tiles, M = ROW_TILE rows, S = KEY_TILE keys, H KV heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from unisono.kernels.attention.cpu_reads import KEY_TILE, ROW_TILE, KernelCall, PassSizes, Spans, TileGroup, reads_of
from unisono.kernels.cache.kv_e4m3 import dequantised

_fused: Any = getattr(getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None), "default", None)
available = _fused is not None
"""True where this torch has the kernel."""

Pages = tuple[torch.Tensor, torch.Tensor | None]
"""(keys or values [NP, H, P, D], exponents of the scales of e4m3 ones [NP, H, P, 1] or None)."""


def attend(
    q: torch.Tensor,
    keys: Pages,
    values: Pages,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    spans: Spans,
    scale: float,
    window: int,
    first: int,
    sinks: torch.Tensor | None,
    until: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the spans (row of the page table, first token, end token) of q [T, Hq, D]. Returns [T, Hq · D].

    until [T]: last position that a token sees; None: its own.
    """
    tokens, heads, dim = q.shape
    pages, kv_heads, page_size, _ = keys[0].shape
    reads = reads_of(PassSizes(heads, kv_heads, pages, page_size, window, first), page_table, positions, spans, until)
    if not reads.parts:
        return q.new_zeros(tokens, heads * dim)
    rows = q.reshape(tokens * heads, dim)
    merged = [_attend_part(rows, keys, values, part, scale, sinks) for part in reads.parts]
    found = (merged[0] if len(merged) == 1 else torch.cat(merged)).view(-1, dim)
    out = found.index_select(0, reads.out).view(tokens, heads * dim)
    return out if reads.idle is None else out.masked_fill_(reads.idle[:, None], 0.0)


def _attend_part(
    rows: torch.Tensor, keys: Pages, values: Pages, part: TileGroup, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend one group of tiles: results [B, H, M, D]. rows [T · Hq, D]: the queries."""
    dim, kv_heads = rows.shape[1], keys[0].shape[1]
    q = rows.index_select(0, part.queries).view(-1, kv_heads, ROW_TILE, dim)
    k, v = _tiles_of(*keys, part.keys), _tiles_of(*values, part.keys)
    for tile, start, stop in part.unseen:  # stale keys and values may be NaN, and 0 · NaN is NaN
        k[tile, :, start:stop].zero_()
        v[tile, :, start:stop].zero_()
    if part.calls[0].place is None:
        out, lse = _kernel(q, k, v, part.calls[0], scale)
    else:
        out = q.new_zeros(part.key_tiles * part.tiles, kv_heads, ROW_TILE, dim)
        lse = q.new_full((part.key_tiles * part.tiles, kv_heads, ROW_TILE), float("-inf"))
        for call in part.calls:
            out[call.place], lse[call.place] = _kernel(q, k, v, call, scale)
    shape = part.key_tiles, part.tiles, kv_heads, ROW_TILE
    sink = None if sinks is None else sinks.view(kv_heads, -1)[:, part.heads].transpose(0, 1)
    return _merged(out.view(*shape, dim), lse.view(shape), sink)


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: KernelCall, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [n, H, M, D], their log-sum-exp [n, H, M]), -inf where a row sees nothing."""
    q = q[call.tiles]
    if call.keys is not None:
        k, v = (x[call.keys : call.keys + 1].expand(len(q), -1, -1, -1) for x in (k, v))
    count = len(q)
    mask = call.mask.expand(count, -1, ROW_TILE, -1)
    if count * q.shape[1] == 1:  # the kernel divides tiles among threads; a single one it would compute on all of them
        q, k, v, mask = (x.expand(2, -1, -1, -1) for x in (q, k, v, mask))
    out, lse = _fused(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    if len(out) > count:
        out, lse = out[:count], lse[:count]
    if call.hidden is not None:
        lse.masked_fill_(call.hidden, float("-inf"))
    return out, lse


def _merged(out_CBHMD: torch.Tensor, lse_CBHM: torch.Tensor, sink_BHM: torch.Tensor | None) -> torch.Tensor:
    """Merge the key tiles' results in order: [B, H, M, D]. A sink is one more key with value zero."""
    if len(out_CBHMD) == 1 and sink_BHM is None:
        return out_CBHMD[0].add_(0.0)  # as adding zero does: no negative zero
    top = lse_CBHM.amax(0)
    if sink_BHM is not None:
        top = torch.maximum(top, sink_BHM)
    top.clamp_(min=torch.finfo(torch.float32).min)  # -inf - -inf would be NaN
    weight_CBHM = lse_CBHM.sub_(top).exp_()
    total = weight_CBHM[0].clone()
    weighted = out_CBHMD.mul_(weight_CBHM[..., None])
    acc = weighted[0].add_(0.0)
    for number in range(1, len(weighted)):
        total.add_(weight_CBHM[number])
        acc.add_(weighted[number])
    if sink_BHM is not None:
        total.add_((sink_BHM - top).exp_())
    return acc.div_(total.clamp_(min=1.0)[..., None])  # it is at least 1 unless a row sees nothing


def _tiles_of(cache: torch.Tensor, scales: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor:
    """Gather key tiles [N, H, S, D] fp32 from runs of tokens of a cache [NP, H, P, D]."""
    heads, dim = cache.shape[1], cache.shape[3]
    runs = cache.shape[2] // math.gcd(cache.shape[2], KEY_TILE)
    taken = cache.reshape(cache.shape[0] * heads * runs, -1).index_select(0, chosen)
    if scales is None:
        return taken.view(-1, heads, KEY_TILE, dim)
    exponents = scales.reshape(cache.shape[0] * heads * runs, -1).index_select(0, chosen)
    return dequantised(taken.view(-1, heads, KEY_TILE, dim), exponents.view(-1, heads, KEY_TILE, 1))
