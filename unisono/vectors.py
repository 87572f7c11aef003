"""Tensors that cross rooms and processes as bytes: embeddings in, hidden states out.

Used by whoever takes embeddings from a caller (``llm``, ``server``), by the engine, and by whoever hands hidden states
back. What a caller gives is checked here: dtype, shape, positions. What only the engine knows (the hidden size, the
context) it checks itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unisono.types import PLACEHOLDER, BadRequest, Overrides, TokenDelta, Vectors

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Given = Mapping[int, Any] | tuple[Sequence[int], Any]
"""Overrides as a caller writes them: {position: vector}, or (positions, tensor [n, hidden])."""


def pack(rows: torch.Tensor) -> Vectors:
    """Rows [n, size] of one of DTYPES, on any device."""
    rows = rows.detach().cpu().contiguous()
    data = rows.view(torch.uint8).numpy().tobytes() if rows.numel() else b""
    return Vectors(str(rows.dtype).removeprefix("torch."), rows.shape[1], data)


def unpack(vectors: Vectors) -> torch.Tensor:
    """The rows [n, size], on the CPU."""
    dtype = DTYPES[vectors.dtype]
    if not vectors.data:
        return torch.empty((0, vectors.size), dtype=dtype)
    return torch.frombuffer(bytearray(vectors.data), dtype=dtype).view(-1, vectors.size)


class Returned:
    """The hidden states that a sequence's deltas bring: put together once, when they are asked for."""

    def __init__(self) -> None:
        self._own: list[Vectors] = []
        self._prompt = Vectors("float32", 0, b"")

    def take(self, delta: TokenDelta) -> None:
        """Add those of the next delta."""
        if delta.prompt_hidden_states is not None:
            self._prompt = delta.prompt_hidden_states
        if delta.hidden_states is not None:
            self._own.append(delta.hidden_states)

    def own(self, tokens: int) -> torch.Tensor:
        """Of each of ``tokens`` generated tokens but the last, [tokens - 1, hidden]."""
        first = self._own[0] if self._own else Vectors("float32", 0, b"")
        whole = replace(first, data=b"".join(rows.data for rows in self._own))
        return unpack(whole)[: max(0, tokens - 1)]

    def prompt(self) -> torch.Tensor:
        """Of each prompt token, [tokens, hidden]; no rows where another sequence of the prompt brings them."""
        return unpack(self._prompt)


def embedded_prompt(embeds: Any, param: str = "prompt_embeds") -> tuple[list[int], Overrides]:
    """A prompt of embeddings alone, [T, hidden] or [1, T, hidden]: its token ids and overrides. Raises BadRequest."""
    rows = _rows(embeds, param)
    if not rows.shape[0]:
        raise BadRequest(f"{param} has no rows; give at least 1.", param)
    return [PLACEHOLDER] * rows.shape[0], Overrides(list(range(rows.shape[0])), pack(rows))


def overridden(
    token_ids: Sequence[int], given: Given, param: str = "embedding_overrides"
) -> tuple[list[int], Overrides | None]:
    """Token ids and overrides of a prompt with embeddings at some positions. Raises BadRequest."""
    if isinstance(given, Mapping):
        positions, vectors = list(given), [_rows(vector, param, dims=1) for vector in given.values()]
        if len({vector.shape for vector in vectors}) > 1:
            raise BadRequest(
                f"{param} has vectors of sizes {sorted({v.shape[1] for v in vectors})}; give one size.", param
            )
        rows = torch.cat(vectors) if vectors else torch.empty(0, 0)
    elif isinstance(given, Sequence) and len(given) == 2:
        positions, rows = list(given[0]), _rows(given[1], param)
    else:
        raise BadRequest(f"{param} is neither {{position: vector}} nor (positions, tensor).", param)
    _check_positions(positions, rows.shape[0], len(token_ids), param)
    if not positions:
        return list(token_ids), None
    order = sorted(range(len(positions)), key=positions.__getitem__)
    ids, ascending = list(token_ids), [positions[i] for i in order]
    for position in ascending:
        ids[position] = PLACEHOLDER
    return ids, Overrides(ascending, pack(rows[order]))


def _check_positions(positions: Sequence[object], rows: int, prompt: int, param: str) -> None:
    wrong = next((p for p in positions if not isinstance(p, int) or isinstance(p, bool) or not 0 <= p < prompt), None)
    if wrong is not None:
        raise BadRequest(f"{param} has position {wrong!r}; the prompt's are 0 to {prompt - 1}.", param)
    if len(set(positions)) < len(positions):
        twice = next(p for i, p in enumerate(positions) if p in positions[:i])
        raise BadRequest(f"{param} has position {twice} twice; give one embedding for each.", param)
    if rows != len(positions):
        raise BadRequest(f"{param} has {len(positions)} positions and {rows} embeddings; give one for each.", param)


def _rows(given: Any, param: str, dims: int = 2) -> torch.Tensor:
    """[n, size]; one vector [size] is [1, size]. Raises BadRequest for what is no such tensor."""
    try:
        rows = given if isinstance(given, torch.Tensor) else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise BadRequest(f"{param} has a {type(given).__name__}; give tensors, or arrays of numbers.", param) from None
    if rows.layout is not torch.strided or rows.device.type == "meta":
        raise BadRequest(
            f"{param} is a {rows.layout} tensor on {rows.device}; give a dense one with its values.", param
        )
    if rows.dtype is torch.float64 and not isinstance(given, torch.Tensor):
        rows = rows.float()  # Python's numbers, and numpy's default
    if rows.dtype not in DTYPES.values():
        raise BadRequest(f"{param} has dtype {rows.dtype}; give one of {', '.join(DTYPES)}.", param)
    shape = tuple(rows.shape)
    rows = rows[None] if dims == 1 and rows.ndim == 1 else rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
    if rows.ndim != 2 or (dims == 1 and len(rows) != 1):
        raise BadRequest(f"{param} has shape {shape}; give {'[hidden]' if dims == 1 else '[tokens, hidden]'}.", param)
    return rows
