"""Accept length of a draft model in training: rounds of greedy drafting, replayed on the target's own greedy answers.

A draft counts only if all drafts before it are right, so the true tokens may stand for the drafts, and one pass over a
text has the drafts of all its rounds.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch

from unisono.tools.draft_training.answers import Text
from unisono.tools.draft_training.batches import Batch
from unisono.tools.draft_training.block import BlockDraft
from unisono.tools.draft_training.draft import TrainableDraft
from unisono.tools.draft_training.teacher import TeacherOutputs

MOST, SHARE = 256, 20
"""Greedy answers that are set aside: up to MOST, at most one of SHARE."""


def set_aside(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """(texts to train on, greedy answers to measure on). The latter are spread evenly over all greedy answers."""
    greedy = [n for n, text in enumerate(texts) if text.greedy]
    count = min(MOST, len(greedy) // SHARE)
    chosen = {greedy[i * len(greedy) // count] for i in range(count)}
    return [t for n, t in enumerate(texts) if n not in chosen], [texts[n] for n in sorted(chosen)]


@dataclasses.dataclass
class ReplayedRounds:
    """Totals of replayed rounds. tokens: committed, bonus tokens included."""

    tokens: int = 0
    rounds: int = 0

    @property
    def accept_length(self) -> float:
        """Mean tokens of a round."""
        return self.tokens / max(1, self.rounds)

    def add(self, batch: Batch, accepted: torch.Tensor) -> None:
        """Play the rounds of a batch. accepted [B, L] int64: drafts accepted in a round whose last token is there."""
        for mask, row in zip(batch.loss_mask, accepted.tolist(), strict=True):
            inside = mask.nonzero()[:, 0].tolist()
            if not inside:
                continue
            at, end = inside[0], inside[-1] + 1
            while at < end:
                new = min(row[at] + 1, end - at)
                self.tokens, self.rounds, at = self.tokens + new, self.rounds + 1, at + new


def accepted_drafts(draft: TrainableDraft, outputs: TeacherOutputs, dtype: torch.dtype) -> torch.Tensor:
    """Drafts [B, L] int64 that a round accepts whose last committed token is there, greedily. dtype: as of ``unroll``.

    Runs with gradients enabled, as training does, so that the same formulas are computed.
    """
    if isinstance(draft, BlockDraft):
        draft = dataclasses.replace(draft, most_anchors=sys.maxsize)
    ids = outputs.token_ids
    following = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-1)
    alive, accepted = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.int64)
    for step, (where, logits) in enumerate(draft.unroll(outputs, dtype)):
        best = logits.detach().argmax(-1)
        best = best if draft.ids is None else draft.ids[best]
        right = torch.zeros_like(alive)
        if isinstance(where, int):
            right[:, where:] = best == following[:, where:]
        else:
            right.view(-1)[where] = best == following.flatten()[where]
        # the draft of this step in a round that starts at a predicts the token after a + step
        alive &= torch.nn.functional.pad(right[:, step:], (0, min(step, right.shape[1])))
        accepted += alive
    return accepted
