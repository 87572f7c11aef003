"""Tensors of a pass at fixed addresses, declared by a schema, and their transfer to the host."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakValueDictionary

import numpy as np
import torch

from unisono.graphs.features import NO_FEATURES, Features, Logits, PassShape, selected_rows


class ProgramError(RuntimeError):
    """Raised when a batch does not match its program's schema: always a bug of the engine, never a user's error."""


Dimension = int | str | tuple[str, int]
"""Size of a field's dimension: a number, a name resolved by the pass's PassShape, or (name, number) for their sum."""


@dataclass(frozen=True)
class Field:
    """One tensor of a program's buffers.

    dtype: a four-byte type (int32 or float32), since all inputs travel as one packed copy.
    shape: dimensions. ``"rows"``, ``"width"``, ``"drafts"`` (width - 1), ``"result"`` (width + 2) and ``"scored"``
        (:func:`selected_rows`, or all rows with Logits.ALL) are resolved by the pass's PassShape; in mixed passes also
        ``"decodes"`` (width - 1), and in all passes with prompts ``"tokens"``, the number of prompt tokens. A pair
        (name, number) is the sum of both.
    pad: value of rows that no request fills.
    output: True if the program writes the field and the host reads it; False for inputs.
    feature: only passes whose features cover these have the field.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Dimension, ...]
    pad: float = 0
    output: bool = False
    feature: Features = NO_FEATURES

    def dims(self, shape: PassShape) -> tuple[int, ...]:
        """The dimensions at this shape."""
        rows, width = shape.rows, shape.width
        known = {"rows": rows, "width": width, "drafts": width - 1, "result": width + 2, "scored": selected_rows(rows)}
        known |= {"decodes": width - 1, "tokens": rows - (width - 1)}

        def size(d: Dimension) -> int:
            return d if isinstance(d, int) else known[d] if isinstance(d, str) else known[d[0]] + d[1]

        return tuple(map(size, self.shape))

    def of(self, features: Features) -> Field:
        """This field in passes with these features."""
        if features.logits is not Logits.ALL or "scored" not in self.shape:
            return self
        return replace(self, shape=tuple("rows" if d == "scored" else d for d in self.shape))


@dataclass(frozen=True)
class BufferSchema:
    """The fields of a program's buffers, in packing order. features: features of the passes that have them; none if the
    schema lists all declared fields."""

    fields: tuple[Field, ...]
    features: Features = NO_FEATURES

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if len(set(names)) != len(names):
            raise ProgramError(f"a schema names a field twice: {names}")
        wrong = [f.name for f in self.fields if f.dtype.itemsize != 4]
        if wrong:
            raise ProgramError(f"fields {wrong} are not of a four-byte type")

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def of(self, features: Features) -> BufferSchema:
        """The fields of a pass with these features."""
        if features not in self._variants:
            self._variants[features] = BufferSchema(
                tuple(f.of(features) for f in self.fields if features.covers(f.feature)), features
            )
        return self._variants[features]

    @cached_property
    def _variants(self) -> dict[Features, BufferSchema]:
        return {}

    def check(self, batch: Mapping[str, object]) -> None:
        """Raise ProgramError unless ``batch`` names every input and nothing else."""
        names = self._input_names
        if batch.keys() != names:
            unknown, missing = sorted(batch.keys() - names), sorted(names - batch.keys())
            raise ProgramError(f"batch does not match the schema: unknown {unknown}, missing {missing}")

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return frozenset(f.name for f in self.inputs)

    @cached_property
    def inputs(self) -> tuple[Field, ...]:
        return tuple(f for f in self.fields if not f.output)

    @cached_property
    def outputs(self) -> tuple[Field, ...]:
        return tuple(f for f in self.fields if f.output)

    @cached_property
    def pads(self) -> Mapping[str, float]:
        """Padding value of each field."""
        return {f.name: f.pad for f in self.fields}

    @cached_property
    def row_words(self) -> tuple[int, ...]:
        """Words of each field. For schemas whose fields do not depend on the pass's shape."""
        return tuple(math.prod(f.dims(PassShape(1))) for f in self.fields)

    @cached_property
    def packer(self) -> struct.Struct:
        """Packs a row of these fields; see :attr:`row_words`."""
        kinds = {torch.float32: "f", torch.int32: "i"}
        return struct.Struct("".join(kinds[f.dtype] * n for f, n in zip(self.fields, self.row_words, strict=True)))

    def words(self, shape: PassShape, fields: tuple[Field, ...]) -> int:
        """Four-byte words of these fields at this shape."""
        return sum(math.prod(f.dims(shape)) for f in fields)


def _carve(arena: torch.Tensor, fields: tuple[Field, ...], shape: PassShape) -> dict[str, torch.Tensor]:
    """Cut a flat int32 arena into one view per field."""
    places = _places(fields, shape)
    return {name: arena[first:end].view(dtype).view(dims) for name, first, end, dims, dtype in places}


FieldPlace = tuple[str, int, int, tuple[int, ...], torch.dtype]
"""Position of a field in packed words: name, first word, end, dimensions, dtype."""

_NUMPY = {torch.float32: np.float32, torch.int32: np.int32}


def _places(fields: tuple[Field, ...], shape: PassShape) -> tuple[FieldPlace, ...]:
    """Positions of the fields, packed in order."""
    places: list[FieldPlace] = []
    at = 0
    for field in fields:
        dims = field.dims(shape)
        end = at + math.prod(dims)
        places.append((field.name, at, end, dims, field.dtype))
        at = end
    return tuple(places)


_STAGES = 3
"""Host copies of the inputs. The engine has at most two passes in flight: it launches pass i + 1 after reading the
outputs of pass i - 1, whose inputs were copied long before. So the copy being filled is never still read by a device
copy.
"""


class Buffers:
    """The tensors of one program at one shape, at fixed addresses.

    Fields are attributes: ``buffers.slots``; use :meth:`find` for fields that only some passes have. :meth:`load` fills
    the inputs. :meth:`fetch` starts the copy of the outputs to the host, from the point at which the pass marks them as
    ready.
    """

    _complete: torch.cuda.Event | None = None  # recorded when the outputs are ready
    _ready_outputs: torch.Tensor | None = None  # on a CPU: the outputs at that point

    def __init__(self, schema: BufferSchema, shape: PassShape, device: torch.device) -> None:
        self.schema, self.shape, self.device = schema, shape, device
        _buffers[id(self)] = self
        self._input = torch.empty(schema.words(shape, schema.inputs), dtype=torch.int32, device=device)
        self._output = torch.zeros(schema.words(shape, schema.outputs), dtype=torch.int32, device=device)
        self._views = _carve(self._input, schema.inputs, shape)
        self._views |= _carve(self._output, schema.outputs, shape)
        self._places = _places(schema.outputs, shape)
        self._staging: list[tuple[torch.Tensor, dict[str, np.ndarray]]] = []
        self._turn = 0
        self.load({f.name: () for f in schema.inputs})

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            view: torch.Tensor = self.__dict__["_views"][name]
        except KeyError:
            raise AttributeError(f"the schema declares no field {name!r}") from None
        return view

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._input.nbytes + self._output.nbytes

    @property
    def features(self) -> Features:
        """Features of the pass."""
        return self.schema.features

    def find(self, name: str) -> torch.Tensor | None:
        """The field of this name; None if passes with these features do not have it."""
        return self._views.get(name)

    def load(self, batch: Mapping[str, object], features: Features | None = None) -> None:
        """Copy a batch into the input buffers in one device copy, padding the rest.

        batch: an array for every input field, with dimensions at most the field's.
        features: the batch's own features, if these buffers may have fields for more: those are padded. Raises
            ProgramError for a field that the schema lacks, one that is missing, or one that is too large.
        """
        (self.schema if features is None else self.schema.of(features)).check(batch)
        host, views = self._stage()
        for field in self.schema.inputs:
            view = views[field.name]
            value = np.asarray(batch.get(field.name, ()), dtype=view.dtype)
            if value.size and (
                value.ndim != view.ndim or any(a > b for a, b in zip(value.shape, view.shape, strict=True))
            ):
                raise ProgramError(f"field {field.name!r} has shape {value.shape}, its buffer {view.shape}")
            if value.shape[1:] == view.shape[1:]:  # whole rows: write nothing twice, since masks are large
                view[: len(value)] = value
                view[len(value) :] = field.pad
                continue
            view[...] = field.pad
            if value.size:
                view[tuple(slice(0, n) for n in value.shape)] = value
        self._input.copy_(host, non_blocking=True)

    def _stage(self) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        """The next host copy of the inputs, and a view of each field. Copies are allocated on first use."""
        self._turn = (self._turn + 1) % _STAGES
        if len(self._staging) < _STAGES:
            host = torch.empty(self._input.shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            views = {name: view.numpy() for name, view in _carve(host, self.schema.inputs, self.shape).items()}
            self._staging.append((host, views))
            self._turn = len(self._staging) - 1
        return self._staging[self._turn]

    def outputs_ready(self) -> None:
        """Called by programs: the outputs are complete, so the host may read them while the rest of the pass runs.

        The pass must not write outputs after this. If a pass does not call it, its outputs are read at its end.
        """
        torch.ops.unisono.outputs_ready(self._output, id(self))

    def _record_outputs_ready(self) -> None:
        if self.device.type != "cuda":
            self._ready_outputs = self._output.clone()
            return
        if self._complete is None:
            self._complete = torch.cuda.Event(external=True)  # a graph records it at each replay
        self._complete.record()

    def fetch(self) -> PendingOutputs:
        """Start copying the outputs to the host; :meth:`PendingOutputs.wait` returns them."""
        if self.device.type != "cuda":
            ready, self._ready_outputs = self._ready_outputs, None
            host = self._output.clone() if ready is None else ready
            return PendingOutputs(self._places, host, None, None)
        host = torch.empty(self._output.shape, dtype=torch.int32, pin_memory=True)
        done = torch.cuda.Event()
        if self._complete is None:
            host.copy_(self._output, non_blocking=True)
            done.record()
        else:
            aside = _aside(self.device)
            aside.wait_event(self._complete)
            with torch.cuda.stream(aside):
                host.copy_(self._output, non_blocking=True)
                done.record()
            torch.cuda.current_stream().wait_event(done)  # before another pass writes there
        return PendingOutputs(self._places, host, done, None)


_buffers: WeakValueDictionary[int, Buffers] = WeakValueDictionary()
"""All live buffers by id: an op's arguments cannot name them otherwise."""


@functools.cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """Stream that copies ready outputs while their passes continue."""
    return torch.cuda.Stream(device)


# The op writes nothing, but must stay after the ops that write the outputs: hence the mutable argument.
_library = torch.library.Library("unisono", "FRAGMENT")
_library.define("outputs_ready(Tensor(a!) outputs, int buffers) -> ()")
_library.impl(
    "outputs_ready", lambda outputs, buffers: _buffers[buffers]._record_outputs_ready(), "CompositeExplicitAutograd"
)


@dataclass
class PendingOutputs:
    """Outputs of a launched pass on their way to the host. Owns its copy, so a later replay cannot change it.

    host: packed words, int32.
    done: event after which they are there; the pass may still run (:meth:`Buffers.outputs_ready`).
    span: start and end events of the pass on the device, if it is timed.
    """

    places: Sequence[FieldPlace]
    host: torch.Tensor
    done: torch.cuda.Event | None
    span: tuple[torch.cuda.Event, torch.cuda.Event] | None

    def device_ms(self) -> float | None:
        """Milliseconds of device time of the pass; None while it runs, or if it is not timed."""
        if self.span is None or not self.span[1].query():
            return None
        return float(self.span[0].elapsed_time(self.span[1]))

    def wait(self) -> dict[str, np.ndarray]:
        """Block until the outputs arrive; return each output field as a numpy array."""
        if self.done is not None:
            self.done.synchronize()
        words = self.host.numpy()
        return {n: words[first:end].view(_NUMPY[kind]).reshape(dims) for n, first, end, dims, kind in self.places}
