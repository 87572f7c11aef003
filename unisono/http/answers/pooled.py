"""Pooled values of prompts: one array each, made when its prompt ends, so that no answer holds all hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import numpy as np

from unisono.http.answers.generation import Generation, merge
from unisono.http.errors import unavailable

Pool = Callable[[np.ndarray, list[int]], np.ndarray]
"""Makes a prompt's value of its hidden states [tokens, hidden] in float32 and its token ids."""


async def pooled_values(generations: Sequence[Generation], pool: Pool) -> list[np.ndarray]:
    """The values of all prompts, in their order. Raises the error that ended a request early."""
    found: dict[int, np.ndarray] = {}
    async with aclosing(merge(generations)) as pieces:
        async for piece in pieces:
            if piece.finish is not None:
                found[piece.index] = await asyncio.to_thread(_pooled, generations[piece.index], pool)
    return [found[index] for index in range(len(generations))]


def _pooled(generation: Generation, pool: Pool) -> np.ndarray:
    states = generation.take_prompt_states()
    if not len(states):
        raise unavailable("The request was aborted by an operator.", "aborted")
    return pool(states, generation.prompt_token_ids)
