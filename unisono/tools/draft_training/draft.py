"""Draft models in training: how they are unrolled over a batch, and the loss. One class per kind of draft model.

A head is unrolled as in drafting ("training-time test" of EAGLE-3, arXiv 2503.01840). Step 0 reads the hidden states of
the target. Step s reads the head's own hidden states of step s - 1, one position later. Every step learns to predict
the target's next token. Where every step has its own module (``drafters/mtp/model.py``), module s reads the output of
module s - 1 for the whole row.

Shapes: B rows, L tokens per row, V' draft vocabulary. Step s predicts from position 1 + s on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from unisono.attention.context import ForwardContext
from unisono.drafters.eagle.model import Eagle3Head, EagleHead
from unisono.drafters.mtp.frozen_kv_model import FrozenHead
from unisono.drafters.mtp.model import MTPModule
from unisono.models.blocks.decoder import Decoder
from unisono.tools.draft_training.attention import KV, new_pass
from unisono.tools.draft_training.teacher import TeacherOutputs

DISCOUNT = 0.8
"""Weight of a step in the loss, relative to the step before: a draft counts only if all earlier ones are accepted."""

Step = tuple[int | torch.Tensor, torch.Tensor]
"""(first position, logits [B, L - first, V']), or (places [N] of the loss mask, as indices b · L + position, logits [N,
V'])."""


class TrainableDraft(Protocol):
    """A draft model in training.

    module: holds the weights, including those shared with the target. ids [V']: the target's token id of each logit, or
    None. aux_layers: layers of the target whose hidden states it reads.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def ids(self) -> torch.Tensor | None: ...
    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    def unroll(self, outputs: TeacherOutputs, dtype: torch.dtype) -> Iterator[Step]:
        """Yields the logits of each step. dtype: of keys and values."""
        ...


@dataclass
class UnrolledHead:
    """One module for all steps: EAGLE, EAGLE-3, and MTP with one module."""

    module: EagleHead | Eagle3Head | MTPModule
    steps: int
    aux_layers: tuple[int, ...] = ()

    @property
    def ids(self) -> torch.Tensor | None:
        return self.module.ids

    def unroll(self, outputs: TeacherOutputs, dtype: torch.dtype) -> Iterator[Step]:
        states = outputs.hidden if outputs.aux is None else outputs.aux
        hidden = self.module.encode(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        earlier: tuple[KV, ...] = ()
        for step in range(min(self.steps, hidden.shape[1] - 1)):
            first = 1 + step
            hidden, logits, kv = _run(self.module, outputs.token_ids[:, first:], hidden[:, :-1], first, dtype, earlier)
            earlier = (*earlier, kv)
            yield first, logits


@dataclass
class FrozenDraft:
    """An assistant, whose queries attend over the target's keys and values. All steps of a round stand at the position
    of its last committed token; a pass computes a round from every position but the first."""

    module: FrozenHead
    steps: int
    ids: None = None
    aux_layers: tuple[int, ...] = ()

    def unroll(self, outputs: TeacherOutputs, dtype: torch.dtype) -> Iterator[Step]:
        hidden, config = outputs.hidden, self.module.config
        for step in range(min(self.steps, hidden.shape[1] - 1)):
            first, hidden = 1 + step, hidden[:, :-1]
            rows, length = hidden.shape[:2]
            inputs, _ = new_pass(config, rows, length, 1, length, 0, dtype, hidden.device)
            ids = outputs.token_ids[:, first:].flatten()
            state, logits = self.module(ids, hidden.flatten(0, 1), ForwardContext.of(inputs), outputs.state)
            hidden = state.unflatten(0, (rows, length))
            yield first, logits.unflatten(0, (rows, length))


@dataclass
class ModulePerStep:
    """MTP with several modules. Each reads the hidden states of the one before."""

    module: nn.ModuleList
    ids: None = None
    aux_layers: tuple[int, ...] = ()

    def unroll(self, outputs: TeacherOutputs, dtype: torch.dtype) -> Iterator[Step]:
        hidden = outputs.hidden
        for step, module in enumerate(self.module):
            if hidden.shape[1] > 1:
                first = 1 + step
                hidden, logits, _ = _run(module, outputs.token_ids[:, first:], hidden[:, :-1], first, dtype)
                yield first, logits


@dataclass
class WholeModel:
    """A small language model. It reads tokens only, so it is trained on one step."""

    module: Decoder
    ids: None = None
    aux_layers: tuple[int, ...] = ()

    def unroll(self, outputs: TeacherOutputs, dtype: torch.dtype) -> Iterator[Step]:
        (rows, length), c = outputs.token_ids.shape, self.module.config
        inputs, kv = new_pass(c, rows, length, 0, length, c.num_layers, dtype, outputs.token_ids.device)
        hidden, _ = self.module(outputs.token_ids.flatten(), ForwardContext.of(inputs), kv)
        yield 0, self.module.logits(hidden).unflatten(0, (rows, length))


def _run(
    module: nn.Module, ids: torch.Tensor, hidden: torch.Tensor, first: int, dtype: torch.dtype,
    earlier: tuple[KV, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, KV]:  # fmt: skip
    """One pass over ids [B, L'] and hidden [B, L', H] -> (new hidden states, logits [B, L', V'], KV cache)."""
    (rows, length), config = ids.shape, module.config
    inputs, (kv,) = new_pass(config, rows, length, first, length, 1, dtype, ids.device, earlier)  # type: ignore[arg-type]
    out = module(ids.flatten(), hidden.flatten(0, 1), ForwardContext.of(inputs), kv)
    state, logits = module.finish(out)  # type: ignore[operator]
    return state.unflatten(0, (rows, length)), logits.unflatten(0, (rows, length)), kv


@dataclass(frozen=True)
class Loss:
    """value: a scalar with a gradient. agreed [steps]: share of positions with equal argmax."""

    value: torch.Tensor
    agreed: torch.Tensor


def loss_of(draft: TrainableDraft, outputs: TeacherOutputs, dtype: torch.dtype) -> Loss:
    """Cross entropy with the target's distribution, averaged over the loss mask, discounted by step.

    With a reduced vocabulary the target's probabilities are not renormalised over the remaining tokens.
    """
    total, weights, agreed = outputs.logits.new_zeros(()), 0.0, list[torch.Tensor]()
    target = outputs.logits.softmax(-1)
    best = outputs.logits.argmax(-1)
    if draft.ids is not None:
        target = target.index_select(1, draft.ids)
    for where, logits in draft.unroll(outputs, dtype):
        if isinstance(where, int):
            mask = outputs.loss_mask[:, where:]
            rows, logits = outputs.logit_rows[:, where:][mask], logits[mask]
        else:
            rows = outputs.logit_rows.flatten().index_select(0, where)
        predicted = logits.float()
        log_probabilities = predicted.log_softmax(-1)
        weight = DISCOUNT ** len(agreed)
        count = max(1, rows.shape[0])
        total = total - weight / count * (target[rows] * log_probabilities).sum()
        weights += weight
        token = predicted.detach().argmax(-1)
        token = token if draft.ids is None else draft.ids[token]
        agreed.append((token == best[rows]).float().sum() / count)
    return Loss(total / weights, torch.stack(agreed))
