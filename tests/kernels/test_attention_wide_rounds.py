"""Attention of few rows on Hopper for wide heads: the kernel's logic, as threads; the GPU proves its bits."""

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from tests.kernels.launches import forget
from tests.kernels.paged_requests import Requests
from unisono.attention.triton import TritonAttention
from unisono.kernels import hopper, overlap
from unisono.kernels.attention import gluon_rounds, gluon_wide_rounds
from unisono.kernels.attention import hopper_rounds as rounds
from unisono.kernels.attention.cpu import SPLIT, attention_plan_cpu
from unisono.kernels.attention.paged import KEYS
from unisono.kernels.attention.triton_kernels import LOG2_E
from unisono.kernels.gemm.fp8_quantize import E4M3, padded_quantize_cpu

LENGTHS = [700, 20, 257, 1030]
HEADS, KV_HEADS, PIECE, PIECES = 4, 2, 16, 4


def attended(
    case: Requests, width: int, programs: int, share: int, partials: int, seed: int, parts: int, quantised: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A round over all requests, and one of padding, by so many programs: outputs [T, Hq · D], and scales if e4m3."""
    slots = torch.tensor([*range(len(LENGTHS)), len(LENGTHS)], dtype=torch.int32)
    kv_len = torch.tensor([*LENGTHS, 0], dtype=torch.int32)
    positions = torch.cat([torch.arange(n - width, n) if n else torch.full((width,), -1) for n in kv_len.tolist()])
    q = torch.cat([*(each[-width:] for each in case.q), torch.randn(width, HEADS, case.dim).half()])
    planned = len(q), width, KV_HEADS, partials, share, case.window if case.planned_window else 0
    work, count, arrivals = attention_plan_cpu(slots, kv_len, None, *planned)
    state = torch.full((partials, width, HEADS, 2), torch.nan)
    acc = torch.full((partials, width, HEADS, case.dim), torch.nan)
    padded = -(-len(q) // 4) * 4 if quantised else len(q)
    out = torch.full((padded, HEADS * case.dim), torch.nan).to(E4M3 if quantised else torch.float16)
    scales = torch.full((HEADS * PIECES // 2, padded), torch.nan)
    rows = max(8, 1 << (width * (HEADS // KV_HEADS) - 1).bit_length())
    boxes = [Descriptor(cache.view(-1, case.dim), [16, PIECE]) for cache in (case.k_cache, case.v_cache)]
    table = case.table.clamp(max=len(case.k_cache))  # rubbish there stays outside of the tensor, as on the device
    Machine([gluon_wide_rounds, gluon_rounds, hopper, overlap], programs, seed).run(
        gluon_wide_rounds.wide_round_attention_kernel, q_ptr=q, k_desc=boxes[0], v_desc=boxes[1], table_ptr=table,
        positions_ptr=positions.int(), work_ptr=work, count_ptr=count, arrivals_ptr=arrivals, state_ptr=state,
        acc_ptr=acc, out_ptr=out, scales_ptr=scales, tokens=len(q), padded=len(out), max_pages=case.table.shape[1],
        window=case.window or None, scale=case.scale * LOG2_E.value, HEADS=HEADS, KV_HEADS=KV_HEADS, PAGE=16,
        TOKENS=width, ROWS=rows // parts, PARTS=parts, PIECES=PIECES, PIECE=PIECE, KEYS=KEYS, SPLIT=SPLIT,
        AT_ONCE=2 ** (seed % 3), STAGES=3, OVERLAP=True,
    )  # fmt: skip
    assert not arrivals.any(), "the next layer's counters"
    return out, scales


def requests(window: int, planned: bool = False) -> Requests:
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": PIECE * PIECES}
    return Requests(LENGTHS, False, torch.float16, **sizes, window=window, planned_window=planned)


@pytest.mark.parametrize(("window", "planned"), [(0, False), (300, False), (300, True), (40, True)])
@pytest.mark.parametrize(("width", "parts"), [(1, 1), (4, 1), (4, 2)])
def test_wide_rounds_as_threads(width, parts, window, planned, assert_close):
    """Whole tiles and cut ones, several programs for a tile, windows that the plan knows and does not."""
    torch.manual_seed(width)
    case = requests(window, planned)
    want = torch.stack([case.oracle(row, n - width, n) for row, n in enumerate(LENGTHS)])
    for seed, (programs, share, partials) in enumerate(((3, 1, 64), (5, 10**6, 64), (40, 12, 8))):
        out, _ = attended(case, width, programs, share, partials, seed, parts)
        got = out.view(len(LENGTHS) + 1, width, HEADS, case.dim)
        assert_close(got[:-1], want)
        assert (got[-1] == 0).all()


@pytest.mark.parametrize("width", [1, 3])
def test_quantised_wide_rounds_as_threads(width):
    """Two pieces share a scale."""
    torch.manual_seed(width)
    case, seen = requests(300, True), []
    for quantised in (False, True):
        torch.manual_seed(7)  # of what padding rows ask
        seen.append(attended(case, width, 3, 10**6, 64, 5, 1, quantised))
    want, scales = padded_quantize_cpu(seen[0][0], 2 * PIECE)
    assert torch.equal(seen[1][0].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(seen[1][1], scales)


def test_wide_heads_are_served_with_windows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    assert rounds.suits(16, 8, 256, torch.bfloat16, device)
    assert rounds.suits(16, 2, 512, torch.bfloat16, device)
    assert not rounds.suits(32, 1, 512, torch.bfloat16, device), "more rows than a program has"
    assert not rounds.suits(16, 8, 64, torch.bfloat16, device)
    sizes = {heads: rounds.wide_sizes(*heads, 4, 64) for heads in ((16, 8, 256), (16, 2, 512), (32, 4, 512))}
    assert [each["PARTS"] for each in sizes.values()] == [1, 2, 2]
    assert {each["STAGES"] * 64 * 2 * head[2] for head, each in sizes.items()} == {192 * 1024}
    caches = {dim: torch.empty(2, 2, 16, dim, dtype=torch.float16) for dim in (512, 256, 128)}
    for dim, cache in caches.items():
        q, key = torch.empty(3, 4, dim, dtype=torch.float16), (4, 2, dim, torch.float16, torch.device("cpu"))
        monkeypatch.setitem(rounds.exact_round_attention.serving, key, True)
        assert rounds.serves(q, cache, 1, 0, 0)
        assert rounds.serves(q, cache, 1, 300, 0) == (dim > 128)
        assert not rounds.serves(q, cache, 1, -300, 0)
        assert rounds.serves(q, cache, 1, 0, 1) == (dim == 128)
        assert not rounds.serves(q, cache, 64, 0, 0)
        assert rounds.serves(torch.empty(500, 4, dim, dtype=torch.float16), cache, 1, 0, 0)
        many = torch.empty(34 * 16, 4, dim, dtype=torch.float16)
        assert rounds.serves(many, cache, 16, 0, 0) == (dim < 512), "68 tiles of a KV head, each of two programs"
        assert rounds.serves(many[: 33 * 16], cache, 16, 0, 0)


def test_wide_heads_are_planned_for_one_program_on_hopper(monkeypatch):
    backend = TritonAttention(16, 8, "cpu")
    backend.prove(256, torch.bfloat16)
    assert backend.programs_per_processor == 2, "other devices keep the plan of the Triton kernel"
    monkeypatch.setattr(rounds, "suits", lambda *heads: True)
    monkeypatch.setattr(rounds.exact_round_attention, "rehearse", lambda *heads: None)
    backend.rehearse(128, torch.bfloat16)
    assert backend.programs_per_processor == 2
    backend.rehearse(256, torch.bfloat16)
    assert backend.programs_per_processor == 1


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="the kernel for Hopper has no twin on other machines")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 256), (16, 2, 512), (32, 4, 512)])
@pytest.mark.parametrize("window", [0, 300, 1024])
def test_wide_rounds_on_hopper_have_the_same_bits(heads, kv_heads, dim, window, monkeypatch):
    case = Requests(
        [2000, 130, 700, 1025], True, torch.bfloat16, heads, kv_heads, dim, window=window, planned_window=True,
        to_e4m3=True,
    )  # fmt: skip
    forget(monkeypatch, rounds.exact_round_attention)
    ends = [(0, 2000), None, (1, 130), (3, 1025), (2, 64)]
    want = [case.round(ends, width, programs) for width in (1, 4) for programs in (10**6, 1)]
    settled = TritonAttention(heads, kv_heads, case.device).prove(dim, torch.bfloat16)
    assert settled["attention of rounds"][0] == "gluon-sm90"
    launched = []
    launch = rounds.launch_round_attention
    monkeypatch.setattr(
        rounds, "launch_round_attention", lambda *args, **kwargs: launched.append(launch(*args, **kwargs))
    )
    got = [case.round(ends, width, programs) for width in (1, 4) for programs in (10**6, 1)]
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours[[0, 2, 3, 4]], theirs[[0, 2, 3, 4]])  # padding asks at random
    assert launched, "it was not the kernel for Hopper"
