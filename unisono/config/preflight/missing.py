"""Architectures that people ask for and that are not served, with the block that is missing, for their refusal."""

from __future__ import annotations

from collections.abc import Mapping

_ALIBI = "scores with a bias by distance (ALiBi)"
_AUDIO = "an audio tower"
_BLOCK_SPARSE = "sparse attention over blocks that an indexer chooses"
_CROSS = "cross-attention to an encoder"
_LEARNT = "learnt positions of a decoder"
_LIGHTNING = "lightning attention"
_MAMBA1 = "a recurrence of Mamba1"
_PACKED = "queries, keys and values packed head by head"
_RELATIVE = "scores with learnt relative positions"
_INDEXED = "sparse attention by an indexer (DSA)"
_QWEN_SPARSE = "Qwen's sparse attention and parallel residual streams"
_STREAMS = "parallel residual streams (AltUp)"
_TOWER = "its vision tower"

MISSING: Mapping[str, str] = {
    "BailingMoeLinearV2ForCausalLM": _LIGHTNING,
    "BailingMoeV2_5ForCausalLM": _LIGHTNING,
    "BartForConditionalGeneration": _CROSS,
    "BloomForCausalLM": _ALIBI,
    "DebertaV2ForSequenceClassification": _RELATIVE,
    "DeepseekV32ForCausalLM": _INDEXED,
    "DeepseekV4ForCausalLM": "compressed sparse attention (CSA, HCA)",
    "FalconForCausalLM": _PACKED,
    "FalconH1ForCausalLM": "Mamba2 and attention side by side in a layer",
    "FalconMambaForCausalLM": _MAMBA1,
    "GPT2LMHeadModel": _LEARNT,
    "GPTBigCodeForCausalLM": _LEARNT,
    "GPTNeoXForCausalLM": _PACKED,
    "Gemma3nForCausalLM": _STREAMS,
    "Gemma3nForConditionalGeneration": _STREAMS,
    "Glm4vForConditionalGeneration": _TOWER,
    "Glm4vMoeForConditionalGeneration": _TOWER,
    "Glm5NextForConditionalGeneration": _INDEXED,
    "GlmMoeDsaForCausalLM": _INDEXED,
    "Idefics3ForConditionalGeneration": _TOWER,
    "InternVLForConditionalGeneration": _TOWER,
    "JambaForCausalLM": _MAMBA1,
    "LlavaForConditionalGeneration": _TOWER,
    "LlavaNextForConditionalGeneration": _TOWER,
    "LlavaOnevisionForConditionalGeneration": _TOWER,
    "LongcatFlashForCausalLM": "experts that return their input",
    "MPNetModel": _RELATIVE,
    "MambaForCausalLM": _MAMBA1,
    "Mamba2ForCausalLM": "a model without attention",
    "MiniMaxForCausalLM": _LIGHTNING,
    "MiniMaxM3SparseForCausalLM": _BLOCK_SPARSE,
    "MiniMaxM3SparseForConditionalGeneration": _BLOCK_SPARSE,
    "MiniMaxM3VLForCausalLM": _BLOCK_SPARSE,
    "MiniMaxText01ForCausalLM": _LIGHTNING,
    "MllamaForConditionalGeneration": "cross-attention to pictures",
    "MptForCausalLM": _ALIBI,
    "NomicBertModel": "rotary positions in layers with norms of sums",
    "OPTForCausalLM": _LEARNT,
    "PaliGemmaForConditionalGeneration": _TOWER,
    "Phi4MultimodalForCausalLM": _AUDIO,
    "Qwen2AudioForConditionalGeneration": _AUDIO,
    "Qwen2_5OmniForConditionalGeneration": _AUDIO,
    "Qwen3OmniMoeForConditionalGeneration": _AUDIO,
    "Qwen4ExpForCausalLM": _QWEN_SPARSE,
    "Qwen4ExpForConditionalGeneration": _QWEN_SPARSE,
    "RecurrentGemmaForCausalLM": "a recurrence of RG-LRU",
    "SmolVLMForConditionalGeneration": _TOWER,
    "T5ForConditionalGeneration": _CROSS,
    "WhisperForConditionalGeneration": _CROSS,
    "Zamba2ForCausalLM": "attention that layers share",
}
"""By ``architectures[0]`` of config.json."""
