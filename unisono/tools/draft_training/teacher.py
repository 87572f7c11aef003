"""The target model in training: its hidden states and logits for a batch, from one forward pass without gradients.

The pass uses the decoder and the ops of serving, so that a draft model is trained on the same inputs that it will get.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from unisono.attention.context import ForwardContext
from unisono.config import EngineConfig, Hardware, ResolvedConfig, resolve
from unisono.kv.recurrent_pass import RecurrentPass
from unisono.kv.specs import Paged, Recurrent, Spec, has_recurrent_state, map_tree
from unisono.kv.store import RecurrentView
from unisono.models.blocks.decoder import Decoder
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import load_model
from unisono.tools.draft_training.attention import TrainingAttention, new_pass
from unisono.tools.draft_training.batches import PAGE, Batch, to_device


@dataclass(frozen=True)
class TeacherOutputs:
    """A batch and the target's results for it.

    N positions are in the loss mask, V is the vocabulary size.

    token_ids [B, L] int32. loss_mask [B, L] bool. hidden [B, L, H]: after the final norm. aux [B, L, layers · H], or
    None. logits [N, V] fp32: at the positions in the loss mask, row by row. batch: the same batch in host memory.
    state: keys and values of each layer that has some.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor
    aux: torch.Tensor | None
    logits: torch.Tensor
    batch: Batch
    state: list[Sequence[torch.Tensor]] = field(default_factory=list)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        """Row in ``logits`` of each position, [B, L]; valid where the loss mask is True."""
        return (self.loss_mask.flatten().cumsum(0) - 1).view_as(self.loss_mask)


class Teacher:
    """The target with the dtype and weights that serving would use on this device."""

    def __init__(self, checkpoint: Checkpoint, device: str, longest: int, load_format: str = "auto") -> None:
        config = EngineConfig(model=str(checkpoint.path), device=device)
        self.checkpoint = checkpoint
        self.resolved: ResolvedConfig = resolve(config, Hardware.detect(device), checkpoint)
        self.device, self.dtype, self.longest = self.resolved.device, self.resolved.dtype, longest
        self.backend = TrainingAttention()
        self.decoder: Decoder = load_model(
            checkpoint, attention=self.attention, dtype=self.dtype, device=self.device, max_positions=longest
        )
        self.recurs = has_recurrent_state(self.decoder.state_specs())

    def attention(self, num_heads: int, num_kv_heads: int) -> TrainingAttention:
        """The backend of every layer."""
        return self.backend

    @torch.no_grad()
    def run(self, batch: Batch, aux_layers: tuple[int, ...] = ()) -> TeacherOutputs:
        """One forward pass over the batch; ``aux_layers`` as for ``Decoder.forward``."""
        ids, loss_mask = (to_device(t, self.device) for t in (batch.token_ids, batch.loss_mask))
        (rows, length), c = ids.shape, self.decoder.config
        trained = to_device(batch.loss_mask.flatten().nonzero()[:, 0], self.device)
        inputs, _ = new_pass(c, rows, length, 0, PAGE, 0, self.dtype, self.device)
        context = ForwardContext.of(inputs)
        if self.recurs:  # a prompt pass of rows without a state
            inputs.query_start, inputs.width = inputs.slots.new_tensor(range(0, (rows + 1) * length, length)), None
            where = inputs.positions, inputs.kv_len, inputs.query_start
            context.recurrent = RecurrentPass.of(inputs.slots, *where, torch.zeros_like(inputs.slots))
        state = map_tree(self.decoder.state_specs(), lambda spec: self._empty(spec, rows, length))
        with torch.autocast(self.device.type, enabled=False):
            hidden, aux = self.decoder(ids.flatten(), context, state, aux_layers)
            logits = self.decoder.logits(hidden.index_select(0, trained)).float()
        aux = None if aux is None else aux.view(rows, length, -1)
        return TeacherOutputs(ids, loss_mask, hidden.view(rows, length, -1), aux, logits, batch, state)

    def _empty(self, spec: Spec, rows: int, length: int) -> Any:
        """State of rows without a token, in the form that layers take."""
        if isinstance(spec, Paged):
            return torch.zeros((rows * length // PAGE, *spec.shape), dtype=spec.dtype, device=self.device)
        assert isinstance(spec, Recurrent)  # the state of decoder layers is one of both
        zeros = functools.partial(torch.zeros, device=self.device)
        return RecurrentView(
            {name: zeros((rows, *shape), dtype=dtype) for name, (shape, dtype) in spec.snapshot.items()},
            {name: zeros((rows, each.ring(1), *each.shape), dtype=each.dtype) for name, each in spec.inputs.items()},
        )
