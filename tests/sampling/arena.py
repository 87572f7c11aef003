"""Slots for tests: fields as strided views of one int32 arena, as the engine lays them out."""

from types import SimpleNamespace

import torch

DEFAULTS = {
    "length": 7,
    "status": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed_lo": 1,
    "seed_hi": 2,
}


def arena(slots: int, device: str | torch.device = "cpu", **fields: torch.Tensor | float) -> SimpleNamespace:
    """Sampling fields of ``slots`` slots: DEFAULTS, overridden by numbers or tensors [slots]."""
    views, columns = SimpleNamespace(), []
    for name, default in DEFAULTS.items():
        dtype = torch.float32 if isinstance(default, float) else torch.int32
        column = torch.as_tensor(fields.pop(name, default)).to(dtype).expand(slots).contiguous()
        columns.append(column.view(torch.int32))
    assert not fields, f"unknown fields {sorted(fields)}"
    block = torch.stack(columns, 1).to(device)
    for i, (name, default) in enumerate(DEFAULTS.items()):
        setattr(views, name, block[:, i].view(torch.float32) if isinstance(default, float) else block[:, i])
    return views


ROWS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 1.5, "min_p": 0.1},
    {"top_k": 3},
    {"top_k": 40, "temperature": 2.0},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 0.8},
    {"top_k": 60, "top_p": 0.95},
    {"top_k": 60, "top_p": 0.7, "min_p": 0.2, "temperature": 1.2},
    {"top_p": 0.9, "status": 1},
    {"status": 4},
]
"""Sampling parameters of requests of every kind; the last two are not running."""


def fields_of(rows: list[dict], device: str | torch.device = "cpu") -> list[torch.Tensor]:
    """The field arguments of the sampling ops, one slot per row. Every slot has its own seed and length."""
    names = ("temperature", "top_k", "top_p", "min_p", "status")
    columns = {name: torch.tensor([row.get(name, DEFAULTS[name]) for row in rows]) for name in names}
    index = torch.arange(len(rows))
    return list(vars(arena(len(rows), device, seed_lo=index * 1001 - 3, length=index * 5, **columns)).values())
