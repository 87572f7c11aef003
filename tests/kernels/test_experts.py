"""Experts: the products and their sum against float64, both plans and all tiles with the same bits, sorted pairs."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.expert_cases import SMALL, all_pairs, choice, expert_down_cpu, expert_gate_up_cpu, inputs, plans
from tests.kernels.gluon_threads import Descriptor, Machine
from unisono.kernels import hopper, rms_norm
from unisono.kernels.moe import gluon as experts_gluon
from unisono.kernels.moe.combine import (
    combine_experts,
    combine_experts_norm,
    combine_experts_op,
    launch_combine,
)
from unisono.kernels.moe.experts import (
    _same_bits,
    exact_experts,
    expert_down,
    expert_gate_up,
    expert_tile,
    expert_tiles,
    expert_up_op,
    launch_down,
    launch_gate_up,
)
from unisono.kernels.moe.plan import (
    LEAD_PAIRS,
    ExpertPlan,
    Shapes,
    launch_sort_pairs,
    num_tiles,
    plan_experts,
    sort_pairs_op,
)

SHAPES = [  # M, H, I, E, top_k, shared experts that ride along
    (5, 40, 24, 7, 3, 1),
    (1, 33, 20, 4, 2, 0),
    (9, 16, 16, 1, 1, 1),
    (6, 48, 17, 5, 5, 0),
]


def test_a_proof_of_gated_experts_serves_no_others(monkeypatch):
    """Gate and up [E, 2 I, H] may have the shape of a stack of up alone, which other code multiplies."""
    stack, down = torch.empty(4, 64, 32, dtype=torch.bfloat16), torch.empty(4, 32, 32, dtype=torch.bfloat16)
    for key in exact_experts.keys(stack, down, 4, 2, True):
        monkeypatch.setitem(exact_experts.serving, key, True)
    pairs = 4 * experts_gluon.FEWEST
    assert expert_tile(pairs, 4, stack) == experts_gluon.TILE_PAIRS
    assert expert_tile(pairs, 4, stack, gated=False) == expert_tiles(pairs, 4, stack.dtype).rows
    assert not {*exact_experts.keys(stack, down, 4, 2, False)} <= {*exact_experts.serving}


@pytest.mark.parametrize("plan", ["lead", "sorted", "twin"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_match_float64(plan, shape, dtype, device, assert_close):
    rows, hidden, inner, experts, top_k, rides = shape
    on = torch.device("cpu") if plan == "twin" else device
    x, gate_up, down = inputs(rows, hidden, inner, experts, rides, dtype, on)
    ids = choice(rows, experts, top_k).to(on)
    pairs = all_pairs(ids, experts, rides)
    both = torch.stack([gate_up[e].double() @ x[token].double() for e, token in pairs])
    expected = torch.nn.functional.silu(both[:, :inner]) * both[:, inner:]
    if plan == "twin":
        h = expert_gate_up_cpu(x, gate_up, ids, experts)
        y = expert_down_cpu(h, down, ids, experts)
    else:
        h = launch_gate_up(x, gate_up, plans(ids, experts, 16)[plan], SMALL)
        y = launch_down(h, down, plans(ids, experts, 16)[plan], SMALL)
    assert_close(h, expected)
    assert_close(y, torch.stack([down[e].double() @ h[i].double() for i, (e, _) in enumerate(pairs)]))


@pytest.mark.parametrize("plan", ["lead", "sorted", "twin"])
def test_the_product_without_a_gate_matches_float64(plan, dtype, device, assert_close):
    rows, hidden, inner, experts, top_k = 6, 40, 24, 7, 3
    on = torch.device("cpu") if plan == "twin" else device
    x, _, down = inputs(rows, inner, hidden, experts, 0, dtype, on)  # down: [E, inner, hidden]
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(3)).to(on, dtype)
    ids = choice(rows, experts, top_k).to(on)
    products = torch.stack([down[e].double() @ x[token].double() for e, token in all_pairs(ids, experts, 0)])
    if plan == "twin":
        h = expert_up_op.cpu(x, down, ids, experts, 0, None, None)
    else:
        h = launch_down(x, down, plans(ids, experts, 16)[plan], SMALL, up=True)
    assert_close(h, products.relu().square())


def test_plans_and_tiles_have_the_same_bits(dtype, device):
    """Many tokens of few experts, so that tiles are full, half full and empty."""
    experts, rides = 5, 1
    x, gate_up, down = inputs(27, 32, 20, experts, rides, dtype, device)
    ids = torch.cat((choice(22, 3, 2), choice(5, experts, 2))).to(device)
    want_h, want_y = None, None
    for rows in (16, 32):
        for plan in plans(ids, experts, rows).values():
            for tile in (SMALL, SMALL._replace(n=32, warps=4, across=False)):
                h = launch_gate_up(x, gate_up, plan, tile)
                y = launch_down(h, down, plan, tile)
                want_h, want_y = h if want_h is None else want_h, y if want_y is None else want_y
                assert torch.equal(h, want_h)
                assert torch.equal(y, want_y)
    assert not want_y.isnan().any()


@pytest.mark.parametrize("run", ["lead", "sorted", "twin"])
def test_rows_are_exact(run, dtype, device, assert_rows_exact):
    experts, rides, on = 6, 1, torch.device("cpu") if run == "twin" else device
    x, gate_up, down = inputs(9, 32, 16, experts, rides, dtype, on)
    ids, weights = choice(9, experts, 3).to(on), torch.rand(9, 3, device=on)
    gates, residual = torch.rand(9, device=on), torch.randn(9, 32).to(on, dtype)

    def layer(x, ids, weights, gates, residual):
        if run == "twin":
            y = expert_down_cpu(expert_gate_up_cpu(x, gate_up, ids, experts), down, ids, experts)
            return combine_experts_op.cpu(y[: ids.numel()], weights, y[ids.numel() :], gates, residual, None, 0.0)[0]
        plan = plans(ids, experts, 16)[run]
        y = launch_down(launch_gate_up(x, gate_up, plan, SMALL), down, plan, SMALL)
        return launch_combine(y[: ids.numel()], weights, y[ids.numel() :], gates, residual, None, 0.0)[0]

    assert_rows_exact(layer, x, ids, weights, gates, residual)


def test_padding_rows_do_not_affect_other_rows(device):
    experts, dtype = 4, torch.float32
    x, gate_up, down = inputs(6, 32, 16, experts, 1, dtype, device)
    ids = choice(6, experts, 2).to(device)
    dirty = x.clone()
    dirty[2], dirty[5] = float("nan"), float("inf")
    for plan in plans(ids, experts, 16).values():
        clean_y, dirty_y = (
            launch_down(launch_gate_up(rows, gate_up, plan, SMALL), down, plan, SMALL) for rows in (x, dirty)
        )
        for row, (_, token) in enumerate(all_pairs(ids, experts, 1)):
            if token not in (2, 5):
                assert torch.equal(clean_y[row], dirty_y[row])


@pytest.mark.parametrize("run", ["lead", "sorted", "twin"])
def test_padding_goes_to_no_expert(run, device):
    """Its rows stay unwritten, which the sum does not read; the others keep their bits."""
    experts, on = 5, torch.device("cpu") if run == "twin" else device
    x, gate_up, down = inputs(6, 32, 16, experts, 1, torch.float32, on)
    ids, weights, real = choice(6, experts, 2).to(on), torch.rand(6, 2, device=on), [0, 3, 4]
    residual, padded_ids, padded_weights = torch.randn(6, 32, device=on), ids.clone(), weights.clone()
    padded_ids[[1, 2, 5]], padded_weights[[1, 2, 5]] = experts, 0

    def layer(ids, weights):
        if run == "twin":
            y = expert_down_cpu(expert_gate_up_cpu(x, gate_up, ids, experts), down, ids, experts)
        else:
            plan = plans(ids, experts, 16)[run]
            y = launch_down(launch_gate_up(x, gate_up, plan, SMALL), down, plan, SMALL)
        combine = combine_experts_op.cpu if run == "twin" else launch_combine
        return combine(y[:12], weights, y[12:], None, residual, None, 0.0)[0], y

    out, y = layer(padded_ids, padded_weights)
    assert torch.equal(out[real], layer(ids, weights)[0][real])
    assert y[:12].view(6, 2, 32)[[1, 2, 5]].isnan().all()
    assert torch.equal(out[[1, 2, 5]], (y[12:] + residual)[[1, 2, 5]])


@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(70, 16, 2), (90, 5, 3), (300, 1, 1), (33, 40, 8), (5000, 9, 2)]
)
@pytest.mark.parametrize("tile", [16, 64])
def test_the_sort_is_stable_and_its_tiles_cover_every_pair_once(rows, experts, top_k, tile, device):
    if rows > 1000 and tile == 16:
        pytest.skip("one large case is enough in the interpreter")
    ids = choice(rows, experts, top_k)
    if experts > 4:
        ids[ids == 3] = 2  # an expert that no token takes, and one that many take
        ids[5:9] = experts  # padding
    order, tiles = (t.cpu() for t in launch_sort_pairs(ids.to(device), experts, tile))
    sorted_ = ids.flatten().argsort(stable=True)[: (ids < experts).sum()]
    assert torch.equal(order[: len(sorted_)].long(), sorted_)
    assert torch.equal(order[: len(sorted_)], sort_pairs_op.cpu(ids, experts, tile)[0][: len(sorted_)])
    assert tiles.shape == (3, num_tiles(ids.numel(), experts, tile))
    flat, covered = ids.flatten(), []
    for expert, first, count in tiles.T.tolist():
        assert 0 <= count <= tile
        mine = order[first : first + count].long()
        assert (flat[mine] == expert).all()
        covered += mine.tolist()
    assert sorted(covered) == (flat < experts).nonzero().flatten().tolist()
    full = tiles[:, tiles[2] > 0]
    assert torch.equal(full, sort_pairs_op.cpu(ids, experts, tile)[1][:, : full.shape[1]])


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize(("rides", "hidden", "inner"), [(0, 128, 192), (1, 128, 192), (1, 384, 320)])
def test_prefill_kernel_threads_wait_for_their_inputs(rides, hidden, inner, programs):
    """As threads (``gluon_threads``): tiles with pairs for both groups, for one, for none; outputs beyond the last.

    Tiles have fewer steps than there are stages, and more: a group that leaves one out must not run ahead.
    """
    rows, experts, top_k = 70, 5, 3
    x, gate_up, down = inputs(rows, hidden, inner, experts, rides, torch.float16, "cpu")
    ids = torch.cat((torch.tensor([[0, 1, 2]]).repeat(rows - 4, 1), choice(4, experts - 1, top_k))).int()
    ids[-1] = experts  # a row of padding
    ids[:30, 1] = 0  # 96 pairs and more
    plan = ExpertPlan(ids, experts, 128, *sort_pairs_op.cpu(ids, experts, 128))
    assert {(n > 0) + (n > 64) for n in plan.tiles[2].tolist()} == {0, 1, 2}  # groups that have pairs
    h = expert_gate_up_cpu(x, gate_up, ids, experts)
    inside = h.nan_to_num()  # rows of padding are not written
    cases = [(x, gate_up, "gated", h), (inside, down, "down", expert_down_cpu(inside, down, ids, experts))]
    if not rides:
        up = gate_up[:, :inner].contiguous()
        cases.append((x, up, "up", expert_up_op.cpu(x, up, ids, experts, 0, None, None)))
    for given, weight, kind, wanted in cases:
        out, (_, n, k) = torch.full_like(wanted, torch.nan), weight.shape
        gated, shapes = kind == "gated", Shapes(rows, 0, 0, experts, top_k, rides > 0)
        sizes = experts_gluon._sizes(shapes, k, n // (1 + gated), gated, up=kind == "up")
        Machine((experts_gluon, hopper), programs).run(
            experts_gluon.expert_rows_kernel, x=given, w_desc=Descriptor(weight.view(-1, k), [128, 64]), x_scales=None,
            w_scales=None, out=out, out8=None, out_scales=None, order=plan.order, tiles=plan.tiles, M=rows,
            count=plan.listed, PADDED=0, padded=0, **sizes,
        )  # fmt: skip
        written = torch.ones(len(out), dtype=torch.bool)
        written[(rows - 1) * top_k : rows * top_k] = False  # those of padding are not
        torch.testing.assert_close(out[written], wanted[written], rtol=0.01, atol=0.01)
        assert out[~written].isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize(
    "shape", [(2048, 512, 64, 8, 1), (2048, 768, 16, 8, 0), (192, 320, 8, 2, 1), (64, 64, 4, 1, 0)]
)
def test_the_kernel_of_prompts_has_the_tritons_bits(shape, device):
    hidden, inner, experts, top_k, rides = shape
    for dtype in (torch.bfloat16, torch.float16):
        _, gate_up, down = inputs(1, hidden, inner, experts, rides, dtype, device)
        assert experts_gluon.suits(gate_up)
        assert experts_gluon.suits(down)
        assert _same_bits(gate_up, down, experts, top_k)
        if not rides:
            assert _same_bits(gate_up[:, :inner].contiguous(), down, experts, top_k, gated=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_proof_inputs_match_weight_shapes(ranks, monkeypatch):
    """Also those of a rank, whose ``down`` reads more than its ``gate_up`` makes."""
    hidden, inner, experts = 32, 64, 4
    _, gate_up, down = inputs(3, hidden, inner, experts, 1, torch.float16, torch.device("cpu"))
    gate_up, down = gate_up[:, : 2 * inner // ranks].contiguous(), down[:, : hidden // ranks].contiguous()
    seen = []

    def by_either(x, weight, plan, gated, up=False):
        assert x.shape[1] == weight.shape[2]
        seen.append(gated)
        return (expert_gate_up_cpu if gated else expert_down_cpu)(x, weight, plan.ids, plan.experts)

    monkeypatch.setattr("unisono.kernels.moe.experts._PROOF_TOKENS", 12)
    monkeypatch.setattr("unisono.kernels.moe.experts.launch_gate_up", lambda *given: by_either(*given, True))
    monkeypatch.setattr("unisono.kernels.moe.experts.launch_down", lambda *given: by_either(*given, False))
    monkeypatch.setattr(experts_gluon, "launch_expert_rows", by_either)
    assert not _same_bits(gate_up, down, experts, 2), "this is no Hopper GPU"
    monkeypatch.setattr(experts_gluon, "suits", lambda weight: True)
    assert _same_bits(gate_up, down, experts, 2)
    assert seen == [True, True, False, False]


def test_the_plan_is_chosen_by_the_shape():
    ids = torch.zeros(LEAD_PAIRS // 2, 2, dtype=torch.int32)
    assert plan_experts(ids, 8, 16).order is None
    more = plan_experts(torch.zeros(LEAD_PAIRS // 2 + 1, 2, dtype=torch.int32), 8, 16)
    assert more.order is not None
    assert num_tiles(4, 256, 16) == 4
    assert [expert_tiles(pairs, 256, torch.bfloat16).rows for pairs in (8, 512, 4096, 32768)] == [16, 16, 32, 128]


@pytest.mark.parametrize("run", [launch_combine, combine_experts_op.cpu])
@pytest.mark.parametrize("shared", ["none", "gated", "full"])
def test_the_sum_matches_float64(run, shared, dtype, device, assert_close):
    on = device if run is launch_combine else torch.device("cpu")
    y, residual = torch.randn(7 * 3, 70).to(on, dtype), torch.randn(7, 70).to(on, dtype)
    weights, gates = torch.rand(7, 3, device=on), torch.rand(7, device=on) if shared == "gated" else None
    also = None if shared == "none" else torch.randn(7, 70).to(on, dtype)
    expected = (y.double().view(7, 3, 70) * weights.double()[..., None]).sum(1)
    if also is not None:
        expected = expected + also.double() * (1 if gates is None else gates.double()[:, None])
    out, *_ = run(y, weights, also, gates, residual, None, 0.0)
    assert_close(out, expected + residual.double())
    unfused, *_ = run(y, weights, also, gates, torch.zeros_like(residual), None, 0.0)
    assert torch.equal(out, unfused + residual), "the sum is rounded before the residual is added"
    weights_of_norms = [torch.rand(70, device=on).to(dtype), torch.rand(70, device=on)]
    for norm_weight in weights_of_norms if run is launch_combine else weights_of_norms[:1]:
        total, normed, *_ = run(y, weights, also, gates, residual, norm_weight, 1e-3)
        assert torch.equal(total, out)
        value = out.double()
        assert_close(normed, value * (value.square().mean(1, keepdim=True) + 1e-3).rsqrt() * norm_weight.double())


def test_the_sum_is_in_the_order_of_the_slots(device):
    """In fp32, large and small do not commute: 1e8 + 1 - 1e8 is 0, 1e8 - 1e8 + 1 is 1."""
    residual, weights = torch.zeros(1, 1, device=device), torch.ones(1, 3, device=device)
    for parts, total in (([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)):
        y = torch.tensor(parts, device=device)[:, None]
        assert launch_combine(y, weights, None, None, residual, None, 0.0)[0].item() == total
        assert combine_experts_op.cpu(y.cpu(), weights.cpu(), None, None, residual.cpu(), None, 0.0)[0].item() == total


def test_ops_dispatch_and_know_their_shapes():
    x, gate_up, down = inputs(5, 20, 12, 4, 1, torch.float32, "cpu")
    plan = plan_experts(choice(5, 4, 2), 4, 16)
    h = expert_gate_up(x, gate_up, plan)
    y = expert_down(h, down, plan)
    assert torch.equal(h, expert_gate_up_cpu(x, gate_up, plan.ids, 4))
    assert (h.shape, y.shape) == ((15, 12), (15, 20))
    meta = plan_experts(torch.empty(200, 2, dtype=torch.int32, device="meta"), 4, 16)
    assert [t.shape for t in (meta.order, meta.tiles)] == [(400,), (3, num_tiles(400, 4, 16))]
    h = expert_gate_up(torch.empty(200, 20, device="meta"), gate_up.to("meta"), meta)
    assert expert_down(h, down.to("meta"), meta).shape == (600, 20)
    out = combine_experts(y[:10], torch.ones(5, 2), y[10:], None, x)
    assert torch.equal(out, combine_experts_op.cpu(y[:10], torch.ones(5, 2), y[10:], None, x, None, 0.0)[0])
    total, normed = combine_experts_norm(y[:10], torch.ones(5, 2), y[10:], None, x, torch.ones(20), 1e-3)
    assert torch.equal(total, out)
    assert torch.equal(normed, rms_norm(out, torch.ones(20), 1e-3))
