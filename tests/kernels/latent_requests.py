"""Requests over latent pages, and latent attention of them: for tests."""

from __future__ import annotations

import torch

from unisono.kernels.attention import cpu as twin
from unisono.kernels.attention import paged
from unisono.kernels.attention.latent import head_blocks, latent_attention_op, launch_latent
from unisono.kernels.cache.kv_e4m3 import dequantised, quantised

PAGE, LATENT, ROPE = 16, 40, 8


class Rows:
    """Requests of these lengths over latent pages in shuffled order; what was never written is NaN.

    e4m3: latents are quantised.
    """

    def __init__(self, lengths, heads, device, latent=LATENT, rope=ROPE, e4m3=False):
        generator = torch.Generator().manual_seed(3)
        self.lengths, self.heads, self.latent, self.device = lengths, heads, latent, device
        needed = [-(-n // PAGE) for n in lengths]
        pages = torch.randperm(sum(needed), generator=generator).add(1).split(needed)
        self.table = torch.zeros(len(lengths) + 1, max(needed), dtype=torch.int32)
        cache = torch.full((sum(needed) + 1, 1, PAGE, latent + rope), torch.nan)
        self.keys, self.q = [], []
        for row, (n, own) in enumerate(zip(lengths, pages, strict=True)):
            self.table[row, : len(own)] = own
            keys = torch.randn(n, latent + rope, generator=generator)
            at = torch.arange(n)
            cache[own[at // PAGE], 0, at % PAGE] = keys
            self.keys.append(keys)
            self.q.append(torch.randn(n, heads, latent + rope, generator=generator))
        self.table, self.e4m3 = self.table.to(device), ()
        if e4m3:
            cache, turned = cache.split((latent, rope), dim=-1)
            cache, scales = quantised(cache.contiguous())
            self.e4m3 = turned.contiguous().to(device), scales.to(device)
            for keys in self.keys:
                keys[:, :latent] = dequantised(*quantised(keys[:, :latent]))
        self.cache = cache.to(device)

    def attend(self, triton, spans, width=None, programs=1, first=0):
        """Outputs of the tokens start … end - 1 of each row, in one pass. programs: many cut every tile."""
        plan, run = (
            (paged.launch_attention_plan, launch_latent)
            if triton
            else (twin.attention_plan_cpu, latent_attention_op.cpu)
        )
        ints = {"dtype": torch.int32, "device": self.device}
        q = torch.cat([each[a:b] for each, (a, b) in zip(self.q, spans, strict=True)]).to(self.device)
        positions = torch.cat([torch.arange(a, b) for a, b in spans]).to(**ints)
        starts = None if width else torch.tensor([0, *torch.tensor([b - a for a, b in spans]).cumsum(0)], **ints)
        partials = 64 if programs > 1 else 0
        where = torch.arange(len(spans), **ints), torch.tensor([b for _, b in spans], **ints), starts
        work = plan(*where, len(q), width or 3, head_blocks(self.heads), partials, programs)
        scale = 0.2
        out = run(q, self.cache, self.table, positions, *work, partials, scale, self.latent, first, *self.e4m3)
        assert not work[2][: int(work[1])].any(), "the next layer's counters"
        return out.split([b - a for a, b in spans])

    def expected(self, row, span, first=0):
        q, keys = self.q[row][slice(*span)].double(), self.keys[row].double()
        scores = torch.einsum("thd,kd->htk", q, keys) * 0.2
        at, of = torch.arange(*span)[:, None], torch.arange(len(keys))
        scores = scores.masked_fill((of > at) | (of < first), -torch.inf)
        return torch.einsum("htk,kd->thd", scores.softmax(2), keys[:, : self.latent]).flatten(1)
