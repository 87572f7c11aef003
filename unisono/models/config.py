"""Model configuration as data: the result of reading a family's config.json, layer by layer.

Owns :class:`DecoderConfig` and :class:`Family` (how a family reads its config and names its tensors). Family files
build these from the specs in ``blocks/``; decoder, loader and engine read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unisono.distributed.gather import ALONE, Ranks
from unisono.layers.norm import RMS, NormKind
from unisono.layers.rotary import RotarySpec
from unisono.models.blocks.input_tables import InputTablesSpec
from unisono.models.blocks.latent_attention import LatentSpec
from unisono.models.blocks.layer_inputs import LayerInputsSpec
from unisono.models.blocks.layers import AttentionSpec, BlockSpec, LayerSpec, MLPSpec
from unisono.models.blocks.one_block import AbsentSpec
from unisono.models.load.build import require
from unisono.models.vision.config import TowerSpec, VisionConfig
from unisono.types import CheckpointError


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: its layers and their shared settings. Immutable; sizes are element counts.

    layers: spec of each layer.
    max_positions: context length declared by config.json, or a smaller one of sentence-transformers' files.
    zero_centered_norms, wide_norms: kind of all norms that the builder makes (``layers.norm``).
    embed_scale: factor of token embeddings.
    norms: kind of the residual stream's norms.
    embed_norm: embeddings are normed before the first layer.
    input_tables: learnt embeddings of positions and token types; None: there are none.
    final_norm: the last layer's stream is normed.
    logit_scale: factor of logits, before the cap.
    head_bias: the LM head has a bias; with an embedding that is not tied to it.
    logit_cap: logits become logit_cap * tanh(logit / logit_cap); 0: no cap.
    layer_inputs: inputs of every layer beside the stream; None: there are none.
    mtp_modules: number of multi-token prediction modules declared by config.json.
    vision: the vision tower beside the decoder; None: there is none.
    hf_config: the transformers config it was read from; that of the text model if there are several. Raises
        CheckpointError for values that cannot be computed.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_eps: float
    max_positions: int
    tie_embeddings: bool = False
    zero_centered_norms: bool = False
    wide_norms: bool = False
    embed_scale: float = 1.0
    logit_cap: float = 0.0
    layer_inputs: LayerInputsSpec | None = None
    mtp_modules: int = 0
    norms: NormKind = RMS
    embed_norm: bool = False
    input_tables: InputTablesSpec | None = None
    final_norm: bool = True
    logit_scale: float = 1.0
    head_bias: bool = False
    vision: VisionConfig | None = None
    hf_config: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = {"vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "num_layers": len(self.layers)}
        for name, value in sizes.items():
            require(value >= 1, name, value, "it must be at least 1")
        tied = self.head_bias and self.tie_embeddings
        require(not tied, "tie_word_embeddings", True, "an LM head with a bias has a weight of its own")
        if self.vision is not None and self.vision.mrope_section:
            layers = tuple(_on_three_axes(layer, self.vision) for layer in self.layers)
            object.__setattr__(self, "layers", layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec | LatentSpec:
        """Spec of the last layer that attends. Draft modules take settings from it that their tensors do not show."""
        for spec in map(attention_of, reversed(self.layers)):
            if spec is not None:
                return spec
        raise CheckpointError(f"a {self.architecture} with this config.json has no attention layer.")

    @property
    def feed_forward(self) -> BlockSpec:
        """Spec of the last feed-forward. Draft modules with random weights copy it."""
        for layer in reversed(self.layers):
            if not isinstance(layer.feed_forward, AbsentSpec):
                return layer.feed_forward
        raise CheckpointError(f"a {self.architecture} with this config.json has no feed-forward.")

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each layer, in positions: see :class:`AttentionSpec`."""
        return tuple(getattr(layer.mixer, "window", 0) for layer in self.layers)

    @property
    def whole_text(self) -> bool:
        """True if tokens see later ones, so that a prompt is computed in one pass and no text is written."""
        return any(getattr(layer.mixer, "whole_text", False) for layer in self.layers)

    @property
    def reads(self) -> tuple[int, ...]:
        """Number of the layer whose state each layer reads: its own, or an earlier one's."""
        found = [getattr(layer.mixer, "reads", None) for layer in self.layers]
        return tuple(number if read is None else read for number, read in enumerate(found))

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Each distinct (query heads, KV heads, head size) of the attention layers, at least one."""
        return self.attention_shapes_of(ALONE)

    def attention_shapes_of(self, ranks: Ranks) -> tuple[tuple[int, int, int], ...]:
        """:attr:`attention_shapes` of one rank."""
        specs = [self.attention, *(spec for spec in map(attention_of, self.layers) if spec is not None)]
        of_rank = [spec.of(ranks) for spec in specs]
        return tuple(dict.fromkeys((spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in of_rank))

    def check_divides(self, ranks: Ranks) -> None:
        """Raise ConfigError if a layer cannot be divided among the ranks."""
        for layer in self.layers:
            for block in (layer.mixer, layer.feed_forward):
                check = getattr(block, "of", None)
                if check is not None:
                    check(ranks)


def _on_three_axes(layer: LayerSpec, vision: VisionConfig) -> LayerSpec:
    """Return the layer with rotary planes assigned to the axes of the model's sections.

    Raises CheckpointError if the sections do not match the number of planes.
    """
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec):
        return layer
    planes, section = mixer.rotary.planes, list(vision.mrope_section)
    axes = vision.rotary_axes(planes)
    require(len(axes) == planes, "mrope_section", section, f"the sections have to be {planes} planes")
    return replace(layer, mixer=replace(mixer, rotary=replace(mixer.rotary, axes=axes)))


def attention_of(layer: LayerSpec) -> AttentionSpec | LatentSpec | None:
    """Spec of a layer that attends; None for another mixer."""
    return layer.mixer if isinstance(layer.mixer, (AttentionSpec, LatentSpec)) else None


Name = str | Mapping[type, str]
"""Checkpoint name of a module; a mapping by the type of the layer's mixer spec if the name depends on it."""


TOWER_PREFIXES = ("model.visual.", "visual.")
"""Prefixes of a vision tower's tensors in exports of different tools."""


@dataclass(frozen=True)
class Family:
    """Exported by a family file and listed in the catalog.

    read: transformers config -> DecoderConfig.
    names: module -> checkpoint module; ``*`` is the layer number, and after ``each`` a second one the expert's. A
        projection of a merged linear layer is named like a module in it (``layers.*.mixer.qkv.q``). ``.weight``,
        ``.bias`` and the like carry over. ``mtp.norm``: the last norm of an MTP module that is a layer after the
        others, unless it has DeepSeek's name.
    rows: projection -> a function of its layer's spec that returns the rows of the checkpoint tensor that form the
        projection, in order, int64. Several projections may then share the rows of one checkpoint module.
    unread: name prefix of tensors that are not read -> reason.
    tied_unless_stored: embedding and head are tied if and only if the checkpoint has no tensor of the head, whatever
        config.json has.
    tower: module of the vision tower -> checkpoint module, inside one of TOWER_PREFIXES; empty: there is no tower.
    tower_roots: name prefix of a tower's tensors -> prefix inside TOWER_PREFIXES[0], or None for tensors that are not
        read; the first that fits counts. Empty: the tensors are in one of TOWER_PREFIXES.
    tower_rows: as ``rows``, of the tower's projections by its spec.
    """

    read: Callable[[Any], DecoderConfig]
    names: Mapping[str, Name]
    rows: Mapping[str, Callable[[LayerSpec], torch.Tensor]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    tower: Mapping[str, Name] = field(default_factory=dict)
    tower_roots: Mapping[str, str | None] = field(default_factory=dict)
    tower_rows: Mapping[str, Callable[[TowerSpec], torch.Tensor]] = field(default_factory=dict)
    tied_unless_stored: bool = False

    @property
    def tower_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the tensors of a vision tower; none if the family has none."""
        return (tuple(self.tower_roots) or TOWER_PREFIXES) if self.tower else ()

    def tower_name(self, name: str) -> str | None:
        """Rename a tower's tensor to its one prefix; other names are returned as they are. None: it is not read."""
        root = next((root for root in self.tower_roots if name.startswith(root)), None)
        if root is None:
            return name
        inside = self.tower_roots[root]
        return None if inside is None else TOWER_PREFIXES[0] + inside + name[len(root) :]

    def name(self, module: str, layers: Sequence[LayerSpec] = ()) -> str:
        """Checkpoint name of a module. layers: the model's, for names that depend on a layer's mixer."""
        return checkpoint_name(self.names, module, layers)

    def rows_of(self, module: str, layers: Sequence[LayerSpec]) -> torch.Tensor | None:
        """Rows of the checkpoint tensor that form a module; None for all, in order."""
        if not self.rows:
            return None
        key, numbers = _key(module)
        return self.rows[key](layers[numbers[0]]) if key in self.rows else None

    def tower_rows_of(self, module: str, tower: TowerSpec) -> torch.Tensor | None:
        """:meth:`rows_of` a module of the vision tower."""
        rows = self.tower_rows.get(_key(module)[0])
        return None if rows is None else rows(tower)


def checkpoint_name(names: Mapping[str, Name], module: str, layers: Sequence[LayerSpec] = ()) -> str:
    """Checkpoint name of a module, by ``names`` in the form of :class:`Family`. Raises KeyError if there is none."""
    key, numbers = _key(module)
    theirs = names[key]
    if not isinstance(theirs, str):
        theirs = theirs[type(layers[numbers[0]].mixer)]
    for number in numbers:
        theirs = theirs.replace("*", str(number), 1)
    return theirs


def _key(module: str) -> tuple[str, list[int]]:
    """Split a module's name: (``*`` for its layer number, its expert's number dropped; these numbers)."""
    key = re.sub(r"\.\d+(?=\.)", ".*", re.sub(r"\.each\.\d+", ".each", module))
    return key, [int(number) for number in re.findall(r"\.(\d+)(?=\.)", module)]


def in_language_model(names: Mapping[str, Name]) -> dict[str, Name]:
    """Return the names in a model with a vision tower: ``model.language_model.`` replaces ``model.``."""

    def moved(name: str) -> str:
        return re.sub(r"^model\.", "model.language_model.", name)

    return {
        ours: moved(theirs) if isinstance(theirs, str) else {kind: moved(each) for kind, each in theirs.items()}
        for ours, theirs in names.items()
    }


def read_decoder_config(
    hf_config: Any, layers: Sequence[LayerSpec], rms_eps: float | None = None, **options: Any
) -> DecoderConfig:
    """A DecoderConfig of these layers, with the fields that all families spell alike from a transformers config.

    Sizes are those of the text model if the config has several. rms_eps: of all norms, by default ``rms_norm_eps``.
    options: further fields of the DecoderConfig.
    """
    text = hf_config.get_text_config()
    text.name_or_path = hf_config.name_or_path
    return DecoderConfig(
        architecture=hf_config.architectures[0],
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layers=tuple(layers),
        rms_eps=text.rms_norm_eps if rms_eps is None else rms_eps,
        max_positions=int(text.max_position_embeddings * stretch_of(text)),
        tie_embeddings=bool(hf_config.tie_word_embeddings),
        hf_config=text,
        **options,
    )


def stretch_of(text: Any) -> float:
    """Factor by which ``dynamic`` rotary embeddings extend a text model's declared context; 1 for others."""
    parameters = getattr(text, "rope_parameters", None) or {}
    dynamic = parameters.get("rope_type") == "dynamic" and not parameters.get("alpha")
    return max(1.0, float(parameters.get("factor", 1.0))) if dynamic else 1.0


def read_attention(hf_config: Any, **options: Any) -> AttentionSpec:
    """Spec of an attention layer: heads and rotary from a transformers config; ``options`` are specific to the
    family."""
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    kv_heads = hf_config.num_key_value_heads or heads
    return AttentionSpec(heads, kv_heads, head_dim, RotarySpec.of(hf_config, head_dim), **options)


def read_mlp(hf_config: Any, bias: bool = False) -> MLPSpec:
    """Spec of a gated MLP from a transformers config."""
    return MLPSpec(hf_config.intermediate_size, bias, hf_config.hidden_act)


def windows_by_layer_type(hf_config: Any) -> tuple[int, ...]:
    """Windows of a config with ``layer_types`` (Qwen2, Qwen3): ``sliding_window`` for sliding layers.

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
