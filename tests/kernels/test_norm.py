"""RMSNorm: right against float64, the Llama rounding order, alike in kernel and twin, exact in any batch."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from unisono.kernels.norm.rms_norm import launch_add_rms_norm, launch_rms_norm, rms_norm
from unisono.layers.norm import RMSNorm

SIZES = [1, 24, 128, 257, 4096]


def inputs(rows, size, dtype, device="cpu"):
    return [torch.randn(shape).to(device, dtype) for shape in ((rows, size), (size,))]


@pytest.mark.parametrize("run", [launch_rms_norm, rms_norm.cpu])
@pytest.mark.parametrize("size", SIZES)
def test_matches_float64(run, size, dtype, device, assert_close):
    x, weight = inputs(5, size, dtype, "cpu" if run is rms_norm.cpu else device)
    wide = x.double()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_close(run(x, weight, 1e-5), want)


@pytest.mark.parametrize("run", [launch_rms_norm, rms_norm.cpu])
def test_rounds_before_the_weight(run, device):
    """In fp16 1 + 2^-10 times 1 + 2^-10 depends on whether the first factor was rounded."""
    x = torch.randn(64, 96).to("cpu" if run is rms_norm.cpu else device, torch.float16)
    ones, weight = torch.ones_like(x[0]), torch.randn_like(x[0])
    assert torch.equal(run(x, weight, 1e-6), run(x, ones, 1e-6) * weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 128, 257, 4096])
def test_twin_rows_are_exact(size, dtype, assert_rows_exact):
    x, weight = inputs(40, size, dtype)
    assert_rows_exact(lambda x: rms_norm.cpu(x, weight, 1e-6), x)


@pytest.mark.parametrize("size", [24, 257, 4096])
def test_kernel_rows_are_exact(size, dtype, device, assert_rows_exact):
    x, weight = inputs(9, size, dtype, device)
    assert_rows_exact(lambda x: launch_rms_norm(x, weight, 1e-6), x)


# ---- weights in fp32: the norms of Qwen3-Next and Qwen3.5, whose weight is 1 + w ----------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 257, 2048])
@torch.no_grad()
def test_zero_centred_is_transformers_bit_for_bit(size, dtype):
    theirs = Qwen3_5RMSNorm(size, eps=1e-6)
    theirs.weight.copy_(0.3 * torch.randn(size))
    x = 3 * torch.randn(33, size).to(dtype)
    assert torch.equal(rms_norm.cpu(x, 1 + theirs.weight, 1e-6), theirs(x))


def test_zero_centred_kernel_rounds_once(dtype, device):
    """The kernel in ``dtype`` is the kernel in fp32, rounded; a weight of ``dtype`` rounds earlier, so it differs."""
    x, w = inputs(64, 96, dtype, device)
    weight = 1 + 0.3 * w.float()
    residual = torch.randn_like(x)
    once = launch_rms_norm(x.float(), weight, 1e-6).to(dtype)
    assert torch.equal(launch_rms_norm(x, weight, 1e-6), once)
    assert torch.equal(launch_add_rms_norm(x, residual, weight, 1e-6)[1], launch_rms_norm(x + residual, weight, 1e-6))
    if dtype is not torch.float32:
        assert not torch.equal(launch_rms_norm(x, weight.to(dtype), 1e-6), once)


@pytest.mark.parametrize("run", [launch_rms_norm, rms_norm.cpu])
@pytest.mark.parametrize("size", [24, 257, 4096])
def test_zero_centred_matches_float64_and_rows_are_exact(run, size, dtype, device, assert_close, assert_rows_exact):
    x, w = inputs(9, size, dtype, "cpu" if run is rms_norm.cpu else device)
    weight, wide = 1 + w.float(), x.double()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_close(run(x, weight, 1e-5), want)
    assert_rows_exact(lambda x: run(x, weight, 1e-5), x)


def test_the_module_loads_one_plus_w():
    """w of bf16 is added to 1 in fp32: 1 + 2^-12 is no bf16 number."""
    norm = RMSNorm(4, 1e-6, torch.bfloat16, "cpu", zero_centered=True)
    assert norm.weight.dtype is torch.float32
    assert torch.equal(norm.weight, torch.ones(4))
    ((name, place),) = norm.weight_targets()
    place.fill(torch.full((4,), 2.0**-12, dtype=torch.bfloat16))
    assert name == "weight"
    assert torch.equal(norm.weight, torch.full((4,), 1 + 2.0**-12))
    assert norm(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_op_dispatches_and_knows_its_shape():
    x, weight = inputs(3, 64, torch.float32)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm.cpu(x, weight, 1e-6))
    assert rms_norm(x.to("meta"), weight.to("meta"), 1e-6).shape == (3, 64)
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, 64)
