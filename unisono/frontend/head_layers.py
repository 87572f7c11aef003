"""Small dense layers after a model, applied on the CPU to one state at a time, and the tensors they are read from.

They are the dense modules of sentence-transformers, and the layers of a classifier's or reward model's head. Each is
computed in float64, so that a result does not depend on the other requests.

Shapes: I inputs, O outputs of a layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

HEADER_BYTES = 8
"""Length of the field with the size of a safetensors header."""
KINDS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in KINDS.items()}

T = TypeVar("T")

Stored = tuple[Path, str, tuple[int, ...], int]
"""File, dtype, shape and offset in bytes of a tensor."""

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5))),
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
}
"""Supported activations of layers."""


def field_of(config: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """The value of a checkpoint's field; ``default`` if it is missing or null. Raises ValueError for another type."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name}={str(value)[:80]} must be of type {kind.__name__}")
    return value


@dataclass(frozen=True)
class HeadNorm:
    """A LayerNorm: weight [O], bias [O] or None, float64."""

    weight: np.ndarray
    bias: np.ndarray | None
    eps: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[O] -> [O]."""
        centred = x - x.mean()
        normed: np.ndarray = centred / np.sqrt(np.square(centred).mean() + self.eps) * self.weight
        return normed if self.bias is None else normed + self.bias


@dataclass(frozen=True)
class HeadLayer:
    """``norm(activation(weight x + bias))``. weight [O, I], bias [O] or None, float64. activation: of ACTIVATIONS."""

    weight: np.ndarray
    bias: np.ndarray | None = None
    activation: str = "identity"
    norm: HeadNorm | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[I] -> [O], float64."""
        y: np.ndarray = self.weight @ x
        y = ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)
        return y if self.norm is None else self.norm(y)


def folded(layers: Sequence[HeadLayer]) -> tuple[HeadLayer, ...]:
    """The layers with products of neighbours in place of both, where nothing lies between them and it is cheaper."""
    found: list[HeadLayer] = []
    for layer in layers:
        before = found[-1] if found else None
        if before is not None and before.activation == "identity" and before.norm is None:
            weight = layer.weight @ before.weight
            if weight.size <= layer.weight.size + before.weight.size:
                bias = layer.bias
                if before.bias is not None:
                    moved = layer.weight @ before.bias
                    bias = moved if bias is None else bias + moved
                found[-1] = replace(layer, weight=weight, bias=bias)
                continue
        found.append(layer)
    return tuple(found)


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """The tensors of the safetensors files of a directory, by name."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(HEADER_BYTES), "little")
            header = json.loads(opened.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                start = HEADER_BYTES + length + tensor["data_offsets"][0]
                found[name] = (file, tensor["dtype"], tuple(tensor["shape"]), start)
    return found


def read_stored(file: Path, dtype: str, shape: tuple[int, ...], start: int, row: int | None = None) -> np.ndarray:
    """A tensor, or one row of it, in float64. Raises ValueError for a dtype that is not floating-point."""
    if dtype not in DTYPES:
        raise ValueError(f"{file.name}: a tensor of dtype {dtype} is no head: {', '.join(DTYPES)} are read")
    kind, count = DTYPES[dtype], int(np.prod(shape, dtype=np.int64))
    if row is not None:
        count = int(np.prod(shape[1:], dtype=np.int64))
        start, shape = start + row * count * kind.itemsize, shape[1:]
    with file.open("rb") as opened:
        opened.seek(start)
        values = np.frombuffer(opened.read(count * kind.itemsize), kind)
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64).reshape(shape)


def layer_of(
    tensors: Mapping[str, Stored], name: str, inputs: int, activation: str = "identity", norm: HeadNorm | None = None
) -> HeadLayer:
    """The layer ``name`` of a checkpoint. inputs: its inputs. Raises ValueError for a tensor that does not fit."""
    if f"{name}.weight" not in tensors:
        raise ValueError(f"the checkpoint has no tensor {name}.weight")
    weight = read_stored(*tensors[f"{name}.weight"])
    bias = read_stored(*tensors[f"{name}.bias"]) if f"{name}.bias" in tensors else None
    if weight.ndim != 2 or weight.shape[1] != inputs or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"{name}.weight has shape {list(weight.shape)}; it reads {inputs} values")
    return HeadLayer(weight, bias, activation, norm)
