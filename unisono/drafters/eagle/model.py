"""Draft heads over the target's hidden states: EAGLE-1/2 and EAGLE-3, one decoder layer each.

Owns their forward passes and parameters (uninitialised until ``eagle/checkpoint.py`` fills them). Inference only;
called by drafters. A head's entry at position p joins the token at p with the hidden state of p - 1 and predicts p + 1
(Li et al., arXiv 2401.15077, 2406.16858 and 2503.01840). The papers number entries from 0; here an entry has its
token's position, since rotary attention depends on differences only.

All heads, and the modules of ``mtp``, have the same interface::

    encode(seen)                                 the target's hidden states as the head's input    [T, H]
    forward(token_ids, hidden, context, state, overriding)   one pass, writes T keys and values    [T, H] or [E, H]
    finish(out)                                  (hidden state for the next step, logits)
    state_specs()                                state of its layer

Shapes: T tokens in a pass, E of them whose output is read (``attention.base.LastTokens``), H the head's hidden size, Ht
the target's, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.distributed.columns import Columns
from unisono.kernels.norm.concat_norm import concat_norm
from unisono.kv.specs import Tree
from unisono.layers.embedding import Embedding
from unisono.layers.linear import Linear
from unisono.layers.norm import RMSNorm
from unisono.models.blocks.embedding_overrides import Overriding, merged
from unisono.models.blocks.layers import DecoderLayer, LayerSpec, Stream
from unisono.models.config import DecoderConfig
from unisono.models.load.build import Builder


@dataclass(frozen=True)
class DraftConfig:
    """Configuration of a head. Sizes are element counts.

    layer: a decoder config with its one layer; ``vocab_size`` there is the target's.
    target_hidden: Ht.
    draft_vocab: V'.
    fc_bias, input_norm: EAGLE-1: fc has a bias; the layer has a norm on its input (the original has none).
    aux_layers: EAGLE-3: the target's layers whose *inputs* the head reads; an id equal to the number
        of layers means the last layer's output.
    norm_before_residual: the residual is the normed hidden state.
    norm_before_fc: one norm over the whole input of fc.
    fc_norm: one norm per layer's part of the input of fc.
    norm_output: the next step reads the normed output.
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
    """Base of all heads: a pass through the decoder layer. Embedding and LM head are its own or the target's.

    ids [V'] int32: the target's token of each logit; None if they are the same. target_hidden: Ht; None: H.
    """

    layer: DecoderLayer

    def __init__(
        self, config: DecoderConfig, embed: Embedding, lm_head: Linear, target_hidden: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.target_hidden = target_hidden or config.hidden_size
        self.embed, self.lm_head = embed, lm_head
        self.ids: torch.Tensor | None = None

    def state_specs(self) -> Tree:
        """State of the layer: keys and values."""
        return self.layer.state_specs()

    def encode(self, seen: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states [T, H] unchanged."""
        return seen

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
        state: Sequence[torch.Tensor],
        overriding: Sequence[Overriding] = (),
    ) -> torch.Tensor:
        """token_ids [T] i32, hidden [T, H] of the positions before -> [T, H], or [E, H] with last tokens.

        overriding: the target's embeddings in place of those of some token ids; ignored unless :attr:`sees_embeddings`.
        """
        stream = self.begin(token_ids, hidden, overriding if self.sees_embeddings else ())
        out: Stream = self.layer(stream, context, state)
        return out.x

    @property
    def sees_embeddings(self) -> bool:
        """True if the target's embeddings have the head's width, so that they can replace its own."""
        return self.embed.weight.shape[1] == self.target_hidden

    def begin(self, token_ids: torch.Tensor, hidden: torch.Tensor, overriding: Sequence[Overriding] = ()) -> Stream:
        """Input of the layer."""
        raise NotImplementedError

    def embedded(self, token_ids: torch.Tensor, overriding: Sequence[Overriding]) -> torch.Tensor:
        """Embeddings [T, H] of token ids, with overrides."""
        return merged(self.embed(token_ids), overriding)


class EagleHead(DraftBlock):
    """EAGLE-1/2: an ordinary decoder layer over ``fc([embedding, hidden])``; the target's LM head reads its output.

    hidden: the target's after its final norm; the layer's output takes its place at the next step.
    """

    def __init__(self, config: DraftConfig, embed: Embedding, lm_head: Linear, builder: Builder) -> None:
        super().__init__(config.layer, embed, lm_head, config.target_hidden)
        hidden = builder.hidden_size
        self.fc = builder.joined("fc", 2 * hidden, hidden, config.fc_bias, split_inputs=False)
        self.layer = config.layer.layers[0].build(builder.at("layer"))
        if not config.input_norm:
            self.layer.mixer_norm = nn.Identity()

    def begin(self, token_ids: torch.Tensor, hidden: torch.Tensor, overriding: Sequence[Overriding] = ()) -> Stream:
        return self.layer.begin(self.fc(torch.cat((self.embedded(token_ids, overriding), hidden), dim=1)))

    def finish(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | Columns]:
        """out [R, H] -> (hidden state for the next step [R, H], logits [R, V'], not gathered)."""
        return out, self.lm_head.columns(out)


class Eagle3Head(DraftBlock):
    """EAGLE-3: a decoder layer over the states of several target layers, a norm and an LM head.

    The layer's mixer reads the normed embedding beside the normed hidden state. The next step reads the layer's output
    before the norm, or after it with ``norm_output``.
    """

    def __init__(self, config: DraftConfig, embed: Embedding, lm_head: Linear, builder: Builder) -> None:
        super().__init__(config.layer, embed, lm_head, config.target_hidden)
        parts, part = len(config.aux_layers), config.target_hidden
        self.norm_output, self.norm_before_residual = config.norm_output, config.norm_before_residual
        self.input_norm = builder.norm(parts * part) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(builder.norm(part) for _ in range(parts)) if config.fc_norm else None
        self.fc = builder.joined("fc", parts * part, builder.hidden_size, config.fc_bias, split_inputs=False)
        self.hidden_norm = builder.norm()
        self.layer = _wide(config.layer.layers[0], builder).build(builder.at("layer"))
        self.norm = builder.norm()

    def encode(self, seen: torch.Tensor) -> torch.Tensor:
        """seen [T, layers · Ht], concatenated in the order of ``aux_layers`` -> [T, H]."""
        if self.input_norm is not None:
            seen = self.input_norm(seen)
        if self.fc_norm is not None:
            parts = seen.chunk(len(self.fc_norm), dim=1)
            seen = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=1)
        joined: torch.Tensor = self.fc(seen)
        return joined

    def begin(self, token_ids: torch.Tensor, hidden: torch.Tensor, overriding: Sequence[Overriding] = ()) -> Stream:
        """Both normed and concatenated [T, 2 H], and the residual [T, H]."""
        of_embedding, of_hidden = cast(RMSNorm, self.layer.mixer_norm).weight, self.hidden_norm.weight
        table: torch.Tensor = self.embed.weight
        if overriding:  # the kernel gathers from a table: here each token has a row of its own
            table = self.embedded(token_ids, overriding)
            token_ids = torch.arange(token_ids.shape[0], dtype=torch.int32, device=token_ids.device)
        both = concat_norm(token_ids, table, hidden, of_embedding, of_hidden, self.hidden_norm.eps)
        return Stream(both[:, hidden.shape[1] :] if self.norm_before_residual else hidden, both)

    def finish(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | Columns]:
        """out [R, H] -> (hidden state for the next step [R, H], logits [R, V'], not gathered)."""
        normed = self.norm(out)
        return normed if self.norm_output else out, self.lm_head.columns(normed)


def _wide(layer: LayerSpec, builder: Builder) -> LayerSpec:
    """The layer with a mixer whose input has 2 H elements per token."""
    return replace(layer, mixer=replace(layer.mixer, input_size=2 * builder.hidden_size))  # type: ignore[type-var]
