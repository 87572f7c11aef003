"""Sampling of one token per row of logits on the device, filters included.

Owns the op ``sample``. `sampling/pipeline.py` calls it for the target, drafters for their own logits. There are two
launches for all parameters: *filter* turns top-k, top-p and min-p into one threshold per row, and *argmax* takes
``argmax(logit * (1 / T) + gumbel(seed, position, id))`` over the logits at or above it (Gumbel-max: a draw from the
softmax). Temperature 0 is the argmax of the logits. Ties go to the lowest id everywhere.

Every filter keeps the logits at or above some value, since softmax is monotone, so no sort is needed: the
threshold is found by bisection on the integer representation of floats, which has the order of the values. A row is
read by one program in one order, so its threshold depends on nothing else.

* top-k: the k-th largest logit; its ties all stay.
* top-p: after top-k, the largest value at and above which the mass is at least p of the whole. Mass is summed
  in fp32: if two candidates' mass lies within about 1e-6 of p, either may be the boundary.
* min-p: p(token) >= min_p * p(best), which is logit >= top + T * log(min_p).

NaN counts as -inf; a row of NaN and -inf only yields token 0. Inactive rows yield token 0.

Shapes: N = R * W rows of logits, V vocabulary, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, one_stride, op
from unisono.kernels.sampling.noise import gumbel, gumbel_cpu
from unisono.types import FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
GREEDY_BELOW = tl.constexpr(1e-5)
"""Temperatures below this are greedy: dividing by them would overflow."""

FILTER_LANES, FILTER_WARPS = 8192, 32
ARGMAX_BLOCKS = {16: (1024, 4), 1 << 30: (4096, 8)}
"""Maximum rows -> elements and warps of an argmax program. Many rows fill the device with few programs each."""

CACHED = 16384
"""Elements whose noise the twin computes at a time: they fit in a core's cache."""

UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low mantissa bits of fp32 that values of a storage type never use. They save steps of the bisection."""


@triton.jit
def order_key(value):
    """Map fp32 values to int32 keys in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_value(key):
    """Map :func:`order_key` keys back to fp32 values."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _grid_key(value, UNUSED: tl.constexpr):
    """Compute :func:`order_key` in steps of the storage type. int64, so that differences cannot overflow."""
    return order_key(value).to(tl.int64) >> UNUSED


@triton.jit
def _grid_value(key, UNUSED: tl.constexpr):
    """Map a :func:`_grid_key` back to its fp32 value."""
    low = tl.where(key < 0, (1 << UNUSED) - 1, 0)
    return order_value(((key << UNUSED) | low).to(tl.int32))


@triton.jit
def _load(row, at, V):
    return tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _kth_key(row, lanes, low, high, k, V, UNUSED: tl.constexpr, LANES: tl.constexpr):
    """Find the highest key in [low, high) with ``k`` logits at or above it; ``low`` if there is none.

    ``lanes`` holds the maximum of each lane's column. They are logits of the row, so a key that k of them
    reach is a bound. It costs no pass over memory and usually is the answer. From it the search gallops up, then
    bisects.
    """
    above = high
    while above - low > 1:
        middle = (low + above) >> 1
        enough = tl.sum((lanes >= _grid_value(middle, UNUSED)).to(tl.int32)) >= k
        low = tl.where(enough, middle, low)
        above = tl.where(enough, above, middle)
    lane = tl.arange(0, LANES)
    step = (low - low) + (1 << (16 - UNUSED))
    while high - low > 1:
        middle = tl.minimum(low + step, (low + high) >> 1)
        least = _grid_value(middle, UNUSED)
        count = tl.zeros((LANES,), tl.int32)
        for start in range(0, V, LANES):
            count += (_load(row, start + lane, V) >= least).to(tl.int32)
        enough = tl.sum(count) >= k
        step = 4 * (middle - low)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _inner_key(value, low, high, UNUSED: tl.constexpr):
    """Key of ``value``, clamped strictly between ``low`` and ``high``."""
    return tl.minimum(tl.maximum(_grid_key(value, UNUSED), low + 1), high - 1)


@triton.jit
def _narrow(low, high, key, enough):
    """Narrow [low, high) by the result at ``key``: enough mass at and above it, or not."""
    return tl.where(enough, tl.maximum(low, key), low), tl.where(enough, high, tl.minimum(high, key))


@triton.jit
def _nucleus_key(row, low, high, p, top, t, V, UNUSED: tl.constexpr, LANES: tl.constexpr):
    """Find the highest key in [low, high) with at least ``p`` of the mass of ``low`` at or above it."""
    scale = tl.div_rn(1.4426950408889634, t)  # exp(x / t) = exp2(x * scale)
    shift = -top * scale
    lane = tl.arange(0, LANES)
    least = _grid_value(low, UNUSED)
    mass = tl.zeros((LANES,), tl.float32)
    for start in range(0, V, LANES):
        logit = _load(row, start + lane, V)
        mass += tl.where(logit >= least, tl.exp2(tl.fma(logit, scale, shift)), 0.0)
    whole = tl.sum(mass)
    target = p * whole
    # V tokens below this have at most half of the mass that may be dropped.
    bound = top + t * tl.log(0.5 * (1.0 - p) * whole / V)
    low = tl.minimum(tl.maximum(_grid_key(bound, UNUSED), low), high - 1)
    while high - low > 1:
        # A pass costs mainly reads and exponentials, so it tries three keys: two quarters of the range of values, and
        # the middle of the keys, which halves them even where they are dense around zero.
        bottom = _grid_value(low, UNUSED)
        span = _grid_value(high, UNUSED) - bottom
        key0 = _inner_key(bottom + 0.25 * span, low, high, UNUSED)
        key1 = (low + high) >> 1
        key2 = _inner_key(bottom + 0.75 * span, low, high, UNUSED)
        least0, least1, least2 = _grid_value(key0, UNUSED), _grid_value(key1, UNUSED), _grid_value(key2, UNUSED)
        mass0 = tl.zeros((LANES,), tl.float32)
        mass1 = tl.zeros((LANES,), tl.float32)
        mass2 = tl.zeros((LANES,), tl.float32)
        for start in range(0, V, LANES):
            logit = _load(row, start + lane, V)
            weight = tl.exp2(tl.fma(logit, scale, shift))
            mass0 += tl.where(logit >= least0, weight, 0.0)
            mass1 += tl.where(logit >= least1, weight, 0.0)
            mass2 += tl.where(logit >= least2, weight, 0.0)
        low, high = _narrow(low, high, key0, tl.sum(mass0) >= target)
        low, high = _narrow(low, high, key1, tl.sum(mass1) >= target)
        low, high = _narrow(low, high, key2, tl.sum(mass2) >= target)
    return low


@triton.jit
def _least(row, k, p, floor, t, V, UNUSED: tl.constexpr, LANES: tl.constexpr):
    """Find the least value of a row that the filters keep."""
    lane = tl.arange(0, LANES)
    lanes = tl.full((LANES,), float("-inf"), tl.float32)
    for start in range(0, V, LANES):
        logit = _load(row, start + lane, V)
        lanes = tl.where(logit > lanes, logit, lanes)  # NaN is never greater
    top = tl.max(lanes)
    low = _grid_key(tl.full((), float("-inf"), tl.float32), UNUSED)
    high = _grid_key(top, UNUSED) + 1
    if (k > 0) & (k < V):
        low = _kth_key(row, lanes, low, high, k, V, UNUSED, LANES)
    if p < 1.0:
        low = _nucleus_key(row, low, high, p, top, t, V, UNUSED, LANES)
    least = _grid_value(low, UNUSED)
    if floor > 0.0:
        least = tl.maximum(least, top + t * tl.log(floor))
    return least


@triton.jit
def _source(places, n):
    """Row of the logits of row ``n``; below 0: it is not sampled."""
    if places is not None:
        return tl.load(places + n)
    else:
        return n


@triton.jit
def _filter_kernel(
    logits, slots, status, temperature, top_k, top_p, min_p, edits, edited, threshold, best, arrived, tokens, places,
    stride, row_stride, width, V, UNUSED: tl.constexpr, LANES: tl.constexpr, HAS_EDITS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    source = _source(places, n)
    field = tl.load(slots + n // width) * stride
    t = tl.load(temperature + field)
    k = tl.load(top_k + field)
    p = tl.load(top_p + field)
    floor = tl.load(min_p + field)
    drawn = (tl.load(status + field) == RUNNING) & (t >= GREEDY_BELOW) & (source >= 0)
    least = float("-inf")
    if drawn & (((k > 0) & (k < V)) | (p < 1.0) | (floor > 0.0)):
        if HAS_EDITS:  # tested alone, here and below: without edits the reads of them must not be compiled
            if tl.load(edits + field) != 0:
                least = _least(edited + n.to(tl.int64) * V, k, p, floor, t, V, 0, LANES)
            else:
                least = _least(logits + source.to(tl.int64) * row_stride, k, p, floor, t, V, UNUSED, LANES)
        else:
            least = _least(logits + source.to(tl.int64) * row_stride, k, p, floor, t, V, UNUSED, LANES)
    tl.store(threshold + n, least)
    # Initial values of the accumulators of *argmax*: this saves a launch.
    tl.store(best + n, -(2**63))
    tl.store(arrived + n, 0)
    tl.store(tokens + n, 0)


@triton.jit
def ranked_keys(
    logits, field, length, temperature, seed_lo, seed_hi, ids, edits, edited, threshold,
    n, source, column, row_stride, position, V, HAS_IDS: tl.constexpr, HAS_EDITS: tl.constexpr, first=0,
    FILTERED: tl.constexpr = True,
):  # fmt: skip
    """Compute keys of a block of columns of row ``n``: the score in the upper half of an int64, the token in the lower.

    The maximum of such keys is the argmax with ties to the lowest id, in any order. ``position`` counts from
    ``length``; ``source``: its row of the logits. Columns from V on score -inf. Without ``ids`` column 0 is token
    ``first``. FILTERED: ``threshold`` is read.
    """
    token = tl.load(ids + column, mask=column < V, other=0x7FFFFFFF) if HAS_IDS else column + first
    if HAS_EDITS:
        if tl.load(edits + field) != 0:
            score = _load(edited + n.to(tl.int64) * V, column, V)
        else:
            score = _load(logits + source.to(tl.int64) * row_stride, column, V)
    else:
        score = _load(logits + source.to(tl.int64) * row_stride, column, V)
    score = tl.where(score == score, score, float("-inf"))
    t = tl.load(temperature + field)
    if t >= GREEDY_BELOW:
        if FILTERED:
            kept = score >= tl.load(threshold + n)
            if tl.max(kept.to(tl.int32)) > 0:  # most blocks of a filtered row keep nothing and need no noise
                at = tl.load(length + field) + position
                noise = gumbel(token, at, tl.load(seed_lo + field), tl.load(seed_hi + field))
                score = tl.fma(score, tl.div_rn(1.0, t), noise)
            score = tl.where(kept, score, float("-inf"))
        else:
            at = tl.load(length + field) + position
            noise = gumbel(token, at, tl.load(seed_lo + field), tl.load(seed_hi + field))
            score = tl.fma(score, tl.div_rn(1.0, t), noise)
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 ties with 0.0
    return (order_key(score).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(key):
    """Extract the token of a :func:`ranked_keys` key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _argmax_kernel(
    logits, slots, length, status, temperature, seed_lo, seed_hi, ids, edits, edited, threshold, best, arrived, tokens,
    places, stride, row_stride, width, offset, V, HAS_IDS: tl.constexpr, HAS_EDITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    source = _source(places, n)
    field = tl.load(slots + n // width) * stride
    if (tl.load(status + field) == RUNNING) & (source >= 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ranked = ranked_keys(
            logits, field, length, temperature, seed_lo, seed_hi, ids, edits, edited, threshold,
            n, source, column, row_stride, offset + n % width, V, HAS_IDS, HAS_EDITS,
        )  # fmt: skip
        tl.atomic_max(best + n, tl.max(ranked))
        if tl.atomic_add(arrived + n, 1) == tl.num_programs(1) - 1:  # the last block of this row
            tl.store(tokens + n, token_of(tl.atomic_max(best + n, -(2**63))))


def launch_filter(
    logits: Tensor, slots: Tensor, width: int, status: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, edits: Tensor | None = None, edited: Tensor | None = None,
    threshold: Tensor | None = None, places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the filter: (threshold [N] fp32, best i64 [N], arrived i32 [N], tokens i32 [N]), initialised for
    *argmax*.
    """
    vocab, rows = logits.shape[1], (logits if places is None else places).shape[0]
    if threshold is None:
        threshold = logits.new_empty(rows, dtype=torch.float32)
    best = logits.new_empty(rows, dtype=torch.int64)
    arrived, tokens = slots.new_empty(rows), slots.new_empty(rows)
    # The number of lanes depends on the vocabulary only: it is part of the summation order.
    lanes = min(FILTER_LANES, triton.next_power_of_2(vocab))
    _filter_kernel[(rows,)](
        logits, slots, status, temperature, top_k, top_p, min_p, edits, edited, threshold, best, arrived, tokens,
        places, status.stride(0), logits.stride(0), width, vocab,
        UNUSED=UNUSED_BITS[logits.dtype], LANES=lanes, HAS_EDITS=edits is not None, num_warps=FILTER_WARPS,
    )  # fmt: skip
    return threshold, best, arrived, tokens


def launch_sample(
    logits: Tensor, slots: Tensor, width: int, length: Tensor, status: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, seed_lo: Tensor, seed_hi: Tensor, offset: int = 0, ids: Tensor | None = None,
    edits: Tensor | None = None, edited: Tensor | None = None, threshold: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    one_stride(length, status, temperature, top_k, top_p, min_p, seed_lo, seed_hi, *(() if edits is None else (edits,)))
    vocab, rows = logits.shape[1], (logits if places is None else places).shape[0]
    threshold, best, arrived, tokens = launch_filter(
        logits, slots, width, status, temperature, top_k, top_p, min_p, edits, edited, threshold, places
    )
    block, warps = next(launch for most, launch in ARGMAX_BLOCKS.items() if rows <= most)
    _argmax_kernel[(rows, triton.cdiv(vocab, block))](
        logits, slots, length, status, temperature, seed_lo, seed_hi, ids, edits, edited, threshold, best, arrived,
        tokens, places, status.stride(0), logits.stride(0), width, offset, vocab,
        HAS_IDS=ids is not None, HAS_EDITS=edits is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return tokens


def thresholds_cpu(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Find the least logit that each row keeps: logits [N, V] fp32 without NaN, parameters [N] -> [N] fp32.

    The twin of the filter kernel; it sorts, and sums mass in float64.
    """
    vocab = logits.shape[1]
    ordered = logits.sort(-1, descending=True).values
    top = ordered[:, :1]
    last = (top_k.clamp(1, vocab).long() - 1)[:, None]
    kth = ordered.gather(1, last).masked_fill((top_k <= 0)[:, None], -torch.inf)
    weight = torch.exp((ordered - top) * (1.0 / temperature)[:, None])
    mass = weight.where(ordered >= kth, 0.0).nan_to_num(0.0).double().cumsum(-1)
    within = (mass < top_p.double()[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
    nucleus = ordered.gather(1, within.clamp_max(vocab - 1)).masked_fill((top_p >= 1)[:, None], -torch.inf)
    bound = (top[:, 0] + temperature * min_p.log()).masked_fill(min_p <= 0, -torch.inf)
    return torch.maximum(torch.maximum(kth, nucleus)[:, 0], bound)


def scores_cpu(
    logits: Tensor, slots: Tensor, width: int, length: Tensor, status: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, seed_lo: Tensor, seed_hi: Tensor, offset: int = 0, ids: Tensor | None = None,
    edits: Tensor | None = None, edited: Tensor | None = None, threshold: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the scores [N, V] fp32 whose maximum is sampled, -inf for dropped tokens, and the mask of running rows
    [N].
    """
    slot = slots.long() if width == 1 else slots.long().repeat_interleave(width)
    logits = logits.float() if places is None else logits.index_select(0, places.clamp_min(0)).float()
    if edits is not None and edited is not None and (edited_rows := edits.index_select(0, slot) != 0).any():
        logits = torch.where(edited_rows[:, None], edited, logits)
    scores = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    running = status.index_select(0, slot) == RUNNING.value
    if places is not None:
        running &= places >= 0

    row = (running & (temperature.index_select(0, slot) >= GREEDY_BELOW.value)).nonzero()[:, 0]
    if threshold is not None:
        threshold.fill_(-torch.inf)
    if row.numel() == 0:
        return scores, running
    slot, score = slot.index_select(0, row), scores.index_select(0, row)
    t, k, p, floor = (field.index_select(0, slot) for field in (temperature, top_k, top_p, min_p))
    filtered = (((k > 0) & (k < logits.shape[1])) | (p < 1) | (floor > 0)).nonzero()[:, 0]
    least = torch.full_like(t, -torch.inf)
    if filtered.numel() > 0:
        least[filtered] = thresholds_cpu(score[filtered], t[filtered], k[filtered], p[filtered], floor[filtered])
    if threshold is not None:
        threshold[row] = least

    kept, scale = score >= least[:, None], 1.0 / t
    position, lo, hi = (field.index_select(0, slot) for field in (length, seed_lo, seed_hi))
    position = position + offset + row % width
    if kept.numel() <= CACHED and kept.all():  # keys broadcast: the values below, in less time
        token = torch.arange(score.shape[1]) if ids is None else ids
        drawn = score * scale[:, None] + gumbel_cpu(token, position[:, None], lo[:, None], hi[:, None])
    else:
        n, column = kept.nonzero(as_tuple=True)
        keys = (column if ids is None else ids[column], position[n], lo[n], hi[n])
        noise = torch.cat([gumbel_cpu(*part) for part in zip(*(key.split(CACHED) for key in keys), strict=True)])
        drawn = torch.full_like(score, -torch.inf)
        drawn[n, column] = score[n, column] * scale[n] + noise
    scores.index_copy_(0, row, drawn)
    return scores, running


def _sample_meta(logits: Tensor, slots: Tensor, width: int, *_: object) -> Tensor:
    return slots.new_empty(slots.shape[0] * width)


@op(cuda=launch_sample, meta=_sample_meta)
def sample(
    logits: Tensor, slots: Tensor, width: int, length: Tensor, status: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, seed_lo: Tensor, seed_hi: Tensor, offset: int = 0, ids: Tensor | None = None,
    edits: Tensor | None = None, edited: Tensor | None = None, threshold: Mutated[Tensor | None] = None,
    places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sample one token per row of logits; row r * width + j samples position ``length[slots[r]] + offset + j``.

    logits [R * width, V] bf16, fp16 or fp32, last dimension contiguous; slots [R] int32. The rest are slot
    fields [S] of one stride: temperature (0: greedy), top_p (1: off), min_p (0: off) fp32; length, status,
    top_k (0: off), seed_lo, seed_hi int32. ids [V] int32, ascending: the token of each column, if a drafter's
    vocabulary is a part of the target's (None: the column itself). Slots whose ``edits [S]`` int32 is not 0 have
    their logits in ``edited [R * width, V]`` fp32 (:func:`unisono.kernels.sampling.edits.edit_logits`) instead. Into
    ``threshold [R * width]`` fp32 goes the least logit that each row's filters keep. places [R * width] int32: each
    row's row of logits [T, V]; below 0: it is not sampled. Returns tokens [R * width] int32, 0 for rows not sampled.

    Filters apply in the order of transformers' warpers: temperature, top-k, top-p, min-p. A row's token
    depends on its own logits, parameters, seed and position only.
    """
    scores, running = scores_cpu(
        logits, slots, width, length, status, temperature, top_k, top_p, min_p, seed_lo, seed_hi, offset, ids, edits,
        edited, threshold, places,
    )  # fmt: skip
    best = scores.argmax(-1)
    return (best if ids is None else ids[best]).where(running, 0).int()


def _signature(logits: str, *, floats: str, ints: str, longs: str, scalars: str) -> dict[str, str]:
    pointers = dict.fromkeys(floats.split(), "*fp32") | dict.fromkeys(ints.split(), "*i32")
    pointers |= dict.fromkeys(longs.split(), "*i64")
    return {"logits": f"*{logits}"} | pointers | dict.fromkeys(scalars.split(), "i32")


def _case(
    kernel: Any, signature: dict[str, str], sizes: dict[str, Any], edits: bool, warps: int, places: bool = False
) -> AotCase:
    """Without ``edits`` their fields are None, as in a launch, and without ``places``."""
    absent = {} if edits else {"edits": None, "edited": None}
    absent |= {} if places else {"places": None}
    present = {name: kind for name, kind in signature.items() if name not in absent}
    return AotCase(kernel, present, sizes | absent | {"HAS_EDITS": edits}, num_warps=warps)


AOT: list[AotCase] = [
    _case(
        _filter_kernel,
        _signature(
            dtype,
            floats="temperature top_p min_p edited threshold",
            ints="slots status top_k edits arrived tokens places",
            longs="best",
            scalars="stride row_stride width V",
        ),
        {"UNUSED": unused, "LANES": FILTER_LANES},
        has_edits,
        FILTER_WARPS,
        places,
    )
    for dtype, unused, has_edits, places in (
        ("bf16", 16, False, False),
        ("bf16", 16, True, False),
        ("fp16", 13, True, False),
        ("fp32", 0, True, False),
        ("bf16", 16, True, True),
    )
] + [
    _case(
        _argmax_kernel,
        _signature(
            dtype,
            floats="temperature edited threshold",
            ints="slots length status seed_lo seed_hi ids edits arrived tokens places",
            longs="best",
            scalars="stride row_stride width offset V",
        ),
        {"BLOCK": block, "HAS_IDS": has_ids},
        has_edits,
        warps,
        places,
    )
    for dtype in ("bf16", "fp16", "fp32")
    for has_ids, has_edits, places in (
        (False, True, False),
        (True, True, False),
        (False, False, False),
        (False, True, True),
    )
    for block, warps in ARGMAX_BLOCKS.values()
]
