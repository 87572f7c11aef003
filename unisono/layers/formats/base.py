"""Weight formats: how a linear layer's weight is stored, read from a checkpoint, applied, and proven exact.

A ``Linear`` delegates to a :class:`WeightFormat`; ``Plain`` is the format of unquantised weights. A
:class:`WeightTarget` says which parameter a checkpoint tensor fills; the loader (``models/load/weights.py``) fills
them. docs/extend/weight-format.md shows how to write one.

Shapes: N outputs, K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import torch

from unisono.kernels import exact_blas, linear, linear_norm, rms_norm
from unisono.types import CheckpointError, ConfigError

FLOATS = ("F32", "F16", "BF16")
"""safetensors' names of the dtypes from which a floating-point parameter is converted."""


class LinearLayer(Protocol):
    """Attributes of a linear layer that every format may read, besides the parameters it declared. dtype: of
    activations."""

    dtype: torch.dtype

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor | None: ...
    @property
    def held(self) -> tuple[int, ...]:
        """Outputs of each projection computed by the layer."""
        ...


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` … ``stop`` - 1 of a tensor along ``dim``."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Any) -> Any:
        """This part of a tensor, or of a safetensors slice, which reads nothing else."""
        return tensor[(slice(None),) * self.dim + (slice(self.start, self.stop),)]


@dataclass(frozen=True)
class Slices:
    """Several runs of elements along ``dim``, concatenated. transposed: the last two dimensions are swapped
    afterwards."""

    dim: int
    runs: tuple[tuple[int, int], ...]
    transposed: bool = False

    def of(self, tensor: Any) -> Any:
        """As :meth:`Slice.of`."""
        parts = [Slice(self.dim, *run).of(tensor) for run in self.runs]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)
        return found.mT if self.transposed else found


Runs = tuple[tuple[int, int], ...]
"""(first, end) of runs of outputs."""


@dataclass(frozen=True)
class Share:
    """A rank's share of a linear layer: part ``index`` of ``count`` equal parts of each projection's outputs.

    sections: sizes of sections of the outputs, each divided like this; empty: one section.
    parts: number of parts of each section, if fewer than ``count``: several ranks then hold the same part.
    order: of the members of a stack of experts, of which each rank takes equally many in turn; empty: ascending.
    """

    index: int = 0
    count: int = 1
    sections: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def members(self, count: int) -> tuple[int, ...]:
        """The members of a stack of ``count`` in this share, in the order in which they are held."""
        first, end = self.part(count)
        return (self.order or tuple(range(count)))[first:end]

    def part(self, outputs: int, parts: int = 0) -> tuple[int, int]:
        """First output and end. Raises ConfigError if the outputs cannot be divided."""
        parts = parts or self.count
        (each, rest), index = divmod(outputs, parts), self.index * parts // self.count
        if rest:
            raise ConfigError(f"{outputs} outputs of a linear layer cannot be divided among {parts} ranks.")
        return index * each, (index + 1) * each

    def runs(self, outputs: int) -> Runs:
        """:meth:`part` of each section, in indices of the whole projection's outputs."""
        found, at = [], 0
        for number, size in enumerate(self.sections or (outputs,)):
            start, stop = self.part(size, self.parts[number] if self.parts else 0)
            found.append((at + start, at + stop))
            at += size
        return tuple(found)

    def size(self, outputs: int) -> int:
        """Number of a projection's outputs in this share."""
        return sum(stop - start for start, stop in self.runs(outputs))


WHOLE = Share()


@dataclass(frozen=True)
class PartOf:
    """A rank's part of a larger tensor: the ``runs`` along ``dim`` of one of this shape.

    Stored in the parameter's attribute ``part_of``.
    """

    shape: tuple[int, ...]
    dim: int
    runs: Runs

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor."""
        return Slices(self.dim, self.runs).of(whole)

    @property
    def slices(self) -> Slices:
        """The part to read of a checkpoint tensor of that shape."""
        return Slices(self.dim, self.runs)


def part_of(parameter: torch.Tensor) -> PartOf | None:
    """The part of a larger tensor held by this parameter; None: it is whole."""
    return getattr(parameter, "part_of", None)


@dataclass(frozen=True)
class TensorLayout:
    """Layout of a tensor whose checkpoint shape differs from its parameter's.

    shapes: shapes with this layout, from a projection's outputs and inputs.
    dim: dimension of the outputs; None: every rank reads the whole tensor.
    packed: outputs in one element along ``dim``.
    stacked: the tensors of all experts are stored as one, with an additional first dimension.
    """

    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    dim: int | None = None
    packed: int = 1
    stacked: bool = False


WHOLE_PROJECTION = 2**62
"""``StoredTensor.outputs`` of a tensor with one row for a projection of any size."""

ONE_VALUE = TensorLayout(lambda outputs, inputs: ((), (1,), (1, 1)))
"""One number for a whole projection."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight format.

    dtype: of the parameter; None: no parameter, only the format's ``read`` sees the tensor.
    accepts: safetensors' names of the dtypes it is read from; empty: no checkpoint has it, the ``read`` of another
        tensor makes it.
    outputs: outputs of the layer served by one row.
    inputs: inputs served by one column; 0: it has rows only.
    layout: layout in a checkpoint; None: as in the parameter.
    drawn: range (least, end) of integer dummy values; None: any bits.
    """

    dtype: torch.dtype | None
    accepts: tuple[str, ...]
    outputs: int = 1
    inputs: int = 1
    layout: TensorLayout | None = None
    drawn: tuple[int, int] | None = None

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Shape of the parameter in a layer of this size."""
        rows = -(-outputs // self.outputs)
        return (rows, -(-inputs // self.inputs)) if self.inputs else (rows,)

    def stored_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        """Shapes that a checkpoint's tensor may have."""
        return self.layout.shapes(outputs, inputs) if self.layout else (self.shape(outputs, inputs),)

    def part(self, runs: Runs) -> Slices | None:
        """Part of a checkpoint's tensor that serves these outputs; None: all of it.

        Raises ConfigError if an element there serves outputs on both sides of a bound.
        """
        self.check(runs, self.outputs)
        dim, each = (self.layout.dim, self.layout.packed) if self.layout else (0, self.outputs)
        if dim is None:
            return None
        self.check(runs, each)
        return Slices(dim, self.rows(runs, each))

    def rows(self, runs: Runs, each: int | None = None) -> Runs:
        """The runs in rows that serve ``each`` outputs, by default as the parameter's do."""
        each = each or self.outputs
        return tuple((start // each, -(-stop // each)) for start, stop in runs)

    def columns(self, runs: Runs) -> Runs:
        """Runs of inputs as runs of columns. Raises ConfigError if a column serves inputs on both sides of a bound, or
        the checkpoint stores the tensor in a layout of its own."""
        if self.layout is not None or self.inputs >= 2**31:
            raise ConfigError("this format's inputs cannot be divided.")
        self.check((*runs, runs[-1]), self.inputs)
        return self.rows(runs, self.inputs)

    @staticmethod
    def check(runs: Runs, each: int) -> None:
        """Raise ConfigError unless all runs begin and all but the last end at multiples of ``each`` outputs."""
        for bound in (*(start for start, _ in runs), *(stop for _, stop in runs[:-1])):
            if bound % each and each < 2**32:
                raise ConfigError(f"output {bound} lies within a block of {each}: the layer cannot be divided there.")


class TensorReader(Protocol):
    """The method of a format called by a :class:`WeightTarget`."""

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """See :meth:`WeightFormat.read`."""
        ...


@dataclass(frozen=True)
class WeightTarget:
    """Destination of a checkpoint tensor.

    parameter: the parameter, or some of its rows.
    shape: shape of the whole checkpoint tensor.
    accepts: safetensors' names of the dtypes it may have.
    part: part that is read, None for all.
    format, kind: format that converts the tensor as read, None for none.
    form: if a module can be stored in several forms, the form of this target; a checkpoint holds all targets of one
        form.
    others: other parameters filled by this tensor, by kind.
    also: other shapes that the checkpoint tensor may have.
    """

    parameter: torch.Tensor
    shape: tuple[int, ...]
    accepts: tuple[str, ...] = FLOATS
    part: Slice | Slices | None = None
    format: TensorReader | None = None
    kind: str = ""
    form: str = ""
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    also: tuple[tuple[int, ...], ...] = ()

    def part_of(self, shape: tuple[int, ...]) -> Slice | Slices | None:
        """:attr:`part` of a checkpoint tensor of this shape, which is :attr:`shape` or one of :attr:`also`."""
        return self.part

    def fill(self, stored: torch.Tensor) -> None:
        """Copy ``stored``, the part that was read, into the parameter, converting it."""
        if self.format is None:
            self.parameter.copy_(stored)
            return
        prepared = self.format.read(self.kind, stored)
        made = {self.kind: prepared} if isinstance(prepared, torch.Tensor) else prepared
        for kind, tensor in made.items():
            (self.parameter if kind == self.kind else self.others[kind]).copy_(tensor)


class JointFormat(Protocol):
    """Part of a weight format that needs several tensors of a projection to make its parameters.

    joint: kinds that :meth:`read_joint` gets together; its ``read`` gets the others. common: those of them that must be
    equal in all projections of a merged product.
    """

    joint: tuple[str, ...]
    common: tuple[str, ...]

    def read_joint(self, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Convert a projection's tensors by kind to the values of its parameters. Raises CheckpointError."""
        ...


class JointReading:
    """Collects the joint tensors of one projection, which arrive in any order and from several threads.

    parameters: the projection's parameters by kind. first: values of the ``common`` kinds in the first projection of
    the layer that was read; shared by its projections. lock: of ``first``.
    """

    def __init__(
        self, format: JointFormat, parameters: Mapping[str, torch.Tensor], first: dict[str, torch.Tensor], lock: Lock
    ) -> None:
        self._format, self._parameters, self._first, self._lock = format, parameters, first, lock
        self._stored: dict[str, torch.Tensor] = {}

    def add(self, kind: str, stored: torch.Tensor) -> None:
        """Keep a tensor; with the last one, fill the parameters. Raises CheckpointError as :class:`JointFormat`."""
        with self._lock:
            self._stored[kind] = stored
            if len(self._stored) < len(self._format.joint):
                return
            made = self._format.read_joint(self._stored)
            self._stored = {}
            for name in self._format.common:
                if not torch.equal(self._first.setdefault(name, made[name]), made[name]):
                    raise CheckpointError(
                        f"{name} differs among projections of one input, such as q, k and v or gate and up; they are "
                        "computed as one product. Give a checkpoint in which it is equal, or with desc_act=false."
                    )
            for name, value in made.items():
                self._parameters[name].copy_(value)


@dataclass(frozen=True)
class JointTarget(WeightTarget):
    """Target of a tensor that its format reads with others of the same projection."""

    reading: JointReading | None = None

    def fill(self, stored: torch.Tensor) -> None:
        assert self.reading is not None
        self.reading.add(self.kind, stored)


class WeightFormat(Protocol):
    """Storage and products of the weight [N, K] of a linear layer. One object serves all layers of its kind.

    A row's result may depend only on that row and the weight, never on the number of rows.
    """

    @property
    def name(self) -> str: ...

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        """The weight's tensors by the last part of their checkpoint names; dtype: of activations.

        Each becomes a parameter of that name.
        """
        ...

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Convert a projection's checkpoint tensor, or a rank's part of it, to the value of parameter ``kind``.

        May return values of several parameters by kind; an empty mapping fills none. Raises CheckpointError if the
        tensor has values that the format does not compute.
        """
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
        """Compare, on the present GPU, the bits of the kernels that serve different numbers of rows.

        Return True if they agree; otherwise one kernel serves all numbers from now on. Called at start.
        """
        ...

    def rehearse(self, layer: LinearLayer) -> None:
        """Launch the kernels of :meth:`prove` and ignore the results, to compile them ahead of time."""
        ...


class NormsAfter:
    """Base of formats without a fused product and norm."""

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`WeightFormat.linear`."""
        raise NotImplementedError

    def linear_norm(
        self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`WeightFormat.linear_norm`."""
        total = self.linear(layer, x, residual)
        return total, rms_norm(total, weight, eps)


@dataclass(frozen=True)
class Plain:
    """One floating-point weight [N, K] in the activations' dtype."""

    name: str = "plain"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(dtype, FLOATS)}

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        return stored

    def linear(self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return linear(x, layer.weight, layer.bias, residual)

    def linear_norm(
        self, layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_norm(x, layer.weight, layer.bias, residual, weight, eps)

    def prove(self, layer: LinearLayer) -> bool:
        """See :data:`unisono.kernels.exact_blas`."""
        return exact_blas.prove(layer.weight)

    def rehearse(self, layer: LinearLayer) -> None:
        exact_blas.rehearse(layer.weight)


PLAIN = Plain()


def can_divide(format: Any, dtype: torch.dtype, count: int, *, outputs: int = 0, inputs: int = 0) -> bool:
    """Return True if ``count`` ranks can hold equal parts of a projection in this format without cutting a block.

    Pass the number to divide, ``outputs`` or ``inputs``.
    """
    try:
        runs = [Share(index, count).runs(outputs or inputs) for index in range(count)]
        for stored in format.tensors(dtype).values():
            for each in runs:
                if outputs:
                    stored.part(each)
                elif stored.inputs:
                    stored.columns(each)
    except ConfigError:
        return False
    return True
