"""Records the experts that a decoder's MoE layers choose while it computes a pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from unisono.layers.experts import Experts


class RouterRecorder:
    """The MoE layers of a model.

    layers: indices of the MoE layers, ascending. experts: largest number of experts of a layer. top_k: experts per
    token; 0 if layers differ or there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        found = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
        self._modules = list(found.values())
        self.layers = tuple(int(number[0]) for name in found if (number := re.findall(r"\d+", name)))
        self.experts = max((module.stacks[0].experts for module in self._modules), default=0)
        sizes = {module.top_k for module in self._modules}
        self.top_k = sizes.pop() if len(sizes) == 1 else 0

    @contextmanager
    def recording(self, chosen: list[torch.Tensor]) -> Iterator[None]:
        """Within the block, each layer appends its choices [tokens, top_k] int32 to ``chosen``."""
        for module in self._modules:
            module.observer = chosen.append
        try:
            yield
        finally:
            for module in self._modules:
                module.observer = None
