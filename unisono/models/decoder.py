"""The decoder that all families share: pre-norm blocks of rotary attention and a gated MLP.

Owns the forward pass and its parameters (uninitialised until the loader fills them). Inference only. The
loader builds it; the engine and drafters call it. Shapes: T tokens in a pass, H hidden, V vocabulary,
Hq/Hkv query/kv heads, D head dim, NP pages, P page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from unisono.attention.base import AttentionBackend, AttentionInputs, LastTokens
from unisono.kernels import rope_and_cache
from unisono.layers.embedding import Embedding
from unisono.layers.linear import Linear, QKVLinear
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import RMSNorm
from unisono.layers.rotary import rotary_table
from unisono.models.config import DecoderConfig
from unisono.state.specs import PAGE_SIZE, Paged


class Attention(nn.Module):
    """Merged qkv; optional head norms, rotary and cache write in one op; paged attention. The layer applies ``o``."""

    def __init__(
        self,
        config: DecoderConfig,
        window: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, heads, kv_heads, dim = (
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.config, self.window, self.backend = config, window, backend
        self.qkv = QKVLinear(hidden, heads, kv_heads, dim, config.qkv_bias, dtype, device)
        self.o = Linear(heads * dim, hidden, config.o_bias, dtype, device)
        self.q_norm = RMSNorm(dim, config.rms_eps, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_eps, dtype, device) if config.qk_norm else None

    def state_specs(self) -> tuple[Paged, Paged]:
        """Keys and values."""
        weight = self.qkv.weight
        spec = Paged((self.config.num_kv_heads, PAGE_SIZE, self.config.head_dim), weight.dtype, self.window)
        return spec, spec

    def forward(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        inputs: AttentionInputs,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        last_tokens: LastTokens | None = None,
    ) -> torch.Tensor:
        """x [T, H] -> [T, Hq · D], which ``o`` reads, or with ``last_tokens`` [E, Hq · D]; writes T keys and values."""
        config = self.config
        q = rope_and_cache(
            self.qkv(x),
            self.q_norm.weight if self.q_norm else None,
            self.k_norm.weight if self.k_norm else None,
            config.rms_eps,
            cos_sin,
            inputs.positions,
            inputs.slot_mapping,
            k_cache,
            v_cache,
            config.num_heads,
            config.num_kv_heads,
        )
        if last_tokens is not None:
            q, inputs = last_tokens.select(q), last_tokens.inputs
        return self.backend.forward(q, k_cache, v_cache, inputs, config.scale, self.window)


class DecoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; each sum, and the norm that reads it, is fused with the
    product before it."""

    def __init__(
        self,
        config: DecoderConfig,
        window: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype, device)
        self.attention = Attention(config, window, backend, dtype, device)
        self.mlp_norm = RMSNorm(hidden, eps, dtype, device)
        self.mlp = GatedMLP(hidden, config.intermediate_size, config.mlp_bias, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        after: RMSNorm | None,
        cos_sin: torch.Tensor,
        inputs: AttentionInputs,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        last_tokens: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] and ``attention_norm`` of it -> (the layer's output [T, H], ``after`` of it).

        after: the next layer's norm or the model's last, None for none. ends: of these tokens only, [E, H]. Writes the
        T tokens' keys and values.
        """
        attended = self.attention(normed, cos_sin, inputs, k_cache, v_cache, last_tokens)
        x = x if last_tokens is None else last_tokens.select(x)
        x, normed = self.attention.o.then_norm(attended, x, self.mlp_norm)
        return self.mlp.down.then_norm(self.mlp.inner(normed), x, after)


class Decoder(nn.Module):
    """A whole model on one device, in one dtype, reading up to ``max_positions`` positions.

    With tied embeddings ``lm_head.weight`` *is* ``embed.weight``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, vocab, tied = config.hidden_size, config.vocab_size, config.tie_embeddings
        self.config, self.backend = config, backend
        self.embed = Embedding(vocab, hidden, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(config, window, backend, dtype, device) for window in config.windows)
        self.norm = RMSNorm(hidden, config.rms_eps, dtype, device)
        self.lm_head = Linear(hidden, vocab, False, dtype, "meta" if tied else device)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.cos_sin = rotary_table(config.hf_config, config.head_dim, max_positions, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        inputs: AttentionInputs,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        aux_layers: Sequence[int] = (),
        overriding: tuple[torch.Tensor, torch.Tensor] | None = None,
        last_tokens: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run T tokens through all layers and the final norm, writing their keys and values.

        token_ids [T] i32: in range, padding tokens too. inputs: where each token is and what it sees; its
        plan is made here. kv: per layer ``(k_cache, v_cache)``, each [NP, Hkv, P, D]. Returns hidden [T, H], and with
        ``aux_layers`` the inputs of those layers side by side, [T, len(aux_layers) · H] (the number of layers
        names the last one's output), else None. overriding: embeddings [T, H] of the model's dtype, and a flag [T] i32
        of the tokens that have them instead of their ids' own. ends: the only tokens whose output is read: hidden
        [E, H]; ``aux_layers`` may not name the last layer's output then.
        """
        self.backend.plan(inputs)
        if last_tokens is not None:
            self.backend.plan(last_tokens.inputs)
        x = self.embed(token_ids)
        if overriding is not None:
            embeddings, overridden = overriding
            x = torch.where(overridden[:, None] != 0, embeddings, x)
        seen = dict.fromkeys(aux_layers, x)  # only these are kept alive
        norms: list[RMSNorm] = [*(cast(DecoderLayer, layer).attention_norm for layer in self.layers), self.norm]
        normed = norms[0](x)
        for number, (layer, (k_cache, v_cache)) in enumerate(zip(self.layers, kv, strict=True)):
            if number in seen:
                seen[number] = x
            read = last_tokens if number + 1 == len(self.layers) else None
            x, normed = layer(x, normed, norms[number + 1], self.cos_sin, inputs, k_cache, v_cache, read)
        if len(self.layers) in seen:
            seen[len(self.layers)] = x
        aux = torch.cat([seen[number] for number in aux_layers], dim=1) if aux_layers else None
        return normed, aux

    def state_specs(self) -> list[tuple[Paged, Paged]]:
        """Keys and values of each layer."""
        return [cast(DecoderLayer, layer).attention.state_specs() for layer in self.layers]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, H] -> logits [M, V], in the model's dtype."""
        return self.lm_head(hidden)
