"""What a decoder is, as data: the one config that every family's config.json is read into.

Owns :class:`DecoderConfig` (shapes and switches of the shared blocks) and :class:`Family` (how one family
reads its config and names its tensors). Family files build these; decoder, loader and engine read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.types import CheckpointError


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and switches of a pre-norm, rotary, gated-MLP decoder. Immutable; sizes are element counts.

    windows: per layer, how many positions a token sees (itself included); 0 is full attention.
    max_positions: the context length that config.json declares.
    hf_config: the transformers config it was read from; the rotary table reads its rope parameters.

    Raises CheckpointError where a value is outside what the blocks compute.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    windows: tuple[int, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    hf_config: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            self._require(getattr(self, name) >= 1, name, "it must be at least 1")
        self._require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"it must divide {self.num_heads} heads")
        self._require(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", "rotary needs an even head size")
        self._require(self.hidden_act == "silu", "hidden_act", "only 'silu' is supported")
        self._require(
            len(self.windows) == self.num_layers,
            "windows",
            f"one is needed for each of {self.num_layers} layers",
        )

    def _require(self, ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise CheckpointError(f"config.json of a {self.architecture}: {name}={getattr(self, name)!r}: {rule}.")

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by: head_dim ** -0.5."""
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Family:
    """What a family file exports, and the catalog lists.

    read: transformers config -> DecoderConfig.
    names: decoder module -> checkpoint module; ``*`` is the layer number. A shard of a merged linear is
        named like a module in it (``layers.*.attention.qkv.q``). ``.weight``, ``.bias`` carry over.
    """

    read: Callable[[Any], DecoderConfig]
    names: Mapping[str, str]


def read_decoder_config(hf_config: Any, *, windows: tuple[int, ...] | None = None, **switches: bool) -> DecoderConfig:
    """A DecoderConfig from a transformers config: what all families spell alike, and the family's own.

    windows: full attention in every layer by default. switches: qkv_bias, o_bias, mlp_bias, qk_norm.
    """
    layers, heads = hf_config.num_hidden_layers, hf_config.num_attention_heads
    return DecoderConfig(
        architecture=hf_config.architectures[0],
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=hf_config.num_key_value_heads or heads,
        head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        rms_eps=hf_config.rms_norm_eps,
        max_positions=hf_config.max_position_embeddings,
        windows=(0,) * layers if windows is None else windows,
        tie_embeddings=bool(hf_config.tie_word_embeddings),
        hidden_act=hf_config.hidden_act,
        hf_config=hf_config,
        **switches,
    )


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
