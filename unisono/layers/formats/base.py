"""Weight formats: how a linear layer's weight is stored, read from a checkpoint, applied, and proven exact.

A :class:`WeightFormat` is what ``Linear`` is composed of; ``Plain`` is the one for weights that are not quantised. A
:class:`Place` says where a checkpoint's tensor goes; the loader (``models/load/weights.py``) fills places.
docs/adding-a-weight-format.md shows a format of one's own.

Shapes: N outputs, K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    @property
    def held(self) -> tuple[int, ...]:
        """The outputs of each projection that the layer computes."""
        ...


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
class Slices:
    """Several runs of elements along ``dim``, one after the other. turned: the last two dimensions are swapped then."""

    dim: int
    runs: tuple[tuple[int, int], ...]
    turned: bool = False

    def of(self, tensor: Any) -> Any:
        """As :meth:`Slice.of`."""
        parts = [Slice(self.dim, *run).of(tensor) for run in self.runs]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)
        return found.mT if self.turned else found


Runs = tuple[tuple[int, int], ...]
"""(first, one after the last) of runs of outputs."""


@dataclass(frozen=True)
class Share:
    """What a rank holds of a linear layer: of each projection's outputs, part ``index`` of ``count`` equal parts.

    sections: the outputs are sections of these sizes, each of which is divided so; none: they are one. parts: into how
    many parts each section is divided, where that is fewer than ``count``: several ranks then hold the same part.
    """

    index: int = 0
    count: int = 1
    sections: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def part(self, outputs: int, parts: int = 0) -> tuple[int, int]:
        """The first output and the one after the last. Raises ConfigError where the outputs cannot be divided."""
        parts = parts or self.count
        (each, rest), index = divmod(outputs, parts), self.index * parts // self.count
        if rest:
            raise ConfigError(f"{outputs} outputs of a linear layer cannot be divided among {parts} ranks.")
        return index * each, (index + 1) * each

    def runs(self, outputs: int) -> Runs:
        """:meth:`part` of each section, by numbers of the whole projection's outputs."""
        found, at = [], 0
        for number, size in enumerate(self.sections or (outputs,)):
            start, stop = self.part(size, self.parts[number] if self.parts else 0)
            found.append((at + start, at + stop))
            at += size
        return tuple(found)

    def size(self, outputs: int) -> int:
        """How many of a projection's outputs it is."""
        return sum(stop - start for start, stop in self.runs(outputs))


WHOLE = Share()


@dataclass(frozen=True)
class PartOf:
    """What of a larger tensor a rank's parameter is: along ``dim`` the ``runs`` of one of this shape.

    A parameter that is a part has it as its attribute ``part_of``.
    """

    shape: tuple[int, ...]
    dim: int
    runs: Runs

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor."""
        return Slices(self.dim, self.runs).of(whole)

    @property
    def slices(self) -> Slices:
        """What is read of a checkpoint's tensor of that shape."""
        return Slices(self.dim, self.runs)


def part_of(parameter: torch.Tensor) -> PartOf | None:
    """What of a larger tensor this parameter is; None: it is whole."""
    return getattr(parameter, "part_of", None)


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores a tensor that has another shape there than in its parameter.

    shapes: the shapes that mean this layout, from a projection's outputs and inputs. dim: along which dimension the
    outputs lie; None: every rank reads all of it. packed: outputs in one element along ``dim``. stacked: the tensors of
    all experts are stored as one, with a first dimension more.
    """

    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    dim: int | None = None
    packed: int = 1
    stacked: bool = False


ONE_VALUE = Layout(lambda outputs, inputs: ((), (1,), (1, 1)))
"""One number for a whole projection."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a weight format.

    dtype: of the parameter; None: there is no parameter, the tensor is only looked at by the format's ``read``.
    accepts: safetensors' names of the dtypes that it is read from; none: no checkpoint has it, the ``read`` of another
    tensor makes it. outputs: how many of the layer's outputs one of its rows serves. inputs: how many of its inputs
    one column serves; 0: it has rows only. layout: in a checkpoint; None: as in the parameter. drawn: the least dummy
    value of integers and the one after the largest; None: any bits.
    """

    dtype: torch.dtype | None
    accepts: tuple[str, ...]
    outputs: int = 1
    inputs: int = 1
    layout: Layout | None = None
    drawn: tuple[int, int] | None = None

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Of the parameter of a layer of this size."""
        rows = -(-outputs // self.outputs)
        return (rows, -(-inputs // self.inputs)) if self.inputs else (rows,)

    def stored_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that a checkpoint's tensor may have."""
        return self.layout.shapes(outputs, inputs) if self.layout else (self.shape(outputs, inputs),)

    def part(self, runs: Runs) -> Slices | None:
        """What of a checkpoint's tensor serves these outputs; None: all of it.

        Raises ConfigError where an element there serves outputs on both sides of a bound.
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
        """Runs of inputs, in columns. Raises ConfigError where a column serves inputs on both sides of a bound, or the
        checkpoint stores the tensor in a layout of its own."""
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


class Reader(Protocol):
    """What a :class:`Place` asks of a format."""

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """See :meth:`WeightFormat.read`."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor goes.

    parameter: what is filled, a parameter or some rows of one. shape: of the checkpoint's whole tensor. accepts:
    safetensors' names of the dtypes that it may have. part: what of it is read, None for all. format, kind: what
    prepares the tensor as it was read, None for nothing. form: where a module can be stored in several forms, the one
    that this place belongs to; a checkpoint holds all places of one form. others: by kind, the parameters that this
    tensor fills beside its own. also: other shapes that the checkpoint's tensor may have.
    """

    parameter: torch.Tensor
    shape: tuple[int, ...]
    accepts: tuple[str, ...] = FLOATS
    part: Slice | Slices | None = None
    format: Reader | None = None
    kind: str = ""
    form: str = ""
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    also: tuple[tuple[int, ...], ...] = ()

    def part_of(self, shape: tuple[int, ...]) -> Slice | Slices | None:
        """:attr:`part` of a checkpoint's tensor of this shape, which is :attr:`shape` or one of :attr:`also`."""
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

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """What is copied into parameter ``kind``, from a projection's tensor in a checkpoint or a rank's part of it.

        Or what is copied into several parameters, by their kinds; into none where the mapping is empty. Raises
        CheckpointError where the tensor holds what the format does not compute.
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


def can_divide(format: Any, dtype: torch.dtype, count: int, *, outputs: int = 0, inputs: int = 0) -> bool:
    """Whether ``count`` ranks can hold equal parts of a projection in this format, so that no block of it is cut.

    Give the number that is divided, ``outputs`` or ``inputs``.
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
