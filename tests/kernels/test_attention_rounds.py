"""Attention of few rows on Hopper (``attention_gluon_rounds``): its logic, as threads; its bits are proven on the GPU."""

import random

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from tests.kernels.paged_requests import Requests
from unisono.kernels import attention_gluon_rounds, hopper, staying
from unisono.kernels.attention import KEYS
from unisono.kernels.attention_cpu import SPLIT, attention_plan_cpu
from unisono.kernels.attention_triton import LOG2_E

LENGTHS = [700, 20, 257, 1030]
WIDTHS = [1, 3, 4]


def attended(case: Requests, width: int, programs: int, share: int, partials: int, seed: int) -> torch.Tensor:
    """A round over all requests, and one of padding, by so many programs: outputs [R, W, Hq, D]."""
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
    out = torch.full((len(q), case.heads * case.dim), torch.nan).half()
    rows = width * (case.heads // case.kv_heads)
    boxes = [Descriptor(cache.view(-1, case.dim), [16, case.dim // 2]) for cache in (case.k_cache, case.v_cache)]
    table = case.table.clamp(max=len(case.k_cache))  # rubbish there stays outside of the tensor, as on the device
    machine = Machine([attention_gluon_rounds, hopper, staying], programs, seed)
    machine.run(
        attention_gluon_rounds.round_attention_kernel, q_ptr=q, k_desc=boxes[0], v_desc=boxes[1], table_ptr=table,
        positions_ptr=positions.int(), work_ptr=work, count_ptr=count, arrivals_ptr=arrivals, state_ptr=state,
        acc_ptr=acc, out_ptr=out, max_pages=case.table.shape[1], scale=case.scale * LOG2_E.value,
        HEADS=case.heads, KV_HEADS=case.kv_heads, PAGE=16, TOKENS=width, ROWS=max(8, 1 << (rows - 1).bit_length()),
        HALF=case.dim // 2, KEYS=KEYS, SPLIT=SPLIT, FIRST=case.first, AT_ONCE=random.Random(seed).choice([1, 2, 4]),
        STAGES=2, OVERLAP=True,
    )  # fmt: skip
    assert not arrivals.any(), "the next layer's counters"
    return out.view(len(LENGTHS) + 1, width, case.heads, case.dim)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_rounds_as_threads(width, first, assert_close):
    """Whole tiles and cut ones, items for no program and for several, a request that sees nothing."""
    torch.manual_seed(width)
    case = Requests(LENGTHS, False, torch.float16, heads=4, kv_heads=2, dim=32, first=first)
    want = torch.stack([case.oracle(row, n - width, n) for row, n in enumerate(LENGTHS)])
    for seed, (programs, share, partials) in enumerate(((3, 1, 64), (5, 10**6, 64), (40, 12, 8))):
        got = attended(case, width, programs, share, partials, seed)
        assert_close(got[:-1], want)
        assert (got[-1] == 0).all()
