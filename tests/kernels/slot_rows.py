"""Slots of requests in every state, for tests of the kernels of rounds."""

import random
from types import SimpleNamespace

import torch

from unisono.types import FinishReason

PAGE, STOP_IDS, MAX_TOKENS = 4, 16, 32


def slots_of(rows: list[dict], device: str | torch.device = "cpu") -> SimpleNamespace:
    """One slot per row and the padding slot after them, as views of one arena with fields in between."""
    rows = [*rows, {"length": 0, "max_length": 0, "status": FinishReason.FREE, "last_token": 0, "stops": ()}]
    block = torch.full((len(rows), 5 + STOP_IDS), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        block[i, :4] = torch.tensor([row["length"], row["max_length"], row["status"], row["last_token"]])
        block[i, 5 : 5 + len(row["stops"])] = torch.tensor(row["stops"])
    block = block.to(device)
    views = {name: block[:, i] for i, name in enumerate(("length", "max_length", "status", "last_token"))}
    history = torch.full((len(rows), MAX_TOKENS), -7, dtype=torch.int32, device=device)
    return SimpleNamespace(**views, stop_ids=block[:, 5:], history=history, block=block)


def random_rows(rng: random.Random, count: int) -> list[dict]:
    """Requests near their limits over a vocabulary of 4, so that every branch of commit is common."""
    rows = []
    for _ in range(count):
        length = rng.randint(1, 12)
        status = rng.choice([FinishReason.RUNNING] * 6 + [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
        stops = rng.choice([(), (), (3,), (2, 3), (*range(100, 115), 1)])
        rows.append(
            {
                "length": length,
                "max_length": length + rng.choice([1, 2, 3, 9]),
                "status": status,
                "last_token": rng.randint(0, 3),
                "stops": stops,
            }
        )
    return rows
