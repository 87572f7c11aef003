"""The decoder shared by all families: an embedding, layers built from their specs, a norm and an LM head.

Owns the forward pass and its parameters (uninitialised until the loader fills them). Inference only. The loader builds
it; the engine and drafters call it. Shapes: T tokens in a pass, E tokens whose output is read, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.distributed.columns import Columns
from unisono.distributed.gather import Ranks
from unisono.kernels.sampling.soft_cap import soft_cap
from unisono.kv.specs import Tree, leaves
from unisono.layers.activations import plain
from unisono.layers.formats.base import Share
from unisono.layers.linear import Linear
from unisono.models.blocks.embedding_overrides import Overriding, merged
from unisono.models.blocks.layers import DecoderLayer, Stream, build_layers
from unisono.models.config import DecoderConfig
from unisono.models.load.build import Builder


def rows_of(head: Linear, ranks: Ranks) -> Linear:
    """Return this rank's part of an LM head that every rank holds whole, as a view."""
    share = Share(ranks.index, ranks.count)
    part = Linear(head.inputs, head.outputs, False, head.dtype, "meta", head.format, share)
    start, stop = share.part(head.outputs)
    part.weight = nn.Parameter(head.weight[start:stop], requires_grad=False)
    return part.joined(ranks, split_inputs=False)


class Decoder(nn.Module):
    """A whole model, or a rank's part of one, on one device, in one dtype, for up to ``builder.max_positions``
    positions.

    keeps: True for each layer with a state.

    With tied embeddings ``lm_head.weight`` *is* ``embed.weight``, or a view of it.
    """

    def __init__(self, config: DecoderConfig, builder: Builder) -> None:
        super().__init__()
        self.config, self.builder = config, builder
        self.embed = builder.embedding(config.vocab_size, scale=config.embed_scale)
        inputs = config.layer_inputs
        self.layer_inputs = None if inputs is None else inputs.build(builder.at("layer_inputs"))
        self.reads = config.reads
        norm: Any = builder.stream_norm() if config.final_norm else None
        tables = config.input_tables
        self.input_tables = None if tables is None else tables.build(builder.at("input_tables"))
        self.embed_norm = builder.stream_norm() if config.embed_norm else None
        self.layers = build_layers(config.layers, builder, norm)
        self.keeps = [any(leaves(specs)) for specs in self.state_specs()]
        self.norm = norm
        sizes = config.hidden_size, config.vocab_size
        if config.tie_embeddings:
            self.lm_head = builder.linear("lm_head", *sizes, empty=True)
            self.lm_head.weight = self.embed.weight
            if builder.ranks.count > 1 and builder.can_divide({"lm_head": config.vocab_size}):
                self.lm_head = rows_of(self.lm_head, builder.ranks)
        else:
            self.lm_head = builder.joined("lm_head", *sizes, config.head_bias, split_inputs=False)

    def state_specs(self) -> Tree:
        """State specs of each layer, in a list."""
        return [cast(DecoderLayer, layer).state_specs() for layer in self.layers]

    def forward(
        self,
        token_ids: torch.Tensor,
        context: ForwardContext,
        state: Sequence[object],
        aux_layers: Sequence[int] = (),
        overriding: Sequence[Overriding] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run T tokens through all layers and the final norm.

        token_ids [T] i32: valid ids, also for padding tokens.
        state: state of each layer, in the form of :meth:`state_specs`.
        aux_layers: layers whose inputs are returned; the number of layers denotes the last one's output, which is not
            allowed together with last tokens.
        overriding: embeddings that replace those of some token ids, and their additions after the first layers.

        Returns hidden [T, H], or [E, H] for ``context.last_tokens``; and the concatenated inputs of ``aux_layers`` [T,
        len(aux_layers) · H], or None.
        """
        x = merged(self.embed(token_ids), overriding)
        if self.input_tables is not None:
            x = self.input_tables(x, token_ids, context.positions, context.query_start)
        if self.embed_norm is not None:
            x = plain(self.embed_norm(x))
        deepest = max((len(each.levels) for each in overriding), default=0)
        seen = dict.fromkeys(aux_layers, x)  # keeps only these alive
        per_layer = None
        if self.layer_inputs is not None:
            for each in overriding:
                token_ids = each.looked_up(token_ids)
            per_layer = self.layer_inputs(token_ids, x)
        stream = cast(DecoderLayer, self.layers[0]).begin(x, per_layer)
        inner, turn = context.all_tokens, self._turn(context, max((deepest, *aux_layers)))
        for number, layer in enumerate(self.layers):
            if number in seen:
                seen[number] = stream.x
            own = inner if number < turn else context if number == turn else context.after_last_keys
            stream = layer(stream, own, state[self.reads[number]])
            if number < deepest:
                stream = self._add_levels(stream, number, overriding, own)
        if len(self.layers) in seen:
            seen[len(self.layers)] = stream.x
        aux = torch.cat([seen[number] for number in aux_layers], dim=1) if aux_layers else None
        return plain(stream.normed), aux

    def _turn(self, context: ForwardContext, deepest: int) -> int:
        """Layer after which a pass goes on with its last tokens only: the last one that writes keys or another state,
        if nothing reads the others after it.

        deepest: layers whose inputs are read, or to whose outputs something is added, are at most this one.
        """
        last, turn = len(self.layers) - 1, len(self.layers) - 1
        while turn > 0 and (self.reads[turn] != turn or not self.keeps[turn]):
            turn -= 1
        return turn if context.rotary_positions is None and deepest <= turn else last

    def reference(self, token_ids: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Plain forward of one text from its start in ``dtype``, token_ids [T] -> logits [T, V]: the tests' oracle."""
        x = self.embed(token_ids).to(dtype)
        x = x if self.input_tables is None else self.input_tables.reference(x, token_ids)
        x = x if self.embed_norm is None else self.embed_norm.reference(x)
        for layer in self.layers:
            x = cast(DecoderLayer, layer).reference(x)
        x = x if self.norm is None else self.norm.reference(x)
        logits, cap = self.lm_head.reference(x) * self.config.logit_scale, self.config.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _add_levels(
        self, stream: Stream, number: int, overriding: Sequence[Overriding], context: ForwardContext
    ) -> Stream:
        """The residual stream after layer ``number``, plus that level of the embeddings with levels."""
        x = stream.x
        for each in overriding:
            if number < len(each.levels):
                here = each if context.last_tokens is None else each.select(context.last_tokens.last)
                x = here.add_level(x, number)
        following = number + 1
        norm = cast(DecoderLayer, self.layers[following]).mixer_norm if following < len(self.layers) else self.norm
        return Stream(x, x if norm is None else norm(x), stream.per_layer)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, H] -> logits [M, V], in the model's dtype, on every rank."""
        return self._scaled(self.lm_head(hidden))

    def logit_columns(self, hidden: torch.Tensor) -> torch.Tensor | Columns:
        """:meth:`logits`, not gathered if the LM head is divided among ranks (:attr:`divides_logits`)."""
        columns = self.lm_head.columns(hidden)
        if isinstance(columns, Columns):
            return Columns(self._scaled(columns.own), columns.ranks)
        return self._scaled(columns)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with the model's factor and cap."""
        cap, scale = self.config.logit_cap, self.config.logit_scale
        logits = logits if scale == 1 else logits * scale
        return soft_cap(logits, cap) if cap > 0 else logits

    @property
    def divides_logits(self) -> bool:
        """True if each rank computes a part of the logits."""
        return self.lm_head.joins
