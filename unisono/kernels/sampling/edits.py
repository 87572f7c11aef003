"""Edits of logits before the filters: forbidden tokens, biases and penalties of a request.

Owns the op ``edit_logits`` and the layout of the edit table, one row of int32 words per slot;
`sampling/edits.py` packs rows and `sampling/pipeline.py` calls the op, for the target's logits and for a
drafter's. Only slots whose ``edits`` field is not 0 have a row. The programs of all others return at once.

Edited rows are written to a separate tensor in fp32, because a penalised bf16 logit is not a bf16 number. In order, as
in vLLM:

* mask: ids that the pass's mask forbids at a position become -inf (a bit for each id), if the pass has a mask.
* allowed: ids outside the set become -inf (a bit for each id).
* bad words: the last id of a word becomes -inf if the output ends with the others.
* bias: added.
* min_tokens: the slot's stop ids become -inf while the output is shorter.
* repetition (of ids in prompt or output): positive logits are divided by it, others multiplied (Keskar et al.,
  CTRL, arXiv 1909.05858). frequency: subtracted once per occurrence in the output; presence: once if there is any.

Occurrences are counted each time from the slot's history, in integers. No state must be kept consistent with commits,
preemption and prefix hits, and no order of additions can change bits. A position of a round also sees the drafts before
it, as if they were committed.

Shapes: N = R * W rows of logits, V columns, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, one_stride, op
from unisono.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_IDS, FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
STOP_IDS = tl.constexpr(MAX_STOP_IDS)
WORD_TOKENS = tl.constexpr(MAX_BAD_WORD_TOKENS)

# Words of a table row. Floats are bitcast.
REPETITION, PRESENCE, FREQUENCY, PROMPT_LEN, MIN_TOKENS, NUM_BIASES, NUM_WORDS, RESTRICTED = map(tl.constexpr, range(8))
BIAS_IDS = tl.constexpr(8)
BIASES = tl.constexpr(8 + MAX_BIASES)
WORDS = tl.constexpr(8 + 2 * MAX_BIASES)
"""Bad words, MAX_BAD_WORD_TOKENS ids each, right-aligned, -1 before."""
ALLOWED = tl.constexpr(8 + 2 * MAX_BIASES + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS)
"""Bit i % 32 of word i // 32: token i may be sampled. Read only if RESTRICTED."""

EDIT_BLOCK, EDIT_WARPS = 4096, 8
HISTORY_CHUNK = 1024
PROGRAMS = 1024
"""Programs per launch: enough to fill a GPU, and few enough that idle ones cost little."""


@triton.jit
def _float(words, at):
    return tl.load(words + at).to(tl.float32, bitcast=True)


@triton.jit
def _column_of(token, ids, V, HAS_IDS: tl.constexpr, FIRST: tl.constexpr, STEPS: tl.constexpr):
    """Column of each token; out of range if it has none. ``ids`` is sorted, so it is searched by bisection."""
    column = token - FIRST
    if HAS_IDS:
        low = tl.zeros_like(token)
        high = low + V
        for _ in tl.static_range(STEPS):
            middle = (low + high) >> 1
            below = tl.load(ids + middle, mask=middle < V, other=0x7FFFFFFF) < token
            low = tl.where(below & (low < high), middle + 1, low)
            high = tl.where(below, high, middle)
        found = tl.load(ids + low, mask=low < V, other=-1) == token
        column = tl.where(found, low, -1)
    return column


@triton.jit
def _count(
    past, first, last, base, ids, V, HAS_IDS, FIRST: tl.constexpr, STEPS, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the occurrences of the columns [BLOCK] from ``base`` on among the tokens ``first`` … ``last`` of a
    history.
    """
    counts = tl.zeros((BLOCK,), tl.int32)
    i = tl.arange(0, CHUNK)
    for start in range(first, last, CHUNK):
        token = tl.load(past + start + i, mask=start + i < last, other=-1)
        column = _column_of(token, ids, V, HAS_IDS, FIRST, STEPS) - base
        counted = (token >= 0) & (column >= 0) & (column < BLOCK)
        counts += tl.histogram(tl.where(counted, column, 0), BLOCK, mask=counted)
    return counts


@triton.jit
def _without_bad_words(logit, token, words, past, drafts, committed, seen):
    """Set the last token of every word to -inf if the output ends with the word's other tokens."""
    j = tl.arange(0, WORD_TOKENS)
    prompt_len = tl.load(words + PROMPT_LEN)
    at = committed + seen - (WORD_TOKENS - 1) + j  # position of word[j] if its last token comes next
    known = (j < WORD_TOKENS - 1) & (at >= prompt_len)
    before = tl.load(past + at, mask=known & (at < committed), other=-1)
    before = tl.where(
        at < committed, before, tl.load(drafts + at - committed, mask=known & (at >= committed), other=-1)
    )
    for i in range(tl.load(words + NUM_WORDS)):
        word = tl.load(words + WORDS + i * WORD_TOKENS + j)
        fits = (word < 0) | (j == WORD_TOKENS - 1) | (known & (before == word))
        last = tl.max(tl.where(j == WORD_TOKENS - 1, word, -1))
        last = tl.where(tl.min(fits.to(tl.int32)) > 0, last, -1)
        logit = tl.where(token == last, float("-inf"), logit)
    return logit


@triton.jit
def _penalised(
    logit, token, words, past, drafts, committed, seen, base, ids, V,
    HAS_IDS: tl.constexpr, FIRST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    repetition, presence, frequency = _float(words, REPETITION), _float(words, PRESENCE), _float(words, FREQUENCY)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        prompt_len = tl.load(words + PROMPT_LEN)
        outputs = _count(past, prompt_len, committed, base, ids, V, HAS_IDS, FIRST, STEPS, BLOCK, CHUNK)
        for i in range(seen):
            outputs += (token == tl.load(drafts + i)).to(tl.int32)
        if repetition != 1.0:
            prompts = _count(past, 0, prompt_len, base, ids, V, HAS_IDS, FIRST, STEPS, BLOCK, CHUNK)
            scaled = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
            logit = tl.where(prompts + outputs > 0, scaled, logit)
        logit -= frequency * outputs.to(tl.float32)
        logit -= tl.where(outputs > 0, presence, 0.0)
    return logit


@triton.jit
def _edit_kernel(
    logits, slots, drafts, edits, length, status, stop_ids, history, table, ids, mask, edited, places,
    stride, row_stride, draft_stride, max_tokens, table_stride, mask_stride, width, offset, V,
    HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, FIRST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    slot = tl.load(slots + n // width)
    field = slot * stride
    source = n
    if places is not None:
        source = tl.load(places + n)
    if (tl.load(edits + field) != 0) & (tl.load(status + field) == RUNNING) & (source >= 0):
        words = table + slot.to(tl.int64) * table_stride
        past = history + slot.to(tl.int64) * max_tokens
        drafted = drafts + (n // width) * draft_stride
        committed = tl.load(length + field)
        seen = offset + n % width
        short = committed + seen - tl.load(words + PROMPT_LEN) < tl.load(words + MIN_TOKENS)
        for base in range(tl.program_id(1) * BLOCK, V, tl.num_programs(1) * BLOCK):
            column = base + tl.arange(0, BLOCK)
            inside = column < V
            token = tl.load(ids + column, mask=inside, other=-1) if HAS_IDS else column + FIRST
            logit = tl.load(logits + source.to(tl.int64) * row_stride + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_MASK:
                masked = tl.load(mask + n.to(tl.int64) * mask_stride + token // 32, mask=inside, other=0)
                logit = tl.where(((masked >> (token % 32)) & 1) != 0, logit, float("-inf"))
            if tl.load(words + RESTRICTED) != 0:
                allowed = tl.load(words + ALLOWED + token // 32, mask=inside, other=0)
                logit = tl.where(((allowed >> (token % 32)) & 1) != 0, logit, float("-inf"))
            logit = _without_bad_words(logit, token, words, past, drafted, committed, seen)
            for i in range(tl.load(words + NUM_BIASES)):
                biased = token == tl.load(words + BIAS_IDS + i)
                logit = tl.where(biased, logit + _float(words, BIASES + i), logit)
            if short:
                for stop in tl.static_range(STOP_IDS):
                    logit = tl.where(token == tl.load(stop_ids + field + stop), float("-inf"), logit)
            logit = _penalised(
                logit, token, words, past, drafted, committed, seen, base, ids, V, HAS_IDS, FIRST, STEPS, BLOCK, CHUNK
            )
            tl.store(edited + n.to(tl.int64) * V + column, logit, mask=inside)


def _edit_meta(logits: Tensor, slots: Tensor, width: int) -> Tensor:
    return logits.new_empty((slots.shape[0] * width, logits.shape[1]), dtype=torch.float32)


def launch_edit_logits(
    logits: Tensor, slots: Tensor, width: int, drafts: Tensor, edits: Tensor, length: Tensor, status: Tensor,
    stop_ids: Tensor, history: Tensor, table: Tensor, offset: int = 0, ids: Tensor | None = None,
    mask: Tensor | None = None, first: int = 0, places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    one_stride(edits, length, status, stop_ids)
    edited = _edit_meta(logits, slots, width)
    rows, vocab = edited.shape
    block = min(EDIT_BLOCK, max(128, triton.next_power_of_2(vocab)))
    share = min(triton.cdiv(vocab, block), max(1, PROGRAMS // max(1, rows)))
    _edit_kernel[(rows, share)](
        logits, slots, drafts, edits, length, status, stop_ids, history, table, ids, mask, edited,
        places, edits.stride(0), logits.stride(0), drafts.stride(0), history.stride(0), table.stride(0),
        0 if mask is None else mask.stride(0), width, offset, vocab,
        HAS_IDS=ids is not None, HAS_MASK=mask is not None, FIRST=first, STEPS=vocab.bit_length(), BLOCK=block,
        CHUNK=HISTORY_CHUNK, num_warps=EDIT_WARPS,
    )  # fmt: skip
    return edited


def _bits(words: Tensor, tokens: Tensor) -> Tensor:
    """Read each token's bit."""
    return (words[tokens // 32] >> (tokens % 32)) & 1


def _edit_row(logit: Tensor, tokens: Tensor, column_of: Tensor, seen: Tensor, stops: Tensor, words: Tensor) -> Tensor:
    """Edit one row: logit [V] fp32 of ``tokens [V]``, after the tokens ``seen``. words: the slot's table row."""
    repetition, presence, frequency = words[:3].view(torch.float32).tolist()
    prompt_len, min_tokens, biases, bad_words, restricted = words[3:8].tolist()
    output = seen[prompt_len:]
    if restricted:
        logit = logit.masked_fill(_bits(words[ALLOWED.value :], tokens) == 0, -torch.inf)
    banned = [word for word in _bad_words(words, bad_words) if _ends_with(output.tolist(), word[:-1])]
    logit = logit.index_fill(0, _known(column_of, torch.tensor([word[-1] for word in banned]).long()), -torch.inf)
    bias = torch.zeros_like(logit)
    biased = column_of[words[BIAS_IDS.value :][:biases].long()]
    bias[biased[biased >= 0]] = words[BIASES.value :][:biases].view(torch.float32)[biased >= 0]
    logit = logit + bias
    if len(output) < min_tokens:
        logit = logit.index_fill(0, _known(column_of, stops), -torch.inf)
    outputs = torch.bincount(_known(column_of, output), minlength=len(logit))
    prompts = torch.bincount(_known(column_of, seen[:prompt_len]), minlength=len(logit))
    if repetition != 1:
        scaled = torch.where(logit > 0, logit / repetition, logit * repetition)
        logit = torch.where(prompts + outputs > 0, scaled, logit)
    return logit - frequency * outputs.float() - presence * (outputs > 0).float()


def _known(column_of: Tensor, tokens: Tensor) -> Tensor:
    """Columns of the tokens that have one."""
    columns = column_of[tokens[tokens >= 0]]
    return columns[columns >= 0]


def _bad_words(words: Tensor, count: int) -> list[list[int]]:
    grid = words[WORDS.value :][: count * WORD_TOKENS.value].view(-1, WORD_TOKENS.value)
    return [[token for token in word if token >= 0] for word in grid.tolist()]


def _ends_with(output: list[int], prefix: list[int]) -> bool:
    return not prefix or output[-len(prefix) :] == prefix


@op(cuda=launch_edit_logits, meta=_edit_meta)
def edit_logits(
    logits: Tensor, slots: Tensor, width: int, drafts: Tensor, edits: Tensor, length: Tensor, status: Tensor,
    stop_ids: Tensor, history: Tensor, table: Tensor, offset: int = 0, ids: Tensor | None = None,
    mask: Tensor | None = None, first: int = 0, places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return edited copies of the rows of slots with edits; the other rows of the result are uninitialised.

    logits [R * width, V] bf16, fp16 or fp32, last dimension contiguous; slots [R] int32. Row r * width + j is for
    position length + offset + j and sees drafts[r, : offset + j] (int32, -1: none) after the history. edits, length,
    status [S], stop_ids [S, 16] (-1: none): slot fields of one stride; history [S, max_tokens], table
    [S, words of a row]; all int32. ids [V] int32, ascending: token of each column (None: ``first`` and those after
    it, if V columns are a part of the vocabulary).
    mask [R * width, words] int32, last dimension contiguous: bit i % 32 of word i // 32 allows token i (None: all).
    places [R * width] int32: each row's row of logits [T, V]; below 0: it stays uninitialised.
    Returns [R * width, V] fp32. A row depends on its own logits, slot and drafts only.
    """
    edited = _edit_meta(logits, slots, width)
    editing = edits.index_select(0, slots.long())
    if not editing.any():
        return edited
    running = status.index_select(0, slots.long()) == RUNNING.value
    rows = ((editing != 0) & running).nonzero()[:, 0].tolist()
    if not rows:
        return edited
    tokens = torch.arange(first, first + logits.shape[1]) if ids is None else ids.long()
    column_of = torch.full(((table.shape[1] - ALLOWED.value) * 32,), -1)
    column_of[tokens] = torch.arange(logits.shape[1])
    for row in rows:
        slot = int(slots[row])
        past, stops = history[slot, : int(length[slot])], stop_ids[slot].long()
        for j in range(width):
            n = row * width + j
            source = n if places is None else int(places[n])
            if source < 0:
                continue
            seen = torch.cat((past, drafts[row, : offset + j])).long()
            logit = logits[source].float()
            if mask is not None:
                logit = logit.masked_fill(_bits(mask[n], tokens) == 0, -torch.inf)
            edited[n] = _edit_row(logit, tokens, column_of, seen, stops, table[slot])
    return edited


_INTS = ("slots", "drafts", "edits", "length", "status", "stop_ids", "history", "table", "ids", "mask")
_SCALARS = ("stride", "row_stride", "draft_stride", "max_tokens", "table_stride", "mask_stride", "width", "offset", "V")

AOT: list[AotCase] = [
    AotCase(
        _edit_kernel,
        {"logits": f"*{dtype}", "edited": "*fp32"}
        | dict.fromkeys((*_INTS, "places") if more == "places" else _INTS, "*i32")
        | dict.fromkeys(_SCALARS, "i32"),
        {
            "HAS_IDS": more == "ids",
            "HAS_MASK": has_mask,
            "FIRST": first,
            "STEPS": 16 if more == "ids" else 18,
            "BLOCK": EDIT_BLOCK,
            "CHUNK": HISTORY_CHUNK,
        }
        | ({} if more == "places" else {"places": None}),
        num_warps=EDIT_WARPS,
    )
    for has_mask, first, kinds in (
        (False, 0, ("bf16", "bf16 ids", "bf16 places", "fp16", "fp32")),
        (True, 0, ("bf16", "fp16", "fp32 ids")),
        (False, 75968, ("bf16",)),
        (True, 75968, ("bf16",)),
    )
    for dtype, _, more in (kind.partition(" ") for kind in kinds)
]
