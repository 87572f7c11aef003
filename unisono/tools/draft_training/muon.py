"""Muon: momentum whose update is made orthogonal by Newton-Schulz iterations (Jordan et al., 2024).

Trains draft models, and the bundled model (``training/tiny``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial of the published method: a large slope at 0, and singular values near 1 after
all iterations."""


class Muon(torch.optim.Optimizer):
    """Optimizes matrices [..., out, in]; use AdamW for embeddings and norms. Equal shapes are updated in one batch."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
                state = self.state[parameters[0]]
                velocity = state.setdefault("velocity", torch.zeros_like(gradients))
                velocity.lerp_(gradients, 1 - group["momentum"])
                update = orthogonal(gradients.lerp(velocity, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(update.to(gradients.dtype).unbind()), alpha=-scale)


def orthogonal(matrices: Tensor, iterations: int = 5) -> Tensor:
    """The approximately nearest semi-orthogonal matrices: [n, out, in] -> the same shape in bf16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
