"""A small state store, and prompts that run on a page pool."""

from __future__ import annotations

import torch

from unisono.kv.pages import PagePool, Reservation
from unisono.kv.specs import ALL, PAGE_SIZE, Paged, PerSlot, Recurrent, Remembered
from unisono.kv.store import RecurrentView, StateStore

KV = Paged((2, PAGE_SIZE, 4), torch.float32)
WINDOW = Paged((1, PAGE_SIZE, 8), torch.float32, window_group=32)
TAIL = Recurrent(
    {"h": ((3, 2), torch.float32), "taps": ((3, 4), torch.float16)},
    {"x": Remembered((5,), torch.float32), "u": Remembered((4,), torch.float16, last=3)},
)


def made(paths: int = 1) -> StateStore:
    """A store with state of every kind for a target and a drafter, filled with random numbers."""
    store = StateStore(slots=4, paths=paths, max_model_len=160, width=4, device=torch.device("cpu"))
    store.declare("target", [(KV, KV), (WINDOW, WINDOW), TAIL])
    page = Paged((6,), torch.float16, by_token=False)
    store.declare("drafter", {"kv": (KV, KV), "hidden": PerSlot((6,), torch.float16, fill=2), "page": page})
    store.allocate({ALL: 12, 32: 7}, snapshots=3)
    generator = torch.Generator().manual_seed(0)
    for tree in (store.view("target").tree, store.view("drafter").tree):
        for tensor in tensors(tree):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return store


def tensors(tree: object) -> list[torch.Tensor]:
    """All tensors of a view."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, RecurrentView):
        return tree.tensors
    parts = tree.values() if isinstance(tree, dict) else tree
    return [t for part in parts for t in tensors(part)]  # type: ignore[attr-defined]


def tokens_of(*words: int) -> list[int]:
    """One page of tokens per word."""
    return [w for w in words for _ in range(PAGE_SIZE)]


def run(pool: PagePool, tokens: list[int], chunk: int = PAGE_SIZE) -> Reservation:
    """Compute a prompt in chunks, as the scheduler does: hold pages, run, commit, free what the window has passed."""
    quotas = {w: p.quota(2 * chunk, 1000) for w, p in pool.windows.items()}
    assert pool.has_quotas(quotas)
    reservation = pool.open([*tokens, -1], quotas)
    reservation.reserve(len(tokens))
    for start in range(reservation.cached_tokens, len(tokens), chunk):
        end = min(len(tokens), start + chunk)
        for window in reservation.windows.values():
            window.grow(end)
        reservation.commit(tokens[:end])
        for window in reservation.windows.values():
            window.free_before(end)
    return reservation
