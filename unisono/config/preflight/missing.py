"""Architectures that people ask for and that are not served, with the block that is missing, for their refusal."""

from __future__ import annotations

from collections.abc import Mapping

_SPARSE = "sparse attention"
_LIGHTNING = "lightning attention"

MISSING: Mapping[str, str] = {
    "BailingMoeV2ForCausalLM": "a class in transformers that its formula is compared with",
    "DeepseekV32ForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": _SPARSE,
    "Gemma3nForCausalLM": "parallel residual streams (AltUp)",
    "Gemma3nForConditionalGeneration": "parallel residual streams (AltUp)",
    "GlmMoeDsaForCausalLM": _SPARSE,
    "InternLM2ForCausalLM": "a class in transformers that its formula is compared with",
    "LlavaForConditionalGeneration": "its vision tower",
    "MiniCPMForCausalLM": "a class in transformers that its formula is compared with",
    "MiniMaxForCausalLM": _LIGHTNING,
    "MiniMaxText01ForCausalLM": _LIGHTNING,
    "MistralLarge3ForCausalLM": "a reader of params.json and consolidated tensors, the only form of its checkpoints",
    "MllamaForConditionalGeneration": "cross-attention to pictures",
}
"""By ``architectures[0]`` of config.json."""
