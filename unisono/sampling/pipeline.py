"""The logits pipeline between the LM head and a token.

Edits (penalties, bias, masks) come first, in ``kernels/sampling/edits.py``; filters and the draw, in
``kernels/sampling/sampler.py``, read the edited logits.

Logits are either whole, [N, V], or :class:`Columns` if each rank has computed a part. With Columns, each rank ranks its
own edited columns and the ranks' best keys are gathered (``kernels/sampling/column_keys.py``). This yields the tokens
of whole logits as long as no row is filtered, which callers with Columns must ensure. Edits treat each column
independently, so they stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, float32, tensor

from unisono.distributed.columns import Columns, whole
from unisono.kernels.sampling.candidates import candidates
from unisono.kernels.sampling.column_keys import best_tokens, column_keys
from unisono.kernels.sampling.edits import edit_logits
from unisono.kernels.sampling.logprobs import logprobs
from unisono.kernels.sampling.sampler import sample


class SamplingFields(Protocol):
    """Slot fields used for sampling, each ``[S]``, as documented in ``kernels/sampling/sampler.py``."""

    length: Tensor
    status: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_lo: Tensor
    seed_hi: Tensor


class EditFields(SamplingFields, Protocol):
    """Slot fields also used for edits and log-probabilities, as documented in ``kernels/sampling/edits.py`` and
    ``kernels/sampling/logprobs.py``."""

    logprobs: Tensor
    prompt_logprobs: Tensor
    edits: Tensor
    stop_ids: Tensor
    history: Tensor
    edit_table: Tensor


@dataclass(frozen=True)
class ReportedValues:
    """Values that ``logprobs`` reports of tokens. Defaults: log-probabilities of the model's logits.

    processed: of logits as tokens are drawn from them: edited, divided by the temperature, filtered.
    normalized: log-probabilities; False: logits.
    """

    processed: bool = False
    normalized: bool = True

    @classmethod
    def of(cls, mode: str) -> ReportedValues:
        """The values of a ``--logprobs-mode``."""
        return cls(mode.startswith("processed"), mode.endswith("logprobs"))


@dataclass(frozen=True)
class Sampled:
    """Result of sampling N rows of logits.

    tokens [N] int32. edited [N, V] fp32: edited logits of rows whose slot has edits; None for Columns. threshold [N]
    fp32: the smallest logit kept by each row's filters; None for Columns.
    """

    tokens: Tensor
    edited: Tensor | None = None
    threshold: Tensor | None = None


def sample_tokens(
    logits: Tensor, slots: Tensor, width: int, fields: SamplingFields, offset: int = 0, ids: Tensor | None = None
) -> Tensor:
    """Sample a token for every row of logits, without edits.

    Row r * width + j is at position ``fields.length[slots[r]] + offset + j``. Drafting, verification and plain decoding
    share this rule, with noise keyed by (seed, position, token id): equal logits give equal tokens for every caller,
    and similar logits usually do (Daliri, Musco, Suresh, arXiv 2408.07978).

    logits [R * width, V]; slots [R] int32. ids: the token of each column, if a drafter knows only some tokens. Returns
    tokens [R * width] int32.
    """
    return sample(
        logits, slots, width, fields.length, fields.status, fields.temperature, fields.top_k, fields.top_p,
        fields.min_p, fields.seed_lo, fields.seed_hi, offset, ids,
    )  # fmt: skip


def edit_and_sample(
    logits: Tensor | Columns, slots: Tensor, width: int, drafts: Tensor, fields: EditFields, offset: int = 0,
    ids: Tensor | None = None, mask: Tensor | None = None, places: Tensor | None = None,
) -> Sampled:  # fmt: skip
    """:func:`sample_tokens` with edits. Row r * width + j treats drafts[r, : offset + j] as committed.

    drafts [R, at least offset + width - 1] int32; -1 is no draft. mask [R * width, words] int32: one bit per allowed
    token, for rows of slots with edits; None allows all. With Columns, ids must be None and the slots must not filter.
    places [R * width] int32: each row's row of logits [T, V]; below 0: it is not sampled.
    """
    if isinstance(logits, Columns):
        logits = logits if places is None else logits.select(places.clamp_min(0))
        return Sampled(_best_of_ranks(logits, slots, width, 1, drafts, fields, offset, mask)[:, 0])
    edited = _edited(logits, slots, width, drafts, fields, offset, ids, mask, places=places)
    threshold = edited.new_empty(edited.shape[0])
    tokens = sample(
        logits, slots, width, fields.length, fields.status, fields.temperature, fields.top_k, fields.top_p,
        fields.min_p, fields.seed_lo, fields.seed_hi, offset, ids, fields.edits, edited, threshold, places,
    )  # fmt: skip
    return Sampled(tokens, edited, threshold)


def _edited(
    logits: Tensor, slots: Tensor, width: int, drafts: Tensor, fields: EditFields, offset: int, ids: Tensor | None,
    mask: Tensor | None = None, first: int = 0, places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Call ``edit_logits`` with the slots' fields."""
    return edit_logits(
        logits, slots, width, drafts, fields.edits, fields.length, fields.status, fields.stop_ids, fields.history,
        fields.edit_table, offset, ids, mask, first, places,
    )  # fmt: skip


def _best_of_ranks(
    logits: Columns, slots: Tensor, width: int, count: int, drafts: Tensor, fields: EditFields, offset: int,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The ``count`` best tokens [R * width, count] int32, from logits whose columns are divided among ranks."""
    own, first = logits.own, logits.first
    edited = _edited(own, slots, width, drafts, fields, offset, None, mask, first)
    keys = column_keys(
        own, slots, width, count, fields.length, fields.status, fields.temperature, fields.seed_lo, fields.seed_hi,
        offset, first, fields.edits, edited,
    )  # fmt: skip
    return best_tokens(logits.ranks.gather(keys), slots, width, count, fields.status)


def report_logprobs(
    logits: Tensor, slots: Tensor, width: int, sampled: Sampled, fields: EditFields, reported: ReportedValues,
    out: Tensor,
) -> None:  # fmt: skip
    """Write the values requested by each slot into out [R, width, WORDS] int32; see ``kernels/sampling/logprobs.py``.

    sampled: result of sampling whole logits.
    """
    assert sampled.edited is not None
    assert sampled.threshold is not None
    logprobs(
        logits, slots, width, sampled.tokens, fields.logprobs, fields.status, fields.temperature, fields.edits,
        sampled.edited, sampled.threshold, reported.processed, reported.normalized, out.view(-1, out.shape[-1]),
    )  # fmt: skip


def report_prompt_logprobs(
    logits: Tensor, slots: Tensor, tokens: Tensor, fields: EditFields, reported: ReportedValues, out: Tensor
) -> None:
    """Write the values of prompt tokens requested by slots [T] into out [T, WORDS] int32, from raw logits [T, V].

    Nothing is drawn from these logits, so they are never processed.
    """
    unused = logits.new_empty(logits.shape[0], dtype=float32)
    logprobs(
        logits, slots, 1, tokens, fields.prompt_logprobs, fields.status, fields.temperature, fields.edits, unused,
        unused, False, reported.normalized, out,
    )  # fmt: skip


def edit_and_rank(
    logits: Tensor | Columns, slots: Tensor, count: int, drafts: Tensor, fields: EditFields, offset: int = 0,
    ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The ``count`` best tokens [R, count] int32 of logits [R, V] under the rule of :func:`edit_and_sample`, best
    first.

    The first is the token that function samples; -1 fills the columns beyond those the filters keep.
    """
    if isinstance(logits, Columns):
        return _best_of_ranks(logits, slots, 1, count, drafts, fields, offset)
    edited = _edited(logits, slots, 1, drafts, fields, offset, ids)
    return candidates(
        logits, slots, count, fields.length, fields.status, fields.temperature, fields.top_k, fields.top_p,
        fields.min_p, fields.seed_lo, fields.seed_hi, offset, ids, fields.edits, edited,
    )  # fmt: skip


class DraftSampler:
    """Sampling rule of drafters (``context.sample``): the target's rule with edits, applied to the drafter's logits.

    While a round drafts (:meth:`seeing`), position length + offset treats the drafts before it as committed, so that
    penalties agree with verification; drafters need not know. Otherwise only committed tokens count.

    ``paths``: the paths of a draft tree; row r · P + l of a round is path l. Each row gets the candidate selected by
    its path's digit (0 after the path's end), so drafters need not know the digits either.

    Columns are gathered into whole logits, unless no request of the pass filters (:meth:`unfiltered`).
    """

    def __init__(self, fields: EditFields, paths: Sequence[Sequence[int]] = ()) -> None:
        self._fields = fields
        self._drafts: Tensor | None = None
        self._whole = True
        depth = max(map(len, paths), default=0)
        digits = [[path[step] if step < len(path) else 0 for path in paths] for step in range(depth)]
        self._counts = [max(step) + 1 for step in digits]
        self._digits = tensor(digits, device=fields.length.device)  # int64 [depth, P]

    @contextmanager
    def seeing(self, drafts: Tensor) -> Iterator[None]:
        """Within the block, ``drafts [R, k]`` is the tensor the drafter writes its picks into, column by column."""
        self._drafts = drafts
        try:
            yield
        finally:
            self._drafts = None

    @contextmanager
    def unfiltered(self, holds: bool) -> Iterator[None]:
        """Within the block, no sampled slot filters, if ``holds`` is True."""
        before, self._whole = self._whole, not holds
        try:
            yield
        finally:
            self._whole = before

    def __call__(self, logits: Tensor | Columns, slots: Tensor, offset: int, ids: Tensor | None) -> Tensor:
        """Sample tokens [R] int32 for position length + offset from logits [R, V] and slots [R] int32."""
        logits, drafts, count = self._gathered(logits, ids), self._drafts, 1
        if drafts is None or drafts.shape[0] != slots.shape[0] or drafts.shape[1] < offset:
            drafts = slots.new_full((slots.shape[0], offset), -1)
        elif offset < len(self._counts):
            count = self._counts[offset]
        if count == 1:
            return edit_and_sample(logits, slots, 1, drafts, self._fields, offset, ids).tokens
        best = edit_and_rank(logits, slots, count, drafts, self._fields, offset, ids)
        digits = self._digits[offset]
        chosen = digits.expand(slots.shape[0] // digits.shape[0], -1).reshape(-1, 1)
        return best.gather(1, chosen)[:, 0]

    def block(
        self, logits: Tensor | Columns, slots: Tensor, count: int, ids: Tensor | None, places: Tensor | None = None
    ) -> Tensor:
        """Sample tokens [R, count] int32 for positions length … length + count - 1 at once.

        logits [R · count, V], slots [R] int32; places: see :func:`edit_and_sample`. No position sees the drafts before
        it: while a round drafts, its drafts are still -1.
        """
        drafts = self._drafts
        if drafts is None or drafts.shape != (slots.shape[0], count):
            drafts = slots.new_full((slots.shape[0], count), -1)
        logits = self._gathered(logits, ids)
        sampled = edit_and_sample(logits, slots, count, drafts, self._fields, 0, ids, places=places)
        return sampled.tokens.view(-1, count)

    def best(self, logits: Tensor | Columns, slots: Tensor, count: int, ids: Tensor | None) -> Tensor:
        """The ``count`` best tokens for position length, [R, count] int32, from logits [R, V] and slots [R] int32.

        Column 0 is the token that a call samples at offset 0 with nothing drafted yet; -1 fills the columns beyond
        those the filters keep.
        """
        nothing = slots.new_empty((slots.shape[0], 0))
        return edit_and_rank(self._gathered(logits, ids), slots, count, nothing, self._fields, 0, ids)

    def _gathered(self, logits: Tensor | Columns, ids: Tensor | None) -> Tensor | Columns:
        """Gather Columns unless the rows need no whole logits."""
        return whole(logits) if self._whole or ids is not None else logits
