"""Frozen-KV multi-token prediction model: a small decoder whose queries attend over the target's keys and values.

Owns its forward pass, its tensor names and the checks against the target. It has no keys, values or cache, so nothing
to catch up with. Its structure is that of Gemma 4's assistants (transformers ``Gemma4AssistantForCausalLM`` and
``SinglePositionMultiTokenCandidateGenerator``; vLLM's ``gemma4_mtp``) over the blocks of the supported families::

    x = pre_projection([embed(token) ; hidden])      the target's embedding and last hidden state, both Ht wide
    x = layers(x)                                    queries only, over the target's last layer of their type
    y = norm(x)        draft: lm_head(y)        the next step's hidden: post_projection(y)

All steps of a round are at the last committed token's position and see the positions before it. The checkpoint's
tensors determine the order of norms; kinds of norms, scales and gates are the target's. With centroids, only the tokens
of the best clusters have a logit (``drafters/mtp/ordered_vocabulary.py``).

Shapes: R rows, H hidden, Ht the target's, V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.config import catalog
from unisono.drafters.mtp.ordered_vocabulary import TOP_K, OrderedSpec
from unisono.kv.specs import Tree
from unisono.layers.activations import common_input_format, plain
from unisono.layers.embedding import Embedding
from unisono.layers.formats.base import PLAIN, WeightFormat, WeightTarget
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import PRE, SANDWICH, AttentionSpec, LayerSpec, MLPSpec, build_layers
from unisono.models.blocks.query_attention import QuerySpec
from unisono.models.config import DecoderConfig, checkpoint_name
from unisono.models.families import llama
from unisono.models.load import weights
from unisono.models.load.build import AttentionFactory, Builder, no_attention
from unisono.models.load.checkpoint import read_tensors
from unisono.models.load.tensor_files import TensorInfo
from unisono.models.load.update import WeightUpdate
from unisono.types import CheckpointError

NAMES = {
    **llama.NAMES,
    "layers.*.mixer.q_norm": "model.layers.*.self_attn.q_norm",
    "pre_projection": "pre_projection",
    "post_projection": "post_projection",
}
"""Our modules -> the checkpoint's. A missing LM head is tied to ``model.embed_tokens``."""

SANDWICH_NAMES = {
    **NAMES,
    "layers.*.mixer_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.feed_forward_post_norm": "model.layers.*.post_feedforward_layernorm",
    "layers.*.scale": "model.layers.*.layer_scalar",
    "ordered.centroids": "masked_embedding.centroids",
    "ordered.ordering": "masked_embedding.token_ordering",
}
"""The same of layers with norms before and after each block."""

EMBED = "model.embed_tokens.weight"

UNSUPPORTED = {
    r"\.self_attn\.(k_proj|v_proj)\.": "keys of its own, so that it needs a cache: give the method that fits it",
}


class FrozenHead(nn.Module):
    """The whole drafter model.

    config: its layers, whose mixers attend over keys and values of the target.
    reads: for each layer, the number of the target layer that wrote these.
    embed: the target's embedding.
    ordered: the choice of tokens that have a logit; None: all have one.
    """

    def __init__(
        self, config: DecoderConfig, reads: Sequence[int], embed: Embedding, builder: Builder,
        ordered: OrderedSpec | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        wide = embed.weight.shape[1]
        self.config, self.reads, self.embed = config, tuple(reads), embed
        self.pre_projection = builder.linear("pre_projection", 2 * wide, config.hidden_size)
        norm = builder.norm()
        self.layers = build_layers(config.layers, builder, norm)
        self.norm = norm
        self.lm_head = builder.linear("lm_head", config.hidden_size, config.vocab_size)
        self.post_projection = builder.linear("post_projection", config.hidden_size, wide)
        self.ordered = None if ordered is None else ordered.build(builder.at("ordered"))
        if self.ordered is None:
            norm.input_format = common_input_format((self.lm_head, self.post_projection))

    def state_specs(self) -> Tree:
        """None: the keys and values are the target's."""
        return ()

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
        kv: Sequence[Sequence[torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step: token_ids [R] i32, hidden [R, Ht] -> (the next step's hidden [R, Ht], logits [R, V]).

        The context's inputs define the visible keys, up to its positions. ``context.rotary_positions`` [R] i32, the
        positions of the queries, lie after those. kv: the target's state, per layer; read-only.
        """
        x = self.pre_projection(torch.cat((self.embed(token_ids), hidden), dim=1))
        stream = self.layers[0].begin(x)  # type: ignore[operator]
        for layer, read in zip(self.layers, self.reads, strict=True):
            stream = layer(stream, context, kv[read])
        y = stream.normed
        logits = self.lm_head(y) if self.ordered is None else self.ordered(plain(y), self.lm_head.weight)
        return self.post_projection(y), logits


@dataclass(frozen=True)
class FrozenCheckpoint:
    """An opened directory, checked against the target. Make one with :meth:`open`."""

    path: Path
    config: DecoderConfig
    reads: tuple[int, ...]
    why: str
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    ordered: OrderedSpec | None = None

    @classmethod
    def open(cls, path: str | Path, target: DecoderConfig) -> FrozenCheckpoint:
        """Read the headers of a directory's safetensors, and ``layer_types`` of its config.json if it has one.

        Raises CheckpointError: no directory, not of this kind, unsupported blocks, sizes that do not fit the target's.
        """
        directory = catalog.resolve_name(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is no directory: give the one that holds the frozen-KV drafter.")
        tensors = read_tensors(directory)
        for pattern, what in UNSUPPORTED.items():
            name = next((n for n in tensors if re.search(pattern, n)), None)
            if name is not None:
                raise CheckpointError(f"{directory} has {what} ({name}).")
        reads, why = _reads(directory, _depth(tensors), target)
        config = _config(directory, tensors, target, reads)
        opened = cls(directory, config, reads, why, tensors, _ordered(directory, tensors, config))
        opened._check(target)
        return opened

    def load(
        self,
        target: Decoder,
        attention: AttentionFactory,
        dtype: torch.dtype,
        progress: Callable[[float], None] = lambda share: None,
        format: WeightFormat = PLAIN,
    ) -> FrozenHead:
        """Load the model with its weights in ``dtype``, linear layers in ``format``, on the target's device.

        ``progress`` is called with the fraction of its elements that is loaded, 0 … 1. The LM head of an ordered
        vocabulary, which is read by rows, and its centroids stay plain.
        """
        rows = () if self.ordered is None else ("lm_head", "ordered.centroids")
        builder = target.builder.beside(
            attention, dtype, self.config.hidden_size, ranks=target.builder.ranks, wide_norms=self.config.wide_norms
        )
        builder = replace(builder, format=lambda module: PLAIN if module in rows else format)
        head = FrozenHead(self.config, self.reads, target.embed, builder, self.ordered)
        weights.fill(self.targets(head), self.tensors, target.embed.weight.device, progress)
        return head.eval()

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head that a step reads, in 16 bits."""
        whole = 2 * self.config.vocab_size * self.config.hidden_size
        return whole if self.ordered is None else whole * self.ordered.top_k // self.ordered.clusters

    def update(self, head: FrozenHead) -> WeightUpdate:
        """This checkpoint's weights for a head that another one made. Raises CheckpointError if that has another
        config.
        """
        if self.config != head.config or self.reads != head.reads:
            raise CheckpointError(f"{self.path}: its config is not that of the drafter that is served.")
        return WeightUpdate(head, self.targets(head), self.tensors)

    def _check(self, target: DecoderConfig) -> None:
        """Compare the tensors with the head's parameters. Raises CheckpointError naming the first misfit."""
        builder = Builder(self.config.hidden_size, self.config.rms_eps, torch.float32, "meta", no_attention, 1)
        embed = Embedding(target.vocab_size, target.hidden_size, torch.float32, "meta")
        reason = "it has no place in this drafter"
        targets = self.targets(FrozenHead(self.config, self.reads, embed, builder, self.ordered))
        weights.check(targets, self.tensors, self.path, lambda name: None if name == EMBED else reason)

    def targets(self, head: FrozenHead) -> dict[str, WeightTarget]:
        """Checkpoint names of the head's own tensors -> the parameters they fill."""
        names = SANDWICH_NAMES if self.config.layers[0].mixer_norms.after else NAMES
        targets = {
            weights.tensor_name(checkpoint_name(names, path), kind): place
            for path, kind, place in weights.weight_targets(head)
            if path != "embed"
        }
        if "lm_head.weight" not in self.tensors:
            targets[EMBED] = targets.pop("lm_head.weight")
        return targets


def _depth(tensors: Mapping[str, TensorInfo]) -> int:
    """Number of layers."""
    return sum(re.fullmatch(r"model\.layers\.\d+\.self_attn\.q_proj\.weight", name) is not None for name in tensors)


def _config(
    directory: Path, tensors: Mapping[str, TensorInfo], target: DecoderConfig, reads: Sequence[int]
) -> DecoderConfig:
    """Config of the head's layers, from the tensors and from the target layers whose keys they read."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise CheckpointError(f"{directory} is no frozen-KV drafter: tensor {name} is missing.")
        return tensors[name].shape

    hidden, wide = shape("pre_projection.weight")
    if wide != 2 * target.hidden_size:
        raise CheckpointError(
            f"{directory}: pre_projection.weight has shape {[hidden, wide]}; a target of hidden size "
            f"{target.hidden_size} needs {2 * target.hidden_size} columns. It belongs to another model."
        )
    layers, order = [], SANDWICH if any("pre_feedforward_layernorm" in name for name in tensors) else PRE
    for number, read in enumerate(reads or [target.reads[_attending(target)[-1]]]):
        layer, theirs = f"model.layers.{number}.", cast(AttentionSpec, target.layers[read].mixer)
        heads = shape(f"{layer}self_attn.q_proj.weight")[0] // theirs.head_dim
        if heads % theirs.num_kv_heads:
            raise CheckpointError(
                f"{directory}: {heads} query heads of size {theirs.head_dim} cannot share the target's "
                f"{theirs.num_kv_heads} KV heads."
            )
        mixer = QuerySpec(
            heads,
            theirs.num_kv_heads,
            theirs.head_dim,
            theirs.rotary,
            # The query is one position after the last visible key, so its own position uses up one of the window.
            max(theirs.window - 1, 0),
            theirs.scale,
            theirs.soft_cap,
            qk_norm=f"{layer}self_attn.q_norm.weight" in tensors,
            qkv_bias=f"{layer}self_attn.q_proj.bias" in tensors,
            o_bias=f"{layer}self_attn.o_proj.bias" in tensors,
            pages=theirs.window_group,
        )
        down = f"{layer}mlp.down_proj"
        mlp = MLPSpec(shape(f"{down}.weight")[1], f"{down}.bias" in tensors, _activation(target.layers[read]))
        layers.append(LayerSpec(mixer, mlp, order, order, scaled=order.after and f"{layer}layer_scalar" in tensors))
    return replace(target, hidden_size=hidden, layers=tuple(layers), layer_inputs=None, logit_cap=0.0)


def _activation(layer: LayerSpec) -> str:
    """The gate of a target's layer, of its dense part where there are several."""
    found: str = getattr(getattr(layer.feed_forward, "dense", layer.feed_forward), "activation", "silu")
    return found


def _ordered(directory: Path, tensors: Mapping[str, TensorInfo], config: DecoderConfig) -> OrderedSpec | None:
    """The choice of tokens, where there are centroids. Raises CheckpointError where the vocabulary has no equal
    clusters."""
    centroids = tensors.get("masked_embedding.centroids.weight")
    if centroids is None:
        return None
    top_k = _settings(directory).get("centroid_intermediate_top_k", TOP_K)
    if config.vocab_size % centroids.shape[0] or not 1 <= top_k <= centroids.shape[0]:
        raise CheckpointError(
            f"{directory}: {centroids.shape[0]} centroids of {config.vocab_size} tokens, of which {top_k} are chosen: "
            "they must have equally many, and there must be as many."
        )
    return OrderedSpec(config.vocab_size, centroids.shape[0], top_k)


def _settings(directory: Path) -> dict[str, Any]:
    """config.json; empty where there is none."""
    file = directory / "config.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def _reads(directory: Path, depth: int, target: DecoderConfig) -> tuple[tuple[int, ...], str]:
    """The target's last attention layer, or the last of each type listed in config.json; and the reason."""
    file, settings = directory / "config.json", _settings(directory)
    types = settings.get("text_config", settings).get("layer_types")
    if types is None:
        last = target.reads[_attending(target)[-1]]
        return (last,) * depth, "the target's last that attends; config.json lists no layer_types"
    if len(types) != depth:
        raise CheckpointError(f"{file}: layer_types names {len(types)} layers, the weights hold {depth}.")
    reads = []
    for kind in types:
        same = [i for i in _attending(target) if (target.windows[i] > 0) == (kind == "sliding_attention")]
        if not same:
            raise CheckpointError(f"{file}: layer_types has {kind!r}, and no layer of the target is of that type.")
        reads.append(target.reads[same[-1]])
    return tuple(reads), "the target's last layer of each type that layer_types in config.json lists"


def _attending(target: DecoderConfig) -> list[int]:
    """Numbers of the target's attention layers, at least one."""
    found = [number for number, layer in enumerate(target.layers) if isinstance(layer.mixer, AttentionSpec)]
    if not found:
        raise CheckpointError(f"a frozen-KV drafter reads keys, and no layer of a {target.architecture} has any.")
    return found
