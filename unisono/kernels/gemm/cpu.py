"""Matrix products of CPU twins: a row's bits depend on that row and the weight alone.

A BLAS chooses its blocking by the number of rows, so the same row may get other bits in a larger batch. There are two
ways around that. oneDNN's inner product adds K in one sequence for two rows and more. It is called with the numbers of
rows in BLOCKS only, and serves a weight's shape if :func:`_exact` saw equal bits for all of them in this process.
Anything else goes through the BLAS in tiles of exactly ROW_TILE rows; where a row's place in a tile matters
(:func:`_even`), each row is the first of a tile of its own.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F

ROW_TILE = 16
"""Rows of a product through the BLAS."""

COLUMN_TILE = 16
"""Minimum columns of a product: libraries may compute fewer in another way, and a rank may hold few of many."""

BLOCKS = (64, 32, 16, 8, 4, 2)
"""Rows of a product through oneDNN."""

LEAST_ROWS, FEW_ROWS = BLOCKS[-1], 8
"""Rows of the smallest block. Up to FEW_ROWS rows are padded to one block, as a second call would read the weight
again.
"""

CALL_ELEMENTS = 1 << 20
"""Multiply-adds that take as long as the start of a call through oneDNN, 20 µs: rows · N · K."""

PACKED_BYTES = 1 << 30
"""Limit of the copies of weights in oneDNN's layout, in bytes. Weights beyond it keep their layout: slower, same
bits.
"""

_BLOCK_OFFSETS = (0, 1, 29)
_available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_proven: dict[tuple[int, ...], tuple[bool, bool]] = {}
"""(N, K, threads) -> True where oneDNN's bits do not depend on the number of rows: of packed weights, and of others."""
_even_tiles: dict[tuple[Hashable, ...], bool] = {}
"""Weight's shape, strides and dtype, threads -> True where the BLAS's bits do not depend on a row's place in a tile."""
_packed_bytes = 0


def row_exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``x [M, K] @ weight [N, K]^T`` so that a row's bits do not depend on M. Returns [M, N] in x's dtype.

    A copy of a parameter without a gradient is kept in oneDNN's layout, until it is freed or changed in place.
    """
    columns = weight.shape[0]
    if columns < COLUMN_TILE:
        return row_exact_product(x, _kept(weight, _widened))[:, :columns].contiguous()
    x = x.contiguous()
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    exact, unpacked = _exact(weight) if x.dtype is weight.dtype is torch.float32 else (False, False)
    if not exact:
        return _blas_product(x, weight.t())
    weight = _kept(weight, _packed)
    return _onednn_product(x, weight if weight.is_mkldnn or unpacked else _packed(weight))


def _onednn_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    blocks = _blocks(rows, CALL_ELEMENTS // max(weight.numel(), 1))
    if blocks == (rows,):
        return _inner_product(x, weight)
    if (missing := sum(blocks) - rows) > 0:
        x = F.pad(x, (0, 0, 0, missing))
    if len(blocks) == 1:
        return _inner_product(x, weight)[:rows]
    return torch.cat([_inner_product(part, weight) for part in x.split(blocks)])[:rows]


def _inner_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], None)
    return product


@functools.lru_cache(4096)
def _blocks(rows: int, spare: int) -> tuple[int, ...]:
    """Divide ``rows`` into numbers of BLOCKS; the last one may exceed the remaining rows.

    spare: rows that take as long as the start of a call. Rows are padded to one block rather than divided at a higher
    cost.
    """
    found = []
    while rows > 0:
        above = min((b for b in BLOCKS if b >= rows), default=None)
        if above is not None and (rows <= FEW_ROWS or above - rows <= spare):
            block = above
        else:
            block = max(b for b in BLOCKS if b <= rows)
        found.append(block)
        rows -= block
    return tuple(found) or (0,)


def _exact(weight: torch.Tensor) -> tuple[bool, bool]:
    """Return (oneDNN serves this weight, also without packing). Compared once in a process for each shape, its strides
    and the number of threads.
    """
    if not _available:
        return False, False
    key = *weight.shape, *weight.stride(), torch.get_num_threads()
    known = _proven.get(key)
    if known is None:
        known = _proven[key] = _same_bits(weight.detach())
    return known


def _same_bits(weight: torch.Tensor) -> tuple[bool, bool]:
    """Compare rows in blocks of every size, and few of the weight's columns: with packed weights, and without."""
    n, k = weight.shape
    x = torch.randn(BLOCKS[0], k, generator=torch.Generator().manual_seed(n))
    with torch.inference_mode():
        whole, layouts = _inner_product(x, _packed(weight)), (_packed, torch.clone)
        packed, unpacked = (_same_rows(x, layout(weight), whole) for layout in layouts)
        for part in (slice(0, COLUMN_TILE), slice(n - COLUMN_TILE, n)):
            few = [torch.equal(_inner_product(x, layout(weight[part])), whole[:, part]) for layout in layouts]
            packed, unpacked = packed and few[0], unpacked and few[1]
        return packed, unpacked


def _same_rows(x: torch.Tensor, weight: torch.Tensor, whole: torch.Tensor) -> bool:
    """Compare blocks of every size with the product of all rows."""
    for block in BLOCKS:
        for start in {min(offset, BLOCKS[0] - block) for offset in _BLOCK_OFFSETS}:
            if not torch.equal(_inner_product(x[start : start + block].clone(), weight), whole[start : start + block]):
                return False
    return True


def slice_of(stack: torch.Tensor, index: int) -> torch.Tensor:
    """Return ``stack[index]``. Slices of a parameter that is not trained are made once, so that their packed copies
    last.
    """
    if not isinstance(stack, torch.nn.Parameter) or stack.requires_grad:
        return stack[index]
    slices: dict[int, torch.nn.Parameter] | None = getattr(stack, "_unisono_slices", None)
    if slices is None:
        slices = stack._unisono_slices = {}  # type: ignore[attr-defined]
    if index not in slices:
        slices[index] = torch.nn.Parameter(stack.detach()[index], requires_grad=False)
    return slices[index]


def _widened(weight: torch.Tensor) -> torch.Tensor:
    """Pad the weight with rows of zeros up to COLUMN_TILE."""
    return F.pad(weight.detach(), (0, 0, 0, COLUMN_TILE - weight.shape[0]))


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """Copy the weight to oneDNN's layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), LEAST_ROWS)
    return packed


def _kept(weight: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return ``make(weight)``, computed once for a parameter that is not trained, until it is changed in place.

    Beyond PACKED_BYTES, and for other tensors, nothing is kept, and a packed weight is the weight itself.
    """
    version = 0 if weight.is_inference() else weight._version
    kept: tuple[int, torch.Tensor] | None = getattr(weight, "_unisono_kept", None)
    if kept is not None and kept[0] == version:
        return kept[1]
    lasting = isinstance(weight, torch.nn.Parameter) and not weight.requires_grad
    if not lasting or (kept is None and not _takes(weight)):
        return weight if make is _packed else make(weight)
    made = make(weight)
    if not made.is_mkldnn:
        made = torch.nn.Parameter(made, requires_grad=False)  # which is packed in turn
    weight._unisono_kept = version, made  # type: ignore[attr-defined]
    return made


def forget_copies(weight: torch.Tensor) -> None:
    """Have copies of the weight in other layouts made again: its values have changed in place.

    Tensors made in inference mode do not count their changes, so :func:`_kept` cannot see them.
    """
    kept: tuple[int, torch.Tensor] | None = getattr(weight, "_unisono_kept", None)
    if kept is not None:
        weight._unisono_kept = -1, kept[1]  # type: ignore[attr-defined]
    for part in getattr(weight, "_unisono_slices", {}).values():
        forget_copies(part)


def _takes(weight: torch.Tensor) -> bool:
    """Count a copy of the weight until it is freed. Returns False if PACKED_BYTES leave no room."""
    global _packed_bytes
    if _packed_bytes + weight.nbytes > PACKED_BYTES:
        return False
    _packed_bytes += weight.nbytes
    weakref.finalize(weight, _free, weight.nbytes)
    return True


def _free(nbytes: int) -> None:
    global _packed_bytes
    _packed_bytes -= nbytes


def _blas_product(x: torch.Tensor, weight_t: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, weight_t.shape[1])
    if not _even(weight_t):
        alone = F.pad(x[:, None], (0, 0, 0, ROW_TILE - 1))
        return torch.cat([(tile @ weight_t)[:1] for tile in alone])
    if rows == ROW_TILE:
        return x @ weight_t
    padded = F.pad(x, (0, 0, 0, -rows % ROW_TILE))
    tiles = [padded[i : i + ROW_TILE] @ weight_t for i in range(0, padded.shape[0], ROW_TILE)]
    return torch.cat(tiles)[:rows]


def _even(weight_t: torch.Tensor) -> bool:
    """Return True where the BLAS treats a tile's rows alike: compared once in a process for each kind of weight."""
    key = *weight_t.shape, *weight_t.stride(), weight_t.dtype, torch.get_num_threads()
    known = _even_tiles.get(key)
    if known is None:
        known = _even_tiles[key] = _same_places(weight_t.detach())
    return known


def _same_places(weight_t: torch.Tensor) -> bool:
    """Compare a tile's rows with the same rows in other places, and one with itself in other company."""
    x = torch.randn(ROW_TILE, weight_t.shape[0], generator=torch.Generator().manual_seed(weight_t.shape[1]))
    x = x.to(weight_t.dtype)
    with torch.inference_mode():
        whole = x @ weight_t
        alone = F.pad(x[:1], (0, 0, 0, ROW_TILE - 1)) @ weight_t
        moved = all(torch.equal(x.roll(by, 0) @ weight_t, whole.roll(by, 0)) for by in (1, 3, ROW_TILE // 2))
        return moved and torch.equal(alone[0], whole[0])
