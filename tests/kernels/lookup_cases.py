"""Random texts for tests of the lookup kernels, and the slot fields that hold them."""

import random
from types import SimpleNamespace

import torch

MAX_TOKENS = 40
"""Capacity of a slot's history."""


def slots_of(rows: list[list[int]], ops: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(history, length) of one slot per text, plus the padding slot.

    length is a strided view, as in the engine. History after the end of a text holds random tokens.
    """
    history = torch.randint(0, 3, (len(rows) + 1, MAX_TOKENS), dtype=torch.int32)
    arena = torch.zeros((len(rows) + 1, 3), dtype=torch.int32)
    for slot, tokens in enumerate(rows):
        history[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        arena[slot, 1] = len(tokens)
    return history.to(ops.device), arena.to(ops.device)[:, 1]


def random_texts(rng: random.Random, count: int, vocab: int) -> list[list[int]]:
    """``count`` random texts; some end with a copy of an earlier part."""
    texts = []
    for _ in range(count):
        text = [rng.randrange(vocab) for _ in range(rng.randrange(1, MAX_TOKENS + 1))]
        if len(text) > 12 and rng.random() < 0.5:
            at, size = rng.randrange(len(text) - 8), rng.randrange(1, 8)
            text[-size:] = text[at : at + size]
        texts.append(text)
    return texts
