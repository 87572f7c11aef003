"""CPU twins of the attention ops: the same walk over KV splits, in plain torch.

Called only through the ops of ``kernels/attention/paged.py``. The twins cut queries into tiles of exactly
ROW_TILE rows and the keys of a split into tiles of exactly KEY_TILE, zero-padded. Every product then has the same
shape, so a row's bits depend on its own query and keys alone. The twins may read values on the host, because an op is
opaque to the tape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from unisono.kernels.attention import cpu_float32 as attention_cpu_float32
from unisono.kernels.attention.cpu_reads import first_seen
from unisono.kernels.cache.kv_e4m3 import dequantised
from unisono.kernels.gemm.cpu import ROW_TILE
from unisono.kernels.library import Mutated

SPLIT = 256
"""Keys per split. Splits begin at multiples of it. It is part of the reduction order, hence of the bits."""

KEY_TILE = 64
"""Keys of a product. A divisor of SPLIT; it too is part of the reduction order."""

TILES_AT_ONCE = 64
"""Query tiles attended together. Bounds the gathered keys to 64 · Hkv · SPLIT · D floats."""


def attention_plan_cpu(
    slots: torch.Tensor,
    kv_len: torch.Tensor,
    query_start: torch.Tensor | None,
    num_tokens: int,
    tile_tokens: int,
    num_kv_heads: int,
    partials: int,
    programs: int,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CPU twin of ``attention_plan``: the same work list."""
    rows = len(slots)
    if query_start is None:
        starts = list(range(0, num_tokens + 1, num_tokens // rows))
    else:
        starts = [*query_start.tolist(), num_tokens]
    lengths = [*kv_len.tolist(), 0]  # the tokens after the last row see nothing
    spans = list(zip([*slots.tolist(), 0], lengths, starts, starts[1:], strict=False))
    skips = [max(length - (end - first) - window + 1, 0) // SPLIT if window else 0 for _, length, first, end in spans]
    sizes = [
        (-(-(end - first) // tile_tokens), -(-length // SPLIT) - skipped)
        for (_, length, first, end), skipped in zip(spans, skips, strict=True)
    ]
    share = max(-(-sum(tiles * splits for tiles, splits in sizes) * num_kv_heads // programs), 1)
    work: list[tuple[int, ...]] = []
    room = 0
    for (slot, length, first, end), skipped, (tiles, splits) in zip(spans, skips, sizes, strict=True):
        room += tiles * splits if splits > share else 0
        cut = splits > share and room <= partials
        pieces = -(-splits // share) if cut else 1
        size = -(-splits // pieces)
        for tile in reversed(range(tiles)):
            begin, counter = first + tile * tile_tokens, len(work)
            partial = room - (tiles - tile) * splits if cut else -1
            item = (slot, length, begin, min(begin + tile_tokens, end))
            ranges = [(skipped + i * size, skipped + min(i * size + size, splits)) for i in range(pieces)]
            work += [(*item, *of, partial, counter) for of in ranges]
    bound = -(-num_tokens // tile_tokens) + rows + 1 + partials
    padded = torch.full((bound, 8), -1, dtype=torch.int32)
    padded[: len(work)] = torch.tensor(work, dtype=torch.int32).view(-1, 8)
    arrivals = torch.zeros(bound, tile_tokens, num_kv_heads, dtype=torch.int32)
    return padded, torch.tensor([len(work)], dtype=torch.int32), arrivals


def attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    work: torch.Tensor,
    count: torch.Tensor,
    arrivals: Mutated[torch.Tensor],
    partials: int,
    scale: float,
    window: int,
    first: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    until: torch.Tensor | None = None,
) -> torch.Tensor:
    """CPU twin of ``attention``: attends each tile of the work list once, however the plan cut it."""
    items = work[: count.item()].tolist()
    spans = tuple((slot, begin, end) for i, (slot, _, begin, end, *_, counter) in enumerate(items) if counter == i)
    caches = (k_cache, k_scales), (v_cache, v_scales)
    if q.dtype is torch.float32 and soft_cap == 0 and attention_cpu_float32.available:
        return attention_cpu_float32.attend(
            q, *caches, page_table, positions, spans, scale, window, first, sinks, until
        )
    return _attend(q, *caches, page_table, positions, spans, scale, window, first, soft_cap, sinks, until)


def _attend(
    q, keys, values, page_table, positions, spans, scale, window, first_key, soft_cap, sinks, until
) -> torch.Tensor:
    """Attend the spans (slot, first token, end token), cut into query tiles, TILES_AT_ONCE at a time.

    A tile row is one (token, query head of the group), so that GQA fills tiles; the padding row at the end
    of ``q_XHD`` has position -1 and sees nothing. keys, values: (pages, scales of e4m3 pages or None). Products over
    e4m3 pages are those of float16, or of fp32 for a float32 model.
    """
    tokens, heads, dim = q.shape
    group = heads // keys[0].shape[1]
    starts: list[int] = []
    ends: list[int] = []
    owners: list[int] = []
    for slot, begin, end in spans:
        tiles = range(begin * group, end * group, ROW_TILE)
        starts += tiles
        ends += [end * group] * len(tiles)
        owners += [slot] * len(tiles)
    start_B, end_B = torch.tensor([starts, ends])
    rows_BM = start_B[:, None] + torch.arange(ROW_TILE)
    rows_BM.masked_fill_(rows_BM >= end_B[:, None], tokens * group)

    products = torch.float16 if keys[1] is not None and q.dtype == torch.bfloat16 else q.dtype
    rounded = q.clamp(-65504, 65504).to(products).float() if products != q.dtype else q.float()
    q_THGD = F.pad(rounded.view(tokens, -1, group, dim), (0, 0) * 3 + (0, 1))
    q_XHD = q_THGD.transpose(1, 2).reshape((tokens + 1) * group, -1, dim)  # X: (token, head of the group)
    token_BM = rows_BM.div(group, rounding_mode="floor")
    position_BM = F.pad(positions, (0, 1), value=-1)[token_BM]
    until_BM = position_BM if until is None else F.pad(until, (0, 1), value=-1)[token_BM]
    sink_XH = None
    if sinks is not None:
        sink_XH = sinks.view(-1, group).T.repeat(tokens + 1, 1)
    out_XHD = torch.zeros_like(q_XHD)
    for at in range(0, len(owners), TILES_AT_ONCE):
        rows, slots = rows_BM[at : at + TILES_AT_ONCE], owners[at : at + TILES_AT_ONCE]
        q_BHMD = q_XHD.index_select(0, rows.flatten()).view(*rows.shape, -1, dim).transpose(1, 2).contiguous()
        number = {slot: u for u, slot in enumerate(dict.fromkeys(slots))}
        maximum, total, acc_BHMD = _attend_tiles(
            q_BHMD, products, keys, values, page_table[list(number)], [number[slot] for slot in slots],
            position_BM[at : at + TILES_AT_ONCE], until_BM[at : at + TILES_AT_ONCE], scale, window, first_key, soft_cap,
        )  # fmt: skip
        if sink_XH is not None:  # one more key, after all splits: its value is zero
            sink = sink_XH[rows].transpose(1, 2)[..., None]
            top = torch.maximum(maximum, sink)
            total = total * (maximum - top).exp() + (sink - top).exp()
            acc_BHMD = acc_BHMD * (maximum - top).exp()
        out_BHMD = acc_BHMD / total.masked_fill(total <= 0, 1.0)
        out_XHD[rows] = out_BHMD.transpose(1, 2)
    out_THGD = out_XHD.view(tokens + 1, group, -1, dim)[:tokens].transpose(1, 2)
    return out_THGD.reshape(tokens, heads * dim).to(q.dtype)


def _attend_tiles(
    q_BHMD, dtype, keys, values, pages_UP, owner_B, position_BM, until_BM, scale, window, first_key, soft_cap
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk the splits that any tile sees, in order, and merge each one's (max, sum, acc) into the total.

    ``owner_B`` is the request whose pages a tile reads. A split is cut into C tiles of KEY_TILE keys; every product is
    one of a query tile and a key tile. Key tiles after the last position that any row sees are left out: their weight
    is zero. Probabilities are rounded to ``dtype``, that of the products.
    """
    last = int(until_BM.max())
    first = 0
    if window and last >= 0:
        lowest = position_BM.masked_fill(position_BM < 0, last).min()
        first = max(first_seen(int(lowest), window), 0)
    users, owners = pages_UP.shape[0], torch.tensor(owner_B)
    position_BM1, until_BM1 = position_BM[:, :, None], until_BM[:, :, None]
    total: tuple[torch.Tensor, ...] = ()
    for split in range(first // SPLIT, last // SPLIT + 1):
        begin = split * SPLIT
        tiles = min(-(-(last + 1 - begin) // KEY_TILE), SPLIT // KEY_TILE)
        seen = tiles * KEY_TILE  # S: keys that a row may see
        key_S = torch.arange(begin, begin + seen, dtype=torch.int32)
        visible_BMS = key_S <= until_BM1
        if first_key > 0:
            visible_BMS &= key_S >= first_key
        if window:
            visible_BMS &= key_S >= first_seen(position_BM1, window)
        seen_US = visible_BMS.any(1)  # of tiles: of users where each has one tile
        if users == 1:
            seen_US = seen_US.any(0, keepdim=True)
        elif users < len(owner_B):
            seen_US = torch.zeros(users, seen).index_add_(0, owners, seen_US.float()) > 0
        values_UHSD = _gather(values, pages_UP, begin, seen)
        if not seen_US.all():  # stale values may be NaN, and 0 · NaN is NaN
            values_UHSD.masked_fill_(~seen_US[:, None, :, None], 0.0)
        keys_US = [each.mT.split(KEY_TILE, 2) for each in _gather(keys, pages_UP, begin, seen).unbind()]
        values_US = [each.split(KEY_TILE, 1) for each in values_UHSD.unbind()]
        q_BC = [[q] * tiles for q in q_BHMD.unbind()]
        scores = _products(q_BC, keys_US, owner_B).mul_(scale)
        if soft_cap > 0:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        hidden_BCMN = visible_BMS.logical_not_().unflatten(2, (tiles, KEY_TILE)).transpose(1, 2)
        scores.masked_fill_(hidden_BCMN[:, :, None], float("-inf"))
        split_max = scores.amax((1, 4), keepdim=True)
        p = scores.sub_(_finite(split_max)).exp_().to(dtype).float()
        acc_BCHMD = _products([weights.unbind() for weights in p.unbind()], values_US, owner_B)
        total = _merged(total, (split_max[:, 0], _in_order(p.sum(-1, keepdim=True)), _in_order(acc_BCHMD)))
    if not total:
        nothing = q_BHMD.new_full((*q_BHMD.shape[:3], 1), float("-inf"))
        total = nothing, torch.zeros_like(nothing), torch.zeros_like(q_BHMD)
    return total[0], total[1], total[2]


def _products(
    left_BC: Sequence[Sequence[torch.Tensor]], right_UC: Sequence[Sequence[torch.Tensor]], owner_B: list[int]
) -> torch.Tensor:
    """Multiply each query tile with its owner's key tiles: C products [Hkv, M, X] @ [Hkv, X, N] to [B, C, Hkv, M, N].

    One BLAS call for each: a BLAS may distribute few matrices among threads differently than many, with other bits.
    """
    pairs = [
        pair for left, owner in zip(left_BC, owner_B, strict=True) for pair in zip(left, right_UC[owner], strict=True)
    ]
    return torch.stack([left.bmm(right) for left, right in pairs]).unflatten(0, (len(left_BC), -1))


def _in_order(parts_BCHMX: torch.Tensor) -> torch.Tensor:
    """Add the key tiles' parts one by one. A tile at the end that no row sees changes no bit."""
    first, *others = parts_BCHMX.unbind(1)
    for part in others:
        first = first + part
    return first


def _merged(total: tuple[torch.Tensor, ...], split: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Merge one more split into (max, sum, acc) of the splits so far. ``total`` is empty before the first."""
    split_max, split_sum, split_acc = split
    if not total:  # the result of merging with nothing: only a negative zero changes its bits
        return split_max, split_sum, split_acc.add_(0.0)
    total_max, total_sum, total_acc = total
    new_max = torch.maximum(total_max, split_max)
    finite = _finite(new_max)
    old_weight, new_weight = (total_max - finite).exp_(), (split_max - finite).exp_()
    return new_max, total_sum * old_weight + split_sum * new_weight, total_acc * old_weight + split_acc * new_weight


def _gather(kept, pages_UP, begin, seen) -> torch.Tensor:
    """Gather keys or values at ``seen`` positions from ``begin`` on: float [U, Hkv, seen, D]. kept: (pages, scales).

    Positions beyond the page table are zero; one that no row sees may be any page's.
    """
    cache, scales = kept
    pages, heads, page_size, dim = cache.shape
    column = begin // page_size
    page_UC = pages_UP[:, column : -(-(begin + seen) // page_size)].clamp(0, pages - 1)
    chosen = page_UC.flatten()
    taken = cache.index_select(0, chosen)
    if scales is not None:
        taken = dequantised(taken, scales.index_select(0, chosen))
    taken = taken.view(*page_UC.shape, heads, page_size, dim)
    runs = taken.transpose(1, 2).reshape(pages_UP.shape[0], heads, -1, dim)
    runs = runs[:, :, begin - column * page_size :][:, :, :seen].float()
    return runs if runs.shape[2] == seen else F.pad(runs, (0, 0, 0, seen - runs.shape[2]))


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """Return the maximum, or 0 if no key was seen: -inf - -inf would be NaN."""
    return maximum.masked_fill(maximum == float("-inf"), 0.0)
