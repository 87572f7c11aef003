"""Embeddings of a caller, checked and packed for the engine: whole prompts, or some positions.

They are checked and converted to the model's dtype here, once. The engine only unpacks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unisono.types import PLACEHOLDER, BadRequest, Overrides
from unisono.types.vectors import DTYPES, dtype_of, pack

if TYPE_CHECKING:
    import torch

EMBEDS, OVERRIDES = "prompt_embeds", "embedding_overrides"


def embedded_prompt(embeds: Any, dtype: str) -> tuple[list[int], Overrides]:
    """Token ids and overrides of a prompt that consists of embeddings, [T, hidden] or [1, T, hidden].

    dtype: the model's, by name. Raises BadRequest.
    """
    rows = _rows(embeds, EMBEDS)
    if not rows.shape[0]:
        raise BadRequest(f"{EMBEDS} has no rows; give at least 1.", EMBEDS)
    positions = list(range(rows.shape[0]))
    return [PLACEHOLDER] * len(positions), _packed(positions, rows, dtype, EMBEDS)


def overridden(token_ids: Sequence[int], value: Any, dtype: str) -> tuple[list[int], Overrides | None]:
    """Token ids and overrides of a prompt with embeddings at some positions.

    value: {position: vector}, or (positions, tensor [n, hidden]). dtype: the model's, by name. Raises BadRequest.
    """
    import torch

    if isinstance(value, Mapping):
        positions, vectors = list(value), [_rows(vector, OVERRIDES, dims=1) for vector in value.values()]
        if len({vector.shape for vector in vectors}) > 1:
            raise BadRequest(
                f"{OVERRIDES} has vectors of sizes {sorted({v.shape[1] for v in vectors})}; give one size.", OVERRIDES
            )
        rows = torch.cat(vectors) if vectors else torch.empty(0, 0)
    elif isinstance(value, Sequence) and len(value) == 2:
        positions, rows = list(value[0]), _rows(value[1], OVERRIDES)
    else:
        raise BadRequest(f"{OVERRIDES} is neither {{position: vector}} nor (positions, tensor).", OVERRIDES)
    _check_positions(positions, rows.shape[0], len(token_ids))
    if not positions:
        return list(token_ids), None
    order = sorted(range(len(positions)), key=positions.__getitem__)
    ids, ascending = list(token_ids), [positions[i] for i in order]
    for position in ascending:
        ids[position] = PLACEHOLDER
    return ids, _packed(ascending, rows[order], dtype, OVERRIDES)


def _packed(positions: list[int], rows: torch.Tensor, dtype: str, param: str) -> Overrides:
    """Pack ``rows`` in the model's dtype. Raises BadRequest for numbers that are not finite in it."""
    import torch

    rows = rows.detach().cpu().to(dtype_of(dtype))
    wrong = (~rows.isfinite().all(dim=1)).nonzero()
    if len(wrong):
        raise BadRequest(
            f"the embedding at position {positions[int(wrong[0])]} has numbers that are not finite in "
            f"{dtype}, the model's dtype; give numbers up to {torch.finfo(rows.dtype).max:.4g}.",
            param,
        )
    return Overrides(positions, pack(rows))


def _check_positions(positions: Sequence[object], rows: int, prompt: int) -> None:
    wrong = next((p for p in positions if not isinstance(p, int) or isinstance(p, bool) or not 0 <= p < prompt), None)
    if wrong is not None:
        raise BadRequest(f"{OVERRIDES} has position {wrong!r}; the prompt's are 0 to {prompt - 1}.", OVERRIDES)
    if len(set(positions)) < len(positions):
        twice = next(p for i, p in enumerate(positions) if p in positions[:i])
        raise BadRequest(f"{OVERRIDES} has position {twice} twice; give one embedding for each.", OVERRIDES)
    if rows != len(positions):
        raise BadRequest(
            f"{OVERRIDES} has {len(positions)} positions and {rows} embeddings; give one for each.", OVERRIDES
        )


def _rows(value: Any, param: str, dims: int = 2) -> torch.Tensor:
    """``value`` as a tensor [n, size]; one vector [size] becomes [1, size]. Raises BadRequest for another shape."""
    import torch

    try:
        rows = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise BadRequest(f"{param} has a {type(value).__name__}; give tensors, or arrays of numbers.", param) from None
    if rows.layout is not torch.strided or rows.device.type == "meta":
        raise BadRequest(
            f"{param} is a {rows.layout} tensor on {rows.device}; give a dense one with its values.", param
        )
    if rows.dtype is torch.float64 and not isinstance(value, torch.Tensor):
        rows = rows.float()  # Python's numbers, and numpy's default
    if rows.dtype not in map(dtype_of, DTYPES):
        raise BadRequest(f"{param} has dtype {rows.dtype}; give one of {', '.join(DTYPES)}.", param)
    shape = tuple(rows.shape)
    rows = rows[None] if dims == 1 and rows.ndim == 1 else rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
    if rows.ndim != 2 or (dims == 1 and len(rows) != 1):
        raise BadRequest(f"{param} has shape {shape}; give {'[hidden]' if dims == 1 else '[tokens, hidden]'}.", param)
    return rows
