"""Linear layers over the exact ``linear`` op, plain and merged from a checkpoint's shards.

Built by ``models``, filled by its loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from unisono.kernels import linear, linear_norm, prove_exact, rehearse_proof
from unisono.layers.norm import RMSNorm


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

    def then_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum, norm(sum)) for the sum of the product and ``residual``; without a norm the sum twice."""
        if norm is None:
            total = self(x, residual)
            return total, total
        return linear_norm(x, self.weight, self.bias, residual, norm.weight, norm.eps)


class MergedLinear(Linear):
    """Several projections of one input as one product.

    ``shards`` maps each projection's name to its rows of weight and bias, in order; the loader fills them.
    """

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


def prove_linears(modules: Iterable[nn.Module]) -> dict[tuple[int, int], bool]:
    """:func:`unisono.kernels.prove_exact` for each distinct weight shape [N, K] of the linear layers among ``modules``.

    What fails runs through the exact kernel at every length. For the start, before any capture.
    """
    return {shape: prove_exact(weight) for shape, weight in _weights(modules).items()}


def rehearse_proofs(modules: Iterable[nn.Module]) -> None:
    """Launch the kernels of :func:`prove_linears` and learn nothing: for compiling them ahead."""
    for weight in _weights(modules).values():
        rehearse_proof(weight)


def _weights(modules: Iterable[nn.Module]) -> dict[tuple[int, int], torch.Tensor]:
    return {(m.weight.shape[0], m.weight.shape[1]): m.weight for m in modules if isinstance(m, Linear)}
