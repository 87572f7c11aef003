"""Products of adapters: right against float64, alike in kernel and twin, the same bits in any company."""

import importlib

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from unisono.kernels.gemm.linear import launch_linear, linear
from unisono.kernels.gemm.linear_norm import linear_norm_cpu
from unisono.kernels.lora.adapters import (
    AdapterPlan,
    adapter_expand_op,
    adapter_shrink_op,
    adapter_silu_op,
    expand_cuda,
    padded_rank,
    shrink_cuda,
    silu_cuda,
)
from unisono.kernels.moe.plan import sort_pairs_op
from unisono.kernels.norm.activation import launch_silu_mul, silu_mul
from unisono.kernels.norm.add_norm import add_rms_norm

adapters = importlib.import_module("unisono.kernels.lora.adapters")
together = importlib.import_module("unisono.kernels.lora.adapters_linear")

RUNS = {"kernel": (shrink_cuda, expand_cuda), "twin": (adapter_shrink_op.cpu, adapter_expand_op.cpu)}
SHAPES = [(5, 100, (48,), 16), (17, 1100, (64, 20, 20), 16), (40, 530, (33, 7, 2, 3), 32), (9, 40, (70,), 320)]
"""M, K, projections, R."""
LOADED = 3


def plan(ids: torch.Tensor, tile: int = 16) -> tuple[torch.Tensor, torch.Tensor, int]:
    """order, tiles and tile: :class:`AdapterPlan` with tiles of this size, whatever the number of rows."""
    order, tiles = sort_pairs_op.cpu(ids.cpu(), LOADED + 1, tile)
    return order.to(ids.device), tiles.to(ids.device), tile


def inputs(rows, k, projections, rank, dtype, device):
    """y, x, a, b and each row's adapter; every adapter and none of them among the rows."""
    n = sum(projections)
    shapes = (rows, n), (rows, k), (LOADED, len(projections) * rank, k), (LOADED, n, rank)
    scales = 1, 1, k**-0.5, rank**-0.5
    tensors = [(torch.randn(shape) * scale).to(device, dtype) for shape, scale in zip(shapes, scales, strict=True)]
    ids = torch.randint(LOADED + 1, (rows,), dtype=torch.int32)
    ids[:4] = torch.arange(4)
    return *tensors, ids.to(device)


def added(run, y, x, a, b, projections, plan):
    shrink, expand = RUNS[run]
    y = y.clone()
    expand(y, shrink(x, a, *plan, b.shape[2]), b, projections, *plan)
    return y


def in_one_launch(run, weight, bias, x, a, b, projections, ids):
    """The base product with adapters, by the kernel or its twin."""
    arrived = torch.zeros(adapters.ARRIVAL_WORDS, dtype=torch.int32, device=x.device)
    product = together.adapted_linear_cuda if run == "kernel" else together.adapted_linear_op.cpu
    return product(x, weight, bias, a, b, projections, ids, arrived)


def oracle(y, x, a, b, projections, ids):
    """In float64, with the low-rank values rounded where they are rounded."""
    out, rank = y.double().cpu().clone(), b.shape[2]
    for row, adapter in enumerate(ids.tolist()):
        done = 0
        for part, outputs in enumerate(projections if adapter < LOADED else ()):
            low = a[adapter, part * rank : (part + 1) * rank].double().cpu() @ x[row].double().cpu()
            low = low.to(x.dtype).double()
            out[row, done : done + outputs] += b[adapter, done : done + outputs].double().cpu() @ low
            done += outputs
    return out


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(run, shape, dtype, device, assert_close):
    *tensors, ids = inputs(*shape, dtype, "cpu" if run == "twin" else device)
    y, x, a, b = tensors
    out = added(run, y, x, a, b, shape[2], plan(ids))
    assert_close(out, oracle(y, x, a, b, shape[2], ids))
    none = ids == LOADED
    assert torch.equal(out[none], y[none])
    assert not torch.equal(out[~none], y[~none])


@pytest.mark.parametrize("run", RUNS)
def test_rows_without_an_adapter_keep_minus_zero(run, device):
    y, x, a, b, ids = inputs(6, 64, (48,), 16, torch.float32, "cpu" if run == "twin" else device)
    y[ids == LOADED] = -0.0
    out = added(run, y, x, a, b, (48,), plan(ids))
    assert torch.signbit(out[ids == LOADED]).all()


@pytest.mark.parametrize("run", RUNS)
def test_rows_are_batch_invariant(run, device, assert_rows_exact):
    y, x, a, b, ids = inputs(6, 520, (16, 4), 16, torch.float32, "cpu" if run == "twin" else device)
    assert_rows_exact(lambda y, x, ids: added(run, y, x, a, b, (16, 4), plan(ids)), y, x, ids)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rank", [16, 128])
def test_the_same_bits_in_prompts_and_rounds(run, rank, device):
    """Long passes add the cuts in a kernel of their own, with larger tiles."""
    y, x, a, b, ids = inputs(70, 520, (24, 8), rank, torch.float32, "cpu" if run == "twin" else device)
    whole = added(run, y, x, a, b, (24, 8), plan(ids, 32))
    for part in (slice(0, 6), slice(30, 31)):
        assert torch.equal(added(run, y[part], x[part], a, b, (24, 8), plan(ids[part])), whole[part])


def test_twin_and_kernel_agree(device, dtype, assert_close):
    y, x, a, b, ids = inputs(20, 700, (40, 8), 16, dtype, device)
    tensors = [tensor.cpu() for tensor in (y, x, a, b)]
    twin = added("twin", *tensors, (40, 8), plan(ids.cpu()))
    assert_close(added("kernel", y, x, a, b, (40, 8), plan(ids)), twin)


def test_batch_without_adapters_is_unchanged(device):
    y, x, a, b, ids = inputs(6, 64, (48,), 16, torch.float32, device)
    nobody = torch.full_like(ids, LOADED)
    assert torch.equal(added("kernel", y, x, a, b, (48,), plan(nobody)), y)


def test_plan_has_the_rows_of_one_adapter_in_each_tile():
    """Those of none, too, for what reads all rows."""
    ids = torch.randint(LOADED + 1, (100,), dtype=torch.int32)
    asked = AdapterPlan(ids, LOADED)
    with pytest.raises(RuntimeError, match="call sort"):
        _ = asked.sorted
    asked.sort()
    (order, tiles), tile = asked.sorted, asked.tile
    seen = []
    for adapter, first, count in tiles.t().tolist():
        rows = order[first : first + count].tolist()
        assert count <= tile
        assert all(ids[row] == adapter for row in rows)
        seen += rows
    assert sorted(seen) == list(range(100))


def test_each_product_of_a_pass_has_a_counter():
    asked = AdapterPlan(torch.zeros(3, dtype=torch.int32), LOADED, products=2)
    first, second = asked.counter(), asked.counter()
    assert first.data_ptr() != second.data_ptr()
    assert not torch.stack((first, second)).any()
    assert asked.counter() is None


# ---- with the base product in one launch ------------------------------------------------------------


def weights(n, k, dtype, device):
    return (torch.randn(n, k) * k**-0.5).to(device, dtype), torch.randn(n).to(device, dtype)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", [*SHAPES[:3], (50, 200, (40, 40), 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_launch_matches_float64(run, shape, has_bias, dtype, device, assert_close):
    """Also where a tile has outputs of several projections, and adapters that fill more than one chunk of the sum."""
    where = "cpu" if run == "twin" else device
    _, x, a, b, ids = inputs(*shape, dtype, where)
    weight, bias = weights(sum(shape[2]), shape[1], dtype, where)
    bias = bias if has_bias else None
    out = in_one_launch(run, weight, bias, x, a, b, shape[2], ids)
    y = (linear.cpu if run == "twin" else launch_linear)(x, weight, bias, None)
    assert_close(out, oracle(y, x, a, b, shape[2], ids))
    none = ids == LOADED
    assert torch.equal(out[none], y[none])
    assert not torch.equal(out[~none], y[~none])


@pytest.fixture
def one_sequence(monkeypatch, device):
    """The interpreter adds a product's terms to the sum so far one by one, whatever the blocks of K."""

    def create_dot(self, a, b, d, *precision):
        total = d.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[..., k, None].astype(total.dtype) * b.data[k].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    if device.type == "cpu":
        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rows", [5, 20, 32])
def test_one_launch_has_the_bits_of_launches_of_their_own(run, rows, dtype, device, one_sequence):
    where = "cpu" if run == "twin" else device
    projections = (64, 24, 8)
    _, x, a, b, ids = inputs(rows, 600, projections, 16, dtype, where)
    weight, bias = weights(96, 600, dtype, where)
    y = (linear.cpu if run == "twin" else launch_linear)(x, weight, bias, None)
    wanted = added(run, y, x, a, b, projections, plan(ids))
    assert torch.equal(in_one_launch(run, weight, bias, x, a, b, projections, ids), wanted)


@pytest.mark.parametrize("run", RUNS)
def test_rows_of_one_launch_are_batch_invariant(run, device, assert_rows_exact):
    _, x, a, b, ids = inputs(6, 520, (16, 4), 16, torch.float32, "cpu" if run == "twin" else device)
    weight, _ = weights(20, 520, torch.float32, x.device)
    assert_rows_exact(lambda x, ids: in_one_launch(run, weight, None, x, a, b, (16, 4), ids), x, ids)


def test_one_launch_keeps_minus_zero_of_rows_without_an_adapter(device):
    _, x, a, b, ids = inputs(6, 64, (48,), 16, torch.float16, device)
    x, weight = torch.full_like(x, 2.0**-12), torch.full((48, 64), -(2.0**-20), dtype=x.dtype, device=device)
    out = in_one_launch("kernel", weight, None, x, a, b, (48,), ids)
    assert torch.signbit(out[ids == LOADED]).all()
    assert not out[ids == LOADED].any()


def test_tile_that_times_out_writes_nan(device, monkeypatch):
    """Rows with an adapter become NaN, others stay. The counter begins too low."""
    if device.type == "cuda":
        pytest.skip("on a GPU the wait takes seconds")
    monkeypatch.setattr(together, "LOOKS", 3)
    _, x, a, b, ids = inputs(6, 64, (48,), 16, torch.float32, device)
    weight, _ = weights(48, 64, torch.float32, device)
    late = torch.full((1,), -100, dtype=torch.int32)
    out = together.adapted_linear_cuda(x, weight, None, a, b, (48,), ids, late)
    assert out[ids < LOADED].isnan().all()
    assert torch.equal(out[ids == LOADED], launch_linear(x, weight, None, None)[ids == LOADED])


def test_conditions_for_single_launch_adapters(monkeypatch):
    _, x, a, b, ids = inputs(70, 64, (48,), 16, torch.float32, "cpu")
    weight, _ = weights(48, 64, torch.float32, "cpu")

    def taken(rows, b=b, products=1):
        asked = AdapterPlan(ids[:rows], LOADED, products)
        return together.adapted_linear(x[:rows], weight, None, a, b, (48,), asked) is not None

    assert taken(32)
    assert not taken(33)
    assert not taken(32, b.repeat(1, 1, 8)), "a large rank"
    assert not taken(32, products=0), "no counter is left"
    monkeypatch.setitem(together.exact_adapted.serving, together._key(weight, a, b), False)
    assert not taken(32), "other bits were seen at the start"


# ---- with SiLU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("rows", "k", "width", "rank"), [(9, 40, 33, 16), (40, 530, 100, 32), (70, 520, 70, 64)])
def test_fused_expand_and_silu_equals_separate_launches(run, rows, k, width, rank, dtype, device):
    """The bits of expanding and SiLU one after the other, of all rows; its input stays."""
    y, x, a, b, ids = inputs(rows, k, (width, width), rank, dtype, "cpu" if run == "twin" else device)
    silu, product = (adapter_silu_op.cpu, silu_mul.cpu) if run == "twin" else (silu_cuda, launch_silu_mul)
    given, tiles, kept = RUNS[run][0], plan(ids, 16 if rows <= 64 else 32), y.clone()
    out = silu(y, given(x, a, *tiles, rank), b, *tiles)
    assert torch.equal(out, product(added(run, y, x, a, b, (width, width), tiles)))
    assert torch.equal(y, kept)


# ---- sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [(1, 16), (8, 16), (17, 32), (33, 64), (320, 320), (500, 512)])
def test_padded_ranks(asked, given):
    assert padded_rank(asked) == given


def test_add_rms_norm_has_the_bits_of_linear_norm():
    x, weight, residual = torch.randn(5, 64), torch.randn(48, 64), torch.randn(5, 48)
    norm = torch.rand(48)
    wanted = linear_norm_cpu(x, weight, None, residual, norm, 1e-6)
    got = add_rms_norm(torch.ops.unisono.linear(x, weight, None, None), residual, norm, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
