"""Ripple, a made-up family: Llama's tensors, with a sliding window in every second layer."""

from transformers import AutoConfig, LlamaConfig

from unisono.models.blocks.layers import LayerSpec
from unisono.models.config import DecoderConfig, Family, read_attention, read_decoder_config, read_mlp
from unisono.models.families.llama import NAMES


class RippleConfig(LlamaConfig):
    model_type = "ripple"


AutoConfig.register("ripple", RippleConfig, exist_ok=True)  # transformers does not know the family


def read(hf_config: RippleConfig) -> DecoderConfig:
    """One spec a layer: a mixer and a feed-forward."""
    layers = [
        LayerSpec(read_attention(hf_config, window=hf_config.sliding_window if i % 2 else 0), read_mlp(hf_config))
        for i in range(hf_config.num_hidden_layers)
    ]
    return read_decoder_config(hf_config, layers)


RIPPLE = Family(read, NAMES)
