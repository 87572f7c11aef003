"""Draft heads that fill a whole block in one pass: DFlash, DFlash2 and DSpark.

Owns their forward passes and parameters (uninitialised until ``block/checkpoint.py`` fills them). Inference only;
called by the block drafters. A head is a short stack of decoder layers with two inputs:

* *context*: ``c = hidden_norm(fc(states of several target layers))`` of each committed token. Every layer stores
  ``rope(k_norm(W_k c))`` and ``W_v c`` at the token's own position: a pure function of the target, one product for all
  layers, and no attention (:meth:`BlockHead.write_context`).
* *block*: the last committed token and mask tokens after it, which run through the layers and see the context and one
  another (DFlash, arXiv 2602.06036). :meth:`BlockHead.forward` stores their keys and values at their own positions,
  where the context of the tokens that are committed later replaces them.

Shapes: T tokens, R rows, B tokens of a block, L layers, H the head's hidden size, Ht the target's, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from unisono.attention.base import KV, AttentionBackend, AttentionInputs, AttentionOptions, QuantisingAttention
from unisono.attention.context import ForwardContext
from unisono.distributed.columns import Columns
from unisono.kernels import rope_and_cache
from unisono.kernels.sampling.soft_cap import soft_cap
from unisono.kv.specs import Tree
from unisono.layers.activations import plain
from unisono.layers.embedding import Embedding
from unisono.layers.linear import Linear
from unisono.models.blocks.layers import Attention, DecoderLayer, build_layers
from unisono.models.config import DecoderConfig
from unisono.models.load.build import Builder


@dataclass(frozen=True)
class ConfidenceInputs:
    """Inputs of a confidence head besides a draft's output.

    markov: the Markov row of the token before. bias: True if the head has a bias.
    """

    markov: bool
    bias: bool


@dataclass(frozen=True)
class BlockConfig:
    """Configuration of a head. Sizes are element counts.

    layer: a decoder config with the head's layers; ``vocab_size`` there is the target's.
    target_hidden: Ht.
    draft_vocab: V'.
    aux_layers: the target's layers whose *inputs* are the context; an id equal to the number of
        layers means the last layer's output.
    block_size: tokens of a block in training, the last committed one included unless ``from_anchor``.
    mask_token: id of the mask token, in the target's vocabulary.
    causal: for each layer, True if a token of the block does not see those after it.
    from_anchor: the last committed token's row predicts the first draft, and so on; otherwise each mask predicts
        itself.
    embed_scale: factor of the embeddings. logit_scale, logit_cap: of the logits, in this order; cap 0: none.
    mask_embedding: the checkpoint stores the mask's embedding apart from the table.
    markov_rank: rank of DSpark's bias; 0: none.
    conv, selector_rank, selector_candidates: DFlash2: (taps, channels of a group) of the convolutions, and sizes of the
        selector; 0: none.
    """

    layer: DecoderConfig
    target_hidden: int
    draft_vocab: int
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    causal: tuple[bool, ...]
    from_anchor: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    mask_embedding: bool = False
    fc_bias: bool = False
    markov_rank: int = 0
    confidence: ConfidenceInputs | None = None
    conv: tuple[int, int] = (0, 0)
    selector_rank: int = 0
    selector_candidates: int = 0

    @property
    def max_drafts(self) -> int:
        """Largest k."""
        return self.block_size - (0 if self.from_anchor else 1)


@dataclass(frozen=True)
class WholeBlock:
    """An attention backend whose rows are blocks without an order: each token sees the row's last position.

    ``AttentionInputs.positions`` says what a token sees; rotation has its own positions. So a token that is given the
    position of its block's end sees the whole block, and no kernel has to know of blocks. A window is counted from the
    block's first token, for all of its tokens (as speculators trains it).
    """

    backend: AttentionBackend
    name = "whole block"

    @property
    def capturable(self) -> bool:
        return self.backend.capturable

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """See :class:`AttentionBackend`. Changes the positions of ``inputs``, which is a copy for this plan."""
        kv_len, positions = inputs.kv_len, inputs.positions
        if inputs.query_start is None:
            assert inputs.width is not None
            ends = positions.new_empty(len(kv_len), inputs.width)  # stored apart, as kernels read them
            inputs.positions = torch.sub(kv_len[:, None].expand_as(ends), 1, out=ends).flatten()
        else:
            each = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
            owners = torch.searchsorted(inputs.query_start[1:].contiguous(), each, right=True)
            ends = kv_len.index_select(0, owners.clamp_max(len(kv_len) - 1)) - 1
            inputs.positions = torch.where(positions < 0, positions, ends)
        self.backend.plan(inputs, self._window(inputs, window))

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        return self.backend.forward(q, kv, inputs, self._options(inputs, options))

    def quantises(self, head_dim: int, group: int) -> bool:
        """See :class:`QuantisingAttention`."""
        return isinstance(self.backend, QuantisingAttention) and self.backend.quantises(head_dim, group)

    def forward_fp8(
        self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`QuantisingAttention`."""
        return cast(QuantisingAttention, self.backend).forward_fp8(q, kv, inputs, self._options(inputs, options))

    def _options(self, inputs: AttentionInputs, options: AttentionOptions) -> AttentionOptions:
        """Options with the window of a whole block."""
        return replace(options, window=self._window(inputs, options.window))

    @staticmethod
    def _window(inputs: AttentionInputs, window: int) -> int:
        return window + (inputs.width or inputs.widest) - 1 if window > 0 else 0


class BlockHead(nn.Module):
    """The layers of a block drafter. Embedding and LM head are its own or the target's.

    ids [V'] int32: the target's token of each logit; None if they are the same.
    """

    def __init__(self, config: BlockConfig, embed: Embedding, lm_head: Linear, builder: Builder) -> None:
        super().__init__()
        self.config, self.settings = config.layer, config
        self.embed, self.lm_head = embed, lm_head
        self.ids: torch.Tensor | None = None
        inputs, hidden = len(config.aux_layers) * config.target_hidden, builder.hidden_size
        self.fc = builder.joined("fc", inputs, hidden, config.fc_bias, split_inputs=False)
        self.hidden_norm = builder.norm()
        norm = builder.norm()
        self.layers = self._build_layers(builder, norm)
        self.norm = norm
        self.mask_embedding: nn.Parameter | None = None
        if config.mask_embedding:
            row = torch.empty(hidden, dtype=builder.dtype, device=builder.device)
            self.mask_embedding = nn.Parameter(row, requires_grad=False)
        self.context: Linear | None = None
        for layer, causal in zip(self.layers, config.causal, strict=True):
            mixer = cast(Attention, layer.mixer)
            if not causal:
                mixer.backend = WholeBlock(mixer.backend)

    def _build_layers(self, builder: Builder, norm: nn.Module) -> nn.ModuleList:
        return build_layers(self.config.layers, builder, norm)

    def state_specs(self) -> Tree:
        """State specs of each layer, in a list."""
        return [cast(DecoderLayer, layer).state_specs() for layer in self.layers]

    def forward(self, token_ids: torch.Tensor, context: ForwardContext, state: Sequence[Any]) -> torch.Tensor:
        """One pass over blocks: token_ids [R · B] int32 -> the layers' normed outputs [R · B, H]."""
        stream = cast(DecoderLayer, self.layers[0]).begin(self.embedded(token_ids))
        for layer, kept in zip(self.layers, state, strict=True):
            stream = layer(stream, context, kept)
        return plain(stream.normed)

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, H] of token ids [T] int32, with the mask's own embedding if there is one."""
        x: torch.Tensor = self.embed(token_ids)
        if self.mask_embedding is not None:
            x = torch.where((token_ids == self.settings.mask_token)[:, None], self.mask_embedding, x)
        return x if self.settings.embed_scale == 1 else x * self.settings.embed_scale

    def write_context(
        self, seen: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, state: Sequence[Any]
    ) -> None:
        """Store every layer's keys and values of T committed tokens.

        seen [T, layers · Ht]: the target's states, concatenated in the order of ``aux_layers``. positions, slot_mapping
        [T] int32: -1 is padding, which is written to the padding page.
        """
        c = self.hidden_norm(self.fc(seen))
        rows = self._context_rows(plain(c))
        for layer, own, kept in zip(self.layers, rows, state, strict=True):
            mixer, kv = cast(Attention, layer.mixer), KV(*kept)
            norm = mixer.k_norm.weight if mixer.k_norm else None
            where = positions, slot_mapping, kv.k, kv.v
            rope_and_cache(
                own, norm, norm, mixer.eps, mixer.cos_sin, *where, 0, mixer.kv_heads, kv.k_scales, kv.v_scales
            )

    def _context_rows(self, c: torch.Tensor) -> Sequence[torch.Tensor]:
        """Keys and values of each layer before norm and rotation, from c [T, H]: L of [T, 2 · Hkv · D]."""
        if self.context is None:
            linears = [cast(Attention, layer.mixer).qkv for layer in self.layers]
            return [linear(c)[:, linear.held[0] :] for linear in linears]
        rows: torch.Tensor = self.context(c)
        return rows.view(c.shape[0], len(self.layers), -1).transpose(0, 1).contiguous().unbind()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | Columns:
        """hidden [M, H], normed -> logits [M, V'], not gathered."""
        logits = self.lm_head.columns(hidden)
        if isinstance(logits, Columns):
            return Columns(self._shaped(logits.own), logits.ranks)
        return self._shaped(logits)

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.settings.logit_scale == 1 else logits * self.settings.logit_scale
        return soft_cap(logits, self.settings.logit_cap) if self.settings.logit_cap > 0 else logits

    @torch.no_grad()
    def join_context(self) -> None:
        """Copy the key and value rows of all layers into one linear layer, after the weights are loaded.

        Weights in blocks that heads do not fill are left where they are: each layer then computes its own.
        """
        linears = [cast(Attention, layer.mixer).qkv for layer in self.layers]
        first = linears[0]
        tensors = first.format.tensors(first.dtype)
        sizes = [size for linear in linears for size in linear.held]
        whole = all(size % min(stored.outputs, 2**31) == 0 for stored in tensors.values() for size in sizes)
        if len({linear.format for linear in linears}) > 1 or not whole:
            return
        outputs = {str(number): sum(linear.held[1:]) for number, linear in enumerate(linears)}
        bias = first.bias is not None
        joined = Linear(first.inputs, outputs, bias, first.dtype, first.weight.device, first.format)
        kinds = {kind: stored.outputs for kind, stored in tensors.items() if stored.dtype is not None}
        for kind, each in {**kinds, **({"bias": 1} if bias else {})}.items():
            parts = [getattr(linear, kind)[linear.held[0] // each :] for linear in linears]
            getattr(joined, kind).copy_(torch.cat(parts))
        self.context = joined.eval()
