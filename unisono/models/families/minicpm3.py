"""MiniCPM3: DeepSeek's latent attention with halves that rotate, and MiniCPM's factors.

Source of formulas and names: transformers, ``models/minicpm3``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_mlp
from unisono.models.families.deepseek_v3 import NAMES, read_latent
from unisono.models.families.minicpm import read_scaled


def read(hf_config: Any) -> DecoderConfig:
    """Read the config. ``mlp_bias``: of gate, up and down."""
    mixer = replace(read_latent(hf_config), interleaved=False)
    return read_scaled(hf_config, LayerSpec(mixer, read_mlp(hf_config, hf_config.mlp_bias)))


MINICPM3 = Family(read, NAMES)
