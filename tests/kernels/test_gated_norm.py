"""The gated norm: right against float64, exact in any batch, with gates that lie beside other projections."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.kernels.norm.gated_norm import gated_norm, launch_gated_norm


@pytest.mark.parametrize("op", [launch_gated_norm, gated_norm.cpu])
@pytest.mark.parametrize(("heads", "size", "sigmoid"), [(3, 16, False), (3, 16, True), (9, 32, False), (2, 128, False)])
def test_matches_float64(
    op: Any, heads: int, size: int, sigmoid: bool, dtype: torch.dtype, device: torch.device, assert_close: Any
) -> None:
    o, wide = torch.randn(5, heads * size).to(device, dtype), torch.randn(5, 7 + heads * size).to(device, dtype)
    z, weight = wide[:, 7:], torch.rand(size, device=device) + 0.5
    x = o.double().unflatten(1, (heads, size))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    gate = z.double().sigmoid() * (1 if sigmoid else z.double())
    assert_close(op(o, z, weight, 1e-6, sigmoid), normed.flatten(1) * gate)


@pytest.mark.parametrize("op", [launch_gated_norm, gated_norm.cpu])
def test_rows_are_exact(op: Any, device: torch.device, assert_rows_exact: Any) -> None:
    weight = torch.rand(16, device=device)
    o, z = torch.randn(9, 48, device=device), torch.randn(9, 48, device=device)
    assert_rows_exact(lambda a, b: op(a, b, weight, 1e-6), o, z)


def test_op_dispatches_and_knows_its_shape() -> None:
    o, z, weight = torch.randn(3, 64), torch.randn(3, 64), torch.rand(32)
    assert torch.equal(gated_norm(o, z, weight, 1e-6), gated_norm.cpu(o, z, weight, 1e-6))
    assert gated_norm(o.to("meta"), z.to("meta"), weight.to("meta"), 1e-6).shape == (3, 64)
    assert gated_norm(o[:0], z[:0], weight, 1e-6).shape == (0, 64)
