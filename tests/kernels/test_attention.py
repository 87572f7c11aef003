"""Attention: right against float64, and a token's bits are the same in every pass that computes it.

Both implementations are tested: the Triton kernels (on the GPU, else in the interpreter, small
sizes) and the CPU twins. Caches are NaN wherever no token of a request has been written.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.triton import TritonAttention
from unisono.kernels import attention as ops
from unisono.kernels import attention_cpu as twin
from unisono.kernels import attention_hopper as hopper

TRITON = (ops.launch_attention_plan, ops.launch_attention)
TWIN = (twin.attention_plan_cpu, twin.attention_cpu)
IMPLEMENTATIONS = pytest.mark.parametrize("triton", [True, False], ids=["triton", "twin"])
ALWAYS_CUT, NEVER_CUT = 10**6, 1  # programs at a time


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
    first: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
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
            at = torch.arange(self.first, n)
            caches.transpose(2, 3)[:, own[at // self.page], at % self.page] = kv[:, self.first :].float()
            self.k.append(kv[0])
            self.v.append(kv[1])
        self.q = [torch.randn(n, self.heads, self.dim).to(self.dtype) for n in self.lengths]
        self.k_cache, self.v_cache = caches.to(self.device, self.dtype)
        self.table = table.to(self.device, torch.int32)
        self.scale = self.dim**-0.5
        self.sink = torch.randn(self.heads).mul(3) if self.sinks else None

    def _int32(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _queries(self, spans) -> torch.Tensor:
        parts = [self.q[row][a:b] if row >= 0 else torch.randn(b, self.heads, self.dim) for row, a, b in spans]
        return torch.cat(parts).to(self.device, self.dtype)

    def _attend(self, q, positions, slots, kv_len, query_start, tile_tokens, programs, partials) -> torch.Tensor:
        plan, attend = TRITON if self.triton else TWIN
        planned = plan(slots, kv_len, query_start, len(q), tile_tokens, self.kv_heads, partials, programs)
        caches = (self.k_cache, self.v_cache, self.table)
        sink = None if self.sink is None else self.sink.to(self.device)
        args = (q, *caches, self._int32(positions), *planned, partials, self.scale, self.window, self.first)
        args += (self.soft_cap, sink)
        out = attend(*args)
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
        return self._attend(q, positions, rows, ends, self._int32(starts), tile_tokens, programs, partials)

    def oracle(self, row: int, first: int, end: int) -> torch.Tensor:
        """float64 attention of a request's tokens first … end, from its definition."""
        group = self.heads // self.kv_heads
        q = self.q[row][first:end].double().transpose(0, 1)
        k, v = (t[row][:end].double().transpose(0, 1).repeat_interleave(group, 0) for t in (self.k, self.v))
        position, key = torch.arange(first, end)[:, None], torch.arange(end)[None]
        seen = (key <= position) & (key >= self.first) & ((key > position - self.window) | (self.window == 0))
        scores = q @ k.mT * self.scale
        if self.soft_cap:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sink is not None:
            scores = torch.cat((scores, self.sink.double()[:, None, None].expand(-1, end - first, 1)), -1)
        return (scores.softmax(-1).nan_to_num(0)[..., :end] @ v).transpose(0, 1)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(4, 2, 16, 0), (4, 2, 16, 40), (2, 2, 64, 300), (3, 1, 24, 0), (8, 2, 40, 0), (7, 1, 80, 300), (8, 1, 128, 0)],
)
def test_matches_float64(triton, heads, kv_heads, dim, window, dtype, assert_close):
    case = Requests([300, 17, 600], triton, dtype, heads, kv_heads, dim, window=window)
    spans = [(0, 250, 300), (2, 580, 600), (1, 0, 17)]
    want = torch.cat([case.oracle(*span) for span in spans])
    assert_close(case.extend(spans, 4), want)
    got = case.round([(1, 17), (2, 600), (0, 299)], 2)
    assert_close(got, torch.stack([case.oracle(1, 15, 17), case.oracle(2, 598, 600), case.oracle(0, 297, 299)]))


CAPS_AND_SINKS = pytest.mark.parametrize(
    ("soft_cap", "sinks"), [(0.7, False), (0.0, True), (50.0, True)], ids=["cap", "sinks", "both"]
)


@IMPLEMENTATIONS
@CAPS_AND_SINKS
@pytest.mark.parametrize(("window", "first"), [(0, 0), (40, 13)])
def test_soft_cap_and_sinks_match_float64(triton, window, first, soft_cap, sinks, dtype, assert_close):
    case = Requests([300, 17, 530], triton, dtype, 3, 1, 24, 16, window, first, soft_cap, sinks)
    spans = [(0, 280, 300), (2, 520, 530), (1, 0, 17)]
    assert_close(case.extend(spans, 4, padding=2)[:-2], torch.cat([case.oracle(*span) for span in spans]))
    want = torch.stack([case.oracle(1, 15, 17), case.oracle(2, 528, 530), case.oracle(0, 297, 299)])
    assert_close(case.round([(1, 17), (2, 530), (0, 299)], 2), want)
    case.soft_cap, case.sink = 0.0, None
    assert (torch.stack([case.oracle(1, 15, 17)]) - want[:1]).abs().max() > 1e-3, "they change what is attended"


@pytest.mark.parametrize("value", [0.0, 1e-4, 0.1, 0.2499, 0.25, 0.3, 1.0, 5.0, 40.0])
def test_the_soft_cap_of_the_kernel_is_tanh(value, device, assert_close):
    """One key's score against a sink of 0 tells its capped value: weight = 1 / (1 + exp(-capped))."""
    for score in (value, -value):
        case = Requests([1], True, heads=1, kv_heads=1, dim=16, soft_cap=2.0, sinks=True)
        case.q[0] = torch.tensor([score * 2.0 * 4] + [0.0] * 15)[None, None]
        case.k_cache[case.table[0, 0], 0, 0] = torch.eye(16, device=case.device)[0]
        case.v_cache[case.table[0, 0], 0, 0] = 1.0
        case.sink.zero_()
        weight = torch.full((1, 1, 16), score).double().tanh().mul(2).sigmoid()
        assert_close(case.round([(0, 1)], 1)[0], weight)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("soft_cap", "sinks", "window"), [(0.7, False, 0), (50.0, True, 100)])
def test_soft_cap_and_sinks_keep_the_bits_of_every_pass(triton, window, soft_cap, sinks):
    """Extend, chunks, rounds of width 1 to 8, cut or whole: the same bits, padding included."""
    case = Requests([300, 530], triton, heads=2, kv_heads=1, window=window, soft_cap=soft_cap, sinks=sinks)
    want = case.extend([(0, 292, 300), (1, 522, 530)], 8)
    chunks = [(0, 292, 293), (0, 293, 300), (1, 522, 527), (1, 527, 530)]
    assert torch.equal(torch.cat([case.extend([chunk], 8) for chunk in chunks]), want)
    assert torch.equal(case.extend([(1, 522, 530), (0, 292, 300)], 8, 3, ALWAYS_CUT, 64)[:-3].roll(8, 0), want)
    want = want.view(2, 8, case.heads, case.dim)
    for width in range(1, 9):
        programs, partials = ((ALWAYS_CUT, 64), (NEVER_CUT, 64), (16, 64), (ALWAYS_CUT, 3))[width % 4]
        got = case.round([(0, 300), None, (1, 530)], width, programs, partials)
        assert torch.equal(got[[0, 2]], want[:, 8 - width :]), f"width {width}"
        assert not got[1].any()


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
@pytest.mark.parametrize(("width", "window"), [(1, 0), (2, 0), (4, 100), (6, 0), (17, 100)])
def test_rounds_have_the_bits_of_extend(triton, width, window):
    """Alone or together, cut or whole, at any width: a round's bits are the prompt pass's."""
    lengths = [300, 40, 600]
    case = Requests(lengths, triton, window=window)
    ends = [(row, n) for row, n in enumerate(lengths)]
    want = case.extend([(row, n - width, n) for row, n in ends], 8).view(len(ends), width, case.heads, case.dim)
    assert torch.equal(case.round(ends, width), want), "each split by itself"
    assert torch.equal(case.round(ends[::-1], width, NEVER_CUT), want.flip(0))
    assert torch.equal(case.round(ends, width, 16), want), "the longest row in pieces"
    assert torch.equal(case.round(ends, width, partials=3), want), "a workspace too small for all"
    assert torch.equal(case.round([ends[2], None], width)[0], want[2])


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("first", [1, 13, 260])
def test_keys_below_first_are_invisible(triton, first, window, assert_close):
    """They hold NaN here; a token that stands there yields zeros, and rounds have the bits of prompt passes."""
    case = Requests([600, 300], triton, window=window, first=first)
    spans = [(0, 250, 290), (0, 590, 600), (1, 0, 20)]
    got = case.extend(spans)
    assert_close(got, torch.cat([case.oracle(*span) for span in spans]))
    assert not got[50 : 50 + min(first, 20)].any()
    for programs in (ALWAYS_CUT, NEVER_CUT):
        assert torch.equal(case.round([(0, 600), (1, 20)], 4, programs), torch.stack([got[46:50], got[66:]]))
    assert torch.equal(case.extend(spans, 8, 0, ALWAYS_CUT, 64), got)


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [0, 100])
def test_chunks_have_the_bits_of_one_pass(triton, window):
    case = Requests([310, 40], triton, window=window)
    spans = [(0, 230, 310), (1, 0, 40)]
    want = case.extend(spans, 32)
    assert torch.equal(case.extend(spans[::-1], 32), torch.cat([want[80:], want[:80]]))
    cuts = [(0, 230, 231), (0, 231, 256), (0, 256, 300), (0, 300, 310), (1, 0, 13), (1, 13, 40)]
    assert torch.equal(torch.cat([case.extend([cut], 32) for cut in cuts]), want)
    assert torch.equal(case.extend([cuts[1], cuts[5]], 32, padding=3)[:-3], torch.cat([want[1:26], want[93:]]))


def test_twin_bits_do_not_depend_on_the_batch():
    """Many tiles at once, more than TILES_AT_ONCE, or one alone."""
    case = Requests([257 + 13 * i for i in range(30)], False)
    spans = [(row, n - 50, n) for row, n in enumerate(case.lengths)]
    together = case.extend(spans).split(50)
    for span, want in zip(spans, together, strict=True):
        assert torch.equal(case.extend([span]), want)
        assert torch.equal(case.round([(span[0], span[2])], 50)[0], want)


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [0, 100])
def test_short_chunks_are_cut_along_kv(triton, window):
    """A few tokens behind a long prefix: whole, cut, or as the workspace allows, alone or with company."""
    case = Requests([1100, 300], triton, window=window)
    spans = [(0, 1083, 1100), (1, 296, 300)]
    want = case.extend(spans)
    for programs, partials in ((ALWAYS_CUT, 64), (20, 64), (ALWAYS_CUT, 16), (20, 3)):
        assert torch.equal(case.extend(spans, 8, 0, programs, partials), want)
    assert torch.equal(case.extend(spans[:1], 8, 3, ALWAYS_CUT, 64)[:-3], want[:17])


def plan_case(device, ragged):
    slots, kv_len = ([3, 0, 9, 4, 5], [700, 0, 256, 257, 1300])
    query_start = torch.tensor([0, 70, 70, 75, 90, 91], dtype=torch.int32, device=device) if ragged else None
    slots, kv_len = (torch.tensor(x, dtype=torch.int32, device=device) for x in (slots, kv_len))
    return slots, kv_len, query_start, 100 if ragged else 15


@pytest.mark.parametrize("partials", [0, 1, 2, 5, 20, 64])
@pytest.mark.parametrize("programs", [1, 2, 7, 20, 1000])
@pytest.mark.parametrize("tile_tokens", [1, 3, 32])
@pytest.mark.parametrize("ragged", [False, True])
def test_plans_agree(ragged, tile_tokens, programs, partials, device):
    """Kernel and twin list the same work: each token's splits once, cut tiles in workspace of their own."""
    sizes = (tile_tokens, 2, partials, programs)
    work, count, arrivals = (t.cpu() for t in ops.launch_attention_plan(*plan_case(device, ragged), *sizes))
    slots, kv_len, query_start, tokens = plan_case("cpu", ragged)
    expected = twin.attention_plan_cpu(slots, kv_len, query_start, tokens, *sizes)
    items = work[: count.item()]
    assert torch.equal(items, expected[0][: expected[1].item()])
    assert (work.shape, arrivals.shape) == (expected[0].shape, expected[2].shape)
    assert not arrivals[: count.item()].any()
    starts = range(0, 16, 3) if query_start is None else [*query_start.tolist(), tokens]
    tiles: dict[int, list] = {}
    for item in items.tolist():
        tiles.setdefault(item[7], []).append(item)
    covered, places = [], []
    for counter, pieces in tiles.items():
        assert items[counter].tolist() == pieces[0]
        assert len({(*item[:4], item[6]) for item in pieces}) == 1
        slot, length, first, last, _, _, partial, _ = pieces[0]
        covered += range(first, last)
        row = max(r for r, start in enumerate(starts) if start <= first)
        assert (slot, length) == ((slots[row].item(), kv_len[row].item()) if row < len(slots) else (0, 0))
        splits = list(range(-(-length // ops.SPLIT)))
        assert [split for item in pieces for split in range(item[4], item[5])] == splits
        places += [partial + split for split in splits] if partial >= 0 else []
        assert partial >= 0 or len(pieces) == 1
    assert sorted(covered) == list(range(tokens))
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= partials


def test_ops_trace_by_shape():
    """The registered ops run on CPU tensors and have shape functions for tracing."""
    q, cache = torch.randn(6, 4, 16), torch.randn(9, 2, 16, 16)
    table, positions = torch.ones(3, 8, dtype=torch.int32), torch.tensor([4, 5, 90, 91, -1, -1], dtype=torch.int32)
    slots, kv_len = torch.arange(3, dtype=torch.int32), torch.tensor([6, 92, 0], dtype=torch.int32)
    outputs = []
    for query_start, partials in ((None, 16), (torch.tensor([0, 2, 4, 6], dtype=torch.int32), 0)):
        torch.library.opcheck(torch.ops.unisono.attention_plan, (slots, kv_len, query_start, 6, 2, 2, partials, 132))
        plan = ops.attention_plan(slots, kv_len, query_start, 6, 2, 2, partials, 132)
        torch.library.opcheck(torch.ops.unisono.attention, (q, cache, cache, table, positions, *plan, 0.25, 0))
        outputs.append(ops.attention(q, cache, cache, table, positions, plan, 0.25))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("width", [1, 4, None])
def test_backend_plans_and_attends(width, device):
    """The backend as models call it: a round, and a ragged pass with padding."""
    case = Requests([300, 40], device.type == "cuda", torch.float16 if device.type == "cuda" else torch.float32)
    spans = [(0, 270, 300), (1, 0, 40)] if width is None else [(0, 300 - width, 300), (1, 40 - width, 40)]
    positions = case._int32([p for _, a, b in spans for p in range(a, b)])
    rows, _, ends = (case._int32(x) for x in zip(*spans, strict=True))
    query_start = case._int32([0, 30, 70]) if width is None else None
    inputs = AttentionInputs(rows, positions, positions, ends, case.table, width, query_start)
    backend = TritonAttention(case.heads, case.kv_heads, device)
    backend.plan(inputs)
    out = backend.forward(case._queries(spans), case.k_cache, case.v_cache, inputs, case.scale, 0)
    want = torch.cat([case.oracle(*span) for span in spans])
    assert (out.cpu().view_as(want) - want).norm() / want.norm() < 1e-3
    inputs.query_start = None if width is None else positions
    with pytest.raises(ValueError, match="width or query_start"):
        backend.plan(inputs)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="the kernel for Hopper has no twin on other machines")
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(32, 8, torch.bfloat16), (4, 4, torch.float16)])
def test_long_prompts_on_hopper_have_the_same_bits(heads, kv_heads, dtype, monkeypatch):
    case = Requests([2000, 130, 700, 1, 1025], True, dtype, heads, kv_heads, 128)
    backend = TritonAttention(heads, kv_heads, case.device)
    spans = [(0, 300, 2000), (1, 0, 130), (2, 699, 700), (3, 0, 1), (4, 1, 1025), (2, 64, 512)]
    tile = 128 * kv_heads // heads
    monkeypatch.setattr(hopper, "_proven", {})
    want = case.extend(spans, tile, partials=0, padding=7)
    launched = watched(monkeypatch)
    assert backend.prove(128, dtype)[0] == "the kernel for Hopper"
    launched.clear()
    assert torch.equal(case.extend(spans, tile, partials=0, padding=7), want)
    assert launched, "it was not the kernel for Hopper"


@pytest.mark.skipif(not HOPPER, reason="the kernel for Hopper has no twin on other machines")
def test_other_bits_are_not_served(monkeypatch):
    monkeypatch.setattr(hopper, "_proven", {})
    launched = watched(monkeypatch, error=1.0)
    backend = TritonAttention(32, 8, "cuda")
    assert backend.prove(128, torch.bfloat16)[0] == "as all attention"
    assert launched
    launched.clear()
    Requests([2000], True, torch.bfloat16, 32, 8, 128).extend([(0, 0, 2000)], 32, partials=0)
    assert not launched


def watched(monkeypatch, error: float = 0.0) -> list[int]:
    """The numbers of tokens that the kernel for Hopper serves from now on; its outputs are off by ``error``."""
    launch, tokens = hopper.launch_prompt_attention, []

    def launch_and_note(q, *args):
        tokens.append(len(q))
        return launch(q, *args) + error

    monkeypatch.setattr(hopper, "launch_prompt_attention", launch_and_note)
    return tokens


def test_without_hopper_all_attention_is_one_kernel():
    assert TritonAttention(32, 8, "cpu").prove(128, torch.bfloat16)[0] == "as all attention"
    assert not hopper.suits(32, 8, 128, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32, 64])
def test_what_the_kernel_for_hopper_is_compared_on_has_tiles_that_it_serves(heads: int) -> None:
    """Else the comparison would be of one kernel with itself."""
    lengths, starts = hopper.proof_lengths(heads), (700, 13)
    for tokens in (sum(lengths), sum(lengths) - sum(starts)):
        backend = TritonAttention(heads, 1, "cpu")
        backend.processors = 132  # an H200's
        assert backend._tile_tokens(tokens) * heads == hopper.ROWS
        assert tokens * heads >= 64 * backend.processors, "tiles are walked whole"


@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32])
def test_what_the_kernel_for_hopper_is_compared_on_can_be_read(heads: int) -> None:
    """NaN stands where no token may look, and nowhere else; a difference to what serves otherwise is seen."""
    proof, device = (heads, heads, torch.float16, torch.device("cpu")), torch.device("cpu")
    off = 0.0

    def read(q, k, v, table, kv_len, query_start, positions):
        seen = [cache[table[row].long()].transpose(1, 2).flatten(0, 1)[:n] for row, n in enumerate(kv_len.tolist())
                for cache in (k, v)]  # fmt: skip
        return torch.cat(seen).float() + off * hopper._proven[proof]

    try:
        assert hopper._same_bits(read, heads, heads, torch.float16, device)
        off = 1.0
        assert not hopper._same_bits(read, heads, heads, torch.float16, device)
    finally:
        hopper._proven.pop(proof, None)
