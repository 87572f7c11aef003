"""The seam between what a pass computes and how it is replayed: Program, Buffers, Graph.

A *program* is a function over *buffers*: tensors at fixed addresses that a schema declares once. A
*graph* is one capture of a program under a :class:`Key`. Rooms that write programs (engine, drafters)
never import ``graphs``; ``graphs`` imports nothing but this module.
"""

from __future__ import annotations

import enum
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import numpy as np
import torch


class ProgramError(RuntimeError):
    """A batch does not fit its program's schema: always a bug of the engine, never of a user."""


class CaptureError(RuntimeError):
    """A pass did something that cannot be captured, such as a host synchronisation."""


@dataclass(frozen=True, order=True)
class Shape:
    """What a graph is captured for.

    rows: padded number of requests (rounds) or of tokens (extend).
    width: tokens per row: 1 + k in a round, 1 in an extend pass.
    """

    rows: int
    width: int = 1


class Hidden(enum.IntEnum):
    """Which hidden states a pass must leave behind; a later one covers every earlier one but AUX."""

    NULL = 0  # none
    LAST = 1  # of a prompt pass each row's last token's, of a round as FULL
    FULL = 2  # of every token, after the last layer
    AUX = 3  # of every token, from the layers in Needs.aux_layers


class Logits(enum.IntEnum):
    """Of which prompt tokens a pass computes logits; a later one covers every earlier one."""

    LAST = 0  # of each row's last token, to sample from
    SELECTED = 1  # also of up to selected_rows(rows) tokens that the batch names
    ALL = 2  # also of every token, if the batch names it


def selected_rows(rows: int) -> int:
    """Of how many of a pass's ``rows`` tokens Logits.SELECTED has logits: a quarter, but at least a product's tile."""
    return min(rows, max(16, -(-rows // 4)))


@dataclass(frozen=True)
class Needs:
    """What the caller wants of a pass beside its tokens; part of the graph's key.

    hidden, aux_layers: what the drafter reads. logits: of which prompt tokens. embeddings: the batch brings embeddings
    that stand in for those of token ids. returned: final hidden states go to the host. masks: positions are sampled
    under masks that come with the batch.
    """

    hidden: Hidden = Hidden.NULL
    aux_layers: tuple[int, ...] = ()
    logits: Logits = Logits.LAST
    embeddings: bool = False
    returned: bool = False
    masks: bool = False

    @property
    def label(self) -> str:
        """For reports: ``NULL``, ``FULL+embeddings`` …"""
        logits = (f"{self.logits.name} logits",) if self.logits else ()
        flags = (name for name in ("embeddings", "returned", "masks") if getattr(self, name))
        return "+".join((self.hidden.name, *logits, *flags))

    def covers(self, other: Needs) -> bool:
        """True when a graph captured with these needs also serves a pass that needs ``other``."""
        inputs = self.embeddings >= other.embeddings and self.masks >= other.masks
        outputs = self.returned >= other.returned and self.logits >= other.logits
        return inputs and outputs and self._shows(other)

    def _shows(self, other: Needs) -> bool:
        """Whether the hidden states that ``other`` wants are among these."""
        if other.hidden is Hidden.NULL:
            return True
        if Hidden.AUX in (self.hidden, other.hidden):
            return self.hidden is other.hidden and set(other.aux_layers) <= set(self.aux_layers)
        return self.hidden >= other.hidden


NO_NEEDS = Needs()


@dataclass(frozen=True)
class Field:
    """One tensor of a program's buffers.

    dtype: a four-byte type (int32 or float32): all inputs travel as one packed copy.
    shape: dimensions; ``"rows"``, ``"width"``, ``"drafts"`` (width - 1), ``"result"`` (width + 2) and ``"scored"``
        (:func:`selected_rows`, or with Logits.ALL all rows) come from the pass's Shape.
    pad: the value of rows that no request fills.
    output: written by the program and read by the host, rather than the other way round.
    need: what a pass has to need, or more, to have this field.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    pad: float = 0
    output: bool = False
    need: Needs = NO_NEEDS

    def dims(self, shape: Shape) -> tuple[int, ...]:
        """The dimensions at this shape."""
        rows, width = shape.rows, shape.width
        known = {"rows": rows, "width": width, "drafts": width - 1, "result": width + 2, "scored": selected_rows(rows)}
        return tuple(known[d] if isinstance(d, str) else d for d in self.shape)

    def of(self, needs: Needs) -> Field:
        """This field in passes with these needs."""
        if needs.logits is not Logits.ALL or "scored" not in self.shape:
            return self
        return replace(self, shape=tuple("rows" if d == "scored" else d for d in self.shape))


@dataclass(frozen=True)
class Schema:
    """The fields of a program's buffers, in the order in which they are packed."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if len(set(names)) != len(names):
            raise ProgramError(f"a schema names a field twice: {names}")
        wrong = [f.name for f in self.fields if f.dtype.itemsize != 4]
        if wrong:
            raise ProgramError(f"fields {wrong} are not of a four-byte type")

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def of(self, needs: Needs) -> Schema:
        """The fields of a pass with these needs."""
        if needs not in self._variants:
            self._variants[needs] = Schema(tuple(f.of(needs) for f in self.fields if needs.covers(f.need)))
        return self._variants[needs]

    @cached_property
    def _variants(self) -> dict[Needs, Schema]:
        return {}

    def check(self, batch: Mapping[str, object]) -> None:
        """Raises ProgramError unless ``batch`` names every input and nothing else."""
        names = {f.name for f in self.inputs}
        if batch.keys() != names:
            unknown, missing = sorted(batch.keys() - names), sorted(names - batch.keys())
            raise ProgramError(f"batch does not match the schema: unknown {unknown}, missing {missing}")

    @cached_property
    def inputs(self) -> tuple[Field, ...]:
        return tuple(f for f in self.fields if not f.output)

    @cached_property
    def outputs(self) -> tuple[Field, ...]:
        return tuple(f for f in self.fields if f.output)

    def words(self, shape: Shape, fields: tuple[Field, ...]) -> int:
        """Four-byte words that these fields take at this shape."""
        return sum(math.prod(f.dims(shape)) for f in fields)


def _carve(arena: torch.Tensor, fields: tuple[Field, ...], shape: Shape) -> dict[str, torch.Tensor]:
    """Cut a flat int32 arena into one view per field."""
    views, at = {}, 0
    for field in fields:
        dims = field.dims(shape)
        size = math.prod(dims)
        views[field.name] = arena[at : at + size].view(field.dtype).view(dims)
        at += size
    return views


_STAGES = 3
"""Host copies of the inputs. The engine has two passes under way at most (it launches pass i + 1 after
reading pass i - 1), so the copy that is being filled is never one that a device copy still reads."""


class Buffers:
    """The tensors of one program at one shape, at fixed addresses.

    Fields are attributes: ``buffers.slots``; :meth:`find` is for those that only some passes have. :meth:`load` fills
    the inputs, :meth:`fetch` starts the copy of the outputs to the host.
    """

    def __init__(self, schema: Schema, shape: Shape, device: torch.device) -> None:
        self.schema, self.shape, self.device = schema, shape, device
        self._input = torch.empty(schema.words(shape, schema.inputs), dtype=torch.int32, device=device)
        self._output = torch.zeros(schema.words(shape, schema.outputs), dtype=torch.int32, device=device)
        self._views = _carve(self._input, schema.inputs, shape)
        self._views |= _carve(self._output, schema.outputs, shape)
        self._staging: list[tuple[torch.Tensor, dict[str, np.ndarray]]] = []
        self._turn = 0
        self.load({f.name: () for f in schema.inputs})

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["_views"][name]
        except KeyError:
            raise AttributeError(f"the schema declares no field {name!r}") from None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._input.nbytes + self._output.nbytes

    def find(self, name: str) -> torch.Tensor | None:
        """The field of this name; None where passes with these needs have none."""
        return self._views.get(name)

    def load(self, batch: Mapping[str, object], needs: Needs | None = None) -> None:
        """Copy a batch into the input buffers, padding what it does not fill, in one device copy.

        ``batch`` maps every input field to an array whose dimensions are at most the field's. ``needs`` are the
        batch's own where these buffers may have fields for more: those are padded. Raises ProgramError for a field
        that the schema lacks, one that is missing, or one that is too large.
        """
        (self.schema if needs is None else self.schema.of(needs)).check(batch)
        host, views = self._stage()
        for field in self.schema.inputs:
            view = views[field.name]
            value = np.asarray(batch.get(field.name, ()), dtype=view.dtype)
            if value.size and (
                value.ndim != view.ndim or any(a > b for a, b in zip(value.shape, view.shape, strict=True))
            ):
                raise ProgramError(f"field {field.name!r} has shape {value.shape}, its buffer {view.shape}")
            if value.shape[1:] == view.shape[1:]:  # whole rows: nothing is written twice, for masks are large
                view[: len(value)] = value
                view[len(value) :] = field.pad
                continue
            view[...] = field.pad
            if value.size:
                view[tuple(slice(0, n) for n in value.shape)] = value
        self._input.copy_(host, non_blocking=True)

    def _stage(self) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        """The next host copy of the inputs, and a view of each field; copies are made when first used."""
        self._turn = (self._turn + 1) % _STAGES
        if len(self._staging) < _STAGES:
            host = torch.empty(self._input.shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            views = {name: view.numpy() for name, view in _carve(host, self.schema.inputs, self.shape).items()}
            self._staging.append((host, views))
            self._turn = len(self._staging) - 1
        return self._staging[self._turn]

    def fetch(self) -> Pending:
        """Start copying the outputs to the host; :meth:`Pending.wait` returns them."""
        if self.device.type != "cuda":
            return Pending(self.schema, self.shape, self._output.clone(), None)
        host = torch.empty(self._output.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(self._output, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Pending(self.schema, self.shape, host, done)


@dataclass
class Pending:
    """Outputs of a launched pass on their way to the host. Owns its copy: a later replay can't change it."""

    schema: Schema
    shape: Shape
    host: torch.Tensor
    done: torch.cuda.Event | None

    def wait(self) -> dict[str, np.ndarray]:
        """Block until the pass is done; returns each output field as a numpy array."""
        if self.done is not None:
            self.done.synchronize()
        return {n: v.numpy() for n, v in _carve(self.host, self.schema.outputs, self.shape).items()}


@dataclass(frozen=True)
class Program:
    """A pass as data: its name, its buffers' schema and the function that runs it.

    run: works in place on the buffers, at fixed addresses, without a host synchronisation.
    prepare: host work before each replay (host planners, grammar masks), or None.
    """

    name: str
    schema: Schema
    run: Callable[[Buffers], None]
    prepare: Callable[[Buffers], None] | None = None

    def of(self, needs: Needs) -> Program:
        """This program over the fields of passes with these needs."""
        return replace(self, schema=self.schema.of(needs))


@dataclass(frozen=True)
class Key:
    """What a graph was captured for; a pass replays only a graph whose key covers its own."""

    program: str
    shape: Shape
    needs: Needs = NO_NEEDS

    def covers(self, other: Key) -> bool:
        return (
            self.program == other.program
            and self.shape.width == other.shape.width
            and self.shape.rows >= other.shape.rows
            and self.needs.covers(other.needs)
        )


class Reason(enum.Enum):
    """Why a pass ran without a graph. Every value is counted, exported and shown by ``explain``.

    ``value`` says why, ``advice`` what the user could change.
    """

    advice: str

    def __new__(cls, why: str, advice: str) -> Reason:
        member = object.__new__(cls)
        member._value_, member.advice = why, advice
        return member

    DISABLED = "graphs are off", "drop --enforce-eager or --graphs off"
    ABOVE_BUCKETS = (
        "the batch is larger than the largest captured bucket",
        "an idle server captures it; raise --graph-memory, or lower --max-num-batched-tokens to the largest bucket",
    )
    UNPROFITABLE = (
        "the smallest graph that holds it would lose more to padding than it saves",
        "none needed; an idle server captures a closer one where that pays",
    )
    NO_MEMORY = (
        "capturing this bucket ran out of memory",
        "lower --gpu-memory-utilization or --max-num-batched-tokens",
    )
    OVER_BUDGET = "capturing this bucket would have passed the memory budget for graphs", "raise --graph-memory"
    NOT_CAPTURED = "no graph was captured for these needs", "an idle server captures it"


class Graph(Protocol):
    """One captured pass: segments, and the breaks that run eagerly between them.

    kind: full, segmented, compiled; on a CPU tape, tape-segmented, tape-compiled. cost_bytes: what holding it takes
    beside its buffers. replay_ms: of one replay on padding rows. capture_seconds: all of making it.
    """

    kind: str
    key: Key
    buffers: Buffers
    cost_bytes: int
    replay_ms: float
    capture_seconds: float

    @property
    def breaks(self) -> int:
        """Eager calls in a replay."""

    def replay(self) -> None:
        """Run the captured pass on what the buffers hold now."""

    def close(self) -> None:
        """Free the graph's memory."""


@dataclass(frozen=True)
class Replay:
    """The planner's answer: replay this graph."""

    graph: Graph


@dataclass(frozen=True)
class Eager:
    """The planner's answer: run without a graph, for this reason."""

    reason: Reason


# ---- breaks -----------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")


class Capture(Protocol):
    """A capture under way, as an eager break sees it. ``splits``: whether optional breaks are taken."""

    splits: bool

    def interrupt(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """End the segment, run ``function`` eagerly, record the call, begin the next segment; returns its result."""


class _Local(threading.local):
    capture: Capture | None = None


_local = _Local()


@contextmanager
def capturing(capture: Capture | None) -> Iterator[None]:
    """While this is entered, eager breaks that this thread reaches interrupt ``capture``."""
    before, _local.capture = _local.capture, capture
    try:
        yield
    finally:
        _local.capture = before


@overload
def eager_break(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def eager_break(*, optional: bool = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def eager_break(function: Callable[P, R] | None = None, *, optional: bool = False) -> Any:
    """Mark a function that cannot be captured: it runs eagerly, between two captured segments.

    Outside a capture it is the plain function. A capture ends its segment here, runs the function and remembers the
    call; every replay calls it again with the very arguments of the capture, whose tensors then hold the replay's
    values, and copies what it returns into the tensors that the capture's call returned. So it may read tensors on
    the host, plan, synchronise. What it returns must be tensors, None, numbers or strings, or tuples, lists and dicts
    of them; only tensors' values may change from call to call (CaptureError). It may keep state in arguments that are
    no tensors. A break inside a break is part of it.

    optional: break only in segmented captures (``--graphs segmented``); others capture the function.
    """
    if function is None:
        return functools.partial(eager_break, optional=optional)
    plain = function

    @functools.wraps(plain)
    def broken(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = _local.capture
        if capture is None or (optional and not capture.splits):
            return plain(*args, **kwargs)
        with capturing(None):
            return cast(R, capture.interrupt(plain, args, kwargs))

    return broken
