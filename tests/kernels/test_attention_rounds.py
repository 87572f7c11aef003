"""Attention of few rows on Hopper (``attention_gluon_rounds``): its logic, as threads; the GPU proves its bits."""

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from tests.kernels.launches import forget
from tests.kernels.paged_requests import Requests
from unisono.attention.triton import TritonAttention
from unisono.kernels import hopper, overlap
from unisono.kernels.attention import gluon_rounds as attention_gluon_rounds
from unisono.kernels.attention import hopper_rounds as rounds
from unisono.kernels.attention.cpu import SPLIT, attention_plan_cpu
from unisono.kernels.attention.paged import KEYS
from unisono.kernels.attention.triton_kernels import LOG2_E
from unisono.kernels.gemm.fp8_quantize import E4M3, padded_quantize_cpu

LENGTHS = [700, 20, 257, 1030]
WIDTHS = [1, 3, 4]


def attended(
    case: Requests, width: int, programs: int, share: int, partials: int, seed: int, quantised: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A round over all requests, and one of padding, by so many programs: outputs [T, Hq · D], and scales if e4m3."""
    slots = torch.tensor([*range(len(LENGTHS)), len(LENGTHS)], dtype=torch.int32)
    kv_len = torch.tensor([*LENGTHS, 0], dtype=torch.int32)
    positions = torch.cat([torch.arange(n - width, n) if n else torch.full((width,), -1) for n in kv_len.tolist()])
    q = torch.cat([*(each[-width:] for each in case.q), torch.randn(width, case.heads, case.dim).half()])
    work, count, arrivals = attention_plan_cpu(
        slots, kv_len, None, len(q), width, case.kv_heads, partials, share, 0
    )  # fmt: skip
    state, acc = (
        torch.full((partials, width, case.heads, 2), torch.nan),
        torch.full((partials, width, case.heads, case.dim), torch.nan),
    )
    padded = -(-len(q) // 4) * 4 if quantised else len(q)
    out = torch.full((padded, case.heads * case.dim), torch.nan).to(E4M3 if quantised else torch.float16)
    scales = torch.full((case.heads, padded), torch.nan)
    rows = width * (case.heads // case.kv_heads)
    boxes = [Descriptor(cache.view(-1, case.dim), [16, case.dim // 2]) for cache in (case.k_cache, case.v_cache)]
    table = case.table.clamp(max=len(case.k_cache))  # rubbish there stays outside of the tensor, as on the device
    machine = Machine([attention_gluon_rounds, hopper, overlap], programs, seed)
    machine.run(
        attention_gluon_rounds.round_attention_kernel, q_ptr=q, k_desc=boxes[0], v_desc=boxes[1], table_ptr=table,
        positions_ptr=positions.int(), work_ptr=work, count_ptr=count, arrivals_ptr=arrivals, state_ptr=state,
        acc_ptr=acc, out_ptr=out, scales_ptr=scales, tokens=len(q), padded=len(out), max_pages=case.table.shape[1],
        scale=case.scale * LOG2_E.value,
        HEADS=case.heads, KV_HEADS=case.kv_heads, PAGE=16, TOKENS=width, ROWS=max(8, 1 << (rows - 1).bit_length()),
        HALF=case.dim // 2, KEYS=KEYS, SPLIT=SPLIT, FIRST=case.first, AT_ONCE=2 ** (seed % 3),
        STAGES=2, OVERLAP=True,
    )  # fmt: skip
    assert not arrivals.any(), "the next layer's counters"
    return out, scales


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_rounds_as_threads(width, first, assert_close):
    """Whole tiles and cut ones, items for no program and for several, a request that sees nothing."""
    torch.manual_seed(width)
    case = Requests(LENGTHS, False, torch.float16, heads=4, kv_heads=2, dim=32, first=first)
    want = torch.stack([case.oracle(row, n - width, n) for row, n in enumerate(LENGTHS)])
    for seed, (programs, share, partials) in enumerate(((3, 1, 64), (5, 10**6, 64), (40, 12, 8))):
        out, _ = attended(case, width, programs, share, partials, seed)
        got = out.view(len(LENGTHS) + 1, width, case.heads, case.dim)
        assert_close(got[:-1], want)
        assert (got[-1] == 0).all()


@pytest.mark.parametrize("width", [1, 3])
def test_quantised_rounds_as_threads(width):
    """What a product in e4m3 reads: the rows, quantised, and the padding after the last."""
    torch.manual_seed(width)
    case = Requests(LENGTHS, False, torch.float16, heads=4, kv_heads=2, dim=32)
    seen = []
    for quantised in (False, True):
        torch.manual_seed(7)  # of what padding rows ask
        seen.append(attended(case, width, 3, 10**6, 64, 5, quantised))
    want, scales = padded_quantize_cpu(seen[0][0], case.dim)
    assert seen[1][0].shape == want.shape
    assert torch.equal(seen[1][0].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(seen[1][1], scales)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="the kernel for Hopper has no twin on other machines")
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(32, 8, torch.bfloat16), (4, 4, torch.float16)])
@pytest.mark.parametrize("first", [0, 1])
def test_rounds_on_hopper_have_the_same_bits(heads, kv_heads, dtype, first, monkeypatch):
    case = Requests([2000, 130, 700, 1025], True, dtype, heads, kv_heads, 128, first=first)
    forget(monkeypatch, rounds.exact_round_attention)
    ends = [(0, 2000), None, (1, 130), (3, 1025), (2, 64)]
    want = [case.round(ends, width, programs) for width in (1, 4) for programs in (10**6, 1)]
    settled = TritonAttention(heads, kv_heads, case.device).prove(128, dtype)
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


def test_supported_shapes_of_round_attention(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0))
    heads = 32, 8, 128, torch.bfloat16
    assert rounds.suits(*heads, torch.device("cuda"))
    assert asked
    assert not rounds.suits(*heads, torch.device("cpu"))
    assert not rounds.suits(32, 8, 64, torch.bfloat16, torch.device("cuda"))
    assert not rounds.suits(64, 1, 128, torch.bfloat16, torch.device("cuda")), "more rows than a tile has"


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (32, 8), (32, 1)])
def test_proof_inputs_of_round_attention_have_nan_only_in_masked_slots(heads: int, kv_heads: int) -> None:
    """NaN stands where no token may look, and nowhere else; a difference to what serves otherwise is seen."""
    device, off, widths = torch.device("cpu"), 0.0, []
    proof = heads, kv_heads, 128, torch.float16, device

    def read(q, k, v, table, kv_len, width, window):
        assert len(q) == width * len(kv_len)
        widths.append(width)
        seen = [cache[table[row].long()].transpose(1, 2).flatten(0, 1)[:n] for row, n in enumerate(kv_len.tolist())
                for cache in (k, v)]  # fmt: skip
        return torch.cat(seen).float() + off * rounds.exact_round_attention.serves(proof)

    try:
        assert rounds._same_bits(read, *proof)
        assert max(widths) * heads <= rounds.MOST_ROWS * kv_heads
        off = 1.0
        assert not rounds._same_bits(read, *proof)
    finally:
        rounds.exact_round_attention.serving.pop(proof, None)
