"""Attention in plain PyTorch, planned on the host: a reference for kernels, and a backend that cannot be captured.

It reads positions and page tables on the host, so in a graph it runs between segments. Each token is attended alone
over exactly the keys that it sees, in products whose shapes depend on its position only. So it is exact: its bits
depend on nothing else. They differ from those of the ``triton`` backend. It is slow: a few operations per token.
"""

from __future__ import annotations

import itertools

import torch

from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.kernels.attention.cpu_reads import first_seen
from unisono.kernels.cache.kv_e4m3 import dequantised


class ReferenceAttention:
    """``softmax(q kᵀ · scale) v`` in float32 over gathered pages, one token at a time."""

    name = "torch"
    capturable = False

    def __init__(self, num_heads: int, num_kv_heads: int, device: torch.device | str) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """Fill ``inputs.plan`` with (token, position, ``until``, its row's page table [MP]) of each token except
        padding."""
        positions, slots = inputs.positions.tolist(), inputs.slots.tolist()
        until = positions if inputs.until is None else inputs.until.tolist()
        if inputs.width is not None:
            rows = [token // inputs.width for token in range(len(positions))]
        elif inputs.query_start is not None:
            edges = inputs.query_start.tolist()
            rows = [row for row, (a, b) in enumerate(itertools.pairwise(edges)) for _ in range(a, b)]
        else:
            raise ValueError("Set width or query_start of the attention inputs.")
        inputs.plan = [
            (token, positions[token], until[token], inputs.page_table[slots[row]])
            for token, row in enumerate(rows)
            if positions[token] >= 0
        ]

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """See :class:`unisono.attention.base.AttentionBackend`. H KV heads, G query heads per KV head."""
        tokens, heads, dim = q.shape
        kv_heads, page_size = kv.k.shape[1:3]
        pages = [(kv.k, kv.k_scales), (kv.v, kv.v_scales)]
        latents = options.values > 0 and kv.k_scales is not None
        out = q.new_zeros(tokens, heads * (options.values or dim))
        for token, position, until, table in inputs.plan:
            last = until if options.both_ways else position
            since = max(options.first, first_seen(position, options.window) if options.window else 0)
            if since > last:
                continue
            at = torch.arange(since, last + 1, device=q.device)
            page, offset = table[at // page_size].long(), at % page_size
            k_HND, v_HND = (_rows(*each, page, offset) for each in pages)
            if latents:  # a key's first elements, and the rest of it
                k_HND, v_HND = torch.cat((k_HND, v_HND), dim=-1), k_HND
            q_HGD = q[token].view(kv_heads, heads // kv_heads, dim).float()
            scores_HGN = q_HGD @ k_HND.transpose(1, 2) * options.scale
            if options.soft_cap > 0:
                scores_HGN = options.soft_cap * (scores_HGN / options.soft_cap).tanh()
            if options.sinks is not None:  # one more column, dropped after the softmax
                scores_HGN = torch.cat((scores_HGN, options.sinks.float().view(kv_heads, -1, 1)), -1)
            weights_HGN = scores_HGN.softmax(-1)[..., : len(at)]
            out[token] = (weights_HGN @ v_HND[..., : options.values or dim]).flatten().to(q.dtype)
        return out


def _rows(pages: torch.Tensor, scales: torch.Tensor | None, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Gather keys or values [Hkv, N, D] fp32 from N cache slots."""
    scale = None if scales is None else scales[page, :, offset]
    return dequantised(pages[page, :, offset], scale).transpose(0, 1).contiguous()
