"""Requests whose keys and values lie in shuffled pages, and attention over them: for tests of attention.

Both implementations can be asked: the Triton kernels (on the GPU, else in the interpreter) and the CPU twins.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from unisono.kernels.attention import cpu as twin
from unisono.kernels.attention import paged as ops
from unisono.kernels.cache.kv_e4m3 import dequantised, quantised
from unisono.kernels.gemm.fp8_quantize import launch_quantize, padded_quantize_cpu

TRITON = (ops.launch_attention_plan, ops.launch_attention)
TWIN = (twin.attention_plan_cpu, twin.attention_cpu)
QUANTISING = (ops.launch_attention_fp8, launch_quantize)
TWIN_QUANTISING = (torch.ops.unisono.attention_fp8, padded_quantize_cpu)
IMPLEMENTATIONS = pytest.mark.parametrize("triton", [True, False], ids=["triton", "twin"])
ALWAYS_CUT, NEVER_CUT = 10**6, 1  # programs at a time


@dataclass
class Requests:
    """Requests of the given lengths: queries for each token, keys and values in shuffled pages.

    The last slot is the padding slot; page 0 is the padding page. Everything unwritten is NaN. With ``e4m3`` the pages
    are quantised, and keys and values are what they stand for. With ``spread`` they have all magnitudes. With
    ``to_e4m3`` attention whose outputs are e4m3 is compared each time with those that are quantised afterwards.
    """

    lengths: list[int]
    triton: bool
    dtype: torch.dtype = torch.float32
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 16
    window: int = 0
    first: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    planned_window: bool = False
    e4m3: bool = False
    spread: bool = False
    to_e4m3: bool = False
    pictures: tuple[tuple[int, int, int], ...] = ()  # (request, first, end): tokens that see each other
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = torch.device("cuda" if self.triton and torch.cuda.is_available() else "cpu")
        needed = [-(-n // self.page) for n in self.lengths]
        pages = torch.randperm(sum(needed)).add(1).split(needed)
        table = torch.full((len(needed) + 1, max(needed) + 2), 2**30)  # columns past a request's end hold rubbish
        table[-1] = 0
        shape = (sum(needed) + 1, self.kv_heads, self.page, self.dim)
        caches = torch.full((2, *shape), torch.nan)
        self.k, self.v = [], []
        for row, (n, own) in enumerate(zip(self.lengths, pages, strict=True)):
            table[row, : len(own)] = own
            kv = torch.randn(2, n, self.kv_heads, self.dim).to(self.dtype)
            if self.spread:
                kv *= 2.0 ** torch.randint(-18, 8, (2, n, self.kv_heads, 1))
            at = torch.arange(self.first, n)
            caches.transpose(2, 3)[:, own[at // self.page], at % self.page] = kv[:, self.first :].float()
            self.k.append(kv[0])
            self.v.append(kv[1])
        self.q = [torch.randn(n, self.heads, self.dim).to(self.dtype) for n in self.lengths]
        self.k_cache, self.v_cache = caches.to(self.device, self.dtype)
        self.scales: tuple[torch.Tensor, ...] = ()
        if self.e4m3:
            (self.k_cache, k_scales), (self.v_cache, v_scales) = (quantised(c) for c in (self.k_cache, self.v_cache))
            self.scales = k_scales, v_scales
            for x in (*self.k, *self.v):
                x.copy_(dequantised(*quantised(x)))
        self.table = table.to(self.device, torch.int32)
        self.scale = self.dim**-0.5
        self.sink = torch.randn(self.heads).mul(3) if self.sinks else None

    def until(self, row: int, position: int) -> int:
        """The last position that a token sees."""
        return next((b - 1 for r, a, b in self.pictures if r == row and a <= position < b), position)

    def _int32(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _queries(self, spans) -> torch.Tensor:
        parts = [self.q[row][a:b] if row >= 0 else torch.randn(b, self.heads, self.dim) for row, a, b in spans]
        return torch.cat(parts).to(self.device, self.dtype)

    def _attend(
        self, q, positions, slots, kv_len, query_start, tile_tokens, programs, partials, until=None
    ) -> torch.Tensor:
        plan, attend = TRITON if self.triton else TWIN
        window = abs(self.window) if self.planned_window else 0
        planned = plan(slots, kv_len, query_start, len(q), tile_tokens, self.kv_heads, partials, programs, window)
        caches = (self.k_cache, self.v_cache, self.table)
        sink = None if self.sink is None else self.sink.to(self.device)
        args = (q, *caches, self._int32(positions), *planned, partials, self.scale, self.window, self.first)
        args += (self.soft_cap, sink, *(self.scales or (None, None)), None if until is None else self._int32(until))
        out = attend(*args)
        if self.to_e4m3:
            quantising, quantise = QUANTISING if self.triton else TWIN_QUANTISING
            for got, want in zip(quantising(*args), quantise(out, ops.scale_columns(self.dim)), strict=True):
                assert got.shape == want.shape
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        if partials:
            assert torch.equal(out, attend(*args)), "the plan does not serve a second layer"
        return out.view(-1, self.heads, self.dim).cpu()

    def round(self, ends, width, programs=ALWAYS_CUT, partials=64) -> torch.Tensor:
        """Outputs [R, W, Hq, D] of a round: row r's tokens end at ``ends[r] = (request, length)``; None is padding."""
        slots = self._int32([len(self.table) - 1 if end is None else end[0] for end in ends])
        kv_len = self._int32([0 if end is None else end[1] for end in ends])
        positions = [range(n - width, n) if n else [-1] * width for n in kv_len.tolist()]
        q = self._queries([(-1, 0, width) if end is None else (end[0], end[1] - width, end[1]) for end in ends])
        flat = [p for row in positions for p in row]
        out = self._attend(q, flat, slots, kv_len, None, width, programs, partials)
        return out.view(len(ends), width, self.heads, self.dim)

    def extend(self, spans, tile_tokens=8, padding=0, programs=NEVER_CUT, partials=0) -> torch.Tensor:
        """Outputs [T, Hq, D] of an extend pass over ``spans`` (request, first, end); ``padding`` tokens behind."""
        starts = list(itertools.accumulate((b - a for _, a, b in spans), initial=0))
        positions = [p for _, a, b in spans for p in range(a, b)] + [-1] * padding
        rows, _, ends = (self._int32(x) for x in zip(*spans, strict=True))
        q = self._queries([*spans, (-1, 0, padding)])
        until = [self.until(row, p) for row, a, b in spans for p in range(a, b)] + [-1] * padding
        own = tile_tokens, programs, partials, until if self.pictures else None
        return self._attend(q, positions, rows, ends, self._int32(starts), *own)

    def oracle(self, row: int, first: int, end: int) -> torch.Tensor:
        """float64 attention of a request's tokens first … end, from its definition."""
        group = self.heads // self.kv_heads
        q = self.q[row][first:end].double().transpose(0, 1)
        k, v = (t[row][:end].double().transpose(0, 1).repeat_interleave(group, 0) for t in (self.k, self.v))
        position, key = torch.arange(first, end)[:, None], torch.arange(end)[None]
        until = torch.tensor([self.until(row, p) for p in range(first, end)])[:, None]
        seen = (key <= until) & (key >= self.first)
        if self.window > 0:
            seen &= key > position - self.window
        elif self.window < 0:
            seen &= key // -self.window == position // -self.window
        scores = q @ k.mT * self.scale
        if self.soft_cap:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sink is not None:
            scores = torch.cat((scores, self.sink.double()[:, None, None].expand(-1, end - first, 1)), -1)
        return (scores.softmax(-1).nan_to_num(0)[..., :end] @ v).transpose(0, 1)
