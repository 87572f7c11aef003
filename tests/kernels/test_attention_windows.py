"""Attention with a window reads nothing outside it: pages behind the window may be freed and hold anything.

Before the second of two equal passes every key behind the window becomes NaN or infinite, and the page-table columns
behind it name the padding page or another request's page. Not one bit may change.
"""

import pytest
import torch

from tests.kernels.paged_requests import ALWAYS_CUT, IMPLEMENTATIONS, NEVER_CUT, Requests
from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.attention.reference import ReferenceAttention

LENGTHS = [570, 40, 570]
VALUES = pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)


def requests(triton: bool, window: int, **options) -> Requests:
    """Three requests. The third is a tree path of the first: its first pages are shared, the last two are its own."""
    case = Requests(LENGTHS, triton, heads=2, kv_heads=1, window=window, **options)
    pages = -(-LENGTHS[0] // case.page)
    for cache in (case.k_cache, case.v_cache):
        cache[case.table[2, pages - 2 : pages].long()] = cache[case.table[0, pages - 2 : pages].long()]
    case.table[2, : pages - 2] = case.table[0, : pages - 2]
    case.q[2], case.k[2], case.v[2] = case.q[0], case.k[0], case.v[0]
    return case


def forget(case: Requests, firsts: list[int], value: float) -> None:
    """Free what precedes the window or chunk of each request's first token of the pass; ``value`` is written there."""
    for row, first in enumerate(firsts):
        low = max(first - case.window + 1, 0) if case.window > 0 else first // -case.window * -case.window
        column = low // case.page
        page = case.table[row, column].long()
        for cache in (case.k_cache, case.v_cache):
            cache[case.table[row, :column].long()] = value
            cache[page, :, : low % case.page] = value
            cache[0] = value
        case.table[row, 0:column:2] = 0
        case.table[row, 1:column:2] = case.table[1, 0] if row != 1 else case.table[0, -3]  # columns in use


@IMPLEMENTATIONS
@VALUES
@pytest.mark.parametrize(("window", "soft_cap", "sinks"), [(1, 0.0, False), (100, 0.0, False), (290, 50.0, True)])
def test_rounds_read_nothing_behind_the_window(triton, value, window, soft_cap, sinks):
    """The request's own table row and a tree path's, cut or whole."""
    ends = [(row, n) for row, n in enumerate(LENGTHS)]
    for width, programs in ((1, NEVER_CUT), (5, ALWAYS_CUT), (5, 2)):
        case = requests(triton, window, soft_cap=soft_cap, sinks=sinks)
        want = case.round(ends, width, programs)
        assert torch.equal(want[0], want[2])
        forget(case, [n - width for n in LENGTHS], value)
        assert torch.equal(case.round(ends, width, programs), want)


@IMPLEMENTATIONS
@pytest.mark.parametrize("window", [1, 300])
def test_a_plan_without_the_splits_before_the_window_has_the_same_bits(triton, window):
    """Rounds and chunks, cut or whole, in a workspace that holds all, some or no splits."""
    case = requests(triton, window)
    ends, spans = [(0, 570), None, (1, 40), (2, 513)], [(0, 552, 570), (1, 35, 40)]
    want = case.round(ends, 3), case.extend(spans, 8)
    case.planned_window = True
    for programs, partials in ((ALWAYS_CUT, 64), (ALWAYS_CUT, 3), (2, 64)):
        assert torch.equal(case.round(ends, 3, programs, partials), want[0])
        assert torch.equal(case.extend(spans, 8, 0, programs, partials), want[1])


@IMPLEMENTATIONS
@VALUES
def test_extend_reads_nothing_behind_the_window(triton, value):
    """A chunk of several tiles, cut or whole; each pass frees what is behind its first token's window."""
    firsts = [545, 20, 560]
    spans = [(row, first, n) for row, (first, n) in enumerate(zip(firsts, LENGTHS, strict=True))]
    for programs, partials in ((NEVER_CUT, 0), (ALWAYS_CUT, 64)):
        case = requests(triton, 100)
        want = case.extend(spans, 8, 2, programs, partials)
        forget(case, [545, 20, 545], value)  # the pages that requests 0 and 2 share
        assert torch.equal(case.extend(spans, 8, 2, programs, partials), want)


@VALUES
@pytest.mark.parametrize("width", [None, 5])
def test_the_reference_reads_nothing_behind_the_window(value, width):
    case = requests(False, 100, sinks=True)
    firsts = [n - 5 for n in LENGTHS]
    positions = case._int32([p for first, n in zip(firsts, LENGTHS, strict=True) for p in range(first, n)])
    query_start = case._int32([0, 5, 10, 15]) if width is None else None
    q = case._queries([(row, n - 5, n) for row, n in enumerate(LENGTHS)])
    backend, outputs = ReferenceAttention(case.heads, case.kv_heads, "cpu"), []
    for forgetting in (False, True):
        if forgetting:
            forget(case, firsts, value)
        inputs = AttentionInputs(
            case._int32([0, 1, 2]), positions, positions, case._int32(LENGTHS), case.table, width, query_start
        )
        backend.plan(inputs)
        options = AttentionOptions(case.scale, 100, soft_cap=2.0, sinks=case.sink)
        caches = KV(case.k_cache, case.v_cache)
        outputs.append(backend.forward(q, caches, inputs, options))
    case.soft_cap = 2.0
    want = torch.cat([case.oracle(row, n - 5, n) for row, n in enumerate(LENGTHS)])
    assert torch.equal(*outputs)
    assert (outputs[0].view_as(want) - want).norm() / want.norm() < 1e-5


@IMPLEMENTATIONS
@pytest.mark.parametrize("chunk", [1, 96, 281])
def test_a_token_sees_its_own_chunk_alone(triton, chunk):
    """Rounds and prompt chunks that cross a border (at 281 · 2 = 562), cut or whole, beside float64."""
    case = requests(triton, -chunk)
    ends, spans = [(0, 570), None, (1, 40), (2, 563)], [(0, 552, 570), (1, 35, 40), (2, 280, 283)]
    rounds, extended = case.round(ends, 3), case.extend(spans, 8, 2)
    want = torch.cat([case.oracle(row, n - 3, n) for row, n in ((0, 570), (1, 40), (2, 563))])
    assert (rounds[[0, 2, 3]].flatten(0, 1) - want).norm() / want.norm() < 1e-5
    want = torch.cat([case.oracle(*span) for span in spans])
    assert (extended[: len(want)] - want).norm() / want.norm() < 1e-5
    assert torch.equal(extended[15:18], rounds[0]), "the bits depend on the kind of pass"
    case.planned_window = True
    for programs, partials in ((ALWAYS_CUT, 64), (ALWAYS_CUT, 3), (2, 64)):
        assert torch.equal(case.round(ends, 3, programs, partials), rounds)
        assert torch.equal(case.extend(spans, 8, 2, programs, partials)[: len(want)], extended[: len(want)])
    forget(case, [560, 35, 560], torch.nan)  # requests 0 and 2 share pages
    assert torch.equal(case.round(ends, 3), rounds)


@IMPLEMENTATIONS
def test_chunks_of_e4m3_pages_read_the_same_keys(triton):
    case = requests(triton, -96, e4m3=True)
    rounds = case.round([(0, 570), (1, 40), (2, 481)], 3)
    want = torch.cat([case.oracle(row, n - 3, n) for row, n in ((0, 570), (1, 40), (2, 481))])
    assert (rounds.flatten(0, 1) - want).norm() / want.norm() < 3e-3
    assert torch.equal(case.extend([(0, 560, 570)], 8)[-3:], rounds[0])
