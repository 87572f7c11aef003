"""Frozen-KV multi-token prediction: a small decoder whose queries attend over the target's own keys and values.

Owns its forward pass, its checkpoint's names and what does not fit. It has no keys, no values and no cache, so nothing
to catch up with. The shape is that of Gemma 4's assistants (transformers ``Gemma4AssistantForCausalLM`` and
``SinglePositionMultiTokenCandidateGenerator``; vLLM's ``gemma4_mtp``) over the blocks of the supported families::

    x = pre_projection([embed(token) ; hidden])      the target's embedding and last hidden state, both Ht wide
    x = layers(x)                                    pre-norm blocks; queries only, over the target's last layer
    y = norm(x)        draft: lm_head(y)        the next step's hidden: post_projection(y)

All steps of a round stand at the last committed token's position and see what lies before it. Gemma's own assistants
have blocks that are not supported yet, and are refused by name.

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

from unisono import catalog
from unisono.attention.base import AttentionBackend, AttentionInputs
from unisono.kernels import rope_and_cache
from unisono.layers.linear import Linear
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import RMSNorm
from unisono.models.checkpoint import TensorInfo, read_tensors
from unisono.models.config import DecoderConfig
from unisono.models.decoder import Decoder
from unisono.models.draft import KV
from unisono.models.loader import IGNORED, check_tensor, shards, stream
from unisono.types import CheckpointError

NAMES = {
    "lm_head": "lm_head",
    "norm": "model.norm",
    "pre_projection": "pre_projection",
    "post_projection": "post_projection",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.q": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate_up.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.gate_up.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
}
"""Our modules -> the checkpoint's. An LM head that is absent is tied to ``model.embed_tokens``."""

EMBED = "model.embed_tokens.weight"

UNSUPPORTED = {
    r"\.self_attn\.(k_proj|v_proj)\.": "keys of its own, so that it needs a cache: give the method that fits it",
    r"\.(pre_feedforward_layernorm|layer_scalar)": "Gemma 4's blocks, which are not supported yet",
    r"^masked_embedding\.": "centroids over the vocabulary, which are not supported yet",
}


class QueryAttention(nn.Module):
    """Attention of new queries over keys and values that another model wrote."""

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        heads, dim = config.num_heads, config.head_dim
        self.config, self.backend = config, backend
        self.q = Linear(config.hidden_size, heads * dim, config.qkv_bias, dtype, device)
        self.q_norm = RMSNorm(dim, config.rms_eps, dtype, device) if config.qk_norm else None
        self.o = Linear(heads * dim, config.hidden_size, config.o_bias, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        inputs: AttentionInputs,
        kv: KV,
        window: int,
    ) -> torch.Tensor:
        config, (keys, values) = self.config, kv
        norm = self.q_norm.weight if self.q_norm else None
        nothing = keys[:, :0]  # a cache of no heads
        q = rope_and_cache(
            self.q(x), norm, norm, config.rms_eps, cos_sin, positions, inputs.slot_mapping, nothing, nothing,
            config.num_heads, 0,
        )  # fmt: skip
        return self.o(self.backend.forward(q, keys, values, inputs, config.scale, window), residual)


class QueryLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype, device)
        self.attention = QueryAttention(config, backend, dtype, device)
        self.mlp_norm = RMSNorm(hidden, eps, dtype, device)
        self.mlp = GatedMLP(hidden, config.intermediate_size, config.mlp_bias, dtype, device)

    def forward(self, x: torch.Tensor, *context: Any) -> torch.Tensor:
        """x [R, H] -> [R, H]; ``context`` is QueryAttention's."""
        x = self.attention(self.attention_norm(x), x, *context)
        return self.mlp(self.mlp_norm(x), x)


class FrozenHead(nn.Module):
    """The whole drafter model. ``embed`` and ``cos_sin`` are the target's.

    config: shapes of its layers; reads: for each, the target's layer whose keys and values it attends over.
    """

    def __init__(
        self,
        config: DecoderConfig,
        reads: Sequence[int],
        target: Decoder,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, target.config.hidden_size
        self.config, self.reads, self.backend = config, tuple(reads), backend
        self.windows = [target.config.windows[layer] for layer in reads]
        self.embed, self.cos_sin = target.embed, target.cos_sin
        self.pre_projection = Linear(2 * wide, hidden, False, dtype, device)
        self.layers = nn.ModuleList(QueryLayer(config, backend, dtype, device) for _ in reads)
        self.norm = RMSNorm(hidden, config.rms_eps, dtype, device)
        self.lm_head = Linear(hidden, config.vocab_size, False, dtype, device)
        self.post_projection = Linear(hidden, wide, False, dtype, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        inputs: AttentionInputs,
        kv: Sequence[KV],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: token_ids, positions [R] i32, hidden [R, Ht] -> (the next step's hidden [R, Ht], logits [R, V]).

        ``inputs`` are planned and say what is seen: keys up to its positions, which lie before ``positions``. kv: the
        target's, per layer; only read.
        """
        x = self.pre_projection(torch.cat((self.embed(token_ids), hidden), dim=1))
        for layer, read, window in zip(self.layers, self.reads, self.windows, strict=True):
            # The query stands one behind the last key it sees: of its window that one is spent on itself.
            x = layer(x, self.cos_sin, positions, inputs, kv[read], max(window - 1, 0))
        x = self.norm(x)
        return self.post_projection(x), self.lm_head(x)


@dataclass(frozen=True)
class FrozenCheckpoint:
    """An opened directory, checked against the target. Make one with :meth:`open`."""

    path: Path
    config: DecoderConfig
    reads: tuple[int, ...]
    why: str
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path, target: DecoderConfig) -> FrozenCheckpoint:
        """Read the headers of a directory's safetensors, and ``layer_types`` of its config.json if it has one.

        Raises CheckpointError: no directory, not of this kind, blocks that are not supported, sizes that do not
        fit the target's.
        """
        directory = catalog.resolve_name(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is no directory: give the one that holds the frozen-KV drafter.")
        tensors = read_tensors(directory)
        for pattern, what in UNSUPPORTED.items():
            name = next((n for n in tensors if re.search(pattern, n)), None)
            if name is not None:
                raise CheckpointError(f"{directory} has {what} ({name}).")
        config, depth = _config(directory, tensors, target)
        reads, why = _reads(directory, depth, target)
        opened = cls(directory, config, reads, why, tensors)
        opened._check(target)
        return opened

    def load(
        self,
        target: Decoder,
        backend: AttentionBackend,
        dtype: torch.dtype,
        progress: Callable[[float], None] = lambda share: None,
    ) -> FrozenHead:
        """The model with its weights in ``dtype`` on the target's device.

        ``progress`` is called with the share of its tensors that is in place, 0 … 1.
        """
        head = FrozenHead(self.config, self.reads, target, backend, dtype, target.embed.weight.device)
        targets = self._targets(head)
        with torch.no_grad():
            for done, (name, tensor) in enumerate(stream(targets, self.tensors, head.norm.weight.device), 1):
                targets[name].copy_(tensor)
                progress(done / len(targets))
        return head.eval()

    def _check(self, target: DecoderConfig) -> None:
        """Compare the tensors with what the head needs. Raises CheckpointError naming the first misfit."""
        backend = cast(AttentionBackend, None)  # measured, never run
        wide = Decoder(replace(target, num_layers=1, windows=(0,)), backend, 1, torch.float32, "meta")
        targets = self._targets(FrozenHead(self.config, [0] * len(self.reads), wide, backend, torch.float32, "meta"))
        for name, parameter in targets.items():
            if name not in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {name} {list(parameter.shape)} is missing.")
            check_tensor(name, self.tensors[name], parameter)
        for name in self.tensors.keys() - targets.keys() - {EMBED}:
            if not IGNORED.search(name):
                raise CheckpointError(f"{self.path}: tensor {name} is unexpected: it has no place in this drafter.")

    def _targets(self, head: FrozenHead) -> dict[str, torch.Tensor]:
        """The checkpoint's names of the head's own tensors -> the parameters, or rows of one, that they fill."""
        targets = {}
        for path, kind, parameter in shards(head):
            if path != "embed":
                number = re.search(r"\.(\d+)\.", path)
                theirs = NAMES[re.sub(r"\.\d+\.", ".*.", path)]
                targets[f"{theirs.replace('*', number[1] if number else '')}.{kind}"] = parameter
        if "lm_head.weight" not in self.tensors:
            targets[EMBED] = targets.pop("lm_head.weight")
        return targets


def _config(directory: Path, tensors: Mapping[str, TensorInfo], target: DecoderConfig) -> tuple[DecoderConfig, int]:
    """(shapes of the layers, how many), from the tensors; what they do not tell is the target's."""

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
    numbers = [
        int(m[1]) for m in (re.match(r"model\.layers\.(\d+)\.self_attn\.q_proj\.weight", n) for n in tensors) if m
    ]
    layer = "model.layers.0."
    heads = shape(f"{layer}self_attn.q_proj.weight")[0] // target.head_dim
    if heads % target.num_kv_heads:
        raise CheckpointError(
            f"{directory}: {heads} query heads of size {target.head_dim} cannot share the target's "
            f"{target.num_kv_heads} KV heads."
        )
    config = replace(
        target,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=shape(f"{layer}mlp.down_proj.weight")[1],
        qk_norm=f"{layer}self_attn.q_norm.weight" in tensors,
        qkv_bias=f"{layer}self_attn.q_proj.bias" in tensors,
        o_bias=f"{layer}self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{layer}mlp.down_proj.bias" in tensors,
    )
    return config, len(numbers)


def _reads(directory: Path, depth: int, target: DecoderConfig) -> tuple[tuple[int, ...], str]:
    """The target's last layer, or where config.json lists ``layer_types``, its last of each layer's type; and why."""
    file = directory / "config.json"
    types = json.loads(file.read_text()).get("layer_types") if file.is_file() else None
    if types is None:
        return (target.num_layers - 1,) * depth, "the target's last; config.json lists no layer_types"
    if len(types) != depth:
        raise CheckpointError(f"{file}: layer_types names {len(types)} layers, the weights hold {depth}.")
    reads = []
    for kind in types:
        same = [i for i, window in enumerate(target.windows) if (window > 0) == (kind == "sliding_attention")]
        if not same:
            raise CheckpointError(f"{file}: layer_types has {kind!r}, and no layer of the target is of that type.")
        reads.append(same[-1])
    return tuple(reads), "the target's last layer of each type that layer_types in config.json lists"
