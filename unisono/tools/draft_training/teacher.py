"""The target, looking on: its hidden states and logits for a batch, in one pass without gradients.

It is the decoder that serves, with its exact ops, so that a head learns from what it will read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from unisono.attention.context import PassContext
from unisono.config import EngineConfig, Hardware, ResolvedConfig, resolve
from unisono.models.checkpoint import Checkpoint
from unisono.models.decoder import Decoder
from unisono.models.loader import load_model
from unisono.tools.draft_training.attention import TrainingAttention, new_pass
from unisono.tools.draft_training.batches import ROUND, Batch


@dataclass(frozen=True)
class Seen:
    """What the target showed of a batch. N learnt positions, V vocabulary.

    token_ids [B, L] int32; learnt [B, L] bool. hidden [B, L, H]: after the final norm. aux [B, L, layers · H], or
    None. logits [N, V] fp32: at the learnt positions, row by row.
    """

    token_ids: torch.Tensor
    learnt: torch.Tensor
    hidden: torch.Tensor
    aux: torch.Tensor | None
    logits: torch.Tensor

    @cached_property
    def rows(self) -> torch.Tensor:
        """Where position [B, L] stands in ``logits``; meaningless where it is not learnt."""
        return (self.learnt.flatten().cumsum(0) - 1).view_as(self.learnt)


class Teacher:
    """A target as it is served on this device: same dtype, same weights."""

    def __init__(self, checkpoint: Checkpoint, device: str, longest: int, load_format: str = "auto") -> None:
        asked = EngineConfig(model=str(checkpoint.path), device=device)
        self.checkpoint = checkpoint
        self.resolved: ResolvedConfig = resolve(asked, Hardware.detect(device), checkpoint)
        self.device, self.dtype, self.longest = self.resolved.device, self.resolved.dtype, longest
        self.backend = TrainingAttention()
        self.decoder: Decoder = load_model(
            checkpoint, attention=self.attention, dtype=self.dtype, device=self.device, max_positions=longest
        )

    def attention(self, num_heads: int, num_kv_heads: int) -> TrainingAttention:
        """The backend of every layer."""
        return self.backend

    @torch.no_grad()
    def look(self, batch: Batch, aux_layers: tuple[int, ...] = ()) -> Seen:
        """One pass over the batch; ``aux_layers`` as of ``Decoder.forward``."""
        ids, learnt = (t.to(self.device, non_blocking=True) for t in (batch.token_ids, batch.learnt))
        (rows, length), c = ids.shape, self.decoder.config
        inputs, kv = new_pass(c, rows, length, 0, ROUND, c.num_layers, self.dtype, self.device)
        with torch.autocast(self.device.type, enabled=False):
            hidden, aux = self.decoder(ids.flatten(), PassContext.of(inputs), kv, aux_layers)
            logits = self.decoder.logits(hidden[learnt.flatten()]).float()
        aux = None if aux is None else aux.view(rows, length, -1)
        return Seen(ids, learnt, hidden.view(rows, length, -1), aux, logits)
