"""Packs texts into batches of rows. The texts of step n depend on the seed and n only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from unisono.tools.draft_training.answers import Text

PAGE = 16
"""Rows are padded to a multiple of this, the page size of the KV caches in the target's pass."""

POOL = 64
"""Number of batches whose texts are sorted by length together, to reduce padding."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from host memory to ``device``, in the order of its stream, without waiting for it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """token_ids [B, L] int32, padded with 0. loss_mask [B, L] bool: where the next token's prediction is trained."""

    token_ids: torch.Tensor
    loss_mask: torch.Tensor


class Batches:
    """``batches[n]`` is the batch of step n: texts of similar length, at most ``tokens`` tokens including padding.

    A text longer than ``tokens`` is truncated. Every text occurs once per epoch.
    """

    def __init__(self, texts: Sequence[Text], tokens: int, seed: int) -> None:
        self.texts, self.tokens, self.seed = texts, tokens, seed
        self._epoch, self._first, self._order = -1, 0, list[list[int]]()

    def __getitem__(self, step: int) -> Batch:
        while step < self._first or step >= self._first + len(self._order):
            back = step < self._first
            self._first = 0 if back else self._first + len(self._order)
            self._epoch = 0 if back else self._epoch + 1
            self._order = self._shuffled(self._epoch)
        return self._rows([self.texts[i] for i in self._order[step - self._first]])

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """Yield all batches of an epoch: each text once."""
        for chosen in self._shuffled(number):
            yield self._rows([self.texts[i] for i in chosen])

    def _shuffled(self, epoch: int) -> list[list[int]]:
        rng = Random(f"{self.seed} {epoch}")
        order = list(range(len(self.texts)))
        rng.shuffle(order)
        mean = sum(len(t.token_ids) for t in self.texts) / len(self.texts)
        pool = max(1, int(POOL * self.tokens / mean))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            some = sorted(order[start : start + pool], key=lambda i: len(self.texts[i].token_ids))
            batches += self._cut(some)
        rng.shuffle(batches)
        return batches

    def _cut(self, ascending: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for i in ascending:
            if batches[-1] and (len(batches[-1]) + 1) * self._length(self.texts[i]) > self.tokens:
                batches.append([])
            batches[-1].append(i)
        return batches

    def _length(self, text: Text) -> int:
        tokens = min(len(text.token_ids), self.tokens)
        return tokens + -tokens % PAGE

    def _rows(self, texts: list[Text]) -> Batch:
        length = max(self._length(text) for text in texts)
        ids = torch.zeros((len(texts), length), dtype=torch.int32)
        loss_mask = torch.zeros((len(texts), length), dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens = text.token_ids[:length]
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            loss_mask[row, text.answer_start : len(tokens) - 1] = (
                True  # the prompt pass samples an answer's first token
            )
        return Batch(ids, loss_mask)
