"""Paged attention whose bits depend on a token's own query and keys alone.

One op serves every pass. It walks KV in splits of SPLIT keys at absolute positions. Each split has fresh accumulators,
and splits are merged in order by one formula (``split.merge``). One program may walk all splits and merge
them in registers, or several programs may share them and the last one merges: the bits are the same. The tensor core
computes row sums (a dot with ones), because its order is the same in every layout; a reduction's is not. Each
multiply-add that a compiler might contract is an explicit fma.

The host knows only the shapes of a pass. The device reads lengths when it makes a plan, once per pass for all layers.
A tile is a few query tokens × the query heads that share a KV head. Tiles are cut along KV where whole tiles would
leave the device idle: a small batch, or a short chunk after a long prefix.

Called by the attention backends. Shapes: T tokens, R rows, S slots, NP pages, MP pages per request, P page size,
Hq / Hkv query / KV heads, G = Hq / Hkv, D head dim. Index tensors are int32.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton

from unisono.kernels.attention import hopper as attention_hopper
from unisono.kernels.attention import hopper_rounds as attention_hopper_rounds
from unisono.kernels.attention.cpu import SPLIT, attention_cpu, attention_plan_cpu
from unisono.kernels.attention.merge import launch_merge, merges_separately
from unisono.kernels.attention.triton_kernels import LOG2_E, attention_kernel, plan_kernel
from unisono.kernels.cards import HOPPER, shared_memory
from unisono.kernels.gemm.fp8_quantize import GROUP, empty_quantised, launch_quantize, quantised_cpu
from unisono.kernels.library import AotCase, Mutated, op
from unisono.kernels.overlap import overlapped

KEYS = 64
"""Keys per step of a walk. Like SPLIT it is part of the reduction order: one value everywhere."""


def _plan_outputs(
    slots: torch.Tensor, num_tokens: int, tile_tokens: int, num_kv_heads: int, partials: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bound = triton.cdiv(num_tokens, tile_tokens) + slots.shape[0] + 1 + partials
    shapes = (bound, 8), (1,), (bound, tile_tokens, num_kv_heads)
    work, count, arrivals = (torch.empty(shape, dtype=torch.int32, device=slots.device) for shape in shapes)
    return work, count, arrivals


def launch_attention_plan(
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
    """See :func:`attention_plan`."""
    rows = slots.shape[0]
    planned = _plan_outputs(slots, num_tokens, tile_tokens, num_kv_heads, partials)
    width = num_tokens // rows if query_start is None else 0
    listed = rows if width else rows + 1
    plan_kernel[(listed,)](
        slots, kv_len, query_start, *planned, rows, num_tokens, partials, programs,
        window or None, width, tile_tokens, num_kv_heads, SPLIT, triton.next_power_of_2(listed),
    )  # fmt: skip
    return planned


def _geometry(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tile_tokens: int, cut: bool, shared: int = HOPPER
) -> tuple[dict[str, int], dict[str, int]]:
    """Choose the kernel's compile-time sizes and launch options; only speed depends on them.

    The rows of a query tile are a power of two and hold at least one token's heads. Two accumulators per row must fit
    into registers, and the buffers of keys and values into ``shared`` bytes of shared memory.
    """
    group, dim = heads // kv_heads, max(triton.next_power_of_2(head_dim), 16)
    small = shared < HOPPER and dim >= 256
    fits = 16 if dtype == torch.float32 else min(64 if cut else 128, 2 ** (13 if small else 14) // dim)
    rows = triton.next_power_of_2(max(min(tile_tokens * group, fits), group, 16))
    tokens = min(rows // group, tile_tokens)
    sizes = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "ROWS": rows,
        "TOKENS": tile_tokens,
    }
    sizes |= {"PARTS": triton.cdiv(tile_tokens, tokens), "USED": triton.next_power_of_2(tokens * group)}
    sizes |= {"KEYS": KEYS, "SPLIT": SPLIT, "CUT": cut}
    wide = dtype == torch.float32 or dim >= 256 or rows * max(dim, 128) >= (2**13 if cut else 2**14)
    stages = 5 if dim * dtype.itemsize <= 256 else 3  # page ids take two of them, then keys and values follow
    if small and dim > 256:
        stages = 1
    return sizes, {"num_warps": 8 if wide else 4, "num_stages": stages}


def _programs(device: torch.device, tiles: int, warps: int) -> int:
    """Choose the number of programs that share a pass's work. tiles: number of whole tiles.

    Two of four warps fit on a multiprocessor. A third waits until one has ended, so that the hardware balances uneven
    rows; where there are many tiles, it would begin with its share when the others have ended with theirs.
    """
    if device.type != "cuda":
        return 4
    at_once = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    if warps < 4:
        return 2 * at_once
    return at_once if tiles > 2 * at_once else at_once * 3 // 2


def _few_warps(device: torch.device, tiles: int, sizes: dict[str, int]) -> bool:
    """Return True if programs of two warps read e4m3 pages: where a multiprocessor has several tiles of few rows.

    A step's instructions bound these tiles, and fewer threads take fewer of them: 59 and 67 µs at 64 requests of 1,152
    tokens, 14 and 12 at one (H200).
    """
    most = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    return sizes["ROWS"] == 16 and sizes["DIM"] <= 128 and tiles > most > 0


def _elements(pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View pages [NP, Hkv, P, X] of bytes as elements of ``dtype`` [NP, …]. Raises ValueError if that is impossible."""
    if pages.shape[2] % 4 or (pages.shape[3] % 4 and pages.shape[3] > 1) or not pages.is_contiguous():
        raise ValueError(f"e4m3 pages {list(pages.shape)}: make them contiguous, P and D multiples of 4")
    return pages.flatten(1).view(dtype)


def _attended(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


class _Arguments(NamedTuple):
    """Arguments of the ops after the queries; see :func:`attention`."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    positions: torch.Tensor
    work: torch.Tensor
    num_items: torch.Tensor
    arrivals: torch.Tensor
    partials: int
    scale: float
    window: int
    first: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    until: torch.Tensor | None = None


def launch_attention(q: torch.Tensor, *args: Any, **options: int) -> torch.Tensor:
    """Launch :func:`attention`. options: launch options that override the defaults (for tuning)."""
    g = _Arguments(*args)
    if not options and (out := _by_hopper(q, g)) is not None:
        return out
    out = _attended(q)
    _launch(out, None, q, g, options)
    return out


def launch_attention_fp8(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`attention_fp8`."""
    g, (tokens, heads, head_dim) = _Arguments(*args), q.shape
    if (out := _by_hopper(q, g)) is not None:
        return launch_quantize(out, scale_columns(head_dim))
    x8, scales = empty_quantised(q, tokens, heads * head_dim, scale_columns(head_dim))
    _launch(x8, scales, q, g, {})
    return x8, scales


def _by_hopper(q: torch.Tensor, g: _Arguments) -> torch.Tensor | None:
    """Attend with the kernel for Hopper. Returns None if it does not serve such a pass."""
    plain = g.partials == 0 and g.soft_cap == 0 and g.sinks is None and g.k_scales is None and g.until is None
    if not plain or not attention_hopper.serves(q, g.k_cache, g.arrivals.shape[1], g.window, g.first):
        return None
    whole = q, g.k_cache, g.v_cache, g.page_table, g.positions, g.work, g.num_items
    return attention_hopper.launch_prompt_attention(*whole, g.scale * LOG2_E.value, KEYS)


def _launch(
    out: torch.Tensor, scales: torch.Tensor | None, q: torch.Tensor, g: _Arguments, options: dict[str, int]
) -> None:
    """Attend into ``out``. scales: scales of e4m3 outputs."""
    (tokens, heads, head_dim), (_, tile_tokens, kv_heads) = q.shape, g.arrivals.shape
    state = q.new_empty(g.partials, tile_tokens, heads, 2, dtype=torch.float32)
    acc = q.new_empty(g.partials, tile_tokens, heads, head_dim, dtype=torch.float32)
    own = (heads, kv_heads, head_dim), triton.cdiv(tokens, tile_tokens), g.window, g.first
    options = {"separate_merge": merges_separately(*own, g.sinks is None and g.until is None)} | options
    separate_merge = bool(options.pop("separate_merge")) and g.partials > 0
    plain = g.partials > 0 and g.soft_cap == 0 and g.sinks is None and g.k_scales is None and g.until is None
    if plain and not options and attention_hopper_rounds.serves(q, g.k_cache, tile_tokens, g.window, g.first):
        attention_hopper_rounds.launch_round_attention(
            out, scales, q, g.k_cache, g.v_cache, g.page_table, g.positions, g.work, g.num_items, g.arrivals,
            (state, acc), g.scale * LOG2_E.value, g.window, g.first, KEYS, merge=not separate_merge,
        )  # fmt: skip
    else:
        _launch_walk(out, scales, q, g, (state, acc), options, merge=not separate_merge)
    if separate_merge:
        launch_merge(out, scales, q, g.positions, g.work, g.num_items, state, acc, g.window)


def _launch_walk(
    out: torch.Tensor, scales: torch.Tensor | None, q: torch.Tensor, g: _Arguments,
    workspace: tuple[torch.Tensor, torch.Tensor], options: dict[str, int], merge: bool,
) -> None:  # fmt: skip
    """Attend with the kernel for all passes. workspace: states and values of splits. merge: it merges cut tiles."""
    (tokens, heads, head_dim), (_, tile_tokens, kv_heads) = q.shape, g.arrivals.shape
    sizes, launch = _geometry(heads, kv_heads, head_dim, q.dtype, tile_tokens, g.partials > 0, shared_memory(q.device))
    items, tiles = (n * sizes["PARTS"] * kv_heads for n in (len(g.arrivals), triton.cdiv(tokens, tile_tokens)))
    k_cache, v_cache, exponents = g.k_cache, g.v_cache, (g.k_scales, g.v_scales)
    if g.k_scales is not None and g.v_scales is not None:
        k_cache, v_cache = _elements(k_cache, torch.int16), _elements(v_cache, torch.int16)
        exponents = _elements(g.k_scales, torch.int32), _elements(g.v_scales, torch.int32)
        if _few_warps(q.device, tiles, sizes):
            launch["num_warps"] = 2
    launch |= options
    programs = launch.pop("programs", _programs(q.device, tiles, launch["num_warps"]))
    rows = (None, None) if scales is None else (tokens, len(out))
    attention_kernel[(min(programs, items) if g.partials else items,)](
        q, k_cache, v_cache, g.page_table, g.positions, g.work, g.num_items, g.arrivals, *workspace, out,
        g.sinks, *exponents, scales, g.until, *rows,
        g.page_table.stride(0), k_cache.stride(0), abs(g.window), (g.soft_cap or g.scale) * LOG2_E.value,
        PAGE=g.k_cache.shape[2], WINDOW=g.window != 0, CHUNKED=g.window < 0, FIRST=g.first,
        TO_CAP=g.scale / g.soft_cap if g.soft_cap else 0.0, MERGE=merge, **sizes, **launch, **overlapped(q.device),
    )  # fmt: skip


def _quantised_shapes(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_quantised(q, q.shape[0], q.shape[1] * q.shape[2], scale_columns(q.shape[2]))


attention_plan_op = op(cuda=launch_attention_plan, meta=_plan_outputs)(attention_plan_cpu)
attention_op = op(cuda=launch_attention, meta=_attended)(attention_cpu)


@op(cuda=launch_attention_fp8, meta=_quantised_shapes)
def attention_fp8_op(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor,
    work: torch.Tensor, count: torch.Tensor, arrivals: Mutated[torch.Tensor], partials: int, scale: float, window: int,
    first: int = 0, soft_cap: float = 0.0, sinks: torch.Tensor | None = None, k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None, until: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out = attention_cpu(
        q, k_cache, v_cache, page_table, positions, work, count, arrivals, partials, scale, window, first, soft_cap,
        sinks, k_scales, v_scales, until,
    )  # fmt: skip
    return quantised_cpu(out, scale_columns(q.shape[2]))


class AttentionPlan(NamedTuple):
    """Work list of a pass: the division of its tiles among programs.

    work [ceil(T / tile_tokens) + R + 1 + partials, 8]: per item (slot, kv_len, first token, end token, first split,
        end split, partial, counter). ``partial`` is the place of the tile's first split in the workspace, -1 for a
        tile that is walked whole; ``counter`` is the first item of the tile.
    num_items [1]: items in use.
    arrivals [len(work), tile_tokens, Hkv]: splits of a tile that have arrived; 0 between layers.
    partials: places for splits in the workspace.
    """

    work: torch.Tensor
    num_items: torch.Tensor
    arrivals: torch.Tensor
    partials: int


def attention_plan(
    slots: torch.Tensor,
    kv_len: torch.Tensor,
    query_start: torch.Tensor | None,
    num_tokens: int,
    tile_tokens: int,
    num_kv_heads: int,
    partials: int,
    programs: int,
    window: int = 0,
) -> AttentionPlan:
    """Plan a pass over R rows: slots [R], kv_len [R] (keys a row may see: its highest position + 1, or 0).

    query_start [R + 1]: first token of each row among ``num_tokens`` tokens; those from its last entry on are padding.
        None for rows of equal width.
    tile_tokens: maximum tokens per query tile.
    programs: programs the device runs at a time. A tile longer than a program's fair share of all splits is cut into
        pieces of that share, unless the workspace has no room left; it has ``partials`` places.
    window: > 0 where each attention of the plan has this window or a smaller one, and a row's tokens stand at positions
        ≥ kv_len - their number. Splits before the window of a row's first token are then left out of the plan.
    The plan affects speed, never bits.
    """
    work, num_items, arrivals = attention_plan_op(
        slots, kv_len, query_start, num_tokens, tile_tokens, num_kv_heads, partials, programs, window
    )
    return AttentionPlan(work, num_items, arrivals, partials)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int = 0,
    first: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    until: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the tokens of a planned pass over the paged cache.

    q [T, Hq, D]; k_cache, v_cache [NP, Hkv, P, D] of q's dtype and equal strides; page_table [S, MP]; positions [T].
    Or k_cache, v_cache of e4m3, contiguous, P and D multiples of 4, with the exponents of their scales in k_scales,
    v_scales [NP, Hkv, P, 1] uint8: then queries and probabilities are rounded to float16, unless q is fp32.
    A token sees keys at first ≤ p ≤ its position: with window > 0 those at p > position - window, with window < 0 those
    of its own chunk of -window positions (p ≥ position - position % -window; without ``until``). One below ``first``,
    as at position -1, sees nothing and yields zeros. fp32 accumulation, probabilities rounded to q's dtype.
    soft_cap > 0: scores become soft_cap · tanh(score / soft_cap), before they are masked.
    sinks [Hq] fp32: exp(sink) is added to the denominator of its head's softmax.
    until [T]: last position that a token sees, at least its own and below its row's kv_len; None: its own.
    Returns [T, Hq · D] in q's dtype.
    """
    return attention_op(
        q, k_cache, v_cache, page_table, positions, *plan, scale, window, first, soft_cap, sinks, k_scales, v_scales,
        until,
    )  # fmt: skip


def quantises(head_dim: int, group: int) -> bool:
    """Return True if :func:`attention_fp8` serves heads of this size for consumers with one scale per ``group``
    columns.
    """
    return scale_columns(head_dim) == group and head_dim & (head_dim - 1) == 0


def scale_columns(head_dim: int) -> int:
    """Columns of a head that share a scale in :func:`attention_fp8`."""
    return min(head_dim, GROUP)


def attention_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    plan: AttentionPlan,
    *args: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend and quantise to e4m3, with a scale per token and C = ``scale_columns(D)`` columns of a head: the bits of
    ``quantize_fp8(attention(…), C)``.

    D: a power of two (:func:`quantises`). The other arguments are those of :func:`attention`. Returns (values e4m3 [T',
    Hq · D], scales fp32 [Hq · D / C, T']), T' = T padded to a multiple of four with zeros.
    """
    return attention_fp8_op(q, k_cache, v_cache, page_table, positions, *plan, *args)


def _case(
    shared: int, heads: int, kv_heads: int, head_dim: int, tile_tokens: int, cut: bool, window: bool = False,
    first: int = 0, soft_cap: float = 0.0, sinks: bool = False, e4m3: bool = False, quantised: bool = False,
    until: bool = False, chunked: bool = False, merge: bool = True,
) -> AotCase:  # fmt: skip
    sizes, options = _geometry(heads, kv_heads, head_dim, torch.bfloat16, tile_tokens, cut, shared)
    signature = {"q_ptr": "*bf16", "out_ptr": "*fp8e4nv" if quantised else "*bf16"}
    signature |= dict.fromkeys(("k_ptr", "v_ptr"), "*i16" if e4m3 else "*bf16")
    signature |= dict.fromkeys(("table_ptr", "positions_ptr", "work_ptr", "count_ptr", "arrivals_ptr"), "*i32")
    signature |= {"state_ptr": "*fp32", "acc_ptr": "*fp32", "scale": "fp32"}
    signature |= dict.fromkeys(("max_pages", "page_stride", "window"), "i32")
    constants: dict[str, Any] = sizes | {"PAGE": 16, "WINDOW": window or chunked, "FIRST": first, "OVERLAP": True}
    constants |= {"CHUNKED": chunked, "MERGE": merge}
    constants["TO_CAP"] = head_dim**-0.5 / soft_cap if soft_cap else 0.0
    optional = {"sinks_ptr": (sinks, "*fp32"), "scales_ptr": (quantised, "*fp32"), "until_ptr": (until, "*i32")}
    optional |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), (e4m3, "*i32"))
    optional |= dict.fromkeys(("tokens", "padded"), (quantised, "i32"))
    signature |= {name: kind for name, (there, kind) in optional.items() if there}
    constants |= {name: None for name, (there, _) in optional.items() if not there}
    return AotCase(attention_kernel, signature, constants, **options)


_PLAN = dict.fromkeys(("slots_ptr", "kv_len_ptr", "work_ptr", "count_ptr", "arrivals_ptr", "query_start_ptr"), "*i32")
_PLAN |= dict.fromkeys(("rows", "num_tokens", "partials", "programs"), "i32")
_PLAN_SIZES = {"WIDTH": 0, "TOKENS": 32, "KV_HEADS": 8, "SPLIT": SPLIT, "BLOCK": 64}


def aot(shared: int) -> list[AotCase]:
    """AotCases of a card with ``shared`` bytes of shared memory."""
    case = functools.partial(_case, shared)
    return [
        *(case(32, 8, 128, width, cut=True) for width in (1, 4, 6, 17)),  # Qwen3-8B: rounds
        *(case(32, 8, 128, tokens, cut=False) for tokens in (16, 32)),  # and extend passes
        case(32, 8, 128, 4, cut=True, window=True),
        *(
            case(32, 8, 128, tokens, cut, first=1) for tokens, cut in ((4, True), (32, False))
        ),  # drafters without a key 0
        case(14, 2, 64, 1, cut=True),  # Qwen2.5-0.5B
        case(14, 2, 64, 18, cut=False),
        case(8, 4, 256, 6, cut=True),
        case(8, 4, 256, 64, cut=False),
        case(8, 4, 256, 4, cut=True, window=True, soft_cap=50.0),  # Gemma 2
        case(8, 4, 256, 64, cut=False, soft_cap=50.0),
        *(case(16, 2, 512, width, cut=True, merge=width > 4) for width in (1, 4, 6)),  # Gemma 4, full layers: rounds
        case(16, 2, 512, 64, cut=False),  # and extend passes
        case(16, 8, 256, 4, cut=True, window=True),  # and layers with a window
        case(16, 2, 512, 4, cut=True, e4m3=True),
        case(16, 8, 256, 64, cut=False, window=True, until=True),  # pictures of Gemma 3 and 4
        case(16, 8, 256, 16, cut=True, window=True, until=True),
        case(8, 4, 256, 64, cut=False, until=True),
        *(case(40, 8, 128, tokens, cut, chunked=True) for tokens, cut in ((4, True), (16, False))),  # Llama 4
        case(40, 8, 128, 4, cut=True, chunked=True, e4m3=True),
        case(64, 8, 64, 4, cut=True, sinks=True),  # gpt-oss
        case(64, 8, 64, 16, cut=False, window=True, sinks=True),
        *(case(32, 8, 128, width, cut=True, e4m3=True) for width in (1, 4, 6)),
        replace(case(32, 8, 128, 1, cut=True, e4m3=True), num_warps=2),
        *(case(32, 8, 128, tokens, cut=False, e4m3=True) for tokens in (16, 32)),
        case(32, 8, 128, 4, cut=True, first=1, e4m3=True),
        case(14, 2, 64, 1, cut=True, e4m3=True),
        case(8, 4, 256, 6, cut=True, e4m3=True),
        case(8, 4, 256, 64, cut=False, e4m3=True),
        case(8, 4, 256, 4, cut=True, window=True, soft_cap=50.0, e4m3=True),
        case(64, 8, 64, 16, cut=False, window=True, sinks=True, e4m3=True),
        *(case(32, 8, 128, width, cut=True, quantised=True) for width in (1, 4, 6)),
        *(case(32, 8, 128, tokens, cut=False, quantised=True) for tokens in (16, 32)),
        case(32, 8, 128, 4, cut=True, window=True, e4m3=True, quantised=True),
        case(16, 2, 512, 1, cut=True, quantised=True),  # Gemma 4
        case(16, 2, 512, 64, cut=False, quantised=True),
        *(case(16, 8, 256, tokens, cut, window=True, quantised=True) for tokens, cut in ((4, True), (64, False))),
        AotCase(plan_kernel, _PLAN, _PLAN_SIZES | {"window": None}),
        AotCase(plan_kernel, _PLAN | {"window": "i32"}, _PLAN_SIZES),
    ]


AOT = aot(HOPPER)
