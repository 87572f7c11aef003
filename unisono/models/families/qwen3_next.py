"""Qwen3-Next: the layers of Qwen3.5 with experts, whose Gated DeltaNet projections are packed by key head.

A checkpoint's ``in_proj_qkvz`` has, for each key head, the rows of its query, its key, and the values and gates z of
its value heads; ``in_proj_ba`` has the rows b and then a of its value heads. The loader reorders them.
``mlp_only_layers`` and ``decoder_sparse_step`` select the layers with a plain MLP. Source of formulas and names:
transformers, ``models/qwen3_next``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from unisono.models.blocks.gated_delta import GatedDeltaSpec
from unisono.models.blocks.layers import BlockSpec, LayerSpec
from unisono.models.config import DecoderConfig, Family, Name, read_mlp
from unisono.models.families.qwen3_5 import read_hybrid
from unisono.models.families.qwen3_5_moe import MOE_NAMES, read_experts
from unisono.models.families.qwen3_moe import is_sparse

NAMES: dict[str, Name] = {
    **MOE_NAMES,
    "layers.*.mixer.in_proj.qkv": "model.layers.*.linear_attn.in_proj_qkvz",
    "layers.*.mixer.in_proj.z": "model.layers.*.linear_attn.in_proj_qkvz",
    **{
        f"layers.*.mixer.{linear}.{gate}": "model.layers.*.linear_attn.in_proj_ba"
        for linear in ("in_proj", "gates")
        for gate in ("b", "a")
    },
}


def packed(*parts: str, within: tuple[str, ...]) -> Callable[[LayerSpec], torch.Tensor]:
    """Rows of ``parts``, one part after the other and each by key head, in a tensor packed by key head.

    within: the parts of each key head in the tensor, in order.
    """

    def rows(layer: LayerSpec) -> torch.Tensor:
        spec = cast(GatedDeltaSpec, layer.mixer)
        each = spec.num_value_heads // spec.num_key_heads
        values = each * spec.value_head_dim
        sizes = {"q": spec.key_head_dim, "k": spec.key_head_dim, "v": values, "z": values, "b": each, "a": each}
        by_head = torch.arange(spec.num_key_heads * sum(sizes[part] for part in within)).view(spec.num_key_heads, -1)
        of = dict(zip(within, by_head.split([sizes[part] for part in within], dim=1), strict=True))
        return torch.cat([of[part].flatten() for part in parts])

    return rows


QKVZ, BA = ("q", "k", "v", "z"), ("b", "a")
ROWS = {
    "layers.*.mixer.in_proj.qkv": packed("q", "k", "v", within=QKVZ),
    "layers.*.mixer.in_proj.z": packed("z", within=QKVZ),
    **{
        f"layers.*.mixer.{linear}.{gate}": packed(gate, within=BA)
        for linear in ("in_proj", "gates")
        for gate in ("b", "a")
    },
}


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. Every ``decoder_sparse_step``-th layer has experts, except those of ``mlp_only_layers``."""

    def feed_forward(layer: int) -> BlockSpec:
        if is_sparse(hf_config, layer):
            return read_experts(hf_config, normalize=hf_config.norm_topk_prob)
        return read_mlp(hf_config)

    return read_hybrid(hf_config, [feed_forward(layer) for layer in range(hf_config.num_hidden_layers)])


QWEN3_NEXT = Family(read, NAMES, rows=ROWS)
