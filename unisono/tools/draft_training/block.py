"""Block drafters in training: blocks at sampled positions of each row, in one pass, with gradients.

A block stands after each *anchor*, a position of the row: the anchor's token and mask tokens after it. Its queries see
the context before the anchor and their own block, as in drafting (DFlash, arXiv 2602.06036). Mask j predicts the
target's token j positions after the anchor.

Shapes: B rows, L tokens per row, M anchors, W tokens of a block, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.attention.context import ForwardContext
from unisono.drafters.block.model import BlockHead
from unisono.tools.draft_training.draft import Step
from unisono.tools.draft_training.teacher import TeacherOutputs

MOST_ANCHORS = 64
"""Anchors of a row."""


class BlockPass(NamedTuple):
    """Geometry of a pass. rows: B. length: L. visible [M · W, L + M · W]: True where a query sees a key."""

    rows: int
    length: int
    visible: torch.Tensor


class BlockTrainingAttention:
    """An ``AttentionBackend`` whose cache has the context's B · L tokens first, then the blocks' B · M · W tokens.

    ``inputs.plan`` is a :class:`BlockPass`, set by the caller.
    """

    name = "block training"
    capturable = True

    def plan(self, inputs: AttentionInputs, window: int = 0) -> None:
        """Does nothing: the caller has set ``inputs.plan``."""

    def forward(self, q: torch.Tensor, kv: KV, inputs: AttentionInputs, options: AttentionOptions) -> torch.Tensor:
        """q [B · M · W, Hq, D] -> [B · M · W, Hq · D]."""
        rows, length, visible = inputs.plan
        heads, context = q.shape[1], rows * length
        queries = q.view(rows, -1, *q.shape[1:]).transpose(1, 2)
        keys, values = (
            torch.cat([part.view(rows, -1, *part.shape[1:]) for part in cache[:, :, 0].split([context, len(q)])], 1)
            .transpose(1, 2)
            .repeat_interleave(heads // cache.shape[1], 1)
            for cache in kv[:2]
        )
        out = scaled_dot_product_attention(queries, keys, values, visible, scale=options.scale)
        return out.transpose(1, 2).reshape(len(q), -1)


@dataclass
class BlockDraft:
    """A block head in training. Its layers see everything before the anchor and the whole block."""

    module: BlockHead
    aux_layers: tuple[int, ...]

    @property
    def ids(self) -> torch.Tensor | None:
        return self.module.ids

    def unroll(self, outputs: TeacherOutputs, dtype: torch.dtype) -> Iterator[Step]:
        """Yields (positions, logits [B, positions, V']) of each draft: the target's logits there predict its token."""
        assert outputs.aux is not None
        ids, settings, device = outputs.token_ids, self.module.settings, outputs.token_ids.device
        (rows, length), width = ids.shape, settings.block_size
        anchors = _anchors(ids)
        count = len(anchors)
        at = (anchors[:, None] + torch.arange(width, device=device)).clamp_max(length)
        tokens = ids.new_full((rows, count, width), settings.mask_token)
        tokens[:, :, 0] = ids[:, anchors]
        spec, places = self.module.config.attention, rows * (length + count * width)
        shape = places, spec.num_kv_heads, 1, spec.head_dim
        state = [KV(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))) for _ in self.module.layers]
        slots = torch.arange(places, dtype=torch.int32, device=device)
        each = slots[:length].repeat(rows)
        self.module.write_context(outputs.aux.flatten(0, 1), each, slots[: rows * length], state)
        inputs = AttentionInputs(
            slots=slots[: rows * count],
            positions=at.int().flatten().repeat(rows),
            slot_mapping=slots[rows * length :],
            kv_len=at[:, -1].int().repeat(rows) + 1,
            page_table=slots[: rows * count, None],
            width=width,
            plan=BlockPass(rows, length, _visible(anchors, length, width)),
        )
        hidden = self.module(tokens.flatten(), ForwardContext.of(inputs), state)
        hidden = hidden.view(rows, count, width, -1)[:, :, 1:]
        for step in range(width - 1):
            inside = int((anchors + step < length).sum())
            logits = self.module.logits(hidden[:, :inside, step].flatten(0, 1))
            assert isinstance(logits, torch.Tensor)
            yield anchors[:inside] + step, logits.unflatten(0, (rows, inside))


def _anchors(ids: torch.Tensor) -> torch.Tensor:
    """Anchors of a batch [M] int64, ascending: all positions but the last, or MOST_ANCHORS of them drawn by the ids."""
    length = ids.shape[1]
    drawn = torch.randperm(length - 1, generator=torch.Generator().manual_seed(int(ids.sum())))
    return drawn[:MOST_ANCHORS].sort().values.to(ids.device)


def _visible(anchors: torch.Tensor, length: int, width: int) -> torch.Tensor:
    """The mask [M · W, L + M · W]: context before the query's anchor, and its own block."""
    of_query = anchors.repeat_interleave(width)[:, None]
    context = torch.arange(length, device=anchors.device) < of_query
    return torch.cat((context, of_query == of_query.T), 1)
