"""Block drafters in the layouts found in the wild, and their papers' forward passes in plain PyTorch.

Tensors are named here as z-lab's, DeepSeek's and speculators' code name them, spelled out and not taken from the
loader. Forward passes run in float64 over the whole text anew: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu

from tests.drafters.make_heads import THETA, Weights, layer_fields, scales, write
from tests.models.make_mtp import norm, rotate
from unisono.models.config import DecoderConfig

MASK = 7
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Block:
    """A head as written.

    layers: the inputs of these layers of the target are its context. masks: for each layer, (window or 0, causal).
    anchor: the last token's row predicts the first draft. extra: context positions that a window sees beyond the
    block's first token's own.
    """

    path: Path
    weights: Weights
    settings: dict[str, Any]
    layers: tuple[int, ...]
    masks: tuple[tuple[int, bool], ...]
    anchor: bool = False
    extra: int = 0

    @property
    def ids(self) -> torch.Tensor | None:
        offsets = self.weights.get("d2t")
        return None if offsets is None else torch.arange(len(offsets)) + offsets


def block_weights(
    fields: dict[str, Any], target: DecoderConfig, parts: int, draft_vocab: int, markov_rank: int = 0
) -> Weights:
    """Random tensors of a head; with an embedding of its own where its hidden size is not the target's."""
    generator = torch.Generator().manual_seed(11)
    hidden, width, head = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head

    def matrix(rows: int, columns: int, factor: float = 1.5) -> torch.Tensor:
        return factor * torch.randn(rows, columns, generator=generator) / columns**0.5

    w = {"fc.weight": matrix(hidden, parts * target.hidden_size)}
    for i in range(fields["num_hidden_layers"]):
        at = f"layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden), ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden), ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", width, hidden), ("mlp.up_proj", width, hidden), ("mlp.down_proj", hidden, width),
        ):  # fmt: skip
            w[f"{at}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{at}{name}.weight"] = scales(hidden, generator)
        if fields["model_type"] == "qwen3":
            w |= {f"{at}self_attn.{n}_norm.weight": scales(head, generator) for n in ("q", "k")}
    w |= {"hidden_norm.weight": scales(hidden, generator), "norm.weight": scales(hidden, generator)}
    if hidden != target.hidden_size:
        w["embed_tokens.weight"] = torch.randn(target.vocab_size, hidden, generator=generator)
    if hidden != target.hidden_size or draft_vocab != target.vocab_size:
        w["lm_head.weight"] = matrix(draft_vocab, hidden)
    if draft_vocab != target.vocab_size:
        kept = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab].sort().values
        w["d2t"] = kept - torch.arange(draft_vocab)
        w["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    if markov_rank:
        w["markov_head.markov_w1.weight"] = matrix(target.vocab_size, markov_rank, 3.0)
        w["markov_head.markov_w2.weight"] = matrix(draft_vocab, markov_rank, 3.0)
        w["confidence_head.proj.weight"] = matrix(1, hidden + markov_rank)
        w["confidence_head.proj.bias"] = torch.zeros(1)
    return w


def block_fields(target: DecoderConfig, **changes: Any) -> dict[str, Any]:
    return layer_fields(target, **{"model_type": "qwen3", "num_hidden_layers": 2, **changes})


def make_dflash(
    directory: Path, target: DecoderConfig, outputs: tuple[int, ...] = (0, 2), *, block_size: int = 8,
    nested: dict[str, Any] | None = None, top: dict[str, Any] | None = None,
    masks: tuple[tuple[int, bool], ...] = ((0, False), (0, False)), **changes: Any,
) -> Block:  # fmt: skip
    """A DFlash head as published: ``outputs`` are the layers whose outputs it reads."""
    fields = block_fields(target, **changes)
    weights = block_weights(fields, target, len(outputs), target.vocab_size)
    config = {
        **fields, "architectures": ["DFlashDraftModel"], "block_size": block_size,
        "num_target_layers": target.num_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(outputs), **(nested or {})}, **(top or {}),
    }  # fmt: skip
    write(directory, config, weights)
    return Block(directory, weights, fields, tuple(i + 1 for i in outputs), masks)


def make_speculators_block(
    directory: Path, target: DecoderConfig, layers: tuple[int, ...] = (1, 3), *, kind: str = "dflash",
    draft_vocab: int | None = None, settings: dict[str, Any] | None = None, anchor: bool = False,
    masks: tuple[tuple[int, bool], ...] = ((0, False), (0, False)), markov_rank: int = 0, extra: int = 0,
    **changes: Any,
) -> Block:  # fmt: skip
    """A head in speculators' layout: ``layers`` are inputs of layers."""
    fields = block_fields(target, **changes)
    weights = block_weights(fields, target, len(layers), draft_vocab or target.vocab_size, markov_rank)
    config = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": 8,
        "draft_vocab_size": draft_vocab or target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "aux_hidden_state_layer_ids": list(layers),
        "mask_token_id": MASK,
        "transformer_layer_config": fields,
        **({"markov_rank": markov_rank, "markov_head_type": "vanilla"} if markov_rank else {}),
        **(settings or {}),
    }
    write(directory, config, weights)
    return Block(directory, weights, fields, layers, masks, anchor, extra)


def make_dspark(directory: Path, target: DecoderConfig, outputs: tuple[int, ...] = (0, 2), **changes: Any) -> Block:
    """A DSpark head as published: fields at the top level, the last token's row predicts the first draft."""
    fields = block_fields(target, **changes)
    weights = block_weights(fields, target, len(outputs), target.vocab_size, markov_rank=6)
    config = {
        **fields, "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": MASK,
        "target_layer_ids": list(outputs), "num_target_layers": target.num_layers, "markov_rank": 6,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    write(directory, config, weights)
    masks = ((0, False),) * fields["num_hidden_layers"]
    return Block(directory, weights, fields, tuple(i + 1 for i in outputs), masks, anchor=True)


CONV, SELECTOR = (2, 2), (5, 9)
"""(taps, channels of a group) and (rank, candidates) of DFlash2 heads."""


def make_dflash2(
    directory: Path, target: DecoderConfig, outputs: tuple[int, ...] = (0, 2), *, suffix: str = "", **changes: Any
) -> Block:
    """A DFlash2 head as published; suffix ".weight": the codebooks' names in speculators."""
    (taps, group), (rank, candidates) = CONV, SELECTOR
    fields = block_fields(target, **changes)
    weights, hidden = block_weights(fields, target, len(outputs), target.vocab_size), fields["hidden_size"]
    generator = torch.Generator().manual_seed(12)
    for i in range(fields["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            base = 0.3 * torch.randn(2, taps, hidden, generator=generator)
            base[:, 0] += 1
            weights[f"layers.{i}.{name}.base_kernel"] = base
            weights[f"layers.{i}.{name}.kernel_projection.weight"] = (
                0.3 * torch.randn(2 * taps * hidden // group, hidden, generator=generator) / hidden**0.5
            )
    for name in ("predecessor_codebook", "successor_codebook"):
        codes = torch.randn(target.vocab_size, rank, generator=generator)
        weights[f"candidate_selector.{name}{suffix}"] = codes
    weights["candidate_selector.hidden_projection.weight"] = (
        torch.randn(rank, hidden, generator=generator) / hidden**0.5
    )
    nested = {
        "mask_token_id": MASK, "target_layer_ids": list(outputs), "conv_kernel_size": taps, "conv_group_size": group,
        "selector_rank": rank, "selector_top_k": candidates,
    }  # fmt: skip
    top = {"block_size": 8, "is_causal": False, "architectures": ["DFlash2DraftModel"]}
    write(directory, {**fields, **top, "dflash_config": nested}, weights)
    masks = ((0, False),) * fields["num_hidden_layers"]
    if suffix:
        weights = {name.removesuffix(suffix) if "codebook" in name else name: t for name, t in weights.items()}
    return Block(directory, weights, fields, tuple(i + 1 for i in outputs), masks)


# ---- the papers' forward passes ---------------------------------------------------------------------


def backbone(
    block: Block, w: Weights, embed: torch.Tensor, ids: Sequence[int], seen: torch.Tensor, k: int
) -> torch.Tensor:
    """The normed outputs [k, H] that the drafts after ``ids`` are read from. seen [len(ids) - 1, layers · Ht]."""
    fields, eps, past = block.settings, block.settings["rms_norm_eps"], len(ids) - 1
    size = k if block.anchor else k + 1
    context = norm(seen @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embed[torch.tensor([ids[-1], *[MASK] * (size - 1)])]
    at = torch.arange(past + size)
    for i, (window, causal) in enumerate(block.masks):
        own = {n.removeprefix(f"layers.{i}."): t for n, t in w.items() if n.startswith(f"layers.{i}.")}

        def heads(name: str, y: torch.Tensor, positions: torch.Tensor, own: Weights = own) -> torch.Tensor:
            y = (y @ own[f"self_attn.{name}_proj.weight"].T).view(len(y), -1, fields["head_dim"])
            if f"self_attn.{name}_norm.weight" in own:
                y = norm(y, own[f"self_attn.{name}_norm.weight"], eps)
            y = y if name == "v" else rotate(y, THETA, positions)
            return y.transpose(0, 1).repeat_interleave(fields["num_attention_heads"] // y.shape[1], 0)

        h = norm(x, own["input_layernorm.weight"], eps)
        h, after = convolved(own, "attention_conv", h)
        both = torch.cat((context, h))
        queries, keys, values = heads("q", h, at[past:]), heads("k", both, at), heads("v", both, at)
        visible = torch.ones(size, past + size, dtype=torch.bool)
        if causal:
            visible &= at <= at[past:, None]
        if window:
            since = at[past:, None] if causal else past
            visible &= at > since - window - (0 if causal else block.extra)
        scores = (queries @ keys.mT / fields["head_dim"] ** 0.5).masked_fill(~visible, -torch.inf)
        out = (scores.softmax(-1) @ values).transpose(0, 1).reshape(size, -1)
        x = x + after(out @ own["self_attn.o_proj.weight"].T)
        h = norm(x, own["post_attention_layernorm.weight"], eps)
        h, after = convolved(own, "mlp_conv", h)
        h = silu(h @ own["mlp.gate_proj.weight"].T) * (h @ own["mlp.up_proj.weight"].T)
        x = x + after(h @ own["mlp.down_proj.weight"].T)
    return norm(x, w["norm.weight"], eps)[size - k :]


def convolved(own: Weights, name: str, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """(x [B, H] after the first convolution, the second one); both unchanged in a layer that has none."""
    if f"{name}.base_kernel" not in own:
        return x, lambda y: y
    base, (taps, group) = own[f"{name}.base_kernel"], CONV
    terms = (x @ own[f"{name}.kernel_projection.weight"].T).view(len(x), 2, taps, -1).repeat_interleave(group, -1)

    def side(number: int, y: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(y)
        for t in range(len(y)):
            for tap in range(min(taps, t + 1)):
                out[t] += (base[number, tap] + terms[t, number, tap]) * y[t - tap]
        return out

    return side(0, x), lambda y: side(1, y)


def reference(
    block: Block, embed: torch.Tensor, lm_head: torch.Tensor, ids: Sequence[int], seen: torch.Tensor,
    drafts: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(logits, scores) [k, V'] of the drafts after ``ids``: a greedy draft has the best score.

    Scores of DSpark and DFlash2 are those given the drafts that were made before.
    """
    w = {n: t.double() if t.is_floating_point() else t for n, t in block.weights.items()}
    hidden = backbone(block, w, w.get("embed_tokens.weight", embed.double()), ids, seen.double(), len(drafts))
    logits = scores = hidden @ w.get("lm_head.weight", lm_head.double()).T
    before = torch.tensor([ids[-1], *drafts[:-1]])
    if "markov_head.markov_w1.weight" in w:
        scores = logits + w["markov_head.markov_w1.weight"][before] @ w["markov_head.markov_w2.weight"].T
    if "candidate_selector.predecessor_codebook" in w:
        left = w["candidate_selector.predecessor_codebook"][before]
        left = left * (hidden @ w["candidate_selector.hidden_projection.weight"].T)
        pairs = logits + left @ w["candidate_selector.successor_codebook"].T
        known = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(SELECTOR[1]).indices, True)
        scores = pairs.masked_fill(~known, -torch.inf)
    return logits, scores
