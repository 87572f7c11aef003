"""Random weights of a decoder layer after its mixer."""

from __future__ import annotations

import torch

from unisono.kernels.gemm import layer_tail as tail


def random_layer(rows: int, h: int, q: int, i: int, f: int, dtype: torch.dtype, device: str = "cpu", bias: bool = False,
         normed: bool = True):  # fmt: skip
    """Random rows x [M, Q] and residual [M, H], and the weights of a layer."""
    generator = torch.Generator(device).manual_seed(rows + h)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    def weight(n: int, k: int) -> torch.Tensor:
        return (random(n, k) * k**-0.5).to(dtype)

    weights = weight(h, q), weight(2 * i, h), weight(h, i), random(h)
    end = (random(h), 1e-5) if normed else ()
    after = {"following": weight(f, h), "bias": random(f) if bias else None} if f else {}
    return random(rows, q), random(rows, h), tail.LayerTailWeights(*weights, 1e-6, *end, **after)
