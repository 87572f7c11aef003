"""The gated norm of groups: right against float64, exact in any batch, with gates that lie beside other projections."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.kernels.norm.gated_group_norm import gated_group_norm, launch_gated_group_norm

OPS = pytest.mark.parametrize("op", [launch_gated_group_norm, gated_group_norm.cpu], ids=["triton", "twin"])


@OPS
@pytest.mark.parametrize(("groups", "size"), [(1, 40), (3, 16)])
def test_matches_float64(
    op: Any, groups: int, size: int, dtype: torch.dtype, device: torch.device, assert_close: Any
) -> None:
    width = groups * size
    x, wide = torch.randn(5, width).to(device, dtype), torch.randn(5, 7 + width).to(device, dtype)
    z, weight = wide[:, 7:], torch.rand(width, device=device) + 0.5
    gated = (x.double() * z.double() * z.double().sigmoid()).unflatten(1, (groups, size))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5)
    assert_close(op(x, z, weight, 1e-5, groups), normed.flatten(1) * weight.double())


@OPS
def test_rows_are_exact(op: Any, device: torch.device, assert_rows_exact: Any) -> None:
    weight = torch.rand(48, device=device)
    x, z = torch.randn(9, 48, device=device), torch.randn(9, 48, device=device)
    assert_rows_exact(lambda a, b: op(a, b, weight, 1e-6, 2), x, z)
