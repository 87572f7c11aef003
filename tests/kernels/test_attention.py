"""Attention: right against float64, and a token's bits are the same in every pass that computes it.

Both implementations are tested: the Triton kernels (on the GPU, else in the interpreter, small
sizes) and the CPU twins. Caches are NaN wherever no token of a request has been written.
"""

import itertools

import pytest
import torch

from tests.kernels.launches import forget
from tests.kernels.paged_requests import ALWAYS_CUT, IMPLEMENTATIONS, NEVER_CUT, Requests
from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.attention.triton import TritonAttention
from unisono.kernels.attention import cpu as twin
from unisono.kernels.attention import hopper
from unisono.kernels.attention import paged as ops


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(4, 2, 16, 0), (4, 2, 16, 40), (2, 2, 64, 300), (3, 1, 24, 0), (8, 2, 40, 0), (7, 1, 80, 300), (8, 1, 128, 0)],
)
def test_matches_float64(triton, heads, kv_heads, dim, window, dtype, assert_close):
    case = Requests([300, 17, 600], triton, dtype, heads, kv_heads, dim, window=window)
    spans = [(0, 274, 300), (2, 588, 600), (1, 0, 17)]
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
@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 1),
        ({"sinks": True, "soft_cap": 20.0}, 3),
        ({"e4m3": True, "window": 100}, 4),
        ({"dim": 32, "first": 3}, 2),
        ({"dim": 256, "window": 100}, 1),  # two scales a head
    ],
)
def test_outputs_in_e4m3_have_the_bits_of_quantised_ones(triton, options, width, dtype):
    """Padding after the last token, of rows and of passes, included; whole tiles and cut ones."""
    made = {"heads": 6, "kv_heads": 2, "dim": 16} | options
    case = Requests([300, 40, 9], triton, dtype, to_e4m3=True, **made)
    ends = [(1, 40), None, (2, 9), None, (0, 300)]
    for rows in (1, 2, 3):
        case.round(ends[:rows], width)
    case.round(ends[1:], width)
    case.round(ends[2:], width, NEVER_CUT)
    case.extend([(0, 280, 300), (1, 0, 9), (2, 3, 9)], padding=3)
    case.extend([(2, 0, 9)], 4, 0, ALWAYS_CUT, 64)


@pytest.mark.parametrize(
    ("first", "window", "triton"),
    [
        pytest.param(*cell, marks=pytest.mark.full if cell in ((1, 40, True), (13, 0, True), (260, 40, True)) else ())
        for cell in itertools.product((1, 13, 260), (0, 40), (True, False))
    ],
)
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


PLANS = [
    pytest.param(*rows, *sizes, marks=() if (i + sum(at)) % 4 == 0 else pytest.mark.full)
    for i, rows in enumerate([(False, 0), (True, 0), (False, 300), (True, 1)])
    for at, sizes in zip(
        itertools.product(range(3), range(5), range(6)),
        itertools.product((1, 3, 32), (1, 2, 7, 20, 1000), (0, 1, 2, 5, 20, 64)),
        strict=True,
    )
]
"""Ragged or not and a window, the tokens of a tile, programs at a time, room for parts: every fourth by default."""


@pytest.mark.parametrize(("ragged", "window", "tile_tokens", "programs", "partials"), PLANS)
def test_plans_agree(ragged, window, tile_tokens, programs, partials, device):
    """Kernel and twin list the same work: each token's splits once, cut tiles in workspace of their own."""
    sizes = (tile_tokens, 2, partials, programs, window)
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
        seen = length - (starts[row + 1] - starts[row]) - window + 1 if window and row < len(slots) else 0
        splits = list(range(max(seen, 0) // ops.SPLIT, -(-length // ops.SPLIT)))
        assert [split for item in pieces for split in range(item[4], item[5])] == splits
        places += [partial + i for i in range(len(splits))] if partial >= 0 else []
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
    out = backend.forward(case._queries(spans), KV(case.k_cache, case.v_cache), inputs, AttentionOptions(case.scale))
    want = torch.cat([case.oracle(*span) for span in spans])
    assert (out.cpu().view_as(want) - want).norm() / want.norm() < 1e-3
    inputs.query_start = None if width is None else positions
    with pytest.raises(ValueError, match="width or query_start"):
        backend.plan(inputs)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PROMPTS = "attention of long prompts"


@pytest.mark.skipif(not HOPPER, reason="the kernel for Hopper has no twin on other machines")
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(32, 8, torch.bfloat16), (4, 4, torch.float16)])
def test_long_prompts_on_hopper_have_the_same_bits(heads, kv_heads, dim, dtype, monkeypatch):
    case = Requests([2000, 130, 700, 1, 1025], True, dtype, heads, kv_heads, dim)
    backend = TritonAttention(heads, kv_heads, case.device)
    spans = [(0, 300, 2000), (1, 0, 130), (2, 699, 700), (3, 0, 1), (4, 1, 1025), (2, 64, 512)]
    tile = 128 * kv_heads // heads
    forget(monkeypatch, hopper.exact_prompt_attention)
    want = case.extend(spans, tile, partials=0, padding=7)
    launched = watched(monkeypatch)
    assert backend.prove(dim, dtype)[PROMPTS][0] == "gluon-sm90"
    launched.clear()
    assert torch.equal(case.extend(spans, tile, partials=0, padding=7), want)
    assert launched, "it was not the kernel for Hopper"


@pytest.mark.skipif(not HOPPER, reason="the kernel for Hopper has no twin on other machines")
def test_other_bits_are_not_served(monkeypatch):
    forget(monkeypatch, hopper.exact_prompt_attention)
    launched = watched(monkeypatch, error=1.0)
    backend = TritonAttention(32, 8, "cuda")
    assert backend.prove(128, torch.bfloat16)[PROMPTS][0] == "triton"
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
    settled = TritonAttention(32, 8, "cpu").prove(128, torch.bfloat16)
    assert {what for what, _ in settled.values()} == {"triton"}
    assert not hopper.suits(32, 8, 128, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32, 64])
def test_proof_inputs_of_hopper_attention_fill_its_tiles(heads: int) -> None:
    """Else the comparison would be of one kernel with itself."""
    lengths, starts = hopper.proof_lengths(heads), (700, 13)
    for tokens in (sum(lengths), sum(lengths) - sum(starts)):
        backend = TritonAttention(heads, 1, "cpu")
        backend.processors = 132  # an H200's
        assert backend._tile_tokens(tokens) * heads == hopper.ROWS
        assert tokens * heads >= 64 * backend.processors, "tiles are walked whole"


@pytest.mark.parametrize(("heads", "dim"), [(2, 128), (4, 128), (8, 128), (16, 128), (32, 128), (2, 256)])
def test_proof_inputs_of_hopper_attention_have_nan_only_in_masked_slots(heads: int, dim: int) -> None:
    """NaN stands where no token may look, and nowhere else; a difference to what serves otherwise is seen."""
    proof, device = (heads, heads, dim, torch.float16, torch.device("cpu")), torch.device("cpu")
    off = 0.0

    def read(q, k, v, table, kv_len, query_start, positions):
        seen = [cache[table[row].long()].transpose(1, 2).flatten(0, 1)[:n] for row, n in enumerate(kv_len.tolist())
                for cache in (k, v)]  # fmt: skip
        return torch.cat(seen).float() + off * hopper.exact_prompt_attention.serves(proof)

    try:
        assert hopper._same_bits(read, heads, heads, dim, torch.float16, device)
        off = 1.0
        assert not hopper._same_bits(read, heads, heads, dim, torch.float16, device)
    finally:
        hopper.exact_prompt_attention.serving.pop(proof, None)
