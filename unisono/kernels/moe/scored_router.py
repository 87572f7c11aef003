"""Router of the families after DeepSeek-V3: experts chosen by a score and a learnt correction, within chosen groups.

Owns the ``route_scored`` op; called by ``layers``. The logits are those of ``kernels/moe/router.py``, which serves
routers that are a plain softmax. One program chooses for one row, so a row's choice depends on that row alone. Ties go
to the lower id, of groups and of experts.

Shapes: M rows, H features, E experts, G groups of E / G neighbouring experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.cpu import row_exact_product
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.library import AotCase, Mutated, ints, op
from unisono.kernels.moe.router import LOWEST, Routing, empty_routing
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.sampling.sampler import order_key

_SEEN = 512
"""Positions that a row of padding reads together."""


@dataclass(frozen=True)
class RouterScores:
    """Scores of experts, the choice among them and their weights, as hashable data of a layer.

    sigmoid: an expert's score is the sigmoid of its logit; otherwise the softmax over all experts.
    correction: experts are chosen by score plus a learnt fp32 number each; their weights are the scores alone.
    groups: groups of neighbouring experts, of equal size. top_groups: groups in which a token may choose.
    group_best: a group counts as much as the sum of this many of its best experts (1 or 2).
    epsilon: added to the sum by which weights are divided. scale: factor of the weights.
    margin: above 0, an expert's score is its logit, and the weight of each choice is a softmax of its own (sparsemixer,
        arXiv 2409.12136): over the experts that are left and whose logit lies within this fraction of the best one's.
        The fraction is relative to the larger of |logit| and the best logit. It excludes ``sigmoid``.
    """

    sigmoid: bool = True
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    epsilon: float = 1e-20
    scale: float = 1.0
    margin: float = 0.0


@triton.jit
def _choose_scored_kernel(
    logits, correction, positions, ids, weights, gates, counts, stride, E, epsilon, scale,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, GATE: tl.constexpr, PADDED: tl.constexpr,
    COUNT: tl.constexpr, SEEN: tl.constexpr, OVERLAP: tl.constexpr, MARGIN: tl.constexpr = 0.0,
):  # fmt: skip
    """Choose one row's experts per program. EXPERTS, CHOSEN: E and TOP_K rounded up to powers of two. GATE: logit E is
    the shared expert's."""
    e, k = tl.arange(0, EXPERTS), tl.arange(0, CHOSEN)
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    added = tl.zeros([EXPERTS], tl.float32)
    if correction is not None:
        added = tl.load(correction + e, mask=e < E, other=0.0)
    x = tl.load(logits + row * stride + e, mask=e < E, other=float("-inf"))
    if GATE:
        gate = tl.load(logits + row * stride + E)
        tl.store(gates + row, 1.0 / (1.0 + tl.exp(-gate)))
    x = tl.where(x == x, x, float("-inf"))  # padding may hold any value: its experts must still be valid
    real, furthest = row >= 0, -1
    if PADDED:  # as in ``_choose_kernel``: rows of a pass of padding alone cycle through the experts
        real = tl.load(positions + row) >= 0
        for start in range(0, tl.where(real, 0, tl.num_programs(0)), SEEN):
            at = start + tl.arange(0, SEEN)
            seen = tl.load(positions + at, mask=at < tl.num_programs(0), other=-1)
            furthest = tl.maximum(furthest, tl.max(seen, 0))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    elif MARGIN > 0:
        score = x
    else:
        top = tl.max(x, 0)
        share = tl.where(e < E, tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0.0)
        score = share / tl.sum(share, 0)
        score = tl.where(score == score, score, 0.0)
    choice = score + added
    choice = tl.where(choice == choice, choice, float("-inf"))
    free = tl.where(e < E, order_key(tl.where(choice == 0.0, 0.0, choice)), LOWEST)
    if GROUPS > 1:
        free = tl.where(_allowed(choice, e, E // GROUPS, GROUPS, TOP_GROUPS, GROUP_BEST, EXPERTS), free, LOWEST)
    chosen = tl.zeros([CHOSEN], tl.float32)
    own = tl.zeros([CHOSEN], tl.int32)
    total = 0.0
    for slot in tl.static_range(TOP_K):
        best = tl.max(free, 0)
        at = tl.min(tl.where(free == best, e, EXPERTS), 0)
        weight = tl.sum(tl.where(e == at, score, 0.0), 0)  # one term, so the order does not matter
        if MARGIN > 0:
            weight = _share(score, weight, free != LOWEST, MARGIN)
        free = tl.where(e == at, LOWEST, free)
        total += weight
        chosen, own = tl.where(k == slot, weight, chosen), tl.where(k == slot, at, own)
    if NORMALIZE:
        chosen = chosen / (total + epsilon)
    padding = tl.where(furthest < 0, (row * TOP_K + k) % E, E).to(tl.int32)
    tl.store(ids + row * TOP_K + k, tl.where(real, own, padding), mask=k < TOP_K)
    tl.store(weights + row * TOP_K + k, tl.where(real, chosen * scale, 0.0), mask=k < TOP_K)
    if COUNT:  # of integers, so their order does not matter
        tl.atomic_add(counts + own, 1, mask=real & (k < TOP_K), sem="relaxed")


@triton.jit
def _share(x, top, left, MARGIN: tl.constexpr):
    """Softmax of the largest logit ``top`` over those of x [EXPERTS] that are left and within MARGIN of it."""
    near = left & ~((top - x) / tl.maximum(tl.abs(x), top) > MARGIN)
    share = 1.0 / tl.sum(tl.where(near, tl.exp(x - top), 0.0), 0)
    return tl.where(share == share, share, 0.0)


@triton.jit
def _allowed(
    choice, e, size, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, EXPERTS: tl.constexpr
):
    """Mask of the experts in the TOP_GROUPS best groups [EXPERTS]. size: experts of a group."""
    COUNT: tl.constexpr = triton.next_power_of_2(GROUPS)
    g = tl.arange(0, COUNT)
    totals = tl.full([COUNT], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        inside = tl.where(e // size == group, choice, float("-inf"))
        best = tl.max(inside, 0)
        if GROUP_BEST == 2:
            at = tl.min(tl.where(inside == best, e, EXPERTS), 0)
            best = best + tl.max(tl.where(e == at, float("-inf"), inside), 0)
        totals = tl.where(g == group, best, totals)
    free = tl.where(g < GROUPS, order_key(tl.where(totals == 0.0, 0.0, totals)), LOWEST)
    allowed = e < 0
    for _ in tl.static_range(TOP_GROUPS):
        at = tl.min(tl.where(free == tl.max(free, 0), g, COUNT), 0)
        free = tl.where(g == at, LOWEST, free)
        allowed = allowed | (e // size == at)
    return allowed


def launch_choose_scored(
    logits: torch.Tensor, correction: torch.Tensor | None, positions: torch.Tensor | None,
    counts: torch.Tensor | None, experts: int, top_k: int, normalize: bool, scores: RouterScores,
) -> Routing:  # fmt: skip
    """Choose experts from fp32 logits as :func:`choose_scored_cpu`, in one launch."""
    rows, width = logits.shape
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights, gates = logits.new_empty(rows, top_k), logits.new_empty(rows if width > experts else 0)
    _choose_scored_kernel[(rows,)](
        logits, correction, positions, ids, weights, gates, counts, width, experts, scores.epsilon, scores.scale,
        **_constants(experts, top_k, normalize, scores), GATE=width > experts, PADDED=positions is not None,
        COUNT=counts is not None, SEEN=_SEEN, num_warps=1, **overlapped(logits.device),
    )  # fmt: skip
    return ids, weights, gates


def _constants(experts: int, top_k: int, normalize: bool, scores: RouterScores) -> dict[str, float | bool]:
    return {
        "TOP_K": top_k, "EXPERTS": triton.next_power_of_2(experts), "CHOSEN": triton.next_power_of_2(top_k),
        "SIGMOID": scores.sigmoid, "NORMALIZE": normalize, "GROUPS": scores.groups, "TOP_GROUPS": scores.top_groups,
        "GROUP_BEST": scores.group_best, "MARGIN": scores.margin,
    }  # fmt: skip


def choose_scored_cpu(
    logits: torch.Tensor, correction: torch.Tensor | None, positions: torch.Tensor | None,
    counts: torch.Tensor | None, experts: int, top_k: int, normalize: bool, scores: RouterScores,
) -> Routing:  # fmt: skip
    """CPU twin of the choice: fp32 logits [M, E], or [M, E + 1] with the shared expert's gate."""
    x = logits[:, :experts]
    x = torch.where(x.isnan(), -torch.inf, x).contiguous()
    if scores.sigmoid:
        score = 1 / (1 + torch.exp(-x))
    elif scores.margin:
        score = x
    else:
        top = x.amax(1, keepdim=True)
        shares = torch.exp(x - torch.where(top == -torch.inf, 0.0, top))
        score = torch.nan_to_num(shares / _in_order(shares)[:, None], nan=0.0)
    choice = score if correction is None else score + correction
    choice = torch.where(choice.isnan(), -torch.inf, choice)
    if scores.groups > 1:
        best = choice.view(len(x), scores.groups, -1).topk(scores.group_best, dim=2)[0]
        totals = best[..., 0] if scores.group_best == 1 else best[..., 0] + best[..., 1]
        groups = totals.argsort(dim=1, descending=True, stable=True)[:, : scores.top_groups]
        allowed = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, groups, True)
        order = allowed.repeat_interleave(experts // scores.groups, 1)
        # Allowed experts first, each part in the order of choice: -inf may occur among both.
        ids = choice.argsort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order.gather(1, ids).byte().argsort(dim=1, descending=True, stable=True))[:, :top_k]
    else:
        ids = choice.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    weights = _shares(x, ids, scores.margin) if scores.margin else score.gather(1, ids)
    if normalize:
        weights = weights / (_in_order(weights) + scores.epsilon)[:, None]
    weights = weights * scores.scale
    gates = 1 / (1 + torch.exp(-logits[:, experts:].flatten().contiguous()))
    if counts is not None:
        counts += torch.bincount(ids[slice(None) if positions is None else positions >= 0].flatten(), minlength=experts)
    if positions is not None:
        padding = (positions < 0)[:, None]
        in_turns = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % experts
        ids = torch.where(padding, in_turns if padding.all() else experts, ids)
        weights = torch.where(padding, 0.0, weights)
    return ids.to(torch.int32), weights, gates


def _shares(x: torch.Tensor, ids: torch.Tensor, margin: float) -> torch.Tensor:
    """Weights [M, top_k] of choices ``ids`` by ``RouterScores.margin``; x [M, E]: logits."""
    left, shares = torch.ones_like(x, dtype=torch.bool), []
    for slot in ids.split(1, dim=1):
        top = x.gather(1, slot)
        near = left & ~((top - x) / torch.maximum(x.abs(), top) > margin)
        shares.append(1 / _in_order(torch.where(near, torch.exp(x - top), 0.0)))
        left = left.scatter(1, slot, False)
    return torch.nan_to_num(torch.stack(shares, 1), nan=0.0)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Sum of each row, column by column: the order of torch's own sum depends on the number of rows."""
    total = torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        total = total + column
    return total


def _route_scored_cuda(
    x: torch.Tensor, weight: torch.Tensor, correction: torch.Tensor | None, positions: torch.Tensor | None,
    counts: torch.Tensor | None, experts: int, top_k: int, normalize: bool, sigmoid: bool, groups: list[float],
    bias: torch.Tensor | None = None,
) -> Routing:  # fmt: skip
    logits = launch_linear(x, weight, bias, None, out_dtype=torch.float32)
    scores = _restored(sigmoid, correction is not None, groups)
    return launch_choose_scored(logits, correction, positions, counts, experts, top_k, normalize, scores)


def _restored(sigmoid: bool, correction: bool, groups: list[float]) -> RouterScores:
    """The scores from an op's numbers: (groups, top_groups, group_best, epsilon, scale, margin)."""
    count, top, best, epsilon, scale, margin = groups
    return RouterScores(sigmoid, correction, int(count), int(top), int(best), epsilon, scale, margin)


@op(cuda=_route_scored_cuda, meta=empty_routing)
def route_scored_op(
    x: torch.Tensor, weight: torch.Tensor, correction: torch.Tensor | None, positions: torch.Tensor | None,
    counts: Mutated[torch.Tensor | None], experts: int, top_k: int, normalize: bool, sigmoid: bool,
    groups: list[float], bias: torch.Tensor | None = None,
) -> Routing:  # fmt: skip
    logits = row_exact_product(x.float(), weight.float())
    logits = logits if bias is None else logits + bias.float()
    scores = _restored(sigmoid, correction is not None, groups)
    return choose_scored_cpu(logits, correction, positions, counts, experts, top_k, normalize, scores)


def route_scored(
    x: torch.Tensor, weight: torch.Tensor, correction: torch.Tensor | None, positions: torch.Tensor | None,
    counts: torch.Tensor | None, experts: int, top_k: int, normalize: bool, scores: RouterScores,
    bias: torch.Tensor | None = None,
) -> Routing:  # fmt: skip
    """Choose the ``top_k`` experts of each row of x [M, H] by ``scores``, in descending order of the choice.

    correction [E] fp32: added to the scores for the choice alone. The other arguments and the results are those of
    :func:`unisono.kernels.moe.router.route`; weights are scores, with ``normalize`` divided by their sum, times
    ``scores.scale``.
    """
    s = scores
    groups = [float(s.groups), float(s.top_groups), float(s.group_best), s.epsilon, s.scale, s.margin]
    return route_scored_op(x, weight, correction, positions, counts, experts, top_k, normalize, s.sigmoid, groups, bias)


def _case(experts: int, top_k: int, scores: RouterScores, normalize: bool = True, padded: bool = True) -> AotCase:
    signature = {**dict.fromkeys(("logits", "weights", "gates"), "*fp32"), **ints("positions ids", "stride E")}
    signature |= {"counts": "*i64", "epsilon": "fp32", "scale": "fp32"}
    constants: dict[str, object] = {
        **_constants(experts, top_k, normalize, scores), "GATE": False, "PADDED": padded, "COUNT": padded,
        "SEEN": _SEEN, "OVERLAP": True,
    }  # fmt: skip
    if scores.correction:
        signature["correction"] = "*fp32"
    else:
        constants["correction"] = None
    return AotCase(_choose_scored_kernel, signature, constants, num_warps=1)


AOT: list[AotCase] = [
    _case(64, 4, RouterScores(correction=True, scale=1.8)),  # GLM-4.7-Flash
    _case(128, 8, RouterScores(correction=True)),  # GLM-4.5-Air
    _case(256, 8, RouterScores(correction=True), padded=False),  # MiniMax-M2
    _case(256, 8, RouterScores(correction=True, groups=8, top_groups=4, scale=2.5)),  # DeepSeek-V3
    _case(160, 6, RouterScores(False, groups=8, top_groups=3, group_best=1, scale=16.0), normalize=False),  # V2
    _case(64, 6, RouterScores(False, correction=True, epsilon=1e-12)),  # ERNIE 4.5
    _case(16, 1, RouterScores(), normalize=False),  # Llama 4
    _case(16, 2, RouterScores(False, margin=0.02), normalize=False),  # PhiMoE
]
