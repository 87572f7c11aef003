"""Forced drafts: tokens that a feature knows in advance, such as the only token that a grammar allows
(``RequestState.forced``).

They are verified as all drafts are, so they do not change the text. A drafter's k bounds them. An engine without a
drafter verifies them in passes of their own widths, chosen by the number of requests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unisono.config import ResolvedConfig
from unisono.drafters.base import Drafter
from unisono.engine.sequence import Round
from unisono.engine.worker.progress import Progress
from unisono.types import ConfigError

DEFAULT_FORCED = 7
"""Forced tokens per round without a drafter. A key of a JSON object takes 2 to 8 tokens."""

MAX_VERIFIED = 128
"""Largest verify pass without a drafter, in tokens. Up to this size a GPU pass is bound by reading weights."""


def with_forced_drafts(config: ResolvedConfig, drafter: Drafter, paths: int, recurrent: bool) -> ResolvedConfig:
    """Resolve ``--max-forced-tokens`` to ``forced_drafts``.

    paths: paths of the draft tree; 1 for a chain. recurrent: True if the model has recurrent layers. Raises ConfigError
    for an unsupported value.
    """
    requested, num_drafts, obstacle = config.requested.max_forced_tokens, drafter.num_drafts, None
    choices: tuple[int, ...] = ()
    if config.requested.synthetic:
        obstacle = "synthetic acceptance accepts drafts unseen"
    elif paths > 1:
        obstacle = "a draft tree is verified on pages that its draft pass prepares"
    elif getattr(drafter, "keeps_drafts", False):
        obstacle = f"the {drafter.name} drafter keeps keys and values of its own drafts only"
    if requested == 0:
        reason = "--max-forced-tokens 0"
    elif obstacle is not None:
        if requested is not None:
            raise ConfigError(f"--max-forced-tokens {requested}: {obstacle}. Leave it out.")
        reason = obstacle
    elif num_drafts:
        choices, reason = (num_drafts,), "the drafter's k is the limit of a round"
    elif recurrent and requested is None:
        reason = "recurrent layers keep the inputs of a round; --max-forced-tokens N turns it on"
    else:
        most = requested or DEFAULT_FORCED
        choices = tuple(sorted({most, *(n for n in (1, 3) if n < most)}))
        reason = f"without a drafter; fewer where a pass would have more than {MAX_VERIFIED} tokens"
    value = f"up to {min(choices[-1], requested or choices[-1])} a round" if choices else "not drafted"
    return config.decide("forced tokens", value, reason, forced_drafts=choices)


def forced_rows(drafts: int) -> int:
    """Return the largest number of requests in a verify pass with this number of forced drafts each, without a
    drafter.
    """
    return max(1, MAX_VERIFIED // (1 + drafts))


class ForcedDrafts:
    """Adds forced drafts to rounds whose drafts the host reads. num_drafts: the drafter's k."""

    def __init__(self, config: ResolvedConfig, num_drafts: int, progress: Progress) -> None:
        self._choices, self._num_drafts, self._progress = config.forced_drafts, num_drafts, progress
        self._most = config.requested.max_forced_tokens or max(self._choices, default=0)

    def added(self, work: Round) -> Round:
        """Return ``work`` with the forced tokens of its requests; ``work`` itself if there are none."""
        if not self._choices:
            return work
        slots = work.rows.slots
        room = np.minimum(self._progress.most_drafts(slots), self._most).tolist()
        tokens = [[*s.forced()][:most] for s, most in zip(work.rows.sequences, room, strict=True)]
        drafts = work.drafts or self._width(len(slots))
        if not drafts or not any(tokens):
            return work
        forced = np.full((len(slots), drafts), -1, np.int32)
        for row, known in zip(forced, tokens, strict=True):
            row[: len(known)] = known[:drafts]
        left = np.minimum(self._progress.most_drafts(slots), drafts)
        proposes = bool(work.drafts) and bool(((forced >= 0).sum(1) < left).any())
        return replace(work, drafts=drafts, forced=forced, proposes=proposes)

    def _width(self, rows: int) -> int:
        """Forced drafts per request of a round without other drafts; 0 for none."""
        if self._num_drafts:
            return self._num_drafts if rows <= forced_rows(self._num_drafts) else 0
        return max((n for n in self._choices if rows <= forced_rows(n)), default=0)


def merged(drafts: np.ndarray, forced: np.ndarray | None) -> np.ndarray:
    """Put forced tokens [rows, k] in front of a drafter's ``drafts [rows, P, k]``.

    A draft after forced tokens is kept only if the drafter proposed these tokens too; otherwise it continues another
    text.
    """
    if forced is None:
        return drafts
    known = forced[:, None] >= 0
    agrees = np.where(known, forced[:, None] == drafts, True).all(axis=-1, keepdims=True)
    rest = np.where(agrees | ~known.any(axis=-1, keepdims=True), drafts, -1)
    return np.where(known, forced[:, None], rest)
