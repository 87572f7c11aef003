"""The logits pipeline: what happens between the LM head and a token.

Edits (penalties, bias, masks) come first, in ``kernels/sampling/edits.py``; filters and the draw, in
``kernels/sampling/sampler.py``, see edited logits.

Logits come whole, [N, V], or as :class:`Columns` where ranks have computed parts. From Columns each rank ranks its own,
edited columns, and the ranks' best keys are gathered (``kernels/sampling/column_keys.py``). The tokens are those of
whole logits as long as no row is filtered: callers with Columns know that. Edits treat each column by itself, so they
stay exact.
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
    """The slot fields that sampling reads, each ``[S]``, as ``kernels/sampling/sampler.py`` describes them."""

    length: Tensor
    status: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_lo: Tensor
    seed_hi: Tensor


class EditFields(SamplingFields, Protocol):
    """And those that editing and reporting read, as ``kernels/sampling/edits.py`` and ``kernels/sampling/logprobs.py``
    describe them.
    """

    logprobs: Tensor
    prompt_logprobs: Tensor
    edits: Tensor
    stop_ids: Tensor
    history: Tensor
    edit_table: Tensor


@dataclass(frozen=True)
class Sampled:
    """What came of N rows of logits.

    tokens [N] int32. edited [N, V] fp32: the logits of rows whose slot edits. threshold [N] fp32: the least logit
    that each row's filters kept. Both are None where the logits were Columns.
    """

    tokens: Tensor
    edited: Tensor | None = None
    threshold: Tensor | None = None


def sample_tokens(
    logits: Tensor, slots: Tensor, width: int, fields: SamplingFields, offset: int = 0, ids: Tensor | None = None
) -> Tensor:
    """A token for every row of logits [R * width, V], slots [R] int32 -> tokens [R * width] int32; edits nothing.

    Row r * width + j stands at position ``fields.length[slots[r]] + offset + j``; ``ids`` names the token of each
    column where a drafter knows only some. Drafting, verification and plain decoding pick by this one rule, with
    noise keyed by (seed, position, token id): equal logits give equal tokens for every caller, and near ones mostly
    do (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    return sample(
        logits, slots, width, fields.length, fields.status, fields.temperature, fields.top_k, fields.top_p,
        fields.min_p, fields.seed_lo, fields.seed_hi, offset, ids,
    )  # fmt: skip


def edit_and_sample(
    logits: Tensor | Columns, slots: Tensor, width: int, drafts: Tensor, fields: EditFields, offset: int = 0,
    ids: Tensor | None = None, mask: Tensor | None = None,
) -> Sampled:  # fmt: skip
    """:func:`sample_tokens` by edited logits. Row r * width + j sees drafts[r, : offset + j] as if they were committed.

    drafts [R, at least offset + width - 1] int32; -1 is no draft. mask [R * width, words] int32: what rows of slots
    that edit may pick, a bit for each token; None allows all. From Columns, without ids, the slots must not filter.
    """
    if isinstance(logits, Columns):
        return Sampled(_best_of_ranks(logits, slots, width, 1, drafts, fields, offset, mask)[:, 0])
    edited = _edited(logits, slots, width, drafts, fields, offset, ids, mask)
    threshold = edited.new_empty(edited.shape[0])
    tokens = sample(
        logits, slots, width, fields.length, fields.status, fields.temperature, fields.top_k, fields.top_p,
        fields.min_p, fields.seed_lo, fields.seed_hi, offset, ids, fields.edits, edited, threshold,
    )  # fmt: skip
    return Sampled(tokens, edited, threshold)


def _edited(
    logits: Tensor, slots: Tensor, width: int, drafts: Tensor, fields: EditFields, offset: int, ids: Tensor | None,
    mask: Tensor | None = None, first: int = 0,
) -> Tensor:  # fmt: skip
    """``edit_logits`` of the slots' fields."""
    return edit_logits(
        logits, slots, width, drafts, fields.edits, fields.length, fields.status, fields.stop_ids, fields.history,
        fields.edit_table, offset, ids, mask, first,
    )  # fmt: skip


def _best_of_ranks(
    logits: Columns, slots: Tensor, width: int, count: int, drafts: Tensor, fields: EditFields, offset: int,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The ``count`` best tokens [R * width, count] int32 of rows of which each rank has some columns."""
    own, first = logits.own, logits.first
    edited = _edited(own, slots, width, drafts, fields, offset, None, mask, first)
    keys = column_keys(
        own, slots, width, count, fields.length, fields.status, fields.temperature, fields.seed_lo, fields.seed_hi,
        offset, first, fields.edits, edited,
    )  # fmt: skip
    return best_tokens(logits.ranks.gather(keys), slots, width, count, fields.status)


def report_logprobs(
    logits: Tensor, slots: Tensor, width: int, sampled: Sampled, fields: EditFields, processed: bool, out: Tensor
) -> None:
    """Write into out [R, width, WORDS] int32 what slots asked to know of the picks; see
    ``kernels/sampling/logprobs.py``.

    sampled: of whole logits.
    """
    assert sampled.edited is not None
    assert sampled.threshold is not None
    logprobs(
        logits, slots, width, sampled.tokens, fields.logprobs, fields.status, fields.temperature, fields.edits,
        sampled.edited, sampled.threshold, processed, out.view(-1, out.shape[-1]),
    )  # fmt: skip


def report_prompt_logprobs(logits: Tensor, slots: Tensor, tokens: Tensor, fields: EditFields, out: Tensor) -> None:
    """Write into out [T, WORDS] int32 what slots [T] asked to know of their prompt tokens, from raw logits [T, V]."""
    unused = logits.new_empty(logits.shape[0], dtype=float32)
    logprobs(
        logits, slots, 1, tokens, fields.prompt_logprobs, fields.status, fields.temperature, fields.edits, unused,
        unused, False, out,
    )  # fmt: skip


def edit_and_rank(
    logits: Tensor | Columns, slots: Tensor, count: int, drafts: Tensor, fields: EditFields, offset: int = 0,
    ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The ``count`` best tokens [R, count] int32 of logits [R, V] by the rule of :func:`edit_and_sample`, best first.

    The first is what that picks; -1 stands where the filters keep no more.
    """
    if isinstance(logits, Columns):
        return _best_of_ranks(logits, slots, 1, count, drafts, fields, offset)
    edited = _edited(logits, slots, 1, drafts, fields, offset, ids)
    return candidates(
        logits, slots, count, fields.length, fields.status, fields.temperature, fields.top_k, fields.top_p,
        fields.min_p, fields.seed_lo, fields.seed_hi, offset, ids, fields.edits, edited,
    )  # fmt: skip


class DraftSampler:
    """``context.sample`` of drafters: the target's rule, edits and all, for logits of their own.

    While a round drafts (:meth:`seeing`) position length + offset sees the drafts before it, so that penalties agree
    with verification; a drafter need not know. Elsewhere it sees what is committed.

    ``paths`` are those of a tree, row r · P + l of a round being path l: there each row gets the candidate that its
    path's digit names (0 after its end), so that a drafter need not know of digits either.

    Logits that come as Columns are gathered whole, unless the pass says that no request of it filters
    (:meth:`unfiltered`).
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
        """While this is entered, ``drafts [R, k]`` are what the drafter writes its picks into, column by column."""
        self._drafts = drafts
        try:
            yield
        finally:
            self._drafts = None

    @contextmanager
    def unfiltered(self, holds: bool) -> Iterator[None]:
        """While this is entered, no slot that is asked about filters, where ``holds``."""
        before, self._whole = self._whole, not holds
        try:
            yield
        finally:
            self._whole = before

    def __call__(self, logits: Tensor | Columns, slots: Tensor, offset: int, ids: Tensor | None) -> Tensor:
        """logits [R, V], slots [R] int32 -> tokens [R] int32 for position length + offset."""
        logits, drafts, count = self._given(logits, ids), self._drafts, 1
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

    def best(self, logits: Tensor | Columns, slots: Tensor, count: int, ids: Tensor | None) -> Tensor:
        """logits [R, V], slots [R] int32 -> the ``count`` best tokens for position length, [R, count] int32.

        Column 0 is what a call picks at offset 0 where nothing is drafted yet; -1: the filters keep no more.
        """
        nothing = slots.new_empty((slots.shape[0], 0))
        return edit_and_rank(self._given(logits, ids), slots, count, nothing, self._fields, 0, ids)

    def _given(self, logits: Tensor | Columns, ids: Tensor | None) -> Tensor | Columns:
        """The logits as they are sampled from."""
        return whole(logits) if self._whole or ids is not None else logits
