"""Log-probabilities of sampled tokens and of the most likely ones, for the rows that request them.

Owns the op ``logprobs``. The engine's programs call it after `sampling/pipeline.py`, inside the graph. A row whose slot
requests none costs a program that returns at once. Two launches: *blocks* writes, for every block of columns, its
maximum, its sum of exponentials, the number of logits at or above the sampled one, and its most likely ids; *merge*
combines the blocks of a row in order. Blocks depend on the vocabulary only, so a row's bits depend on nothing else.

``raw`` log-probabilities are the softmax of the model's own logits; ``processed`` ones are of the distribution that the
token was drawn from: edited, divided by the temperature (unless greedy) and filtered (-inf for dropped tokens). Without
``normalized`` the values are logits, before the softmax. The names are vLLM's.

Shapes: N = R * W rows of logits, V vocabulary, S slots, B blocks, L = MAX_LOGPROBS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, one_stride, op
from unisono.kernels.sampling.sampler import GREEDY_BELOW, order_key
from unisono.types import MAX_LOGPROBS, FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
TOP = tl.constexpr(MAX_LOGPROBS)
LEAST = tl.constexpr(-(2**63))

WORDS = 2 + 2 * MAX_LOGPROBS
"""int32 words of an output row: logprob (fp32 bits), rank, L ids, L logprobs (fp32 bits)."""

BLOCK, BLOCK_WARPS = 4096, 8
PROGRAMS = 1024
"""Programs per launch: enough to fill a GPU, and few enough that idle ones cost little."""


@triton.jit
def _value(key):
    """Convert a ranked key to its fp32 value; the inverse of ``order_key`` in its upper half."""
    image = (key >> 32).to(tl.int32)
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _read(row, at, t, least, V, SCALED: tl.constexpr):
    """Load logits with NaN as -inf, -0.0 as 0.0, and -inf for tokens that the filters dropped."""
    value = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    value = tl.where(value == 0.0, 0.0, value)
    if SCALED:
        drawn = t >= GREEDY_BELOW
        scaled = tl.where(value >= least, value * tl.div_rn(1.0, tl.where(drawn, t, 1.0)), float("-inf"))
        value = tl.where(drawn, scaled, value)
    return value


@triton.jit
def _block(row, block, token, wanted, t, least, partial, keys, V, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    value = _read(row, column, t, least, V, SCALED)
    sampled = tl.max(_read(row, token + tl.zeros((1,), tl.int32), t, least, V, SCALED))
    top = tl.max(value)
    mass = tl.sum(tl.where(value == float("-inf"), 0.0, tl.exp(value - top)))
    reach = tl.sum((inside & (value >= sampled)).to(tl.int32))
    tl.store(partial + 3 * block, top)
    tl.store(partial + 3 * block + 1, mass)
    tl.store(partial + 3 * block + 2, reach.to(tl.float32, bitcast=True))
    ranked = (order_key(value).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    ranked = tl.where(inside, ranked, LEAST)
    for i in range(wanted):
        best = tl.max(ranked)
        tl.store(keys + block * TOP + i, best)
        ranked = tl.where(ranked == best, LEAST, ranked)


@triton.jit
def _blocks_kernel(
    logits, slots, tokens, wanted, status, temperature, edits, edited, threshold, partial, keys,
    stride, row_stride, width, V, B, PROCESSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    field = tl.load(slots + n // width) * stride
    count = tl.load(wanted + field)
    if (count >= 0) & (tl.load(status + field) == RUNNING):
        count = tl.minimum(count, TOP)
        token = tl.load(tokens + n)
        t, least = tl.load(temperature + field), tl.load(threshold + n)
        partial += n * B * 3
        keys += n * B * TOP
        in_place = True
        if PROCESSED:
            in_place = tl.load(edits + field) == 0
        for block in range(tl.program_id(1), B, tl.num_programs(1)):
            if in_place:
                source = n.to(tl.int64) * row_stride
                _block(logits + source, block, token, count, t, least, partial, keys, V, PROCESSED, BLOCK)
            else:
                source = n.to(tl.int64) * V
                _block(edited + source, block, token, count, t, least, partial, keys, V, PROCESSED, BLOCK)


@triton.jit
def _merge_kernel(
    logits, slots, tokens, wanted, status, temperature, edits, edited, threshold, partial, keys, out,
    stride, row_stride, width, V, B,
    PROCESSED: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    field = tl.load(slots + n // width) * stride
    count = tl.load(wanted + field)
    if (count >= 0) & (tl.load(status + field) == RUNNING):
        count = tl.minimum(count, TOP)
        block = tl.arange(0, BLOCK_B)
        each = partial + (n * B + block) * 3
        top = tl.load(each, mask=block < B, other=float("-inf"))
        mass = tl.load(each + 1, mask=block < B, other=0.0)
        reach = tl.load(each + 2, mask=block < B, other=0.0).to(tl.int32, bitcast=True)
        most = tl.max(top)
        mass = tl.sum(tl.where(mass > 0.0, mass * tl.exp(top - most), 0.0))
        logarithm = tl.log(mass)

        t, least = tl.load(temperature + field), tl.load(threshold + n)
        at = tl.load(tokens + n) + tl.zeros((1,), tl.int32)
        in_place = True
        if PROCESSED:
            in_place = tl.load(edits + field) == 0
        if in_place:
            sampled = tl.max(_read(logits + n.to(tl.int64) * row_stride, at, t, least, V, PROCESSED))
        else:
            sampled = tl.max(_read(edited + n.to(tl.int64) * V, at, t, least, V, PROCESSED))
        out += n * (2 + 2 * TOP)
        own = (sampled - most) - logarithm if NORMALIZED else sampled
        tl.store(out, own.to(tl.int32, bitcast=True))
        tl.store(out + 1, tl.sum(reach))

        i = tl.arange(0, BLOCK_TOP)[None, :]
        known = (block[:, None] < B) & (i < count)
        ranked = tl.load(keys + (n * B + block[:, None]) * TOP + i, mask=known, other=LEAST)
        for place in range(count):
            best = tl.max(tl.max(ranked, axis=1), axis=0)
            tl.store(out + 2 + place, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32))
            value = (_value(best) - most) - logarithm if NORMALIZED else _value(best)
            tl.store(out + 2 + TOP + place, value.to(tl.int32, bitcast=True))
            ranked = tl.where(ranked == best, LEAST, ranked)


def launch_logprobs(
    logits: Tensor, slots: Tensor, width: int, tokens: Tensor, wanted: Tensor, status: Tensor, temperature: Tensor,
    edits: Tensor, edited: Tensor, threshold: Tensor, processed: bool, normalized: bool, out: Tensor,
) -> None:  # fmt: skip
    one_stride(wanted, status, temperature, edits)
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    partial = edited.new_empty(rows, blocks, 3)
    keys = edited.new_empty(rows, blocks, MAX_LOGPROBS, dtype=torch.int64)
    arguments = (logits, slots, tokens, wanted, status, temperature, edits, edited, threshold, partial, keys)
    scalars = (wanted.stride(0), logits.stride(0), width, vocab, blocks)
    share = min(blocks, max(1, PROGRAMS // max(1, rows)))
    _blocks_kernel[(rows, share)](*arguments, *scalars, PROCESSED=processed, BLOCK=BLOCK, num_warps=BLOCK_WARPS)
    _merge_kernel[(rows,)](
        *arguments, out, *scalars,
        PROCESSED=processed, NORMALIZED=normalized, BLOCK_B=triton.next_power_of_2(blocks),
        BLOCK_TOP=triton.next_power_of_2(MAX_LOGPROBS),
    )  # fmt: skip


def _likeliest(row: Tensor, count: int) -> Tensor:
    """Ids of the largest values; among equal ones the lowest."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    reach = (row >= row.topk(count).values[-1]).nonzero()[:, 0]
    return reach[row[reach].sort(descending=True, stable=True).indices[:count]]


@op(cuda=launch_logprobs)
def logprobs(
    logits: Tensor, slots: Tensor, width: int, tokens: Tensor, wanted: Tensor, status: Tensor, temperature: Tensor,
    edits: Tensor, edited: Tensor, threshold: Tensor, processed: bool, normalized: bool, out: Mutated[Tensor],
) -> None:  # fmt: skip
    """Write the log-probabilities of N = R * width sampled tokens into ``out [N, WORDS]`` int32, contiguous.

    logits [N, V], last dimension contiguous; slots [R]; tokens [N] int32: the sampled tokens; wanted (alternatives, at
    most MAX_LOGPROBS; -1: the row is not written), status, edits int32 and temperature fp32: slot fields [S] of one
    stride; edited [N, V], threshold [N] fp32: outputs of editing and sampling (:class:`Sampled`).

    A row: logprob of its token; its rank, the number of logits at or above its own; ``wanted`` ids, most likely
    first, ties to the lowest id; their logprobs. Words after them keep their values. normalized: False: logits in place
    of logprobs.
    """
    slot = slots.long().repeat_interleave(width)
    for n in ((wanted[slot] >= 0) & (status[slot] == RUNNING.value)).nonzero()[:, 0].tolist():
        s, token = int(slot[n]), int(tokens[n])
        row = edited[n] if processed and edits[s] != 0 else logits[n].float()
        row = row.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        if processed and temperature[s] >= GREEDY_BELOW.value:
            row = (row * (1.0 / temperature[s])).masked_fill(row < threshold[n], -torch.inf)
        logprob = row.log_softmax(-1) if normalized else row
        count = min(int(wanted[s]), MAX_LOGPROBS, len(row))
        words = out[n]
        words[:1].view(torch.float32).copy_(logprob[token])
        words[1] = (row >= row[token]).sum()
        ids = _likeliest(row, count)
        words[2 : 2 + count] = ids.int()
        words[2 + MAX_LOGPROBS :][:count].view(torch.float32).copy_(logprob[ids])


_INTS = ("slots", "tokens", "wanted", "status", "edits")
_FLOATS = ("temperature", "edited", "threshold", "partial")
_SCALARS = ("stride", "row_stride", "width", "V", "B")


def _signature(dtype: str, *outputs: str) -> dict[str, str]:
    signature = {"logits": f"*{dtype}", "keys": "*i64"} | dict.fromkeys((*_INTS, *outputs), "*i32")
    return signature | dict.fromkeys(_FLOATS, "*fp32") | dict.fromkeys(_SCALARS, "i32")


AOT: list[AotCase] = [
    case
    for dtype, processed, normalized in (
        ("bf16", False, True), ("bf16", True, True), ("fp16", False, True), ("fp32", True, True), ("bf16", True, False)
    )
    for case in (
        AotCase(_blocks_kernel, _signature(dtype), {"PROCESSED": processed, "BLOCK": BLOCK}, num_warps=BLOCK_WARPS),
        AotCase(
            _merge_kernel,
            _signature(dtype, "out"),
            {"PROCESSED": processed, "NORMALIZED": normalized, "BLOCK_B": 64, "BLOCK_TOP": 32},
        ),
    )
]  # fmt: skip
