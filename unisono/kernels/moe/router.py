"""Router by softmax: the experts of each token and their weights. Owns the ``route`` op; called by ``layers``.

Other scores: ``kernels/moe/scored_router.py``.

Two launches at any number of rows: the product with the router's weight, whose logits stay fp32, and the choice. One
program chooses for one row, so a row's choice depends on that row alone. Ties go to the lower id.

Shapes: M rows, H features, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unisono.kernels.gemm.cpu import row_exact_product
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.library import AotCase, Mutated, ints, op
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.sampling.sampler import order_key, order_value

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(ids [M, top_k] i32, weights [M, top_k] fp32, gates [M] fp32)."""


LOWEST = tl.constexpr(-(2**31))
"""A value below the key of every logit."""

_SEEN = 512
"""Positions that a row of padding reads together."""


@triton.jit
def _choose_kernel(logits, positions, ids, weights, gates, counts, stride, E,
                   TOP_K: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZE: tl.constexpr,
                   GATE: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, SEEN: tl.constexpr,
                   OVERLAP: tl.constexpr, factors=None):  # fmt: skip
    """Choose one row's experts per program. EXPERTS, CHOSEN: E and TOP_K rounded up to powers of two. GATE: logit E is
    the shared expert's. factors [E], or None: multiply the experts' weights."""
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, EXPERTS), tl.arange(0, CHOSEN)
    x = tl.load(logits + row * stride + e, mask=e < E, other=float("-inf"))
    if GATE:
        gate = tl.load(logits + row * stride + E)
        tl.store(gates + row, 1.0 / (1.0 + tl.exp(-gate)))
    x = tl.where(x == x, x, float("-inf"))  # padding may hold any value: its experts must still be valid
    # Padding has no expert, unless the whole pass is padding: such a pass is measured and must cost as much as others,
    # so its rows cycle through the experts.
    real, furthest = row >= 0, -1
    if PADDED:
        real = tl.load(positions + row) >= 0
        for start in range(0, tl.where(real, 0, tl.num_programs(0)), SEEN):
            at = start + tl.arange(0, SEEN)
            seen = tl.load(positions + at, mask=at < tl.num_programs(0), other=-1)
            furthest = tl.maximum(furthest, tl.max(seen, 0))
    # As integers a warp compares them in one instruction; -0 is 0.
    free = tl.where(e < E, order_key(tl.where(x == 0.0, 0.0, x)), LOWEST)
    top = order_value(tl.max(free, 0))
    chosen = tl.zeros([CHOSEN], tl.float32)
    own = tl.zeros([CHOSEN], tl.int32)
    total = 0.0
    for slot in tl.static_range(TOP_K):
        best = tl.max(free, 0)
        at = tl.min(tl.where(free == best, e, EXPERTS), 0)
        free = tl.where(e == at, LOWEST, free)
        share = tl.exp(order_value(best) - top)
        total += share
        chosen, own = tl.where(k == slot, share, chosen), tl.where(k == slot, at, own)
    if not NORMALIZE:
        total = tl.sum(tl.where(e < E, tl.exp(x - top), 0.0), 0)
    padding = tl.where(furthest < 0, (row * TOP_K + k) % E, E).to(tl.int32)
    tl.store(ids + row * TOP_K + k, tl.where(real, own, padding), mask=k < TOP_K)
    if factors is not None:
        scaled = chosen / total * tl.load(factors + own).to(tl.float32)
        tl.store(weights + row * TOP_K + k, tl.where(real, scaled, 0.0), mask=k < TOP_K)
    else:
        tl.store(weights + row * TOP_K + k, tl.where(real, chosen / total, 0.0), mask=k < TOP_K)
    if COUNT:  # of integers, so their order does not matter
        tl.atomic_add(counts + own, 1, mask=real & (k < TOP_K), sem="relaxed")


def launch_choose(
    logits: torch.Tensor,
    positions: torch.Tensor | None,
    counts: torch.Tensor | None,
    experts: int,
    top_k: int,
    normalize: bool,
    factors: torch.Tensor | None = None,
) -> Routing:
    """Choose experts from fp32 logits [M, E], or [M, E + 1] with the shared expert's gate."""
    rows, width = logits.shape
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights, gates = logits.new_empty(rows, top_k), logits.new_empty(rows if width > experts else 0)
    block = triton.next_power_of_2(experts)
    _choose_kernel[(rows,)](
        logits, positions, ids, weights, gates, counts, width, experts,
        TOP_K=top_k, EXPERTS=block, CHOSEN=triton.next_power_of_2(top_k), NORMALIZE=normalize, GATE=width > experts,
        PADDED=positions is not None, COUNT=counts is not None, SEEN=_SEEN, num_warps=_warps(block),
        **overlapped(logits.device), factors=factors,
    )  # fmt: skip
    return ids, weights, gates


def _warps(block: int) -> int:
    """Warps of a program, from the number of experts alone: part of the order of the softmax's sum."""
    return max(1, min(block // 256, 8))


def route_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor | None,
    counts: torch.Tensor | None,
    experts: int,
    top_k: int,
    normalize: bool,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> Routing:
    logits = launch_linear(x, weight, bias, None, out_dtype=torch.float32)
    return launch_choose(logits, positions, counts, experts, top_k, normalize, factors)


def choose_cpu(
    logits: torch.Tensor,
    positions: torch.Tensor | None,
    counts: torch.Tensor | None,
    experts: int,
    top_k: int,
    normalize: bool,
    factors: torch.Tensor | None = None,
) -> Routing:
    scores = logits[:, :experts]
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    ids = scores.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    shares = torch.exp(scores - scores.amax(1, keepdim=True))
    chosen = shares.gather(1, ids)
    # Column by column: the order of torch's own sum depends on the number of rows.
    total = torch.zeros_like(chosen[:, 0])
    for column in (chosen if normalize else shares).unbind(1):
        total = total + column
    gates = 1 / (1 + torch.exp(-logits[:, experts:].flatten().contiguous()))
    weights = chosen / total[:, None]
    if factors is not None:
        weights = weights * factors.float()[ids]
    if counts is not None:
        counts += torch.bincount(ids[slice(None) if positions is None else positions >= 0].flatten(), minlength=experts)
    if positions is not None:
        padding = (positions < 0)[:, None]
        in_turns = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % experts
        ids = torch.where(padding, in_turns if padding.all() else experts, ids)
        weights = torch.where(padding, 0.0, weights)
    return ids.to(torch.int32), weights, gates


def empty_routing(x: torch.Tensor, weight: torch.Tensor, experts: int, top_k: int) -> Routing:
    """Allocate the outputs of a router with rows x [M, H] and weight [E (+ 1), H]; experts: E."""
    rows = x.shape[0]
    ids, weights = (x.new_empty(rows, top_k, dtype=dtype) for dtype in (torch.int32, torch.float32))
    return ids, weights, x.new_empty(rows if weight.shape[0] > experts else 0, dtype=torch.float32)


@op(cuda=route_cuda, meta=empty_routing)
def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor | None,
    counts: Mutated[torch.Tensor | None],
    experts: int,
    top_k: int,
    normalize: bool,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> Routing:
    """Choose the ``top_k`` experts of each row of x [M, H], in descending order of softmax(x @ weight^T + bias).

    Ties go to the lower id. weight [E, H], or [E + 1, H] with the shared expert's gate as its last row; bias [E] or
    [E + 1]. Logits are summed and kept in fp32. factors [E]: each expert's weight is multiplied by its factor, in fp32,
    after normalisation; None: no factors.
    positions [M] i32: rows below 0 are padding; None: no padding. counts [E] i64, or None: incremented by each expert's
    number of rows, without padding.

    Returns (ids [M, top_k] i32; their softmax over all E, with ``normalize`` divided by its sum over the chosen, [M,
    top_k] fp32; the gate's sigmoid [M] fp32, or [0] without one). The ids of a row are different numbers below E, even
    where x is NaN. Padding has id E, no expert, and weight 0, so no expert's weights are read for it; in a pass of
    padding only, which is run for measurement, its ids cycle through the experts.
    """
    logits = row_exact_product(x.float(), weight.float())
    logits = logits if bias is None else logits + bias.float()
    return choose_cpu(logits, positions, counts, experts, top_k, normalize, factors)


AOT: list[AotCase] = [
    AotCase(
        _choose_kernel,
        {
            **dict.fromkeys(("logits", "weights", "gates"), "*fp32"), **ints("positions ids", "stride E"),
            "counts": "*i64", **({"factors": "*bf16"} if factors else {}),
        },
        {
            "TOP_K": top_k, "EXPERTS": experts, "CHOSEN": triton.next_power_of_2(top_k), "NORMALIZE": normalize,
            "GATE": gate, "PADDED": gate, "COUNT": gate, "SEEN": _SEEN, "OVERLAP": True,
            **({} if factors else {"factors": None}),
        },
        num_warps=_warps(experts),
    )
    for experts, top_k, normalize, gate, factors in (
        (256, 8, True, True, False), (128, 8, True, False, False), (512, 10, False, True, False),
        (8, 2, True, False, False), (128, 8, True, False, True),
    )
]  # fmt: skip
