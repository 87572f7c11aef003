"""Attention in both directions inside pictures: float64's result, the same bits in any pass that cuts no picture."""

import pytest
import torch

from tests.kernels.paged_requests import ALWAYS_CUT, IMPLEMENTATIONS, NEVER_CUT, Requests
from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.attention.reference import ReferenceAttention

LENGTHS = [300, 40]
PICTURES = ((0, 3, 20), (0, 240, 290), (1, 10, 40))
"""One at the end of a prompt, one across the end of a split of keys."""
WINDOWS = (0, 12, 270)
"""None, one smaller than a picture, one that begins in an earlier split."""


def requests(triton: bool, window: int, **options) -> Requests:
    return Requests(LENGTHS, triton, heads=2, kv_heads=1, window=window, pictures=PICTURES, **options)


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_attention_over_images_matches_float64_in_any_pass(triton, window, soft_cap):
    if triton and soft_cap and window != 12:
        return  # one of them, in the interpreter
    case = requests(triton, window, soft_cap=soft_cap, planned_window=True)
    want = torch.cat([case.oracle(row, 0, n) for row, n in enumerate(LENGTHS)])
    got = case.extend([(0, 0, 300), (1, 0, 40)], 16, padding=3)
    assert not got[340:].any()
    assert (got[:340] - want).norm() / want.norm() < 1e-5
    for tile, programs, partials in ((8, ALWAYS_CUT, 64), (16, 2, 64)):
        assert torch.equal(case.extend([(0, 0, 300), (1, 0, 40)], tile, 0, programs, partials), got[:340])
    chunks = [case.extend([(0, a, b)], 8) for a, b in ((0, 21), (21, 240), (240, 290), (290, 300))]
    assert torch.equal(torch.cat(chunks), got[:300])
    inside = case.extend([(0, 250, 300)], 8)  # behind a cached prefix that ends in the picture
    assert torch.equal(inside, got[250:300])


def test_reference_matches_float64():
    case = requests(False, 12)
    positions = case._int32([*range(300), *range(40)])
    until = case._int32([case.until(row, p) for row, n in enumerate(LENGTHS) for p in range(n)])
    inputs = AttentionInputs(
        case._int32([0, 1]), positions, positions, case._int32(LENGTHS), case.table, None, case._int32([0, 300, 340]),
        until=until,
    )  # fmt: skip
    backend, q = ReferenceAttention(case.heads, case.kv_heads, "cpu"), case._queries([(0, 0, 300), (1, 0, 40)])
    backend.plan(inputs)
    want = torch.cat([case.oracle(row, 0, n) for row, n in enumerate(LENGTHS)])
    caches = KV(case.k_cache, case.v_cache)
    got = backend.forward(q, caches, inputs, AttentionOptions(case.scale, 12, both_ways=True)).view_as(want)
    assert (got - want).norm() / want.norm() < 1e-5
    causal = backend.forward(q, caches, inputs, AttentionOptions(case.scale, 12)).view_as(want)
    assert torch.equal(causal[20:240], got[20:240])
    assert not torch.equal(causal[3:19], got[3:19])


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "twin"])
def test_e4m3_pages(triton):
    case = requests(triton, 12, dim=32, e4m3=True, dtype=torch.float32)
    got = case.extend([(1, 0, 40)], 16, programs=NEVER_CUT)
    want = case.oracle(1, 0, 40)
    assert (got - want).norm() / want.norm() < 1e-3
