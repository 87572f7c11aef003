"""Number of drafts of each request in a pass, and the reason if it is below the drafter's k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.engine.sequence import Extend, Pass, Round
from unisono.engine.worker.progress import Progress
from unisono.types import TokenDelta
from unisono.types.acceptance import FewerDrafts


def note_drafts(
    work: Pass,
    committed: np.ndarray,
    deltas: Sequence[TokenDelta],
    drafted: np.ndarray,
    found: np.ndarray | None,
    counts: np.ndarray,
    progress: Progress,
    most: int,
) -> None:
    """Set the drafts of a pass's deltas, and ``fewer`` where they are fewer than ``most``.

    committed [requests]: their rows in the pass. drafted, counts [requests]: verified drafts, and committed tokens;
    drafted is empty for a pass without drafts. found [requests]: drafts before requests shared them; None: they did
    not.
    """
    if drafted.size:
        for delta, proposed, count in zip(deltas, drafted.tolist(), counts.tolist(), strict=True):
            delta.drafted_tokens, delta.accepted_tokens = proposed, count - 1
    if not most:
        return
    if isinstance(work, Round):
        reasons = _of_round(work, committed, drafted, found, progress, most)
    elif isinstance(work, Extend) and work.decodes:
        reasons = np.where(committed < len(work.decodes), int(FewerDrafts.PROMPTS), 0)
    else:
        return
    if reasons.any():
        for delta, reason in zip(deltas, reasons.tolist(), strict=True):
            delta.fewer = reason


def _of_round(
    work: Round, committed: np.ndarray, drafted: np.ndarray, found: np.ndarray | None, progress: Progress, most: int
) -> np.ndarray:
    """Return the reason of each request in a round [requests]; 0 where it had ``most`` drafts."""
    limits = progress.max_drafts[work.rows.slots[committed]]
    reasons = np.full(len(committed), int(work.fewer) if work.most < most else 0)
    if drafted.size:
        shared = np.zeros(len(drafted), bool) if found is None else drafted < found
        own = np.where(drafted >= limits, int(FewerDrafts.LIMIT), int(FewerDrafts.NOT_FOUND))
        own = np.where(shared, int(FewerDrafts.SHARED), own)
        reasons = np.where(drafted < work.most, own, reasons)
    return np.where(limits == 0, int(FewerDrafts.LIMIT), reasons)
