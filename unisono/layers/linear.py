"""Linear layers over the exact ``linear`` op, plain and merged from a checkpoint's shards.

Built by ``models``; filled by the loader, which copies a plain layer's parameters and hands merged
layers their shards by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from unisono.kernels import linear
from unisono.types import CheckpointError


class Linear(nn.Module):
    """``x [M, in_features] -> [M, out_features]``; weight [out_features, in_features] is uninitialised."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = _parameter((out_features, in_features), dtype, device)
        self.bias = _parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``residual [M, out_features]`` is added to the rounded product."""
        return linear(x, self.weight, self.bias, residual)


class MergedLinear(Linear):
    """Several projections of one input as one product; ``shards`` maps their names to rows, in order."""

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(in_features, sum(shards.values()), bias, dtype, device)
        self.shards = dict(shards)

    def shard(self, name: str) -> torch.Tensor:
        """The view of one projection's parameter; ``name`` is e.g. ``"q.weight"`` or ``"gate.bias"``.

        Raises CheckpointError for a name that this layer lacks.
        """
        shard, _, kind = name.rpartition(".")
        whole = {"weight": self.weight, "bias": self.bias}.get(kind)
        if shard not in self.shards or whole is None:
            kinds = "weight" if self.bias is None else "weight and bias"
            raise CheckpointError(f"Unexpected tensor {name}: this layer has {kinds} of {', '.join(self.shards)}.")
        return dict(zip(self.shards, whole.split(list(self.shards.values())), strict=True))[shard]

    def load_shard(self, name: str, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` into :meth:`shard` ``name``. Raises CheckpointError for a wrong shape too."""
        part = self.shard(name)
        if part.shape != tensor.shape:
            raise CheckpointError(
                f"Tensor {name} has shape {list(tensor.shape)}; the configuration asks for {list(part.shape)}."
            )
        part.copy_(tensor)


class QKVLinear(MergedLinear):
    """Query, key and value projections ``q k v``: [M, hidden] -> [M, (Hq + 2 Hkv) D]."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        kv = num_kv_heads * head_dim
        shards = {"q": num_heads * head_dim, "k": kv, "v": kv}
        super().__init__(hidden_size, shards, bias, dtype, device)


class GateUpLinear(MergedLinear):
    """Projections ``gate up`` of a gated MLP: [M, hidden] -> [M, 2 intermediate]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shards = {"gate": intermediate_size, "up": intermediate_size}
        super().__init__(hidden_size, shards, bias, dtype, device)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
