"""Block heads that order their drafts: DSpark's Markov head, DFlash2's convolutions and candidate selector.

Both run the backbone once and then pick the drafts one after another, so that each depends on the one before it. They
add parts to :class:`unisono.drafters.block.model.BlockHead`; ``block/checkpoint.py`` fills them.

Shapes: as in ``block/model.py``; r rank, C candidates of a position, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.drafters.block.model import BlockConfig, BlockHead
from unisono.kernels.speculation.block_conv import block_conv
from unisono.layers.activations import plain
from unisono.layers.embedding import Embedding
from unisono.layers.linear import Linear
from unisono.layers.norm import RMSNorm
from unisono.models.blocks.layers import DecoderLayer, FeedForward, LayerSpec, Mixer, Stream, build_layers
from unisono.models.load.build import Builder


class MarkovTables(nn.Module):
    """The two factors of DSpark's bias: rows [V, r] by token, and a product r -> V'."""

    def __init__(self, builder: Builder, vocab: int, rank: int, draft_vocab: int) -> None:
        super().__init__()
        self.markov_w1 = builder.embedding(vocab, size=rank)
        self.markov_w2 = builder.linear("markov_w2", rank, draft_vocab)

    def forward(self, before: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, V'] plus the bias by the tokens before [R] int32."""
        out: torch.Tensor = self.markov_w2(self.markov_w1(before), logits.contiguous())
        return out


class PairSelector(nn.Module):
    """DFlash2's scores of neighbouring tokens: ``Σ_r left[token before] · project(hidden) · right[token]``."""

    predecessor_codebook: nn.Parameter
    successor_codebook: nn.Parameter

    def __init__(self, builder: Builder, vocab: int, rank: int) -> None:
        super().__init__()
        for name in ("predecessor_codebook", "successor_codebook"):
            table = torch.empty(vocab, rank, dtype=builder.dtype, device=builder.device)
            self.register_parameter(name, nn.Parameter(table, requires_grad=False))
        self.hidden_projection = builder.linear("hidden_projection", builder.hidden_size, rank)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, H] -> [M, r]."""
        out: torch.Tensor = self.hidden_projection(hidden)
        return out

    def forward(
        self, unary: torch.Tensor, candidates: torch.Tensor, projected: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """Scores [R, C] fp32 of the candidates of one position.

        unary [R, C] fp32: their logits. candidates [R, C] int64. projected [R, r]: of :meth:`project`. before [R]
        int32: the tokens before them.
        """
        left = nn.functional.embedding(before, self.predecessor_codebook) * projected
        right = nn.functional.embedding(candidates, self.successor_codebook)
        return unary + (left[:, None].float() * right.float()).sum(-1)


class ConfidenceHead(nn.Module):
    """DSpark's estimate of a draft's acceptance: the logistic function of one product."""

    def __init__(self, builder: Builder, inputs: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Module()
        for name, shape in (("weight", (1, inputs)), *((("bias", (1,)),) if bias else ())):
            table = torch.empty(shape, dtype=builder.dtype, device=builder.device)
            self.proj.register_parameter(name, nn.Parameter(table, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, inputs] -> [R] fp32."""
        bias = cast(torch.Tensor | None, getattr(self.proj, "bias", None))
        weight = cast(torch.Tensor, self.proj.weight)
        return nn.functional.linear(x, weight, bias)[:, 0].float().sigmoid()


class MarkovHead(BlockHead):
    """DSpark: the logits of a draft get a bias by the token before it, ``markov_w2(markov_w1[token])`` of rank r.

    confidence_head: reads the draft's output and, if so trained, ``markov_w1[token]``; None if the checkpoint has none.
    """

    def __init__(self, config: BlockConfig, embed: Embedding, lm_head: Linear, builder: Builder) -> None:
        super().__init__(config, embed, lm_head, builder)
        sizes = config.layer.vocab_size, config.markov_rank, config.draft_vocab
        self.markov_head = MarkovTables(builder.at("markov_head"), *sizes)
        self.confidence_head: ConfidenceHead | None = None
        if (read := config.confidence) is not None:
            inputs = builder.hidden_size + config.markov_rank * read.markov
            self.confidence_head = ConfidenceHead(builder.at("confidence_head"), inputs, read.bias)

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Probability [R] fp32 that drafts are accepted, from their outputs hidden [R, H] and the tokens before [R]."""
        if self.confidence_head is None or self.settings.confidence is None:
            return None
        parts = (
            (hidden, self.markov_head.markov_w1(before).to(hidden.dtype))
            if self.settings.confidence.markov
            else (hidden,)
        )
        found: torch.Tensor = self.confidence_head(torch.cat(parts, -1))
        return found


class BlockConv(nn.Module):
    """DFlash2's convolution before and after a layer's block, causal inside the block of tokens.

    The coefficients of both sides are ``base_kernel`` [2, taps, H] plus a term by token and group of channels, a
    projection of the input.
    """

    def __init__(self, builder: Builder, taps: int, group: int) -> None:
        super().__init__()
        size = builder.hidden_size
        base = torch.empty(2, taps, size, dtype=builder.dtype, device=builder.device)
        self.base_kernel = nn.Parameter(base, requires_grad=False)
        self.kernel_projection = builder.linear("kernel_projection", size, 2 * taps * (size // group))
        self.taps, self.group = taps, group

    def before(self, x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> (the convolved x, the coefficients' terms for both sides)."""
        deltas = self.kernel_projection(x)
        return block_conv(x, deltas, self.base_kernel[0], width, self.group, 0), deltas

    def after(self, x: torch.Tensor, deltas: torch.Tensor, width: int) -> torch.Tensor:
        """x [T, H] -> the convolved x. deltas: from :meth:`before`."""
        return block_conv(x, deltas, self.base_kernel[1], width, self.group, deltas.shape[1] // 2)


@dataclass(frozen=True)
class ConvolvedLayerSpec(LayerSpec):
    """A decoder layer whose mixer and feed-forward stand between convolutions of ``taps`` taps."""

    taps: int = 2
    group: int = 16

    def build(self, builder: Builder) -> DecoderLayer:
        mixer, feed_forward = self.mixer.build(builder.at("mixer")), self.feed_forward.build(builder.at("feed_forward"))
        layer = ConvolvedLayer(mixer, feed_forward, builder.norm(), builder.norm())
        layer.attention_conv = BlockConv(builder.at("attention_conv"), self.taps, self.group)
        layer.mlp_conv = BlockConv(builder.at("mlp_conv"), self.taps, self.group)
        return layer


class ConvolvedLayer(DecoderLayer):
    """A layer of DFlash2. Its passes are rounds: rows of equally many tokens."""

    attention_conv: BlockConv
    mlp_conv: BlockConv

    def set_norm_formats(self) -> None:
        """Keep plain norms: the convolutions read them."""

    def forward(self, stream: Stream, context: ForwardContext, state: Any) -> Stream:
        mixer, feed_forward, width = cast(Mixer, self.mixer), cast(FeedForward, self.feed_forward), context.width
        assert width is not None
        h, deltas = self.attention_conv.before(plain(stream.normed), width)
        out = self.attention_conv.after(mixer.output(mixer(h, context, state)), deltas, width)
        x, normed = cast(RMSNorm, self.feed_forward_norm).of_sum(out, stream.x)
        h, deltas = self.mlp_conv.before(plain(normed), width)
        out = self.mlp_conv.after(feed_forward.output(feed_forward(h, context.positions)), deltas, width)
        return Stream(*cast(RMSNorm, self.next_norm).of_sum(out, x))


class SelectingHead(BlockHead):
    """DFlash2: convolutions inside the block, and a selector that scores pairs of neighbouring candidates."""

    def __init__(self, config: BlockConfig, embed: Embedding, lm_head: Linear, builder: Builder) -> None:
        super().__init__(config, embed, lm_head, builder)
        sizes = config.layer.vocab_size, config.selector_rank
        self.candidate_selector = PairSelector(builder.at("candidate_selector"), *sizes)

    def _build_layers(self, builder: Builder, norm: nn.Module) -> nn.ModuleList:
        taps, group = self.settings.conv
        specs = [
            ConvolvedLayerSpec(layer.mixer, layer.feed_forward, taps=taps, group=group) for layer in self.config.layers
        ]
        return build_layers(specs, builder, norm)
