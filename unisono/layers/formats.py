"""Weight formats: how a linear layer's weight is stored, read from a checkpoint, applied, and proven exact.

A :class:`WeightFormat` is what ``Linear`` is composed of; ``Plain`` is the one that is bundled. A :class:`Place` says
where a checkpoint's tensor goes; the loader (``models/weights.py``) fills places. docs/adding-a-weight-format.md
shows a format of one's own.

Shapes: N outputs, K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unisono.kernels import linear, linear_norm, prove_exact, rehearse_proof
from unisono.types import ConfigError

FLOATS = ("F32", "F16", "BF16")
"""safetensors' names of the dtypes that a floating-point parameter is converted from."""


class LinearLayer(Protocol):
    """What a format reads of a linear layer, beside the other parameters that it named. dtype: of activations."""

    dtype: torch.dtype

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` … ``stop`` - 1 of a tensor along ``dim``."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Any) -> Any:
        """That part of a tensor, or of safetensors' slice of one, which reads nothing else."""
        return tensor[(slice(None),) * self.dim + (slice(self.start, self.stop),)]


@dataclass(frozen=True)
class Share:
    """What a rank holds of a linear layer: of each projection's outputs, part ``index`` of ``count`` equal parts."""

    index: int = 0
    count: int = 1

    def part(self, outputs: int) -> tuple[int, int]:
        """The first output and the one after the last. Raises ConfigError where the outputs cannot be divided."""
        each, rest = divmod(outputs, self.count)
        if rest:
            raise ConfigError(f"{outputs} outputs of a linear layer cannot be divided among {self.count} ranks.")
        return self.index * each, (self.index + 1) * each


WHOLE = Share()


@dataclass(frozen=True)
class Stored:
    """One tensor of a weight format.

    dtype: of the parameter. accepts: safetensors' names of the dtypes that it is read from. outputs: how many of the
    layer's outputs one of its rows serves. inputs: how many of its inputs one column serves; 0: it has rows only.
    """

    dtype: torch.dtype
    accepts: tuple[str, ...]
    outputs: int = 1
    inputs: int = 1

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Of the tensor of a layer of this size."""
        rows = -(-outputs // self.outputs)
        return (rows, -(-inputs // self.inputs)) if self.inputs else (rows,)


class Reader(Protocol):
    """What a :class:`Place` asks of a format."""

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        """See :meth:`WeightFormat.read`."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor goes.

    parameter: what is filled, a parameter or some rows of one. shape: of the checkpoint's whole tensor. accepts:
    safetensors' names of the dtypes that it may have. part: what of it is read, None for all. format, kind: what
    prepares the tensor as it was read, None for nothing. form: where a module can be stored in several forms, the one
    that this place belongs to; a checkpoint holds all places of one form.
    """

    parameter: torch.Tensor
    shape: tuple[int, ...]
    accepts: tuple[str, ...] = FLOATS
    part: Slice | None = None
    format: Reader | None = None
    kind: str = ""
    form: str = ""

    def fill(self, stored: torch.Tensor) -> None:
        """Copy ``stored``, the part that was read, into the parameter, converting it."""
        self.parameter.copy_(stored if self.format is None else self.format.read(self.kind, stored))


class WeightFormat(Protocol):
    """How the weight [N, K] of a linear layer is stored and applied. One object serves all layers of its kind.

    A row's result may depend on that row and the weight only: never on how many rows there are.
    """

    @property
    def name(self) -> str: ...

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Stored]:
        """The weight's tensors by the last part of their names in a checkpoint; dtype: of activations.

        Each becomes a parameter of that name.
        """
        ...

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        """What is copied into parameter ``kind``, from the checkpoint's tensor or a rank's part of it."""
        ...

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """x [M, K] -> [M, N] in x's dtype: product, then ``layer.bias``, then ``residual``, each sum rounded."""
        ...

    def linear_norm(
        self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(:meth:`linear`, RMSNorm of it with ``weight`` and ``eps``)."""
        ...

    def prove(self, layer: LinearLayer) -> bool:
        """Compare, on the GPU at hand, the bits of the kernels that serve different numbers of rows.

        Returns whether they agree; where they do not, one kernel has to serve all from now on. Called at start.
        """
        ...

    def rehearse(self, layer: LinearLayer) -> None:
        """Launch what :meth:`prove` will launch and learn nothing from it: for compiling kernels ahead."""
        ...


@dataclass(frozen=True)
class Plain:
    """One floating-point weight [N, K] in the activations' dtype."""

    name: str = "plain"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Stored]:
        return {"weight": Stored(dtype, FLOATS)}

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        return stored

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return linear(x, layer.weight, layer.bias, residual)

    def linear_norm(
        self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_norm(x, layer.weight, layer.bias, residual, weight, eps)

    def prove(self, layer: LinearLayer) -> bool:
        """See :func:`unisono.kernels.prove_exact`."""
        return prove_exact(layer.weight)

    def rehearse(self, layer: LinearLayer) -> None:
        rehearse_proof(layer.weight)


PLAIN = Plain()
