"""Keys and values as e4m3: the format against its definition; attention over such pages against float64."""

import math

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernels.paged_requests import ALWAYS_CUT, IMPLEMENTATIONS, NEVER_CUT, Requests
from tests.kernels.rope_cases import EPS, PAGE, PAGES, make_case
from unisono.kernels import rope_and_cache
from unisono.kernels.cache.kv_e4m3 import HIGHEST, LOWEST, dequantised, quantised
from unisono.kernels.cache.rotary import launch_rope_and_cache, rope_and_cache_cpu
from unisono.kernels.gemm.fp8_quantize import E4M3, LARGEST

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def smallest_exponent(largest: float) -> int:
    """The smallest e with largest / 2^e <= 448, from the definition, in Python's exact arithmetic."""
    if largest == 0:
        return 0
    e = math.frexp(largest)[1] - 12
    while largest / 2.0**e > LARGEST:
        e += 1
    return min(max(e, LOWEST), HIGHEST)


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows [N, 16] of all magnitudes that the dtype has, with the edges of a scale and of the format among them."""
    top = {torch.float16: 15, torch.float32: 127, torch.bfloat16: 127}[dtype]
    x = torch.randn(600, 16) * 2.0 ** torch.randint(-24 if dtype == torch.float16 else -126, top - 3, (600, 1)).float()
    edges = [448.0, 449.0, 447.0, 1.75, 1.7578125, 1.0, 2.0, 3584.0, 0.0, 2.0**-24, -448.0, 3584.0 * 1.125, 57344.0]
    for i, edge in enumerate(edges):
        x[i] = torch.linspace(-1, 1, 16) * edge
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_rows_are_the_nearest_of_the_format(dtype):
    """Exponents by definition; each element the nearest multiple; what it stands for exact in float16."""
    x = rows(dtype)
    values, scales = quantised(x)
    assert (values.dtype, scales.dtype, scales.shape) == (E4M3, torch.uint8, (len(x), 1))
    back = dequantised(values, scales)
    assert torch.equal(back.half().float(), back)
    grid = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    grid = grid[grid.isfinite()].unique()
    for row, told, exponent in zip(x.double(), back.double(), scales[:, 0].tolist(), strict=True):
        assert exponent - 127 == smallest_exponent(row.abs().max().item())
        scaled = row * 2.0 ** (127 - exponent)
        best = (scaled[:, None].clamp(-LARGEST, LARGEST) - grid).abs().min(1).values
        assert torch.equal((scaled.clamp(-LARGEST, LARGEST) - told * 2.0 ** (127 - exponent)).abs(), best)
    normal = (x.float().abs().amax(1) > 2.0**-17) & (x.float().abs().amax(1) <= 3584)
    error = (back - x.float()).abs() / x.float().abs().amax(1, keepdim=True)
    assert error[normal].max() <= 1 / 16, "half of a step of 32, from 256 on"


def test_a_weight_times_a_scale_is_exact_in_float16():
    """Each float16 number from 0 to 1, times each scale over the lowest one."""
    weights = torch.arange(0x3C01, dtype=torch.int16).view(torch.float16)
    assert weights.max() == 1
    for exponent in range(LOWEST, HIGHEST + 1):
        scaled = weights * torch.tensor(2.0 ** (exponent - LOWEST)).half()
        assert torch.equal(scaled.double(), weights.double() * 2.0 ** (exponent - LOWEST))


def test_ties_go_to_even():
    x = torch.tensor([[448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -17.0]])
    assert dequantised(*quantised(x)).tolist() == [[448.0, 16.0, 20.0, 0.0, 2.0**-8, -16.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_stays_so(dtype, value):
    x = torch.ones(2, 8, dtype=dtype)
    x[1, 3] = value
    values, scales = quantised(x)
    assert scales.tolist() == [[119], [255]]
    back = dequantised(values, scales)
    assert torch.equal(back[0], torch.ones(8))
    assert not back[1].isfinite().any()


# ---- written by rope_and_cache -----------------------------------------------------------------------------

OPS = pytest.mark.parametrize("op", [launch_rope_and_cache, rope_and_cache_cpu], ids=["triton", "twin"])


def written(case, op, kv_heads=2):
    """q, keys, values and their exponents of the case's tokens, from e4m3 pages; the pages, bytes 0xee elsewhere."""
    dim = case.qkv.shape[1] // (case.heads + 2 * kv_heads)
    shape = (PAGES, kv_heads, PAGE, dim)
    pages = [torch.full(shape, 0xEE, dtype=torch.uint8, device=case.qkv.device).view(E4M3) for _ in "kv"]
    scales = [torch.full((*shape[:3], 1), 0xEE, dtype=torch.uint8, device=case.qkv.device) for _ in "kv"]
    given = case.qkv, *case.norms, EPS, case.table, case.positions, case.slots
    q = op(*given, *pages, case.heads, kv_heads, *scales)
    return q, [page.view(torch.uint8) for page in pages], scales


@OPS
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(64, 64), (80, 48), (24, 8)])
@pytest.mark.parametrize("norm", [True, False])
def test_written_rows_are_those_of_plain_pages_quantised(op, head_dim, rot_dim, norm, dtype, device):
    """Bit for bit, by kernel and twin; queries as ever; nothing else is written."""
    case = make_case(head_dim, rot_dim, norm, dtype, "cpu" if op is rope_and_cache_cpu else device)
    case.qkv[:, -head_dim:] *= torch.tensor([0.0, 1e-4, 500.0, 60000.0, 1, 1, 2.0, 448.0, 3.0])[:, None].to(dtype)
    case.qkv.clamp_(-60000, 60000)
    q, plain_k, plain_v = case.run(op)
    got_q, pages, scales = written(case, op)
    assert torch.equal(got_q, q)
    at, offsets = case.slots // PAGE, case.slots % PAGE
    for plain, page, scale in zip((plain_k, plain_v), pages, scales, strict=True):
        want, exponents = quantised(plain[at, :, offsets].cpu())
        assert torch.equal(page[at, :, offsets].cpu(), want.view(torch.uint8))
        assert torch.equal(scale[at, :, offsets].cpu(), exponents)
        page[at, :, offsets] = scale[at, :, offsets] = 0xEE
        assert (page == 0xEE).all()
        assert (scale == 0xEE).all()


@OPS
def test_rows_that_are_not_finite_are_written_as_such(op, device):
    case = make_case(24, 24, False, torch.float32, "cpu" if op is rope_and_cache_cpu else device)
    case.qkv[3, -24:], case.qkv[4, 5 * 24] = torch.nan, torch.inf
    _, _, scales = written(case, op)
    at, offsets = case.slots // PAGE, case.slots % PAGE
    assert (scales[1][at, :, offsets][3, 1] == 255).all()
    assert (scales[0][at, :, offsets][4, 1] == 255).all()
    assert sum((scale[at, :, offsets] == 255).sum().item() for scale in scales) == 2


@OPS
def test_queries_without_keys_leave_e4m3_pages_alone(op, device):
    case = make_case(24, 24, True, torch.float32, "cpu" if op is rope_and_cache_cpu else device)
    page = torch.zeros(PAGES, 2, PAGE, 24, dtype=E4M3, device=case.qkv.device)
    queries, where = case.qkv[:, : 4 * 24].contiguous(), (case.table, case.positions, case.slots)
    got = op(queries, *case.norms, EPS, *where, page[:, :0], page[:, :0], 4, 0)
    assert torch.equal(got, case.run(op)[0])


def test_the_op_declares_that_it_writes_scales():
    case = make_case(24, 24, True, torch.float32, "cpu")
    for mine, theirs in zip(written(case, rope_and_cache)[1:], written(case, rope_and_cache_cpu)[1:], strict=True):
        assert all(map(torch.equal, mine, theirs))
    schema = torch.ops.unisono.rope_and_cache.default._schema
    writes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert writes == ["k_cache", "v_cache", "k_scales", "v_scales"]


# ---- attention over such pages -----------------------------------------------------------------------------

SHAPES = [
    (4, 2, 16, {}),
    (3, 1, 24, {"window": 40}),
    (7, 1, 80, {"window": 300, "first": 13}),
    (8, 2, 64, {"soft_cap": 0.7}),
    (2, 2, 64, {"sinks": True}),
    (4, 1, 128, {"first": 1}),
    (2, 1, 256, {"soft_cap": 50.0, "sinks": True, "window": 100}),
]
FULL = {(3, 1, 24), (7, 1, 80), (2, 2, 64), (2, 1, 256)}
MATRIX = [
    pytest.param(triton, dtype, *shape, marks=pytest.mark.full if rare and shape[:3] in FULL else ())
    for triton in (True, False)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for rare in [triton or dtype is torch.float32]
    for shape in SHAPES
    if not (triton and dtype is torch.bfloat16 and not torch.cuda.is_available())
]
SPANS = [(0, 274, 300), (2, 588, 600), (1, 0, 17)]
ENDS = [(1, 17), None, (2, 600), (0, 299)]


@pytest.mark.parametrize(("triton", "dtype", "heads", "kv_heads", "dim", "options"), MATRIX)
def test_attention_over_the_pages_is_right_and_the_same_everywhere(
    triton, dtype, heads, kv_heads, dim, options, assert_close
):  # fmt: skip
    """Rounds and prompt passes, cut and whole, against float64 over the dequantised rows; they agree in every bit."""
    case = Requests([300, 17, 600], triton, dtype, heads, kv_heads, dim, e4m3=True, **options)
    assert case.k_cache.dtype == E4M3
    got = case.extend(SPANS, 4, padding=2)
    if dtype is not torch.bfloat16 or case.device.type == "cuda":
        assert_close(got[:-2], torch.cat([case.oracle(*span) for span in SPANS]))
    last = {1: got[36:-2], 2: got[26:38], 0: got[:25]}
    for width, programs, partials in ((1, ALWAYS_CUT, 64), (2, NEVER_CUT, 64), (2, 16, 3)):
        rounds = case.round(ENDS, width, programs, partials)
        assert rounds.isfinite().all()
        for row, end in zip(rounds, ENDS, strict=True):
            assert end is None or torch.equal(row, last[end[0]][-width:])


@pytest.fixture
def tensor_core(monkeypatch):
    """In Triton's interpreter, sums of products as a tensor core makes them: 16 at a time, each time rounded once."""

    def dot(self, a, b, d, *_):
        left, right, acc = a.data.astype(np.float64), b.data.astype(np.float64), d.data
        for k in range(0, left.shape[1], 16):
            acc = (acc + left[:, k : k + 16] @ right[k : k + 16]).astype(np.float32)
        return TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dim", [32, pytest.param(128, marks=pytest.mark.full)])
def test_scales_of_very_different_magnitude(triton, dim, tensor_core, assert_close):
    """Keys and values of all magnitudes in a step: tiles of many rows scale these, tiles of few rows their weights."""
    case = Requests([300], triton, torch.float16, heads=8, kv_heads=1, dim=dim, e4m3=True, spread=True)
    many = case.extend([(0, 236, 300)], 32)
    assert_close(many, case.oracle(0, 236, 300))
    assert torch.equal(case.extend([(0, 236, 300)], 2), many)
    assert torch.equal(case.round([(0, 300)], 4), many[None, -4:])


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [0, 100])
def test_rounds_and_chunks_have_the_bits_of_one_pass(triton, window):
    case = Requests([310, 40], triton, window=window, e4m3=True)
    want = case.extend([(0, 230, 310), (1, 0, 40)], 32)
    cuts = [(0, 230, 231), (0, 231, 256), (0, 256, 300), (0, 300, 310), (1, 0, 13), (1, 13, 40)]
    assert torch.equal(torch.cat([case.extend([cut], 32) for cut in cuts]), want)
    assert torch.equal(case.extend([(0, 230, 310), (1, 0, 40)], 8, 3, ALWAYS_CUT, 64)[:-3], want)
    ends = torch.stack([want[76:80], want[116:]])
    for programs in (ALWAYS_CUT, NEVER_CUT):
        assert torch.equal(case.round([(0, 310), (1, 40)], 4, programs), ends)


@IMPLEMENTATIONS
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_stale_bytes_do_not_affect_attention(triton, byte):
    """Behind a window, after a request's end and in the padding page: NaN as e4m3, and exponents that are infinite."""
    case = Requests([300, 17], triton, window=40, e4m3=True)
    spans, ends = [(0, 290, 300), (1, 8, 17)], [(0, 300), None, (1, 17)]
    want = case.extend(spans), case.round(ends, 2)
    for cache, scales in zip((case.k_cache, case.v_cache), case.scales, strict=True):
        for page in [0, *case.table[0, :15].tolist()]:
            cache[page].view(torch.uint8).fill_(byte)
            scales[page] = byte
        last = case.table[1, 1]
        cache[last, :, 1:].view(torch.uint8).fill_(byte)
        scales[last, :, 1:] = byte
    torch.manual_seed(0)
    assert torch.equal(case.extend(spans), want[0])
    assert torch.equal(case.round(ends, 2)[[0, 2]], want[1][[0, 2]])


@IMPLEMENTATIONS
@pytest.mark.parametrize("page", [4, 16, 48, 512])
def test_any_page_size_of_words(triton, page, assert_close):
    case = Requests([270, 5], triton, page=page, e4m3=True)
    assert_close(case.extend([(0, 240, 270), (1, 0, 5)]), torch.cat([case.oracle(0, 240, 270), case.oracle(1, 0, 5)]))


def test_pages_that_have_no_words_are_refused():
    with pytest.raises(ValueError, match="multiples of 4"):
        Requests([20], True, page=6, e4m3=True).extend([(0, 0, 20)])
