"""The router: the choice of softmax and top-k in float64, ties, bits that know no neighbours, padding of any kind."""

from __future__ import annotations

import pytest
import torch

from unisono.kernels.moe.router import choose_cpu, launch_choose, route, route_cuda

SHAPES = [(7, 48, 16, 4), (5, 33, 11, 3), (3, 20, 1, 1), (4, 24, 5, 5), (2, 16, 130, 8)]  # M, H, E, top_k


def logits_of(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns).to(device)


@pytest.mark.parametrize("choose", [launch_choose, choose_cpu])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("rows", "_", "experts", "top_k"), SHAPES)
def test_chooses_as_softmax_and_top_k(choose, normalize, rows, _, experts, top_k, device):
    logits = logits_of(rows, experts + 1, device if choose is launch_choose else torch.device("cpu"))
    ids, weights, gates = choose(logits, None, None, experts, top_k, normalize)
    shares, chosen = logits[:, :experts].double().softmax(1).topk(top_k)
    shares = shares / shares.sum(1, keepdim=True) if normalize else shares
    assert ids.dtype is torch.int32
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights.double(), shares, atol=1e-6, rtol=0)
    torch.testing.assert_close(gates.double(), logits[:, experts].double().sigmoid(), atol=1e-6, rtol=0)
    assert choose(logits[:, :experts].contiguous(), None, None, experts, top_k, normalize)[2].shape == (0,)


@pytest.mark.parametrize("choose", [launch_choose, choose_cpu])
def test_ties_go_to_the_lower_id(choose, device):
    logits = torch.tensor(
        [
            [1.0, 2, 2, 0, 2, 1],
            [0, 0, 0, 0, 0, 0],
            [3, 1, 3, 1, 3, 1],
            [-0.0, 0, -0.0, 0, -1, 0],
            [-3, -2, -2, -1, -2, -9],
        ]
    ).to(device)
    ids, weights, _ = choose(logits, None, None, 6, 4, True)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 2, 4, 1], [0, 1, 2, 3], [3, 1, 2, 4]]
    assert torch.equal(weights[1].cpu(), torch.full((4,), 0.25))


@pytest.mark.parametrize("choose", [launch_choose, choose_cpu])
def test_nonfinite_padding_rows_have_valid_experts(choose, device):
    nan, inf = float("nan"), float("inf")
    clean = logits_of(1, 6, device)
    rows = torch.tensor([[nan] * 6, [inf] * 6, [-inf] * 6, [nan, 1, inf, -inf, 2, nan]]).to(device)
    ids, weights, _ = choose(torch.cat((clean, rows)), None, None, 6, 4, True)
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in ids.tolist())
    alone = choose(clean, None, None, 6, 4, True)
    assert torch.equal(ids[:1], alone[0])
    assert torch.equal(weights[:1], alone[1])


@pytest.mark.parametrize("choose", [launch_choose, choose_cpu])
def test_padding_has_no_expert(choose, device):
    logits = logits_of(4, 6, device)
    positions = torch.tensor([5, -1, 0, -1], dtype=torch.int32).to(device)
    ids, weights, gates = choose(logits, positions, None, 5, 2, True)
    free = choose(logits, None, None, 5, 2, True)
    assert ids[[1, 3]].tolist() == [[5, 5]] * 2
    assert not weights[[1, 3]].any()
    assert torch.equal(gates, free[2])
    for got, want in zip((ids, weights), free, strict=False):
        assert torch.equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("choose", [launch_choose, choose_cpu])
def test_all_padding_pass_assigns_experts_round_robin(choose, device):
    """It is run to be measured: without experts it would say that many tokens cost what one does."""
    positions = torch.full((4,), -1, dtype=torch.int32).to(device)
    ids, weights, _ = choose(logits_of(4, 5, device), positions, None, 5, 3, True)
    assert ids.flatten().tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]
    assert not weights.any()


@pytest.mark.parametrize("choose", [launch_choose, choose_cpu])
def test_rows_are_counted_without_padding(choose, device):
    positions = torch.tensor([5, -1, 0, 7, -1], dtype=torch.int32).to(device)
    counts = torch.tensor([0, 2**40, 0, 0, 7], device=device)
    for given in (positions, None):
        before, logits = counts.clone(), logits_of(5, 5, device)
        ids, _, _ = choose(logits, given, counts, 5, 3, True)
        assert torch.equal(counts - before, torch.bincount(ids[ids < 5].flatten(), minlength=5))
    before = counts.clone()
    choose(logits_of(5, 5, device), torch.full_like(positions, -1), counts, 5, 3, True)
    assert torch.equal(counts, before), "a pass that is measured counts nothing"


@pytest.mark.parametrize("run", [route_cuda, route.cpu])
def test_rows_are_exact(run, dtype, device, assert_rows_exact):
    on = device if run is route_cuda else torch.device("cpu")
    x, weight = torch.randn(10, 40).to(on, dtype), torch.randn(14, 40).to(on, dtype)
    for normalize in (True, False):
        for result in range(3):
            assert_rows_exact(lambda x, n=normalize, r=result: run(x, weight, None, None, 13, 3, n, None)[r], x)


def test_logits_are_summed_and_kept_in_fp32(device):
    """Rounded to fp16 the two best of these would tie, and the lower id would win."""
    x = torch.ones(1, 64, dtype=torch.float16)
    weight = torch.zeros(3, 64, dtype=torch.float16)
    weight[:2], weight[1, 0] = 1, 1 + 2**-10
    assert route.cpu(x, weight, None, None, 3, 1, True, None)[0].item() == 1
    assert route_cuda(x.to(device), weight.to(device), None, None, 3, 1, True)[0].item() == 1


def test_op_dispatches_and_knows_its_shapes():
    x, weight = torch.randn(5, 20), torch.randn(9, 20)
    for got, want in zip(
        route(x, weight, None, None, 8, 3, True), route.cpu(x, weight, None, None, 8, 3, True, None), strict=True
    ):
        assert torch.equal(got, want)
    for got, want in zip(
        route(x.to("meta"), weight.to("meta"), None, None, 8, 3, True),
        route(x, weight, None, None, 8, 3, True),
        strict=True,
    ):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
