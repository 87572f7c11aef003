"""Attention with a soft cap and with sinks: right against float64, with the same bits in every pass."""

import pytest
import torch

from tests.kernels.paged_requests import ALWAYS_CUT, IMPLEMENTATIONS, NEVER_CUT, Requests

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
