"""Block drafters in training: a block after each of a row's anchors, in one pass, with gradients.

An *anchor* is a position whose following tokens are trained: its token and the mask tokens after it are a block. Its
queries see the context before the anchor and their own block, as in drafting (DFlash, arXiv 2602.06036). Mask j
predicts the target's token j positions after the anchor.

Shapes: B rows, L tokens per row, M anchors per row, W tokens of a block, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.attention.context import ForwardContext
from unisono.drafters.block.model import BlockHead
from unisono.tools.draft_training.batches import to_device
from unisono.tools.draft_training.draft import Step
from unisono.tools.draft_training.teacher import TeacherOutputs

MOST_ANCHORS = 64
"""Anchors of a row in a training step, at most."""


class BlockPass(NamedTuple):
    """Geometry of a pass. rows: B. length: L. width: W. visible [B, 1, 1, M, 1, L]: True for context that a block
    sees."""

    rows: int
    length: int
    width: int
    visible: torch.Tensor


class BlockTrainingAttention:
    """An ``AttentionBackend`` whose cache has the context's B · L tokens first, then the blocks' B · M · W tokens.

    ``inputs.plan`` is a :class:`BlockPass`, set by the caller. Scores are computed for the context and for a query's
    own block, not for the other blocks of its row.
    """

    name = "block training"
    capturable = True

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """Does nothing: the caller has set ``inputs.plan``."""

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """q [B · M · W, Hq, D] -> [B · M · W, Hq · D]."""
        rows, length, width, visible = inputs.plan
        heads, (kv_heads, dim) = q.shape[1], (kv.k.shape[1], kv.k.shape[3])
        size = rows, -1, width, kv_heads, heads // kv_heads, dim
        queries = q.view(size).permute(0, 3, 4, 1, 2, 5)  # [B, Hkv, G, M, W, D]
        context, own = [], []
        for cache in kv[:2]:
            before, blocks = cache[:, :, 0].split([rows * length, len(q)])
            context.append(before.view(rows, length, kv_heads, dim).transpose(1, 2))  # [B, Hkv, L, D]
            own.append(blocks.view(rows, -1, width, kv_heads, dim).permute(0, 3, 1, 2, 4))  # [B, Hkv, M, W, D]
        shape = queries.shape[:-1]
        before = (queries.flatten(2, 4) @ context[0].mT).view(*shape, length)
        scores = torch.cat((before.masked_fill(~visible, -torch.inf), queries @ own[0].mT.unsqueeze(2)), -1)
        weights = (scores.float() * options.scale).softmax(-1).to(q.dtype)
        seen, mates = weights.split([length, width], -1)
        out = (seen.flatten(2, 4) @ context[1]).view(*shape, dim) + mates @ own[1].unsqueeze(2)
        return out.permute(0, 3, 4, 1, 2, 5).reshape(len(q), -1)


@dataclass
class BlockDraft:
    """A block head in training. Its layers see everything before the anchor and the whole block."""

    module: BlockHead
    aux_layers: tuple[int, ...]
    most_anchors: int = MOST_ANCHORS

    @property
    def ids(self) -> torch.Tensor | None:
        return self.module.ids

    def unroll(self, outputs: TeacherOutputs, dtype: torch.dtype) -> Iterator[Step]:
        """Yields (places of the loss mask [N], logits [N, V']) of each draft: the target's logits there predict it.

        All indices are computed in host memory, so that the device never waits for the host.
        """
        assert outputs.aux is not None
        settings, device = self.module.settings, outputs.token_ids.device
        (rows, length), width = outputs.token_ids.shape, settings.block_size
        anchors = draw_anchors(outputs.batch.loss_mask, self.most_anchors, seed=int(outputs.batch.token_ids.sum()))
        count = anchors.shape[1]
        trained = _places(anchors, outputs.batch.loss_mask, width)
        at = to_device(anchors, device).clamp_min(0)
        tokens = outputs.token_ids.new_full((rows, count, width), settings.mask_token)
        tokens[:, :, 0] = outputs.token_ids.gather(1, at)
        positions = (at[:, :, None] + torch.arange(width, device=device)).clamp_max(length).int()
        spec, places = self.module.config.attention, rows * (length + count * width)
        shape = places, spec.num_kv_heads, 1, spec.head_dim
        state = [KV(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))) for _ in self.module.layers]
        slots = torch.arange(places, dtype=torch.int32, device=device)
        each = slots[:length].repeat(rows)
        self.module.write_context(outputs.aux.flatten(0, 1), each, slots[: rows * length], state)
        visible = torch.arange(length, device=device) < at[:, None, None, :, None, None]
        inputs = AttentionInputs(
            slots=slots[: rows * count],
            positions=positions.flatten(),
            slot_mapping=slots[rows * length :],
            kv_len=positions[:, :, -1].flatten() + 1,
            page_table=slots[: rows * count, None],
            width=width,
            plan=BlockPass(rows, length, width, visible),
        )
        hidden = self.module(tokens.flatten(), ForwardContext.of(inputs), state)
        for blocks, where in trained:
            logits = self.module.logits(hidden.index_select(0, to_device(blocks, device)))
            assert isinstance(logits, torch.Tensor)
            yield to_device(where, device), logits


def draw_anchors(loss_mask: torch.Tensor, most: int, seed: int) -> torch.Tensor:
    """Anchors [B, M] int64 of each row, ascending, then -1: up to ``most`` places of loss_mask [B, L], drawn by the
    seed."""
    chosen = loss_mask
    if int(loss_mask.sum(1).max()) > most:
        order = torch.rand(loss_mask.shape, generator=torch.Generator().manual_seed(seed))
        limit = order.masked_fill(~loss_mask, 2.0).sort(1).values[:, most - 1 : most]
        chosen = loss_mask & (order <= limit)
    count = max(1, int(chosen.sum(1).max()))
    position = torch.arange(loss_mask.shape[1]).masked_fill(~chosen, loss_mask.shape[1])
    found = position.sort(1).values[:, :count]
    return found.masked_fill(found == loss_mask.shape[1], -1)


def _places(anchors: torch.Tensor, loss_mask: torch.Tensor, width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """List (tokens in the pass [N], the places of the loss mask that they predict [N]) of each mask of a block."""
    (rows, length), found = loss_mask.shape, []
    first, each = torch.arange(rows)[:, None] * length, torch.arange(anchors.numel()).view_as(anchors) * width
    for step in range(width - 1):
        position = anchors + step
        inside = (anchors >= 0) & (position < length)
        place = (first + position)[inside]
        kept = loss_mask.flatten()[place]
        found.append((each[inside][kept] + step + 1, place[kept]))
    return found
