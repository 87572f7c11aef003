"""An MLP without a gate, ``down(act(up(x)))``, and one gated by the exact GELU, ``down(gelu(gate(x)) * up(x))``.

Shapes: M rows, H hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from unisono.kernels.norm.activation import relu_squared
from unisono.kernels.vision.activation import gelu
from unisono.layers.activations import Activations
from unisono.layers.formats.base import WHOLE
from unisono.layers.linear import EndsInLinear, Linear
from unisono.models.load.build import Builder, require

ACTIVATIONS = ("relu2", "gelu_pytorch_tanh", "gelu", "xielu")


@dataclass(frozen=True)
class PlainMLPSpec:
    """An MLP without a gate. bias: both products have one. activation: one of ACTIVATIONS; raises CheckpointError for
    others."""

    intermediate_size: int
    bias: bool = False
    activation: str = "relu2"

    def __post_init__(self) -> None:
        require(self.intermediate_size >= 1, "intermediate_size", self.intermediate_size, "it must be at least 1")
        require(self.activation in ACTIVATIONS, "hidden_act", self.activation, f"supported are {ACTIVATIONS}")

    def build(self, builder: Builder) -> PlainMLP:
        size, hidden = self.intermediate_size, builder.hidden_size
        divided = builder.ranks.count > 1 and builder.can_divide({"up": size})
        share = builder.share if divided else WHOLE
        up = builder.linear("up", hidden, size, self.bias, share=share)
        down = builder.joined("down", size, hidden, self.bias, split_inputs=divided)
        act = Xielu(builder.dtype, builder.device) if self.activation == "xielu" else None
        return PlainMLP(up, down, self.activation, act)


class Xielu(nn.Module):
    """xIELU with learnt factors (arXiv 2411.13010): x [M, I] -> [M, I] in x's dtype, computed in fp32.

    ``ap · x² + beta · x`` above 0, ``an · (expm1(min(x, eps)) - x) + beta · x`` elsewhere, with ap = softplus(alpha_p)
    and an = beta + softplus(alpha_n).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def number(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.alpha_p, self.alpha_n, self.beta, self.eps = number(1), number(1), number(), number()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        p, n, beta, eps = (each.to(dtype) for each in (self.alpha_p, self.alpha_n, self.beta, self.eps))
        value, zero = x.contiguous().to(dtype), torch.zeros_like(p)
        p, n = torch.logaddexp(p, zero), beta + torch.logaddexp(n, zero)
        low = (torch.expm1(torch.minimum(value, eps)) - value) * n
        return (torch.where(value > 0, value * value * p, low) + value * beta).to(x.dtype)


class PlainMLP(EndsInLinear):
    """See :class:`PlainMLPSpec`. A feed-forward (``models/blocks/layers.py``). act: an activation with weights."""

    last = "down"

    def __init__(self, up: Linear, down: Linear, activation: str, act: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down, self.activation, self.act = up, down, activation, act

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.up,)

    def forward(self, x: Activations, positions: torch.Tensor | None = None) -> Activations:
        """[M, H] -> [M, I], the input of ``down``. Positions are ignored."""
        y = self.up(x)
        if self.act is not None:
            out: torch.Tensor = self.act(y)
            return out
        if self.activation == "relu2":
            squared: torch.Tensor = relu_squared(y)
            return squared
        result: torch.Tensor = gelu(y, self.activation == "gelu")
        return result

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain formula in x's dtype, [M, H] -> [M, H]: the tests' oracle."""
        y = self.up.reference(x)
        if self.act is not None:
            return self.down.reference(self.act(y))
        if self.activation == "relu2":
            return self.down.reference(y.relu().square())
        approximate = "none" if self.activation == "gelu" else "tanh"
        return self.down.reference(nn.functional.gelu(y, approximate=approximate))


@dataclass(frozen=True)
class GeluGatedSpec:
    """An MLP gated by GELU with the error function (ModernBERT). bias: both products have one."""

    intermediate_size: int
    bias: bool = False

    def __post_init__(self) -> None:
        require(self.intermediate_size >= 1, "intermediate_size", self.intermediate_size, "it must be at least 1")

    def build(self, builder: Builder) -> GeluGatedMLP:
        size, hidden = self.intermediate_size, builder.hidden_size
        projections = {"gate": size, "up": size}
        divided = builder.ranks.count > 1 and builder.can_divide({"gate_up": projections})
        gate_up = builder.linear("gate_up", hidden, projections, self.bias, share=builder.share if divided else WHOLE)
        down = builder.joined("down", size, hidden, self.bias, split_inputs=divided)
        return GeluGatedMLP(gate_up, down)


class GeluGatedMLP(EndsInLinear):
    """See :class:`GeluGatedSpec`. A feed-forward (``models/blocks/layers.py``)."""

    last = "down"

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input."""
        return (self.gate_up,)

    def forward(self, x: Activations, positions: torch.Tensor | None = None) -> Activations:
        """[M, H] -> [M, I], the input of ``down``. Positions are ignored."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: torch.Tensor = gelu(gate, True) * up
        return result

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`PlainMLP.reference`."""
        gate, up = self.gate_up.reference(x).chunk(2, dim=-1)
        return self.down.reference(nn.functional.gelu(gate) * up)
