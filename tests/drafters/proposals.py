"""Records what an MTP drafter proposes and compares it with a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from unisono.entrypoints.llm import LLM
from unisono.types import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)


class Reference(Protocol):
    """A draft model in plain PyTorch."""

    def drafts(self, ids: Sequence[int], k: int) -> list[torch.Tensor]: ...


def record(llm: LLM, texts: Sequence[list[int]] = ()) -> list[tuple[list[int], list[int]]]:
    """Record what the drafter proposes: returns a list that grows by (committed tokens, drafts) per request and round.

    The engine must run eagerly. texts: all tokens of each request, prompt included. Random modules are almost never
    right, so after recording a draft, the function replaces some drafts by the right tokens from ``texts``. The number
    of right drafts depends on the committed length.
    """
    drafter, slots = llm.engine.worker.drafter, llm.engine.worker.slots
    propose, seen = drafter.propose, []

    def recording(rows: torch.Tensor, drafts: torch.Tensor) -> None:
        propose(rows, drafts)
        for slot, row in zip(rows.tolist(), drafts, strict=True):
            if slots.status[slot] == FinishReason.RUNNING:
                length, max_length = int(slots.length[slot]), int(slots.max_length[slot])
                ids = slots.history[slot, :length].tolist()
                seen.append((ids, row[: max_length - length].tolist()))
                text = next((t for t in texts if t[:length] == ids), [])
                truth = text[length:][: length % (len(row) + 1)]
                row[: len(truth)] = torch.tensor(truth, dtype=row.dtype)

    drafter.propose = recording  # type: ignore[method-assign]
    return seen


def mistakes(reference: Reference, seen: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """Number of wrong drafts by draft position. Drafts after a wrong one are not counted.

    reference: ``drafts(ids, k)`` gives the logits of k greedy drafts after ``ids``.
    """
    wrong = [0] * max(len(drafts) for _, drafts in seen)
    for ids, drafts in seen:
        for number, logits in enumerate(reference.drafts(ids, len(drafts))):
            if logits[drafts[number]] < logits.max() - 1e-3:
                wrong[number] += 1
                break
    return wrong
