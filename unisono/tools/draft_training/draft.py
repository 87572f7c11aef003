"""What is trained: a draft head, how it is unrolled over a batch, and the loss. One class for each kind of head.

A head is unrolled as it will draft (EAGLE-3's "training-time test", arXiv 2503.01840): step 0 reads the target's hidden
states, step s its own of step s - 1, one position further; every step is to foresee what the target picks there.
Modules that each have a step of their own (``models/mtp.py``) need no unrolling: module s reads module s - 1 over the
whole row. Shapes: B rows, L tokens a row, V' draft vocabulary; step s has predictions from position 1 + s on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from unisono.attention.context import PassContext
from unisono.models.decoder import Decoder
from unisono.models.draft import Eagle3Head, EagleHead
from unisono.models.mtp import MTPModule
from unisono.tools.draft_training.attention import KV, new_pass
from unisono.tools.draft_training.teacher import Seen

DISCOUNT = 0.8
"""A step counts so much of the one before it in the loss: a draft is of use only behind accepted ones."""

Step = tuple[int, torch.Tensor]
"""(first position, logits [B, L - first, V'])."""


class Draft(Protocol):
    """A draft model in training.

    module: what holds the weights, those it shares with the target included. ids [V']: the target's token of each
    logit, or None. aux_layers: what it reads of the target.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def ids(self) -> torch.Tensor | None: ...
    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    def unroll(self, seen: Seen, dtype: torch.dtype) -> Iterator[Step]:
        """Each step's logits; ``dtype``: of keys and values."""
        ...


@dataclass
class UnrolledHead:
    """One module for all steps: EAGLE, EAGLE-3, or MTP with one module."""

    module: EagleHead | Eagle3Head | MTPModule
    steps: int
    aux_layers: tuple[int, ...] = ()

    @property
    def ids(self) -> torch.Tensor | None:
        return self.module.ids

    def unroll(self, seen: Seen, dtype: torch.dtype) -> Iterator[Step]:
        shown = seen.hidden if seen.aux is None else seen.aux
        hidden = self.module.encode(shown.flatten(0, 1)).unflatten(0, shown.shape[:2])
        earlier: tuple[KV, ...] = ()
        for step in range(min(self.steps, hidden.shape[1] - 1)):
            first = 1 + step
            hidden, logits, kv = _run(self.module, seen.token_ids[:, first:], hidden[:, :-1], first, dtype, earlier)
            earlier = (*earlier, kv)
            yield first, logits


@dataclass
class ModulePerStep:
    """MTP with several modules, each over the states of the one before."""

    module: nn.ModuleList
    ids: None = None
    aux_layers: tuple[int, ...] = ()

    def unroll(self, seen: Seen, dtype: torch.dtype) -> Iterator[Step]:
        hidden = seen.hidden
        for step, module in enumerate(self.module):
            if hidden.shape[1] > 1:
                first = 1 + step
                hidden, logits, _ = _run(module, seen.token_ids[:, first:], hidden[:, :-1], first, dtype)
                yield first, logits


@dataclass
class WholeModel:
    """A small language model: it sees tokens only, so its one step serves every draft."""

    module: Decoder
    ids: None = None
    aux_layers: tuple[int, ...] = ()

    def unroll(self, seen: Seen, dtype: torch.dtype) -> Iterator[Step]:
        (rows, length), c = seen.token_ids.shape, self.module.config
        inputs, kv = new_pass(c, rows, length, 0, length, c.num_layers, dtype, seen.token_ids.device)
        hidden, _ = self.module(seen.token_ids.flatten(), PassContext.of(inputs), kv)
        yield 0, self.module.logits(hidden).unflatten(0, (rows, length))


def _run(
    module: nn.Module, ids: torch.Tensor, hidden: torch.Tensor, first: int, dtype: torch.dtype,
    earlier: tuple[KV, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, KV]:  # fmt: skip
    """One pass of a module over ids [B, L'] beside hidden [B, L', H] -> (its states, logits [B, L', V'], its cache)."""
    (rows, length), config = ids.shape, module.config
    inputs, (kv,) = new_pass(config, rows, length, first, length, 1, dtype, ids.device, earlier)  # type: ignore[arg-type]
    out = module(ids.flatten(), hidden.flatten(0, 1), PassContext.of(inputs), kv)
    state, logits = module.finish(out)  # type: ignore[operator]
    return state.unflatten(0, (rows, length)), logits.unflatten(0, (rows, length)), kv


@dataclass(frozen=True)
class Loss:
    """value: a scalar with a gradient. agreed [steps]: share of positions where the likeliest tokens are the same."""

    value: torch.Tensor
    agreed: torch.Tensor


def loss_of(draft: Draft, seen: Seen, dtype: torch.dtype) -> Loss:
    """Cross entropy of each step's distribution with the target's, mean over learnt positions, discounted by step.

    What a reduced vocabulary lacks counts as lost: the target's probabilities are not scaled up.
    """
    total, weights, agreed = seen.logits.new_zeros(()), 0.0, list[torch.Tensor]()
    wanted = seen.logits.softmax(-1)
    best = seen.logits.argmax(-1)
    if draft.ids is not None:
        wanted = wanted.index_select(1, draft.ids)
    for first, logits in draft.unroll(seen, dtype):
        learnt = seen.learnt[:, first:]
        rows = seen.rows[:, first:][learnt]
        said = logits[learnt].float()
        log_probabilities = said.log_softmax(-1)
        weight = DISCOUNT ** len(agreed)
        count = max(1, rows.shape[0])
        total = total - weight / count * (wanted[rows] * log_probabilities).sum()
        weights += weight
        picked = said.detach().argmax(-1)
        picked = picked if draft.ids is None else draft.ids[picked]
        agreed.append((picked == best[rows]).float().sum() / count)
    return Loss(total / weights, torch.stack(agreed))
