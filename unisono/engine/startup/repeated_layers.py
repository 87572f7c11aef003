"""Decoder layers that a dry run of a pass may skip, because they launch the kernels of a layer before them.

A start runs dozens of passes to learn which kernels they need (``warmup.py``). The layers of most models are of one or
two kinds, which need the same kernels: two layers are of one kind if they, their inputs and their states differ in the
values of tensors only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from unisono.layers.activations import Projected, consumers_of
from unisono.models.blocks.layers import DecoderLayer, Stream

ALIGNED = 16
"""Bytes of the alignment of a tensor's memory that Triton compiles variants of a kernel for."""

PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
UNRELATED = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
"""Attributes of every module: hooks and the like."""


def kind_of(value: Any, own: Mapping[int, object] | None = None, path: tuple[int, ...] = ()) -> object:
    """Return a hashable description of a value, equal for values that differ in the numbers of their tensors only.

    Functions, classes and objects without attributes are equal to themselves alone. own: descriptions of some objects
    by ``id``. path: ids of the objects that contain the value.
    """
    if own is not None and id(value) in own:
        return own[id(value)]
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        aligned = value.data_ptr() % ALIGNED
        return "tensor", tuple(value.shape), value.dtype, value.stride(), value.device, aligned
    if id(value) in path:
        return "within", len(path) - path.index(id(value))
    path = (*path, id(value))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(kind_of(each, own, path) for each in value)
    if isinstance(value, Mapping):
        return type(value), tuple((key, kind_of(each, own, path)) for key, each in value.items())
    parts = _attributes(value)
    if not parts:
        return type(value), id(value)
    kinds = ((name, kind_of(each, own, path)) for name, each in parts.items() if name not in UNRELATED)
    return type(value), tuple(kinds)


def _attributes(value: object) -> dict[str, Any]:
    """The attributes that describe a value; none for functions, classes and the like."""
    if isinstance(value, type):
        return {}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {} if callable(value) and not isinstance(value, nn.Module) else getattr(value, "__dict__", {})


class RepeatedLayers:
    """Outputs of the layers that ran in the present pass, by kind. ran, skipped: numbers of calls of layers."""

    def __init__(self) -> None:
        self.ran = self.skipped = 0
        self._kinds: dict[int, tuple[int, object]] = {}
        self._numbers: dict[object, int] = {}
        self._outputs: dict[object, tuple[object, Stream]] = {}

    def end_pass(self) -> None:
        """Release the outputs of a pass."""
        self._outputs.clear()

    def _kind(self, value: object) -> int:
        """Return the number of the kind of a layer or a state."""
        if id(value) not in self._kinds:
            number = self._numbers.setdefault(kind_of(value), len(self._numbers))
            self._kinds[id(value)] = number, value  # a value that lives keeps its id
        return self._kinds[id(value)][0]

    def call(self, layer: DecoderLayer, stream: Stream, context: Any, state: Any) -> Stream:
        """Run a layer, or return the output of an equal one that ran in this pass with this context."""
        consumers = (each for each in consumers_of(layer.mixer) if each is not None)
        own = {id(each): ("consumer", number) for number, each in enumerate(consumers)}
        key = self._kind(layer), self._kind(state), id(context), kind_of(stream, own)
        if key in self._outputs:
            self.skipped += 1
            return _of(layer, self._outputs[key][1])
        self.ran += 1
        output: Stream = layer.forward(stream, context, state)
        self._outputs[key] = context, output  # a context that lives keeps its id
        return output


def _of(layer: DecoderLayer, output: Stream) -> Stream:
    """Return an equal layer's output as this layer's: a product is one with its own next layer."""
    if isinstance(output.normed, Projected):
        consumer = consumers_of(layer.next_mixer)[0]
        return output._replace(normed=dataclasses.replace(output.normed, consumer=consumer))
    return output


@contextmanager
def skipping_repeated_layers() -> Iterator[RepeatedLayers]:
    """Within this context, a pass runs one decoder layer of each kind. Its results have no meaning."""
    repeated = RepeatedLayers()

    def call(layer: DecoderLayer, stream: Stream, context: Any, state: Any) -> Stream:
        return repeated.call(layer, stream, context, state)

    with patch.object(DecoderLayer, "__call__", call):
        yield repeated
