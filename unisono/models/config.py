"""What a model is, as data: the config that every family's config.json is read into, layer by layer.

Owns :class:`DecoderConfig` and :class:`Family` (how one family reads its config and names its tensors). Family files
build these from the specs of ``blocks.py``; decoder, loader and engine read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.layers.rotary import RotarySpec
from unisono.models.blocks import AttentionSpec, LayerSpec, MLPSpec
from unisono.models.build import require
from unisono.types import CheckpointError


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: its layers and what they share. Immutable; sizes are element counts.

    layers: each layer's own spec. max_positions: the context length that config.json declares. hf_config: the
    transformers config it was read from. Raises CheckpointError for values that cannot be computed.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_eps: float
    max_positions: int
    tie_embeddings: bool = False
    hf_config: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = {"vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "num_layers": len(self.layers)}
        for name, value in sizes.items():
            require(value >= 1, name, value, "it must be at least 1")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """The spec of the last layer that attends; draft modules take what their tensors do not tell from it."""
        for spec in map(attention_of, reversed(self.layers)):
            if spec is not None:
                return spec
        raise CheckpointError(f"a {self.architecture} with this config.json has no attention layer.")

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each layer, how many positions a token sees, itself included; 0: all."""
        return tuple(getattr(layer.mixer, "window", 0) for layer in self.layers)

    # For callers that take one size for all layers, until state is allocated by ``state_specs()``.
    num_heads = property(lambda self: self.attention.num_heads)
    num_kv_heads = property(lambda self: self.attention.num_kv_heads)
    head_dim = property(lambda self: self.attention.head_dim)


def attention_of(layer: LayerSpec) -> AttentionSpec | None:
    """The spec of a layer that attends; None for another mixer."""
    return layer.mixer if isinstance(layer.mixer, AttentionSpec) else None


@dataclass(frozen=True)
class Family:
    """What a family file exports, and the catalog lists.

    read: transformers config -> DecoderConfig.
    names: module -> checkpoint module; ``*`` is the layer number, and behind ``each`` a second one the expert's. A
        projection of a merged linear layer is named like a module in it (``layers.*.mixer.qkv.q``). ``.weight``,
        ``.bias`` and the like carry over.
    """

    read: Callable[[Any], DecoderConfig]
    names: Mapping[str, str]

    def name(self, module: str) -> str:
        """The checkpoint's name of a module."""
        return checkpoint_name(self.names, module)


def checkpoint_name(names: Mapping[str, str], module: str) -> str:
    """The checkpoint's name of a module, by ``names`` of :class:`Family`'s kind. Raises KeyError without one."""
    numbers = re.findall(r"\.(\d+)(?=\.)", module)
    theirs = names[re.sub(r"\.\d+(?=\.)", ".*", re.sub(r"\.each\.\d+", ".each", module))]
    for number in numbers:
        theirs = theirs.replace("*", number, 1)
    return theirs


def read_decoder_config(hf_config: Any, layers: Sequence[LayerSpec]) -> DecoderConfig:
    """A DecoderConfig of these layers; the rest from a transformers config, where all families spell it alike."""
    return DecoderConfig(
        architecture=hf_config.architectures[0],
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        layers=tuple(layers),
        rms_eps=hf_config.rms_norm_eps,
        max_positions=hf_config.max_position_embeddings,
        tie_embeddings=bool(hf_config.tie_word_embeddings),
        hf_config=hf_config,
    )


def read_attention(hf_config: Any, **options: Any) -> AttentionSpec:
    """An attention layer's spec: heads and rotary from a transformers config, ``options`` are the family's own."""
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    kv_heads = hf_config.num_key_value_heads or heads
    return AttentionSpec(heads, kv_heads, head_dim, RotarySpec.of(hf_config, head_dim), **options)


def read_mlp(hf_config: Any, bias: bool = False) -> MLPSpec:
    """A gated MLP's spec from a transformers config."""
    return MLPSpec(hf_config.intermediate_size, bias, hf_config.hidden_act)


def windows_by_layer_type(hf_config: Any) -> tuple[int, ...]:
    """Windows of a config that lists ``layer_types`` (Qwen2, Qwen3): ``sliding_window`` where it says so.

    Raises CheckpointError for a layer type that is neither full nor sliding attention.
    """
    windows = []
    for layer, kind in enumerate(hf_config.layer_types):
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointError(
                f"config.json: layer_types[{layer}]={kind!r} is not supported; "
                "full_attention and sliding_attention are."
            )
        windows.append((hf_config.sliding_window or 0) if kind == "sliding_attention" else 0)
    return tuple(windows)
