"""Prompt lookup on the device: drafts from the tokens that followed earlier occurrences of a request's last tokens.

Owns the ops ``lookup`` and ``remember``. Drafters that draft from text call them inside the round. ``lookup`` compares
the end of a request's history with every earlier position of the history, and with a ring of tokens that all requests
share. ``remember`` puts the outputs of requests that have just ended into that ring.

One launch serves a whole batch. A program takes one block of one row's text, so a long history is spread over the
device. Each program finds its best match per *voter* (position modulo V), ``atomic_max`` combines the programs'
matches, and the program that arrives last counts the votes. A match is one integer: its length in the upper half, its
rank in the lower. Ranks are the ring's positions from the oldest on, then the request's own, so the latest of equally
long matches wins.

Shapes: R rows, S slots, K drafts per row, N tokens in the ring, V voters (a power of two, up to 1024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, op
from unisono.types import FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
END = tl.constexpr(-1)
"""Separator of two outputs in the ring, and mark of places without a following token: neither a token nor a draft."""
OUTSIDE, BEFORE = tl.constexpr(-2), tl.constexpr(-3)
"""Values read before the start of a text and before a request's first token. They equal no token and not each other."""
ONE = tl.constexpr(1 << 16)
"""Unit of vote shares, 1 / ONE: shares are integers, so that kernel and twin cannot differ."""

BLOCK, WARPS = 1024, 4


@triton.jit
def _wrap(at, N):
    """Map positions 0 … 2N - 1 to a ring of N."""
    return tl.where(at >= N, at - N, at)


@triton.jit
def _following(own, last, ring, head, N, rank, i, HAS_RING: tl.constexpr):
    """Read token ``i`` after the match of this ``rank``. A history repeats from the match on; the ring ends in END."""
    end = rank - N
    period = tl.maximum(last - end, 1)
    token = tl.load(own + end + 1 + i % period, mask=(rank >= N) & (end < last), other=END)
    if HAS_RING:
        at = rank + 1 + i
        shared = tl.load(ring + _wrap(head + at, N), mask=at < N, other=END)
        token = tl.where(rank < N, shared, token)
    return token


@triton.jit
def _vote(
    drafts, own, last, ring, head, N, K, key, factor, share,
    HAS_RING: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Draft the continuation that most of the voters (``key [V]``, 0: abstains) agree on, for as long as they do."""
    matched = (key >> 32).to(tl.int32)
    rank = (key & 0x7FFFFFFF).to(tl.int32)
    agree = (matched[None, :] >= matched[:, None]) & (key[None, :] > 0)
    voters = tl.maximum(tl.sum(agree.to(tl.int32), axis=1), 1)
    most = (matched.to(tl.float32) * factor).to(tl.int32)
    going = key > 0
    score, drafted = tl.zeros_like(matched), tl.zeros_like(matched)
    for i in range(K):
        token = _following(own, last, ring, head, N, rank, i, HAS_RING)
        agree = agree & (token[None, :] == token[:, None])
        part = tl.sum(agree.to(tl.int32), axis=1) * ONE // voters
        going = going & (token != END) & (i < most) & (part >= share)
        score += tl.where(going, part, 0)
        drafted += going.to(tl.int32)
    chosen = tl.max(tl.where(score == tl.max(score), key, 0))
    count = tl.max(tl.where(key == chosen, drafted, 0))
    i = tl.arange(0, BLOCK_K)
    token = _following(own, last, ring, head, N, (chosen & 0x7FFFFFFF).to(tl.int32), i, HAS_RING)
    tl.store(drafts + i, tl.where(i < count, token, END), mask=i < K)


@triton.jit
def _lookup_kernel(
    drafts, slots, history, length, ring, head, scratch,
    stride, max_tokens, N, K, longest, shortest, factor, share,
    HAS_RING: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    own = history + slot.to(tl.int64) * max_tokens
    last = tl.load(length + slot * stride) - 1  # nothing follows the last token yet
    oldest = 0

    text, start, size, ends, base = own, 0, max_tokens, last, N
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if HAS_RING:
        oldest = tl.load(head)
        first = tl.cdiv(max_tokens, BLOCK)
        if tl.program_id(1) >= first:
            text, start, size, ends, base = ring, oldest, N, N, 0
            at -= first * BLOCK

    matched = tl.zeros((BLOCK,), tl.int32)
    alive = at < ends
    j = 0
    while (j < longest) & (tl.max(alive.to(tl.int32)) > 0):
        token = tl.load(own + last - j, mask=j <= last, other=BEFORE)
        earlier = tl.load(text + _wrap(start + at - j, size), mask=alive & (at >= j), other=OUTSIDE)
        alive = alive & (earlier == token) & (token >= 0)
        matched += alive.to(tl.int32)
        j += 1

    key = tl.where(matched >= shortest, (matched.to(tl.int64) << 32) | (base + at).to(tl.int64), 0)
    best = tl.max(tl.reshape(key, (BLOCK // V, V)), axis=0)
    cell = scratch + row * (V + 1)
    votes = cell + 1 + tl.arange(0, V)
    tl.atomic_max(votes, best, mask=best > 0)
    tl.debug_barrier()  # every warp's votes are in before this program counts as arrived
    if tl.atomic_add(cell, 1) == tl.num_programs(1) - 1:
        tl.store(cell, 0)
        cast = tl.atomic_xchg(votes, tl.zeros((V,), tl.int64))
        _vote(drafts + row * K, own, last, ring, oldest, N, K, cast, factor, share, HAS_RING, BLOCK_K)


@triton.jit
def _remember_kernel(
    ring, head, slots, result, history, length, prompt,
    stride, max_tokens, width, N, R, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK_R)
    count = tl.load(result + r * width, mask=r < R, other=0)
    status = tl.load(result + r * width + 1, mask=r < R, other=RUNNING)
    ended = (count > 0) & (status != RUNNING)
    at = tl.load(head)
    row = tl.min(tl.where(ended, r, R))
    while row < R:  # in most rounds no request has ended
        slot = tl.load(slots + row)
        tokens = tl.load(length + slot * stride)
        first = tl.maximum(tl.load(prompt + slot), tokens + 1 - N)
        size = tokens + 1 - first  # END included
        text = history + slot.to(tl.int64) * max_tokens + first
        for begin in range(0, size, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            token = tl.load(text + i, mask=i < size - 1, other=END)
            tl.store(ring + _wrap(at + i, N), token, mask=i < size)
        at = _wrap(at + size, N)
        tl.debug_barrier()  # the next row may overwrite this row's tokens
        row = tl.min(tl.where(ended & (r > row), r, R))
    tl.store(head, at)


def launch_lookup(
    drafts: Tensor, slots: Tensor, history: Tensor, length: Tensor, scratch: Tensor, longest: int,
    shortest: int = 1, factor: float = float(ONE.value), share: float = 0.0, ring: Tensor | None = None,
    head: Tensor | None = None,
) -> None:  # fmt: skip
    rows, k = drafts.shape
    max_tokens, kept = history.shape[1], 0 if ring is None else ring.shape[0]
    _lookup_kernel[(rows, triton.cdiv(max_tokens, BLOCK) + triton.cdiv(kept, BLOCK))](
        drafts, slots, history, length, ring, head, scratch,
        length.stride(0), max_tokens, kept, k, longest, shortest, factor, _share(share),
        HAS_RING=ring is not None, V=scratch.shape[1] - 1, BLOCK=BLOCK, BLOCK_K=triton.next_power_of_2(k),
        num_warps=WARPS,
    )  # fmt: skip


def _matches_cpu(text: Tensor, own: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Find (positions of ``text`` whose preceding tokens equal the last ones of ``own``, match length 1 … ``longest``);
    int64.
    """
    if own.shape[0] == 0 or text.shape[0] == 0:
        return (torch.empty(0, dtype=torch.int64),) * 2
    at = ((text == own[-1]) & (text >= 0)).nonzero()[:, 0]
    matched = torch.ones_like(at)
    for j in range(1, min(longest, own.shape[0])):
        further = (matched == j) & (at >= j) & (text[(at - j).clamp_min(0)] == own[-1 - j]) & (own[-1 - j] >= 0)
        if not further.any():
            break
        matched += further
    return at, matched


def _following_cpu(rank: Tensor, kept: Tensor, own: Tensor, k: int) -> Tensor:
    """Read the ``k`` tokens after the matches of these ranks [V]: [V, k]. Twin of :func:`_following`."""
    size, column = kept.shape[0], torch.arange(k)
    rank = rank[:, None]
    shared = rank < size
    period = (size + own.shape[0] - 1 - rank).clamp_min(1)
    at = rank + 1 + column.where(shared, column % period)
    text = torch.cat((kept, own, own.new_full((1,), END.value)))
    return text[at.masked_fill(shared & (at >= size), -1)]


def _vote_cpu(keys: Tensor, tokens: Tensor, factor: float, share: int) -> Tensor:
    """Vote: keys [R, V] (0: abstains) and their tokens [R, V, k] -> drafts [R, k]. Twin of :func:`_vote`."""
    matched = (keys >> 32).int()
    agree = (matched[:, None, :] >= matched[:, :, None]) & (keys > 0)[:, None, :]
    voters = agree.sum(2).clamp_min(1)
    same = (tokens[:, None] == tokens[:, :, None]).cumprod(-1) * agree[..., None]
    part = same.sum(2) * ONE.value // voters[..., None]
    within = torch.arange(tokens.shape[-1]) < (matched.float() * factor).int()[..., None]
    going = (within & (tokens != END.value) & (part >= share)).int().cumprod(-1)
    score = (part * going).sum(-1)
    winner = keys.where(score == score.amax(1, keepdim=True), -1).argmax(1)
    row = torch.arange(keys.shape[0])
    return tokens[row, winner].where(going[row, winner] > 0, END.value)


def _share(share: float) -> int:
    return round(share * ONE.value)


def launch_remember(
    ring: Tensor, head: Tensor, slots: Tensor, result: Tensor, history: Tensor, length: Tensor, prompt: Tensor
) -> None:
    rows, width = result.shape
    _remember_kernel[(1,)](
        ring, head, slots, result, history, length, prompt,
        length.stride(0), history.shape[1], width, ring.shape[0], rows,
        BLOCK_R=triton.next_power_of_2(rows), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@op(cuda=launch_lookup)
def lookup(
    drafts: Mutated[Tensor], slots: Tensor, history: Tensor, length: Tensor, scratch: Mutated[Tensor], longest: int,
    shortest: int = 1, factor: float = float(ONE.value), share: float = 0.0, ring: Tensor | None = None,
    head: Tensor | None = None,
) -> None:  # fmt: skip
    """Write into drafts [R, K] the tokens that followed earlier occurrences of each request's last tokens.

    slots [R]; history [S, max tokens], the committed tokens; length [S] of them (a strided slot field); ring [N]
    and head [1], the place of its oldest token (None: own history only); all int32. scratch: from
    :func:`lookup_scratch`, whose ``voters`` V is the number of matches that vote.

    A match is an earlier position up to which ``shortest`` … ``longest`` tokens equal the request's last ones
    (m of them). There is one voter for each residue class of positions modulo V: the longest match of the
    class, the latest of equally long ones. V = 1 is the longest match of all. A voter proposes the tokens after its
    match. At the end of the request's own history they repeat from the match on, so a loop of any period is
    drafted whole. At the end of an output in the ring they end. The share of token i of a proposal is the
    fraction of votes that agree with it up to token i, among voters whose match is at least as long. The token is
    drafted while i < factor · m and its share is at least ``share``. The proposal with the greatest sum of shares (the
    expected number of accepted tokens) wins; ties go to the longest, then the latest match. Drafts beyond it, and of
    rows without a match, are -1.
    """
    rows, k = drafts.shape
    kept = history.new_empty(0) if ring is None or head is None else ring.roll(-int(head))
    keys = torch.zeros((rows, scratch.shape[1] - 1), dtype=torch.int64)
    tokens = drafts.new_full((*keys.shape, k), END.value)
    for row, (slot, size) in enumerate(zip(slots.tolist(), length[slots.long()].tolist(), strict=True)):
        own = history[slot, :size]
        for text, base in ((kept, 0), (own[:-1], kept.shape[0])):
            at, matched = _matches_cpu(text, own, longest)
            key = ((matched << 32) | (base + at)).where(matched >= shortest, 0)
            keys[row].scatter_reduce_(0, at % keys.shape[1], key, "amax")
        if keys[row].any():
            tokens[row] = _following_cpu(keys[row] & 0x7FFFFFFF, kept, own, k)
    drafts.copy_(_vote_cpu(keys, tokens, factor, _share(share)))


def lookup_scratch(rows: int, voters: int, device: torch.device | str) -> Tensor:
    """Allocate the workspace of :func:`lookup` for batches of up to ``rows``: zeros before and after each call."""
    return torch.zeros((rows, 1 + voters), dtype=torch.int64, device=device)


@op(cuda=launch_remember)
def remember(
    ring: Mutated[Tensor],
    head: Mutated[Tensor],
    slots: Tensor,
    result: Tensor,
    history: Tensor,
    length: Tensor,
    prompt: Tensor,
) -> None:
    """Put the outputs of requests that ended in this round into the ring, over its oldest tokens.

    ring [N], initially -1; head [1], place of the next token; slots [R]; result [R, W + 2] of
    :func:`unisono.kernels.speculation.rounds.commit`; history [S, max tokens]; length [S] (a strided slot field),
    prompt [S]: end and start of outputs; all int32. An output is followed by -1; if the ring cannot hold it,
    its last N - 1 tokens are kept. Rows in order, one program: the same rounds leave the same ring.
    """
    size = ring.shape[0]
    for slot, (count, status) in zip(slots.tolist(), result[:, :2].tolist(), strict=True):
        if count == 0 or status == RUNNING.value:
            continue
        tokens = int(length[slot])
        output = history[slot, max(int(prompt[slot]), tokens + 1 - size) : tokens]
        written = torch.cat((output, output.new_full((1,), END.value)))
        ring[(int(head) + torch.arange(written.shape[0])) % size] = written
        head += written.shape[0]
        head %= size


def _signature(ints: str, scalars: str) -> dict[str, str]:
    return dict.fromkeys(ints.split(), "*i32") | dict.fromkeys(scalars.split(), "i32")


_LOOKUP = _signature("drafts slots history length", "stride max_tokens N K longest shortest share") | {
    "scratch": "*i64",
    "factor": "fp32",
}

AOT: list[AotCase] = [
    AotCase(
        _lookup_kernel,
        _LOOKUP,
        {"ring": None, "head": None, "HAS_RING": False, "V": 1, "BLOCK": BLOCK, "BLOCK_K": 4},
        num_warps=WARPS,
    ),
    *(
        AotCase(
            _lookup_kernel,
            _LOOKUP | {"ring": "*i32", "head": "*i32"},
            {"HAS_RING": True, "V": voters, "BLOCK": BLOCK, "BLOCK_K": 4},
            num_warps=WARPS,
        )
        for voters in (1, 16)
    ),
] + [
    AotCase(
        _remember_kernel,
        _signature("ring head slots result history length prompt", "stride max_tokens width N R"),
        {"BLOCK_R": rows, "BLOCK": BLOCK},
        num_warps=WARPS,
    )
    for rows in (1, 256)
]
