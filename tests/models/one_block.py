"""One block, or one layer, with random weights and a state of its own, and one prompt pass over it."""

from __future__ import annotations

from typing import Any

import torch

from unisono.attention.base import AttentionInputs
from unisono.attention.triton import TritonAttention
from unisono.kv.specs import PAGE_SIZE, map_tree
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.layers import AttentionSpec
from unisono.models.load.build import Builder

HIDDEN, TOKENS, THETA = 40, 21, 5000.0


def rotary(dim: int, share: float = 1.0, theta: float = THETA) -> RotarySpec:
    parameters = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
    return RotarySpec.of(None, dim, parameters)


SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=20, rotary=rotary(20))


def builder(attention: Any = lambda q, kv: TritonAttention(q, kv, "cpu")) -> Builder:
    return Builder(HIDDEN, 1e-5, torch.float32, "cpu", attention, 64)


def filled(module: torch.nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, 0.2, generator=generator)
    return module


def one_pass(count: int = TOKENS) -> AttentionInputs:
    """One request's first ``count`` tokens."""
    ints: Any = {"dtype": torch.int32}
    positions = torch.arange(count, **ints)
    return AttentionInputs(
        slots=torch.zeros(1, **ints),
        positions=positions,
        slot_mapping=PAGE_SIZE + positions,
        kv_len=torch.tensor([count], **ints),
        page_table=torch.arange(1, 2 + count // PAGE_SIZE, **ints)[None],
        width=None,
        query_start=torch.tensor([0, count], **ints),
    )


def state_of(module: Any) -> Any:
    return map_tree(module.state_specs(), lambda spec: torch.zeros(4, *spec.shape, dtype=spec.dtype))
