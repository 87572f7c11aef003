"""Products of CPU twins: a row has the same bits in any company, with packed weights and through the BLAS too."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.kernels.gemm import cpu as products_cpu
from unisono.kernels.gemm.cpu import row_exact_product, slice_of

ROWS = 70


needs_onednn = pytest.mark.skipif(not products_cpu._available, reason="this torch is built without oneDNN")


def frozen(n: int, k: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(n, k), requires_grad=False)


@pytest.fixture(params=["onednn", "blas"])
def library(request, monkeypatch) -> str:
    """Which library computes."""
    if request.param == "blas":
        monkeypatch.setattr(products_cpu, "_available", False)
    return request.param


@pytest.mark.parametrize(("n", "k"), [(768, 256), (33, 100), (1, 37), (2, 37), (257, 515)])
def test_rows_are_exact_and_right(library, n, k, assert_rows_exact, assert_close):
    weight, x = frozen(n, k), torch.randn(ROWS, k)
    assert_rows_exact(lambda x: row_exact_product(x, weight), x)
    assert_close(row_exact_product(x, weight), x.double() @ weight.double().t())


def test_any_view_of_a_weight_has_its_bits(library):
    weight, x = frozen(64, 96), torch.randn(9, 96)
    want = row_exact_product(x, weight)
    wide = torch.zeros(64, 100)
    wide[:, 2:98] = weight
    for view in (weight.detach().clone(), weight.t().contiguous().t(), wide[:, 2:98]):
        assert torch.equal(row_exact_product(x, view), want)
    assert torch.equal(row_exact_product(x, weight[16:48]), want[:, 16:48]), "a rank's part"
    for first, columns in ((20, 1), (5, 2), (40, 15)):  # libraries compute few columns in another way
        few = torch.nn.Parameter(weight[first : first + columns].clone(), requires_grad=False)
        assert torch.equal(row_exact_product(x, few), want[:, first : first + columns])


@pytest.mark.parametrize("spare", [0, 5, 64])
def test_rows_of_the_batch_are_blocks_that_were_compared(spare):
    for rows in range(1, 300):
        blocks = products_cpu._blocks(rows, spare)
        assert set(blocks) <= set(products_cpu.BLOCKS)
        assert rows <= sum(blocks) <= rows + max(products_cpu.FEW_ROWS - 1, spare)


@needs_onednn
def test_rows_of_a_small_weight_are_one_call(monkeypatch):
    """Rows that are added take less time than a second call; beside a large weight they take more."""
    calls: list[int] = []
    plain = products_cpu._inner_product
    small, large = frozen(32, 64), frozen(1024, 1024)
    for weight in (small, large):
        row_exact_product(torch.randn(2, weight.shape[1]), weight)  # compared and packed
    monkeypatch.setattr(products_cpu, "_inner_product", lambda x, w: calls.append(len(x)) or plain(x, w))
    for weight, blocks in ((small, [32]), (large, [16, 4])):
        row_exact_product(torch.randn(19, weight.shape[1]), weight)
        assert calls == blocks
        calls.clear()


@needs_onednn
def test_a_weight_that_changes_is_packed_again():
    weight, x = frozen(32, 64), torch.randn(4, 64)
    before = row_exact_product(x, weight)
    weight.mul_(2)
    assert torch.equal(row_exact_product(x, weight), 2 * before)


@needs_onednn
def test_weights_beyond_the_limit_are_read_in_place(monkeypatch):
    weight, x = frozen(32, 64), torch.randn(4, 64)
    want = row_exact_product(x, weight)
    monkeypatch.setattr(products_cpu, "PACKED_BYTES", products_cpu._packed_bytes + weight.nbytes)
    first, second = (torch.nn.Parameter(weight.clone(), requires_grad=False) for _ in range(2))
    assert torch.equal(row_exact_product(x, first), want)
    assert torch.equal(row_exact_product(x, second), want)
    assert [hasattr(each, "_unisono_kept") for each in (first, second)] == [True, False]
    del first
    gc.collect()
    row_exact_product(x, second)
    assert hasattr(second, "_unisono_kept"), "a freed weight makes room"


@needs_onednn
def test_a_shape_whose_bits_depend_on_the_rows_goes_through_the_blas(monkeypatch, assert_rows_exact):
    """As oneDNN might on another processor: rows of small blocks differ."""
    plain = products_cpu._inner_product

    def other(x, weight):
        return plain(x, weight) * (1 + 1e-6 * (len(x) < 16))

    monkeypatch.setattr(products_cpu, "_inner_product", other)
    monkeypatch.setattr(products_cpu, "_proven", {})
    weight, x = frozen(48, 64), torch.randn(20, 64)
    assert_rows_exact(lambda x: row_exact_product(x, weight), x)
    assert list(products_cpu._proven.values()) == [(False, False)]


@needs_onednn
def test_weights_are_packed_for_each_product_where_others_are_not_exact(monkeypatch, assert_rows_exact):
    """As oneDNN does on some processors: rows of small blocks differ, but not with packed weights."""
    plain = products_cpu._inner_product

    def other(x, weight):
        return plain(x, weight) * (1 + 1e-6 * (len(x) < 16 and not weight.is_mkldnn))

    monkeypatch.setattr(products_cpu, "_inner_product", other)
    monkeypatch.setattr(products_cpu, "_proven", {})
    weight, x = torch.randn(48, 64), torch.randn(20, 64)
    assert_rows_exact(lambda x: row_exact_product(x, weight), x)
    assert list(products_cpu._proven.values()) == [(True, False)]
    assert torch.equal(
        row_exact_product(x, torch.nn.Parameter(weight, requires_grad=False)), row_exact_product(x, weight)
    )


class Uneven(TorchDispatchMode):
    """A BLAS that adds in another order in a tile's last rows."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        products = torch.ops.aten.mm.default, torch.ops.aten.matmul.default  # the latter in inference mode
        if function in products and len(out) == products_cpu.ROW_TILE:
            out = torch.cat((out[:12], out[12:] * (1 + 1e-6)))
        return out


def test_rows_are_exact_where_their_place_in_a_tile_matters(monkeypatch, assert_rows_exact, assert_close):
    monkeypatch.setattr(products_cpu, "_available", False)
    monkeypatch.setattr(products_cpu, "_even_tiles", {})
    weight, x = torch.randn(48, 64), torch.randn(20, 64)
    with Uneven():
        assert_rows_exact(lambda x: row_exact_product(x, weight), x)
        assert_close(row_exact_product(x, weight), x.double() @ weight.double().t())
        assert row_exact_product(x[:0], weight).shape == (0, 48)
    assert list(products_cpu._even_tiles.values()) == [False]


@needs_onednn
def test_slices_of_a_stack_stay_packed():
    stack = torch.nn.Parameter(torch.randn(3, 32, 64), requires_grad=False)
    x = torch.randn(4, 64)
    for expert in range(3):
        weight = slice_of(stack, expert)
        assert torch.equal(row_exact_product(x, weight), row_exact_product(x, stack[expert]))
        assert slice_of(stack, expert) is weight
        assert hasattr(weight, "_unisono_kept")
    before = row_exact_product(x, slice_of(stack, 1))
    stack[1].mul_(2)
    assert torch.equal(row_exact_product(x, slice_of(stack, 1)), 2 * before)
