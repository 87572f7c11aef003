"""The router of DeepSeek-V3's kind: scores, correction, groups and scale in float64, ties, rows that know no others."""

from __future__ import annotations

import pytest
import torch

from unisono.kernels.moe.scored_router import (
    RouterScores,
    choose_scored_cpu,
    launch_choose_scored,
    route_scored,
    route_scored_op,
)

GLM = RouterScores(correction=True, scale=1.8)
V3 = RouterScores(correction=True, groups=4, top_groups=2, scale=2.5)
V2 = RouterScores(False, groups=3, top_groups=2, group_best=1, scale=16.0)
ERNIE = RouterScores(False, correction=True, epsilon=1e-12)
PHI = RouterScores(False, margin=0.4)
CASES = [
    (9, 2, PHI, False),
    (12, 4, GLM, True),
    (16, 4, V3, True),
    (12, 3, V2, False),
    (12, 4, ERNIE, True),
    (9, 2, RouterScores(), True),
]
CHOOSE = pytest.mark.parametrize("choose", [launch_choose_scored, choose_scored_cpu])


def oracle(logits, correction, top_k, normalize, s):
    """(ids, weights) in float64, from the papers' formulas."""
    x = logits.double()
    if s.margin:
        return near(x, top_k, s.margin)
    score = x.sigmoid() if s.sigmoid else x.softmax(1)
    choice = score + (0 if correction is None else correction.double())
    if s.groups > 1:
        totals = choice.view(len(x), s.groups, -1).topk(s.group_best, dim=2)[0].sum(2)
        groups = totals.topk(s.top_groups)[1]
        allowed = torch.zeros_like(totals).scatter(1, groups, 1).repeat_interleave(x.shape[1] // s.groups, 1)
        choice = choice.masked_fill(allowed == 0, -torch.inf)
    ids = choice.topk(top_k)[1]
    weights = score.gather(1, ids)
    return ids, (weights / weights.sum(1, keepdim=True) if normalize else weights) * s.scale


def near(x, top_k, margin):
    """(ids, weights) of sparsemixer at inference: a softmax for each choice, over logits near the best one left."""
    left, ids, weights = x.clone(), [], []
    for _ in range(top_k):
        top, best = left.max(1, keepdim=True)
        far = (top - x) / x.abs().clamp(min=top) > margin
        weights.append(left.masked_fill(far, -torch.inf).softmax(1).gather(1, best))
        ids.append(best)
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(ids, 1), torch.cat(weights, 1)


@CHOOSE
@pytest.mark.parametrize(("experts", "top_k", "scores", "normalize"), CASES)
def test_chooses_by_the_formula(choose, experts, top_k, scores, normalize, device):
    on = device if choose is launch_choose_scored else torch.device("cpu")
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(40, experts + 1, generator=generator).to(on)
    correction = (0.3 * torch.randn(experts, generator=generator)).to(on) if scores.correction else None
    ids, weights, gates = choose(logits, correction, None, None, experts, top_k, normalize, scores)
    chosen, expected = oracle(logits[:, :experts], correction, top_k, normalize, scores)
    assert ids.dtype is torch.int32
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6 * scores.scale, rtol=0)
    torch.testing.assert_close(gates.double(), logits[:, experts].double().sigmoid(), atol=1e-6, rtol=0)


@CHOOSE
def test_the_correction_changes_the_choice_and_no_weight(choose, device):
    on = device if choose is launch_choose_scored else torch.device("cpu")
    logits, correction = torch.zeros(1, 4, device=on), torch.tensor([0.0, 0.0, 5.0, 1.0], device=on)
    ids, weights, _ = choose(logits, correction, None, None, 4, 2, False, RouterScores(correction=True))
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


@CHOOSE
def test_ties_of_groups_and_experts_go_to_the_lower_id(choose, device):
    on = device if choose is launch_choose_scored else torch.device("cpu")
    logits = torch.zeros(1, 8, device=on)
    scores = RouterScores(groups=4, top_groups=2)
    assert choose(logits, None, None, None, 8, 3, True, scores)[0].tolist() == [[0, 1, 2]]
    logits[0, 6:] = 1.0
    assert choose(logits, None, None, None, 8, 3, True, scores)[0].tolist() == [[6, 7, 0]]


@CHOOSE
@pytest.mark.parametrize("scores", [V3, RouterScores(False, correction=True), PHI])
def test_padding_and_values_of_any_kind_have_valid_experts(choose, scores, device):
    on = device if choose is launch_choose_scored else torch.device("cpu")
    nan, inf = float("nan"), float("inf")
    clean = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([[nan] * 8, [inf] * 8, [-inf] * 8, [nan, 1, inf, -inf, 2, nan, 0, 0]])
    logits, correction = torch.cat((clean, rows)).to(on), torch.zeros(8, device=on)
    counts = torch.zeros(8, dtype=torch.int64, device=on)
    ids, weights, _ = choose(logits, correction, None, counts, 8, 4, True, scores)
    assert all(len(set(row)) == 4 and set(row) <= set(range(8)) for row in ids.tolist())
    assert int(counts.sum()) == ids.numel()
    alone = choose(logits[:1], correction, None, None, 8, 4, True, scores)
    assert torch.equal(ids[:1], alone[0])
    assert torch.equal(weights[:1], alone[1])
    positions = torch.tensor([3, -1, 0, 1, -1], dtype=torch.int32, device=on)
    ids, weights, _ = choose(logits, correction, positions, None, 8, 4, True, scores)
    assert ids[[1, 4]].tolist() == [[8] * 4] * 2
    assert not weights[[1, 4]].any()
    ids, _, _ = choose(logits[:2], correction, torch.full_like(positions[:2], -1), None, 8, 4, True, scores)
    assert ids.flatten().tolist() == list(range(8))


def test_rows_are_exact(dtype, assert_rows_exact):
    x, weight, correction = torch.randn(10, 40).to(dtype), torch.randn(17, 40).to(dtype), torch.randn(16)
    for result in range(3):
        assert_rows_exact(lambda x, r=result: route_scored(x, weight, correction, None, None, 16, 3, True, V3)[r], x)
        assert_rows_exact(lambda x, r=result: route_scored(x, weight, None, None, None, 16, 2, False, PHI)[r], x)


def test_op_knows_its_shapes():
    x, weight, correction = torch.randn(5, 20), torch.randn(17, 20), torch.randn(16)
    here = route_scored(x, weight, correction, None, None, 16, 3, True, V3)
    meta = route_scored(x.to("meta"), weight.to("meta"), correction.to("meta"), None, None, 16, 3, True, V3)
    for got, want in zip(meta, here, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert route_scored_op.cpu is not None
