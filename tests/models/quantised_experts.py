"""Float64 reference of quantised checkpoints with experts: transformers' model with dequantised projections."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models.quantised import Dequantised
from tests.models.quantised_writers import Activations

PROMPT = [7 * i % 251 for i in range(40)]


class Experts(nn.Module):
    """The experts of a layer in float64, token by token; each projection as the layout has it."""

    def __init__(self, projections: dict[str, Dequantised]) -> None:
        super().__init__()
        self.projections = projections

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = []
        for row, chosen, shares in zip(x, ids.tolist(), weights, strict=True):
            total = torch.zeros_like(row)
            for expert, share in zip(chosen, shares, strict=True):
                up, down = (self.projections[f"{expert}.{name}_proj"] for name in ("up", "down"))
                gate = self.projections.get(f"{expert}.gate_proj")
                h = up(row[None])
                h = h.relu().square() if gate is None else nn.functional.silu(gate(row[None])) * h
                total += share * down(h)[0]
            rows.append(total)
        return torch.stack(rows)


@torch.no_grad()
def reference(source: Path, values: dict[str, torch.Tensor], activations: Activations) -> torch.Tensor:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, **eager)
    experts: dict[str, dict[str, Dequantised]] = {}
    for stored, weight in values.items():
        name = stored.replace("backbone.", "model.")
        layer, of_experts, rest = name.partition(".experts.")
        if of_experts:
            experts.setdefault(f"{layer}.experts", {})[rest] = Dequantised(weight, None, activations)
        else:
            model.set_submodule(name, Dequantised(weight, model.get_submodule(name).bias, activations))
    for name, projections in experts.items():
        model.set_submodule(name, Experts(projections))
    return model(torch.tensor([PROMPT])).logits[0]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
