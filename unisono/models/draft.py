"""Draft heads that read the target's hidden states: EAGLE-1/2 and EAGLE-3, one decoder layer each.

Owns their forward passes and parameters (uninitialised until ``draft_checkpoint`` fills them). Inference only;
drafters call them. A head's entry at position p joins the token at p with the hidden state of p - 1 and
predicts p + 1 (Li et al., arXiv 2401.15077, 2406.16858 and 2503.01840). The papers number entries from 0, here they
have their token's position: rotary attention sees differences only.

What drafters ask of a head is the same for both::

    encode(seen)                                   what the target showed, as the head takes it      [T, H]
    forward(token_ids, hidden, inputs, kv, ends)   one pass, writes T keys and values        [T, H] or [E, H]
    finish(out)                                    (hidden state for the next step, logits)

Shapes: T tokens in a pass, E of them whose output is read (``attention.base.LastTokens``), H the head's hidden size,
Ht the target's, V' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from unisono.attention.base import AttentionBackend, AttentionInputs, LastTokens
from unisono.kernels.concat_norm import concat_norm
from unisono.layers.embedding import Embedding
from unisono.layers.linear import Linear, QKVLinear
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import RMSNorm
from unisono.layers.rotary import rotary_table
from unisono.models.config import DecoderConfig
from unisono.models.decoder import Attention, DecoderLayer
from unisono.state.specs import Tree

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DraftConfig:
    """What a head is. Sizes are element counts.

    layer: its one decoder layer; ``vocab_size`` there is the target's. target_hidden: Ht. draft_vocab: V'.
    fc_bias, input_norm: EAGLE-1: whether fc has a bias, and the layer a norm on its input (the original has none).
    aux_layers: EAGLE-3: the target's layers whose *inputs* the head reads; the number of layers names the last
        one's output.
    norm_before_residual: the residual is the normed hidden state. norm_before_fc: one norm over all that fc reads;
    fc_norm: one norm for each layer's part. norm_output: the next step reads the normed output.
    """

    layer: DecoderConfig
    target_hidden: int
    draft_vocab: int
    fc_bias: bool = False
    input_norm: bool = False
    aux_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class DraftBlock(nn.Module):
    """A pass of any head, over what it makes of its inputs; by default through a decoder layer ``layer``."""

    backend: AttentionBackend
    layer: nn.Module
    cos_sin: torch.Tensor

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        inputs: AttentionInputs,
        kv: KV,
        last_tokens: LastTokens | None = None,
    ) -> torch.Tensor:
        """token_ids [T] i32, hidden [T, H] of the positions before -> [T, H], with ``last_tokens`` [E, H]."""
        self.backend.plan(inputs if last_tokens is None else last_tokens.inputs)
        return self.block(self.joined(token_ids, hidden), hidden, inputs, kv, last_tokens)

    def state_specs(self) -> Tree:
        """Keys and values."""
        return cast(DecoderLayer, self.layer).attention.state_specs()

    def joined(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the block reads: [T, H], or as wide as it takes."""
        raise NotImplementedError

    def block(
        self, x: torch.Tensor, hidden: torch.Tensor, inputs: AttentionInputs, kv: KV, last_tokens: LastTokens | None
    ) -> torch.Tensor:
        """x as ``joined`` made it -> [T, H], with ``last_tokens`` [E, H]."""
        layer = cast(DecoderLayer, self.layer)
        return layer(x, layer.attention_norm(x), None, self.cos_sin, inputs, *kv, last_tokens)[0]


class DraftHead(DraftBlock):
    """What both heads have: embedding and LM head, own or the target's, and the rotary table.

    ids [V'] int32 names the target's token of each logit; None where they are the same.
    """

    def __init__(
        self,
        config: DraftConfig,
        embed: Embedding,
        lm_head: Linear,
        backend: AttentionBackend,
        max_positions: int,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        layer = config.layer
        self.config, self.backend = layer, backend
        self.embed, self.lm_head = embed, lm_head
        self.ids: torch.Tensor | None = None
        self.cos_sin = rotary_table(layer.hf_config, layer.head_dim, max_positions, device)


class EagleHead(DraftHead):
    """EAGLE-1/2: an ordinary decoder layer over ``fc([embedding, hidden])``; the target's LM head reads its output.

    hidden is the target's after its final norm, which the output stands in for at the next step.
    """

    def __init__(
        self,
        config: DraftConfig,
        embed: Embedding,
        lm_head: Linear,
        backend: AttentionBackend,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(config, embed, lm_head, backend, max_positions, device)
        layer = config.layer
        self.fc = Linear(2 * layer.hidden_size, layer.hidden_size, config.fc_bias, dtype, device)
        self.layer = DecoderLayer(layer, layer.windows[0], backend, dtype, device)
        if not config.input_norm:
            self.layer.attention_norm = nn.Identity()  # type: ignore[assignment]

    def encode(self, seen: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as they are: [T, H]."""
        return seen

    def joined(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat((self.embed(token_ids), hidden), dim=1))

    def finish(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out [R, H] -> (hidden state for the next step [R, H], logits [R, V'])."""
        return out, self.lm_head(out)


class _WideAttention(Attention):
    """Attention over an input of 2 H: embedding and hidden state side by side."""

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(config, config.windows[0], backend, dtype, device)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = QKVLinear(2 * config.hidden_size, heads, kv_heads, dim, config.qkv_bias, dtype, device)


class _WideLayer(nn.Module):
    """A decoder layer whose attention reads the normed embedding beside the normed hidden state."""

    def __init__(
        self, config: DraftConfig, backend: AttentionBackend, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        layer = config.layer
        hidden, eps = layer.hidden_size, layer.rms_eps
        self.norm_before_residual = config.norm_before_residual
        self.attention_norm = RMSNorm(hidden, eps, dtype, device)  # of the embedding
        self.hidden_norm = RMSNorm(hidden, eps, dtype, device)
        self.attention = _WideAttention(layer, backend, dtype, device)
        self.mlp_norm = RMSNorm(hidden, eps, dtype, device)
        self.mlp = GatedMLP(hidden, layer.intermediate_size, layer.mlp_bias, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        inputs: AttentionInputs,
        kv: KV,
        last_tokens: LastTokens | None,
    ) -> torch.Tensor:
        residual = x[:, hidden.shape[1] :] if self.norm_before_residual else hidden
        residual = residual if last_tokens is None else last_tokens.select(residual)
        attended = self.attention(x, cos_sin, inputs, *kv, last_tokens)
        x, normed = self.attention.o.then_norm(attended, residual, self.mlp_norm)
        return self.mlp(normed, x)


class Eagle3Head(DraftHead):
    """EAGLE-3: a wide decoder layer over the states of several of the target's layers, a norm and an LM head.

    The next step reads the layer's output before the norm, or with ``norm_output`` after it.
    """

    def __init__(
        self,
        config: DraftConfig,
        embed: Embedding,
        lm_head: Linear,
        backend: AttentionBackend,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(config, embed, lm_head, backend, max_positions, device)
        hidden, eps = config.layer.hidden_size, config.layer.rms_eps
        parts, part = len(config.aux_layers), config.target_hidden
        self.norm_output = config.norm_output
        self.input_norm = RMSNorm(parts * part, eps, dtype, device) if config.norm_before_fc else None
        norms = [RMSNorm(part, eps, dtype, device) for _ in range(parts)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = Linear(parts * part, hidden, config.fc_bias, dtype, device)
        self.layer = _WideLayer(config, backend, dtype, device)
        self.norm = RMSNorm(hidden, eps, dtype, device)

    def encode(self, seen: torch.Tensor) -> torch.Tensor:
        """seen [T, layers · Ht], side by side in the order of ``aux_layers`` -> [T, H]."""
        if self.input_norm is not None:
            seen = self.input_norm(seen)
        if self.fc_norm is not None:
            parts = seen.chunk(len(self.fc_norm), dim=1)
            seen = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=1)
        return self.fc(seen)

    def joined(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Both normed, side by side: [T, 2 H]."""
        layer = cast(_WideLayer, self.layer)
        weights = layer.attention_norm.weight, layer.hidden_norm.weight
        return concat_norm(token_ids, self.embed.weight, hidden, *weights, layer.hidden_norm.eps)

    def block(
        self, x: torch.Tensor, hidden: torch.Tensor, inputs: AttentionInputs, kv: KV, last_tokens: LastTokens | None
    ) -> torch.Tensor:
        return self.layer(x, hidden, self.cos_sin, inputs, kv, last_tokens)

    def finish(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out [R, H] -> (hidden state for the next step [R, H], logits [R, V'])."""
        normed = self.norm(out)
        return normed if self.norm_output else out, self.lm_head(normed)
