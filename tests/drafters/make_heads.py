"""Draft heads in every layout found in the wild, and their papers' forward passes in plain PyTorch.

Tensors are kept here by the names that EAGLE's, SGLang's and vLLM's code give them, spelled out and not taken from the
loader, so that a wrong one is found. Forward passes run in float64, over all entries anew for every draft, numbered
from 0 as the papers have them: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu

from tests.models.make_mtp import norm, rotate
from unisono.models.config import DecoderConfig

Weights = dict[str, torch.Tensor]

THETA = 5000.0


@dataclass(frozen=True)
class Head:
    """A head as written: its directory, its tensors by speculators' names, its settings, and what it reads.

    layers: the inputs of these layers of the target; () means the target's final hidden state.
    """

    path: Path
    weights: Weights
    settings: dict[str, Any]
    layers: tuple[int, ...] = ()

    @property
    def ids(self) -> torch.Tensor | None:
        offsets = self.weights.get("d2t")
        return None if offsets is None else torch.arange(len(offsets)) + offsets


def layer_fields(target: DecoderConfig, **changes: Any) -> dict[str, Any]:
    """The fields of config.json that describe a head's decoder layer, in odd sizes."""
    fields = {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 70,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 512,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
    }
    return {**fields, **changes}


def random_weights(fields: dict[str, Any], inputs: int, fc: tuple[int, int], *, bias: bool = False) -> Weights:
    """A layer whose attention reads ``inputs`` features, and fc [rows, columns]."""
    generator = torch.Generator().manual_seed(5)
    hidden, width, head = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 1.5 * torch.randn(rows, columns, generator=generator) / columns**0.5

    w = {"fc.weight": matrix(*fc), "layers.0.self_attn.o_proj.weight": matrix(hidden, queries)}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        soft = 1 if name == "v_proj" else 0.5  # a sharp softmax would magnify roundings from step to step
        w[f"layers.0.self_attn.{name}.weight"] = soft * matrix(rows, inputs)
        if fields["model_type"] == "qwen2":
            w[f"layers.0.self_attn.{name}.bias"] = 0.3 * torch.randn(rows, generator=generator)
    if fields["model_type"] == "qwen3":
        w |= {f"layers.0.self_attn.{n}_norm.weight": scales(head, generator) for n in ("q", "k")}
    for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        w[f"layers.0.mlp.{name}_proj.weight"] = matrix(rows, columns)
    w["layers.0.post_attention_layernorm.weight"] = scales(hidden, generator)
    if bias:
        w["fc.bias"] = 0.3 * torch.randn(fc[0], generator=generator)
    return w


def scales(size: int, generator: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size, generator=generator)


def write(directory: Path, config: dict[str, Any], weights: Weights, *, pickled: bool = False) -> None:
    """Write a head: safetensors, or the pickle of the original repositories."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stored = {name: tensor.contiguous() for name, tensor in weights.items()}
    if pickled:
        torch.save(stored, directory / "pytorch_model.bin")
    else:
        save_file(stored, directory / "model.safetensors")


def make_eagle(directory: Path, target: DecoderConfig, embed: torch.Tensor | None = None, **changes: Any) -> Head:
    """An EAGLE-1 head. With ``embed`` as its repository has them: pickled, fc with a bias, the target's embedding."""
    fields = layer_fields(target, **changes)
    hidden = target.hidden_size
    weights = random_weights(fields, hidden, (hidden, 2 * hidden), bias=embed is not None)
    stored = weights if embed is None else {**weights, "embed_tokens.weight": embed}
    write(directory, {**fields, "architectures": ["LlamaForCausalLM"]}, stored, pickled=embed is not None)
    return Head(directory, weights, fields)


def eagle3_weights(
    fields: dict[str, Any], target: DecoderConfig, draft_vocab: int, settings: dict[str, Any]
) -> Weights:
    """An EAGLE-3 head's tensors; with an embedding of its own where its hidden size is not the target's."""
    generator = torch.Generator().manual_seed(6)
    hidden, vocab = fields["hidden_size"], target.vocab_size
    w = random_weights(fields, 2 * hidden, (hidden, 3 * target.hidden_size))
    w |= {f"layers.0.{name}.weight": scales(hidden, generator) for name in ("input_layernorm", "hidden_norm")}
    w["norm.weight"] = scales(hidden, generator)
    if settings.get("norm_before_fc"):
        w["input_norm.weight"] = scales(3 * target.hidden_size, generator)
    if settings.get("fc_norm"):
        w |= {f"fc_norm.{i}.weight": scales(target.hidden_size, generator) for i in range(3)}
    if hidden != target.hidden_size:
        w["embed_tokens.weight"] = torch.randn(vocab, hidden, generator=generator)
    if hidden != target.hidden_size or draft_vocab != vocab:
        w["lm_head.weight"] = 1.5 * torch.randn(draft_vocab, hidden, generator=generator) / hidden**0.5
    if draft_vocab != vocab:
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        w["d2t"] = kept - torch.arange(draft_vocab)
        w["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    return w


def make_eagle3(
    directory: Path, target: DecoderConfig, layers: tuple[int, ...], *, draft_vocab: int | None = None,
    aux: list[int] | None = None, pickled: bool = False, **changes: Any,
) -> Head:  # fmt: skip
    """An EAGLE-3 head in the original's layout, which SGLang shares.

    layers: what the head is to read, in inputs of layers; aux: what config.json says of it.
    """
    fields = layer_fields(target, **changes)
    weights = eagle3_weights(fields, target, draft_vocab or target.vocab_size, {})
    config = {**fields, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab}
    if aux is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": aux, "use_aux_hidden_state": True}
    write(directory, config, {n.replace("layers.0.", "midlayer."): t for n, t in weights.items()}, pickled=pickled)
    return Head(directory, weights, fields, layers)


def make_speculators(
    directory: Path, target: DecoderConfig, layers: tuple[int, ...], settings: dict[str, Any], *,
    draft_vocab: int | None = None, **changes: Any,
) -> Head:  # fmt: skip
    """An EAGLE-3 head in vLLM's layout; ``settings`` are its switches, ``layers`` are inputs of layers."""
    fields = layer_fields(target, **changes)
    weights = eagle3_weights(fields, target, draft_vocab or target.vocab_size, settings)
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": draft_vocab or target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "norm_before_residual": False,
        **settings,
        "transformer_layer_config": fields,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": [target.architecture]},
        },
    }
    write(directory, config, weights)
    return Head(directory, weights, {**fields, **settings}, layers)


# ---- the papers' forward passes ---------------------------------------------------------------------


def decoder_layer(
    w: Weights, fields: dict[str, Any], x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, …] is what attention reads; T entries that see each other causally. positions: see ``rotate``."""
    tokens, dim, eps = len(x), fields["head_dim"], fields["rms_norm_eps"]

    def heads(name: str) -> torch.Tensor:
        y = x @ w[f"layers.0.self_attn.{name}_proj.weight"].T
        y = (y + w.get(f"layers.0.self_attn.{name}_proj.bias", torch.zeros(()))).view(tokens, -1, dim)
        if f"layers.0.self_attn.{name}_norm.weight" in w:
            y = norm(y, w[f"layers.0.self_attn.{name}_norm.weight"], eps)
        y = y if name == "v" else rotate(y, THETA, torch.arange(tokens) if positions is None else positions)
        return y.transpose(0, 1).repeat_interleave(fields["num_attention_heads"] // y.shape[1], 0)

    causal = torch.ones(tokens, tokens).tril().log()
    scores = heads("q") @ heads("k").mT / dim**0.5 + causal
    attended = (scores.softmax(-1) @ heads("v")).transpose(0, 1).reshape(tokens, -1)
    x = residual + attended @ w["layers.0.self_attn.o_proj.weight"].T
    y = norm(x, w["layers.0.post_attention_layernorm.weight"], eps)
    y = silu(y @ w["layers.0.mlp.gate_proj.weight"].T) * (y @ w["layers.0.mlp.up_proj.weight"].T)
    return x + y @ w["layers.0.mlp.down_proj.weight"].T


def encode(head: Head, w: Weights, seen: torch.Tensor) -> torch.Tensor:
    """The head's input from the target: seen [T, layers · Ht], or the final hidden states unchanged."""
    if not head.layers:
        return seen
    eps = head.settings["rms_norm_eps"]
    if "input_norm.weight" in w:
        seen = norm(seen, w["input_norm.weight"], eps)
    if "fc_norm.0.weight" in w:
        parts = seen.chunk(len(head.layers), -1)
        seen = torch.cat([norm(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], -1)
    return seen @ w["fc.weight"].T


def forward(
    head: Head, w: Weights, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """The layer's outputs for T entries: embedding [T, H] of their tokens, hidden [T, H] of the positions before."""
    eps = head.settings["rms_norm_eps"]
    if not head.layers:
        x = torch.cat((embedding, hidden), -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
        return decoder_layer(w, head.settings, x, x, positions)
    normed = norm(hidden, w["layers.0.hidden_norm.weight"], eps)
    x = torch.cat((norm(embedding, w["layers.0.input_layernorm.weight"], eps), normed), -1)
    residual = normed if head.settings.get("norm_before_residual") else hidden
    return decoder_layer(w, head.settings, x, residual, positions)


def reference(
    head: Head, embed: torch.Tensor, lm_head: torch.Tensor, ids: Sequence[int], seen: torch.Tensor,
    drafts: Sequence[int], given: torch.Tensor | None = None, positions: torch.Tensor | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """(the hidden state handed on [H], logits [V']) of each draft step after ``ids``, given the drafts that were made.

    seen [len(ids) - 1, …]: what the target showed. embed, lm_head: the target's, for a head that has none. given
    [len(ids), H]: the target's embeddings, if they are not those of the ids. positions [len(ids) + len(drafts), …]: see
    ``rotate``.
    """
    w = {n: t.double() if t.is_floating_point() else t for n, t in head.weights.items()}
    embed, lm_head = w.get("embed_tokens.weight", embed.double()), w.get("lm_head.weight", lm_head.double())
    tokens, hidden, found = list(ids[1:]), encode(head, w, seen.double()), []
    for draft in drafts:
        embedding = embed[torch.tensor(tokens)]
        if given is not None:
            embedding[: len(ids) - 1] = given[1:]
        at = None if positions is None else positions[1 : len(tokens) + 1]
        out = forward(head, w, embedding, hidden, at)[-1]
        normed = norm(out, w["norm.weight"], head.settings["rms_norm_eps"]) if head.layers else out
        found.append((normed if head.settings.get("norm_output") else out, lm_head @ normed))
        tokens.append(draft)
        hidden = torch.cat((hidden, found[-1][0][None]))
    return found
