"""Counts the ops that a piece of code dispatches."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """found: how often each op was dispatched, by its name (``unisono.linear.default``)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    @property
    def ours(self) -> Counter[str]:
        """The project's ops, by their own names."""
        names = {name: name.split(".") for name in self.found}
        return Counter({parts[1]: self.found[name] for name, parts in names.items() if parts[0] == "unisono"})

    def __torch_dispatch__(self, op: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.found[str(op)] += 1
        return op(*args, **(kwargs or {}))
