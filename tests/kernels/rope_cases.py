"""Tokens whose heads are turned and written to the cache."""

import dataclasses

import torch

PAGE, PAGES, EPS = 4, 24, 1e-6


@dataclasses.dataclass
class Case:
    """Inputs of the op for T tokens, at shuffled cache slots, with two padding tokens at the end."""

    qkv: torch.Tensor
    norms: tuple[torch.Tensor | None, torch.Tensor | None]
    table: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    heads: int
    kv_heads: int

    def run(self, op, rows=slice(None)):
        """q and both caches (NaN where nothing was written) for these tokens."""
        head_dim = self.qkv.shape[1] // (self.heads + 2 * self.kv_heads)
        caches = [self.qkv.new_empty(PAGES, self.kv_heads, PAGE, head_dim).fill_(torch.nan) for _ in "kv"]
        q = op(
            self.qkv[rows].clone(), *self.norms, EPS, self.table, self.positions[rows], self.slots[rows],
            *caches, self.heads, self.kv_heads,
        )  # fmt: skip
        return q, *caches

    def replaced(self, qkv, heads, kv_heads):
        """The same tokens with other heads."""
        return dataclasses.replace(self, qkv=qkv, heads=heads, kv_heads=kv_heads)


def make_case(head_dim, rot_dim, norm, dtype, device, tokens=9, heads=4, kv_heads=2):
    """norm: whether there are head norms, or the dtype of their weights."""
    angles = torch.rand(64, rot_dim // 2) * 6
    positions = torch.randint(0, 64, (tokens,), dtype=torch.int32)
    slots = PAGE + torch.randperm(PAGE * (PAGES - 1), dtype=torch.int32)[:tokens]
    positions[-2:], slots[-2:] = -1, torch.tensor([1, 2])
    of_norms = norm if isinstance(norm, torch.dtype) else dtype
    weights = [torch.randn(head_dim).to(device, of_norms) if norm else None for _ in "qk"]
    return Case(
        torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(device, dtype),
        tuple(weights),
        torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        positions.to(device),
        slots.to(device),
        heads,
        kv_heads,
    )
