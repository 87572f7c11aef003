"""Causal attention with gradients, as an ``AttentionBackend``.

All rows have the same length and no padding on the left. Each pass has its own KV caches, in which the pages of a row
are contiguous. Shapes: B rows, L tokens a row, Hq / Hkv query / KV heads, D head dim, P page size.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import scaled_dot_product_attention

from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.models.config import DecoderConfig
from unisono.types import ConfigError


class TrainingAttention:
    """An ``AttentionBackend`` in plain torch.

    For an unrolled head ``inputs.plan`` holds the KV caches of the earlier steps, step 0 first ("training-time test" of
    EAGLE-3, arXiv 2503.01840, section 3.2). Query q of a row then attends to keys 0 … q of step 0, which correspond to
    committed tokens, and to key q of every later step including its own, which correspond to drafts.
    """

    name = "training"
    capturable = True

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """Does nothing: the caller has set ``inputs.plan``."""

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """q [B · L, Hq, D] -> [B · L, Hq · D]; see :class:`unisono.attention.base.AttentionBackend`."""
        if options.window < 0:
            raise ConfigError("draft heads cannot be trained for a model whose attention has chunks yet.")
        rows = inputs.slots.shape[0]
        queries = q.view(rows, -1, *q.shape[1:]).transpose(1, 2)
        length, heads = queries.shape[2], q.shape[1]
        caches = [*(inputs.plan or ()), kv]
        keys, values = (
            torch.cat([_by_row(cache[i], rows, length) for cache in caches], dim=2).repeat_interleave(
                heads // kv[0].shape[1], dim=1
            )
            for i in (0, 1)
        )
        values = values[..., : options.values] if options.values else values
        plain = len(caches) == 1 and not options.window
        if options.soft_cap or options.sinks is not None:
            visible = _visible(length, len(caches) - 1, options.window, q.device)
            out = _weights(queries, keys, visible, options) @ values
        else:
            mask = None if plain else _visible(length, len(caches) - 1, options.window, q.device)
            out = scaled_dot_product_attention(queries, keys, values, mask, is_causal=plain, scale=options.scale)
        return out.transpose(1, 2).reshape(rows * length, -1)


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Weights [B, Hq, L, K] of keys [B, Hq, K, D], with a soft cap or sinks, in the queries' dtype. visible [L, K]."""
    scores = (queries @ keys.mT).float() * options.scale
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    return scores.softmax(-1)[..., : keys.shape[2]].to(queries.dtype)


def _by_row(cache: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Cache [B · n, Hkv, P, D] -> the first ``length`` of the n · P tokens of each row, [B, Hkv, length, D]."""
    _, heads, page, dim = cache.shape
    return cache.view(rows, -1, heads, page, dim).transpose(1, 2).reshape(rows, heads, -1, dim)[:, :, :length]


@functools.lru_cache(maxsize=64)
def _visible(length: int, steps: int, window: int, device: torch.device) -> torch.Tensor:
    """The attention mask [L, (1 + steps) · L], True where a query attends to a key."""
    q = torch.arange(length, device=device)[:, None]
    k = q.T
    committed = k <= q
    if window:  # step 0's key k stands ``steps`` + q - k positions before query q
        committed = committed & (steps + q - k < window)
    return torch.cat((committed, *([k == q] * steps)), dim=1)


def new_pass(
    config: DecoderConfig, rows: int, length: int, first: int, page: int, layers: int, dtype: torch.dtype,
    device: torch.device, earlier: tuple[KV, ...] = (),
) -> tuple[AttentionInputs, list[KV]]:  # fmt: skip
    """Attention inputs and empty KV caches for rows of ``length`` tokens at positions first, first + 1, …

    page: page size, a divisor of ``length``. earlier: caches of the earlier steps, see :class:`TrainingAttention`.
    """
    each = torch.arange(rows * length, dtype=torch.int32, device=device)
    slots = each[:rows]
    inputs = AttentionInputs(
        slots=slots,
        positions=each % length + first,
        slot_mapping=each,
        kv_len=slots.new_full((rows,), first + length),
        page_table=slots[:, None],
        width=length,
        plan=earlier,
    )
    shape = (rows * length // page, config.attention.num_kv_heads, page, config.attention.head_dim) if layers else ()
    return inputs, [
        KV(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(layers)
    ]
