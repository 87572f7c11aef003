"""Attention: right against float64, and a token's bits are the same in every pass that computes it.

Both implementations of both ops are tested: the Triton kernels (on the GPU, else in the interpreter, small
sizes) and the CPU twins. Caches are NaN wherever no token of a request has been written.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from unisono.kernels import attention as ops
from unisono.kernels import attention_cpu as twin

TRITON = (
    ops.launch_attention_plan,
    ops.launch_attention_round,
    ops.launch_attention_extend_plan,
    ops.launch_attention_extend,
)
TWIN = (
    twin.attention_plan_cpu,
    twin.attention_round_cpu,
    twin.attention_extend_plan_cpu,
    twin.attention_extend_cpu,
)
IMPLEMENTATIONS = pytest.mark.parametrize("triton", [True, False], ids=["triton", "twin"])
ALWAYS_SPLIT, NEVER_SPLIT = 10**6, 1


@dataclass
class Requests:
    """Requests of the given lengths: queries for each token, keys and values in shuffled pages.

    The last slot is the padding slot; page 0 is the padding page. Everything unwritten is NaN.
    """

    lengths: list[int]
    triton: bool
    dtype: torch.dtype = torch.float32
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 16
    window: int = 0
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
            at = torch.arange(n)
            caches.transpose(2, 3)[:, own[at // self.page], at % self.page] = kv.float()
            self.k.append(kv[0])
            self.v.append(kv[1])
        self.q = [torch.randn(n, self.heads, self.dim).to(self.dtype) for n in self.lengths]
        self.k_cache, self.v_cache = caches.to(self.device, self.dtype)
        self.table = table.to(self.device, torch.int32)
        self.scale = self.dim**-0.5

    def _int32(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _queries(self, spans) -> torch.Tensor:
        parts = [self.q[row][a:b] if row >= 0 else torch.randn(b, self.heads, self.dim) for row, a, b in spans]
        return torch.cat(parts).to(self.device, self.dtype)

    def round(self, ends, width, programs=ALWAYS_SPLIT, partials=64) -> torch.Tensor:
        """Outputs [R, W, Hq, D] of a round: row r's tokens end at ``ends[r] = (request, length)``; None is padding."""
        plan, attend, _, _ = TRITON if self.triton else TWIN
        slots = self._int32([-1 % len(self.table) if end is None else end[0] for end in ends])
        kv_len = self._int32([0 if end is None else end[1] for end in ends])
        positions = [range(n - width, n) if n else [-1] * width for n in kv_len.tolist()]
        positions = self._int32([p for row in positions for p in row])
        q = self._queries([(-1, 0, width) if end is None else (end[0], end[1] - width, end[1]) for end in ends])
        planned = plan(slots, kv_len, width, self.kv_heads, partials, programs)
        args = (q, self.k_cache, self.v_cache, self.table, positions, *planned, self.scale, self.window)
        out = attend(*args)
        assert torch.equal(out, attend(*args)), "the plan does not serve a second layer"
        return out.view(len(ends), width, self.heads, self.dim).cpu()

    def extend(self, spans, tile_tokens=8, padding=0) -> torch.Tensor:
        """Outputs [T, Hq, D] of an extend pass over ``spans`` (request, first, end); ``padding`` tokens behind."""
        _, _, plan, attend = TRITON if self.triton else TWIN
        starts = list(itertools.accumulate((b - a for _, a, b in spans), initial=0))
        tokens = starts[-1] + padding
        positions = self._int32([p for _, a, b in spans for p in range(a, b)] + [-1] * padding)
        planned = plan(self._int32([row for row, _, _ in spans]), self._int32(starts), tokens, tile_tokens)
        q = self._queries([*spans, (-1, 0, padding)])
        caches = (self.k_cache, self.v_cache, self.table)
        out = attend(q, *caches, positions, *planned, tile_tokens, self.scale, self.window)
        return out.view(tokens, self.heads, self.dim).cpu()

    def oracle(self, row: int, first: int, end: int) -> torch.Tensor:
        """float64 attention of a request's tokens first … end, from its definition."""
        group = self.heads // self.kv_heads
        q = self.q[row][first:end].double().transpose(0, 1)
        k, v = (t[row][:end].double().transpose(0, 1).repeat_interleave(group, 0) for t in (self.k, self.v))
        position, key = torch.arange(first, end)[:, None], torch.arange(end)[None]
        seen = (key <= position) & ((key > position - self.window) | (self.window == 0))
        scores = (q @ k.mT * self.scale).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1)


SHAPES = [(4, 2, 16), (4, 4, 64), (6, 2, 24), (8, 2, 40), (7, 1, 80), (8, 1, 128)]


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_matches_float64(triton, heads, kv_heads, dim, window, dtype, assert_close):
    lengths = [300, 17, 600]
    case = Requests(lengths, triton, dtype, heads, kv_heads, dim, window=window)
    spans = [(0, 250, 300), (2, 580, 600), (1, 0, 17)]
    want = torch.cat([case.oracle(*span) for span in spans])
    assert_close(case.extend(spans, 4), want)
    got = case.round([(1, 17), (2, 600), (0, 299)], 2)
    assert_close(got, torch.stack([case.oracle(1, 15, 17), case.oracle(2, 598, 600), case.oracle(0, 297, 299)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_twin_takes_every_dtype_and_head_dim(dtype):
    case = Requests([520], False, dtype, 2, 1, 256)
    got, want = case.extend([(0, 0, 520)]), case.oracle(0, 0, 520)
    assert got.dtype == dtype
    assert (got.double() - want).norm() / want.norm() < {torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 1e-2)


@IMPLEMENTATIONS
@pytest.mark.parametrize("page", [1, 16, 48, 512])
def test_any_page_size(triton, page):
    case = Requests([270, 5], triton, page=page)
    got = case.extend([(0, 240, 270), (1, 0, 5)])
    want = torch.cat([case.oracle(0, 240, 270), case.oracle(1, 0, 5)])
    assert (got - want).abs().max() < 1e-5


@IMPLEMENTATIONS
def test_padding_yields_zeros(triton):
    case = Requests([300, 9], triton)
    got = case.round([(0, 300), None, (1, 9), None], 3)
    assert not got[[1, 3]].any()
    assert torch.equal(got[[0, 2]], case.round([(0, 300), (1, 9)], 3))
    got = case.extend([(0, 280, 300), (1, 0, 9)], padding=35)
    assert not got[29:].any()
    assert torch.equal(got[:29], case.extend([(0, 280, 300), (1, 0, 9)]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("width", [1, 2, 4, 6, 17])
def test_rounds_have_the_bits_of_extend(triton, width, window):
    """Alone or together, split or whole, at any width: a round's bits are the prompt pass's."""
    lengths = [300, 40, 257, 600]
    case = Requests(lengths, triton, window=window)
    ends = [(row, n) for row, n in enumerate(lengths)]
    tile = max(8, width)  # the interpreter multiplies by BLAS: give both kernels tiles of the same height
    want = torch.stack([case.extend([(row, n - width, n)], tile) for row, n in ends])
    assert torch.equal(case.round(ends, width), want)
    assert torch.equal(case.round(ends, width, NEVER_SPLIT), want)
    assert torch.equal(case.round(ends, width, 4), want)
    assert torch.equal(case.round(ends, width, partials=3), want), "workspace for one row only"
    assert torch.equal(case.round(ends[::-1], width), want.flip(0))
    for row, end in enumerate(ends):
        assert torch.equal(case.round([end, None], width)[0], want[row])


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [0, 100])
def test_chunks_have_the_bits_of_one_pass(triton, window):
    case = Requests([310, 70], triton, window=window)
    spans = [(0, 200, 310), (1, 0, 70)]
    want = case.extend(spans)
    assert torch.equal(case.extend(spans[::-1]), torch.cat([want[110:], want[:110]]))
    cuts = [(0, 200, 201), (0, 201, 256), (0, 256, 300), (0, 300, 310), (1, 0, 33), (1, 33, 70)]
    assert torch.equal(torch.cat([case.extend([cut]) for cut in cuts]), want)
    assert torch.equal(case.extend([cuts[1], cuts[5]], padding=3)[:-3], torch.cat([want[1:56], want[143:]]))


def test_twin_bits_do_not_depend_on_the_batch():
    """Many tiles at once, more than TILES_AT_ONCE, or one alone."""
    case = Requests([257 + 13 * i for i in range(30)], False)
    spans = [(row, n - 50, n) for row, n in enumerate(case.lengths)]
    together = case.extend(spans).split(50)
    for span, want in zip(spans, together, strict=True):
        assert torch.equal(case.extend([span]), want)
        assert torch.equal(case.round([(span[0], span[2])], 50)[0], want)


@pytest.mark.parametrize("partials", [1, 2, 5, 64])
@pytest.mark.parametrize("programs", [1, 2, 7, 20, 1000])
def test_plans_agree(programs, partials):
    """Kernel and twin list the same work: every split of every row once, cut rows within the workspace."""
    case = Requests([1], True)
    slots, kv_len = case._int32([3, 0, 9, 4, 5]), case._int32([700, 0, 256, 257, 1300])
    work, count, arrivals = (t.cpu() for t in ops.launch_attention_plan(slots, kv_len, 3, 2, partials, programs))
    expected = twin.attention_plan_cpu(slots.cpu(), kv_len.cpu(), 3, 2, partials, programs)
    listed = work[: count.item()]
    assert torch.equal(listed, expected[0][: expected[1].item()])
    assert arrivals.shape == (5, 3, 2)
    assert not arrivals.any()
    taken = []
    for row, (slot, n) in enumerate(zip(slots.tolist(), kv_len.tolist(), strict=True)):
        pieces = [entry for entry in listed.tolist() if entry[0] == row]
        assert all(entry[1:3] == [slot, n] for entry in pieces)
        assert [split for *_, first, end, _ in pieces for split in range(first, end)] == list(range(-(-n // ops.SPLIT)))
        if pieces[0][5] >= 0:
            assert {entry[5] for entry in pieces} == {len(taken)}
            taken += range(-(-n // ops.SPLIT))
    assert len(taken) <= partials


@pytest.mark.parametrize("tile_tokens", [1, 8, 32])
def test_extend_plans_agree(tile_tokens):
    case = Requests([1], True)
    slots, query_start = case._int32([3, 0, 9]), case._int32([0, 70, 70, 75])
    tiles, count = (t.cpu() for t in ops.launch_attention_extend_plan(slots, query_start, 90, tile_tokens))
    expected = twin.attention_extend_plan_cpu(slots.cpu(), query_start.cpu(), 90, tile_tokens)
    assert tiles.shape == expected[0].shape
    assert torch.equal(tiles[: count.item()], expected[0][: expected[1].item()])
    assert torch.cat([torch.arange(a, b) for _, a, b in tiles[: count.item()].tolist()]).tolist() == list(range(90))


def test_ops_trace_by_shape():
    """The registered ops run on CPU tensors and have shape functions for tracing."""
    q, cache = torch.randn(6, 4, 16), torch.randn(9, 2, 16, 16)
    table, positions = torch.ones(3, 8, dtype=torch.int32), torch.tensor([4, 5, 90, 91, -1, -1], dtype=torch.int32)
    slots, kv_len = torch.arange(3, dtype=torch.int32), torch.tensor([6, 92, 0], dtype=torch.int32)
    plan = ops.attention_plan(slots, kv_len, 2, 2, 16, 132)
    torch.library.opcheck(torch.ops.unisono.attention_plan, (slots, kv_len, 2, 2, 16, 132))
    args = (q, cache, cache, table, positions, *plan, 0.25, 0)
    torch.library.opcheck(torch.ops.unisono.attention_round, args)
    out = ops.attention_round(q, cache, cache, table, positions, plan, 0.25)
    query_start = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    tiles = ops.attention_extend_plan(slots, query_start, 6, 8)
    torch.library.opcheck(torch.ops.unisono.attention_extend_plan, (slots, query_start, 6, 8))
    torch.library.opcheck(torch.ops.unisono.attention_extend, (q, cache, cache, table, positions, *tiles, 0.25, 0))
    assert torch.equal(ops.attention_extend(q, cache, cache, table, positions, tiles, 0.25), out)
