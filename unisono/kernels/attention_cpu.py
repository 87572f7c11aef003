"""CPU twins of the attention ops: the same walk over KV splits, in plain torch.

Called only through the ops that kernels/attention.py registers. The twins cut queries into tiles of exactly ROW_TILE
rows and keys into splits of exactly SPLIT, zero-padded. So every product has one shape, and a row's bits depend on its
own query and keys alone. The twins may read values on the host, because an op is opaque to the tape.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from unisono.kernels.library import ROW_TILE

SPLIT = 256
"""Keys per split. Splits begin at multiples of it. It is part of the reduction order, hence of the bits."""

TILES_AT_ONCE = 64
"""Query tiles attended together; bounds the gathered keys to 64 · Hkv · SPLIT · D floats."""


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
    """Twin of ``attention_plan``: the same work list."""
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
    arrivals: torch.Tensor,
    partials: int,
    scale: float,
    window: int,
    first: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of ``attention``: each tile of the work list once, whatever pieces the plan cut it into."""
    items = work[: count.item()].tolist()
    spans = [(slot, begin, end) for i, (slot, _, begin, end, *_, counter) in enumerate(items) if counter == i]
    return _attend(q, k_cache, v_cache, page_table, positions, spans, scale, window, first, soft_cap, sinks)


def _attend(
    q, k_cache, v_cache, page_table, positions, spans, scale, window, first_key, soft_cap, sinks
) -> torch.Tensor:
    """Attend the spans (slot, first token, end token), cut into query tiles, TILES_AT_ONCE at a time.

    A tile row is one (token, query head of the group), so that GQA fills tiles; the padding row at the end
    of ``q_XHD`` has position -1 and sees nothing.
    """
    tokens, heads, dim = q.shape
    group = heads // k_cache.shape[1]
    index, owners = [], []
    for slot, begin, end in spans:
        rows = torch.arange(begin * group, end * group)
        index.append(F.pad(rows, (0, -len(rows) % ROW_TILE), value=tokens * group).view(-1, ROW_TILE))
        owners += [slot] * len(index[-1])
    rows_BM, slot_B = torch.cat(index), torch.tensor(owners)

    q_THGD = F.pad(q.float().view(tokens, -1, group, dim), (0, 0) * 3 + (0, 1))
    q_XHD = q_THGD.transpose(1, 2).reshape((tokens + 1) * group, -1, dim)  # X: (token, head of the group)
    position_X = F.pad(positions, (0, 1), value=-1).repeat_interleave(group)
    sink_XH = None
    if sinks is not None:
        sink_XH = sinks.view(-1, group).T.repeat(tokens + 1, 1)
    out_XHD = torch.zeros_like(q_XHD)
    for rows, slots in zip(rows_BM.split(TILES_AT_ONCE), slot_B.split(TILES_AT_ONCE), strict=True):
        q_BHMD = q_XHD[rows].transpose(1, 2).contiguous()
        slot_U, owner_B = slots.unique(return_inverse=True)
        maximum, total, acc_BHMD = _attend_tiles(
            q_BHMD, k_cache, v_cache, page_table[slot_U], owner_B.tolist(), position_X[rows], scale, window, first_key,
            soft_cap,
        )  # fmt: skip
        if sink_XH is not None:  # one more key, after all splits: its value is zero
            sink = sink_XH[rows].transpose(1, 2)[..., None]
            top = torch.maximum(maximum, sink)
            total = total * (maximum - top).exp() + (sink - top).exp()
            acc_BHMD = acc_BHMD * (maximum - top).exp()
        out_BHMD = acc_BHMD / torch.where(total > 0, total, 1.0)
        out_XHD[rows] = out_BHMD.transpose(1, 2)
    out_THGD = out_XHD.view(tokens + 1, group, -1, dim)[:tokens].transpose(1, 2)
    return out_THGD.reshape(tokens, heads * dim).to(q.dtype)


def _attend_tiles(
    q_BHMD, k_cache, v_cache, pages_UP, owner_B, position_BM, scale, window, first_key, soft_cap
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk the splits that any tile sees, in order, and merge each one's (max, sum, acc) into the total.

    ``owner_B`` says whose pages a tile reads; the products are one by one, of one shape.
    """
    last = int(position_BM.max())
    seen = position_BM[position_BM >= 0]
    first = max(int(seen.min()) - window + 1, 0) if window > 0 and len(seen) else 0
    total_max = torch.full((*q_BHMD.shape[:3], 1), float("-inf"))
    total_sum, total_acc = torch.zeros_like(total_max), torch.zeros_like(q_BHMD)
    for split in range(first // SPLIT, last // SPLIT + 1):
        key_N = torch.arange(split * SPLIT, (split + 1) * SPLIT, dtype=torch.int32)
        visible_BMN = (key_N <= position_BM[:, :, None]) & (key_N >= first_key)
        if window > 0:
            visible_BMN &= key_N > position_BM[:, :, None] - window
        seen_UN = torch.zeros(len(pages_UP), SPLIT, dtype=torch.int32)
        seen_UN = seen_UN.index_add_(0, torch.tensor(owner_B), visible_BMN.any(1).int()) > 0
        k_UHND = _gather(k_cache, pages_UP, key_N, seen_UN)
        v_UHND = _gather(v_cache, pages_UP, key_N, seen_UN)
        if not seen_UN.all():  # stale values may be NaN, and 0 · NaN is NaN
            v_UHND.masked_fill_(~seen_UN[:, None, :, None], 0.0)
        scores = torch.stack([q @ k_UHND[u].mT for q, u in zip(q_BHMD, owner_B, strict=True)]).mul_(scale)
        if soft_cap > 0:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        scores.masked_fill_(~visible_BMN[:, None], float("-inf"))
        split_max = scores.amax(-1, keepdim=True)
        p = scores.sub_(_finite(split_max)).exp_().to(v_cache.dtype).float()
        split_sum = p.sum(-1, keepdim=True)
        split_acc = torch.stack([weights @ v_UHND[u] for weights, u in zip(p, owner_B, strict=True)])

        new_max = torch.maximum(total_max, split_max)
        old_weight, new_weight = (total_max - _finite(new_max)).exp(), (split_max - _finite(new_max)).exp()
        total_sum = total_sum * old_weight + split_sum * new_weight
        total_acc = total_acc * old_weight + split_acc * new_weight
        total_max = new_max
    return total_max, total_sum, total_acc


def _gather(cache, pages_UP, key_N, seen_UN) -> torch.Tensor:
    """Keys or values at positions ``key_N`` as float [U, Hkv, N, D]; an unseen one comes from page 0.

    Copies runs of ``run`` consecutive positions, which share a page.
    """
    _, heads, page_size, dim = cache.shape
    run = math.gcd(page_size, SPLIT)
    first_C = key_N[::run].long()
    column_C = (first_C // page_size).clamp(max=pages_UP.shape[1] - 1)
    page_UC = pages_UP[:, column_C].masked_fill(~seen_UN.view(len(seen_UN), -1, run).any(-1), 0).long()
    run_UHC = (page_UC[:, None] * heads + torch.arange(heads)[:, None]) * (page_size // run)
    run_UHC = run_UHC + first_C % page_size // run
    runs = cache.reshape(-1, run * dim).index_select(0, run_UHC.flatten())
    return runs.view(len(seen_UN), heads, SPLIT, dim).float()


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """The maximum, or 0 where nothing was seen: -inf - -inf would be NaN."""
    return maximum.masked_fill(maximum == float("-inf"), 0.0)
