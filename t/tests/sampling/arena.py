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
