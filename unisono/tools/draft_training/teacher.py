"""The target model in training: its hidden states and logits for a batch, from one forward pass without gradients.

The pass uses the decoder and the ops of serving, so that a draft model is trained on the same inputs that it will get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from unisono.attention.base import KV
from unisono.attention.context import ForwardContext
from unisono.config import EngineConfig, Hardware, ResolvedConfig, resolve
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import AttentionSpec
from unisono.models.config import attention_of
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import load_model
from unisono.tools.draft_training.attention import TrainingAttention, new_pass
from unisono.tools.draft_training.batches import PAGE, Batch
from unisono.types import CheckpointError


@dataclass(frozen=True)
class TeacherOutputs:
    """A batch and the target's results for it.

    N positions are in the loss mask, V is the vocabulary size.

    token_ids [B, L] int32. loss_mask [B, L] bool. hidden [B, L, H]: after the final norm. aux [B, L, layers · H], or
    None.
    logits [N, V] fp32: at the positions in the loss mask, row by row. state: keys and values of each layer that has
    some.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor
    aux: torch.Tensor | None
    logits: torch.Tensor
    state: list[Sequence[torch.Tensor]] = field(default_factory=list)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        """Row in ``logits`` of each position, [B, L]; valid where the loss mask is True."""
        return (self.loss_mask.flatten().cumsum(0) - 1).view_as(self.loss_mask)


class Teacher:
    """The target with the dtype and weights that serving would use on this device.

    Raises CheckpointError for a target with recurrent layers.
    """

    def __init__(self, checkpoint: Checkpoint, device: str, longest: int, load_format: str = "auto") -> None:
        config = EngineConfig(model=str(checkpoint.path), device=device)
        recurrent = [n for n, layer in enumerate(checkpoint.config.layers) if attention_of(layer) is None]
        if recurrent:
            raise CheckpointError(
                f"{checkpoint.path}: layer {recurrent[0]} has a recurrence, and {len(recurrent) - 1} more have. Drafts "
                "are trained only for targets all of whose layers attend."
            )
        if not isinstance(checkpoint.config.attention, AttentionSpec):
            raise CheckpointError(f"{checkpoint.path}: drafts are not trained for targets with latent attention (MLA).")
        self.checkpoint = checkpoint
        self.resolved: ResolvedConfig = resolve(config, Hardware.detect(device), checkpoint)
        self.device, self.dtype, self.longest = self.resolved.device, self.resolved.dtype, longest
        self.backend = TrainingAttention()
        self.decoder: Decoder = load_model(
            checkpoint, attention=self.attention, dtype=self.dtype, device=self.device, max_positions=longest
        )

    def attention(self, num_heads: int, num_kv_heads: int) -> TrainingAttention:
        """The backend of every layer."""
        return self.backend

    @torch.no_grad()
    def run(self, batch: Batch, aux_layers: tuple[int, ...] = ()) -> TeacherOutputs:
        """One forward pass over the batch; ``aux_layers`` as for ``Decoder.forward``."""
        ids, loss_mask = (t.to(self.device, non_blocking=True) for t in (batch.token_ids, batch.loss_mask))
        (rows, length), c = ids.shape, self.decoder.config
        inputs, _ = new_pass(c, rows, length, 0, PAGE, 0, self.dtype, self.device)
        kv = self._state(rows * length // PAGE)
        with torch.autocast(self.device.type, enabled=False):
            hidden, aux = self.decoder(ids.flatten(), ForwardContext.of(inputs), kv, aux_layers)
            logits = self.decoder.logits(hidden[loss_mask.flatten()]).float()
        aux = None if aux is None else aux.view(rows, length, -1)
        return TeacherOutputs(ids, loss_mask, hidden.view(rows, length, -1), aux, logits, kv)

    def _state(self, pages: int) -> list[Sequence[torch.Tensor]]:
        """Empty keys and values of every layer; none of a layer that reads those of another."""
        found: list[Sequence[torch.Tensor]] = []
        for specs in self.decoder.state_specs():
            each = [torch.zeros((pages, *spec.shape), dtype=self.dtype, device=self.device) for spec in specs]
            found.append(KV(*each) if each else each)
        return found
