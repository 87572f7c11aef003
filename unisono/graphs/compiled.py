"""Compiled ("piecewise") passes: the ops of a segment are recorded, cut into pieces, and the pieces torch.compiled.

A piece is a maximal run of recorded PyTorch ops that change nothing (no op that writes to its arguments, no eager
break, no buffer that is written later) and whose results are exact (:data:`EXACT`). It becomes one function of tensors,
so the compiler sees neither Python nor aliases nor mutation. Ops between pieces run as recorded: mostly the project's
own kernels, which the compiler could only call. A model written in plain PyTorch therefore gains most, and one written
in fused kernels almost nothing.

The bytes stay those of eager execution. Intermediate roundings are kept (``emulate_precision_casts``). Float sums,
exponentials and similar ops, which a compiler may reorder or approximate, are not compiled. A piece is dropped if its
results differ in one bit from the uncompiled ones, on the recorded values or on random ones (including numbers of
tokens and rows, as far as they index nothing out of range).

Called by the captures; works on any device.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor
from torch.utils._pytree import tree_leaves, tree_map

from unisono.graphs import Buffers, eager_break
from unisono.graphs.recorder import RecordedOp, Recorder
from unisono.graphs.segments import Break, storages, tensors

logger = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""Compiler options: fuse across roundings to bfloat16 without omitting them, and do not contract a product and a
sum."""
if hasattr(getattr(inductor, "eager_numerics", None), "disable_ftz"):
    OPTIONS["eager_numerics.disable_ftz"] = True  # keep denormals

_EXACT = """
    abs add bitwise_and bitwise_not bitwise_or bitwise_xor clamp clamp_max clamp_min eq ge gt le logical_and logical_not
    logical_or lt maximum minimum mul ne neg rsub sign sub where masked_fill
    _to_copy arange cat clone constant_pad_nd contiguous copy embedding fill flip full full_like gather index
    index_fill index_select new_full new_ones new_zeros ones ones_like pad repeat reshape roll stack
    to tril triu type_as zeros zeros_like
"""
EXACT = frozenset(_EXACT.split())
"""Ops with exactly one correct result: they move data, compare, or round one IEEE operation. index_copy and scatter are
excluded, since for duplicate indices either source may win."""

EXACT_INTEGERS = EXACT | {"all", "any", "cumsum", "floor_divide", "prod", "remainder", "sum"}
"""Ops that are exact for integer arguments. searchsorted is excluded: on GPUs the compiler takes a slice of the
boundaries for the whole tensor (pytorch issues 160964, 182343; seen with 2.11)."""

Caller = Callable[[Callable[..., Any], tuple[Any, ...]], tuple[torch.Tensor, ...]]
"""Function by which a capture calls a compiled piece; see ``Recorder.call``."""

_compiled: dict[str, Callable[..., Any] | None] = {}
"""Compiled pieces by code and input layouts; layers, and passes of one size, share them. None: differs from eager."""


@dataclass(frozen=True)
class _Value:
    """Number of a tensor made by the pass."""

    number: int


@dataclass
class _Step:
    """One call ``run(*args)``, in which values stand for tensors. ``results``: values made by it, None for a tensor not
    made by the pass.

    kind: "call", "piece" or "break".
    """

    kind: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    drops: list[int] = field(default_factory=list)


class Pieces:
    """A recorded pass with compiled pieces. ``compiled`` counts them; ``steps`` are all steps of :meth:`run`."""

    def __init__(self, steps: Sequence[_Step], pinned: dict[int, torch.Tensor]) -> None:
        self.steps, self._pinned = steps, pinned
        self.compiled = sum(step.kind == "piece" for step in steps)
        seen: set[int] = set(pinned)
        for step in reversed(steps):
            used = {leaf.number for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, _Value)}
            step.drops = sorted((used | {n for n in step.results if n is not None}) - seen)
            seen |= used

    def run(self, call: Caller) -> None:
        """Run the pass on the buffers of the recording. Every tensor that it makes is new, or pinned."""
        held: dict[int, torch.Tensor] = dict(self._pinned)

        def resolve(leaf: Any) -> Any:
            return held[leaf.number] if isinstance(leaf, _Value) else leaf

        for step in self.steps:
            args, kwargs = tree_map(resolve, step.args), tree_map(resolve, step.kwargs)
            made = call(step.run, args) if step.kind == "piece" else step.run(*args, **kwargs)
            outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
            for number, tensor in zip(step.results, outputs, strict=True):
                if number is None:
                    continue
                if number not in self._pinned:
                    held[number] = tensor
                elif tensor is not held[number]:
                    held[number].copy_(tensor)
            del args, kwargs, made, outputs
            for number in step.drops:
                held.pop(number, None)


def compile_program(run: Callable[[Buffers], None], buffers: Buffers, splits: bool) -> Pieces:
    """Record ``run(buffers)`` and compile its pieces. ``splits``: take optional breaks too."""
    return _Compilation(Recorder(splits).record(run, buffers)).pieces()


class _Compilation:
    """Builds :class:`Pieces` from recorded steps."""

    def __init__(self, steps: Sequence[RecordedOp | Break]) -> None:
        self._recorded = steps
        self._numbers: dict[int, int] = {}  # id of a tensor made by the pass -> number of its value
        self._pinned: dict[int, torch.Tensor] = {}
        written: set[int] = set()
        for step in steps:
            if isinstance(step, Break):
                written |= storages(step.args, step.kwargs)
            elif step.op._schema.is_mutable:
                written |= storages(*written_by(step))
            for tensor in _results(step):
                if not any(tensor is t for t in _inputs(step)):
                    self._numbers.setdefault(id(tensor), len(self._numbers))
        # Tensors nested inside a break's arguments must keep their addresses.
        for step in steps:
            if isinstance(step, Break):
                direct = {id(leaf) for leaf in tree_leaves((step.args, step.kwargs))}
                for tensor in tensors((step.args, step.kwargs)):
                    if id(tensor) not in direct and id(tensor) in self._numbers:
                        self._pinned[self._numbers[id(tensor)]] = tensor
        self._pure = [isinstance(step, RecordedOp) and _is_pure(step, written) for step in steps]

    def pieces(self) -> Pieces:
        done: list[_Step] = []
        at = 0
        while at < len(self._recorded):
            end = at
            while end < len(self._recorded) and self._pure[end]:
                end += 1
            if end > at:
                done += self._piece([step for step in self._recorded[at:end] if isinstance(step, RecordedOp)], end)
                at = end
            else:
                done.append(self._plain(self._recorded[at]))
                at += 1
        return Pieces(done, self._pinned)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) in self._numbers:
            return _Value(self._numbers[id(leaf)])
        return leaf

    def _plain(self, step: RecordedOp | Break) -> _Step:
        run = eager_break(step.function) if isinstance(step, Break) else step.op
        args, kwargs = tree_map(self._value, step.args), tree_map(self._value, step.kwargs)
        numbers = tuple(self._numbers.get(id(t)) for t in _results(step))
        return _Step("break" if isinstance(step, Break) else "call", run, args, kwargs, numbers)

    def _piece(self, calls: list[RecordedOp], end: int) -> list[_Step]:
        """Steps for a run of pure calls that ends before recorded step ``end``."""
        if sum(not call.view for call in calls) < 2:  # nothing to fuse
            return [self._plain(call) for call in calls]
        needed = {id(t) for step in self._recorded[end:] for t in tree_leaves(_inputs(step))}
        needed |= {id(t) for t in self._pinned.values()}
        inside, outside = list[RecordedOp](), list[RecordedOp]()
        for call in reversed(calls):  # a view that outlives the piece is recreated outside, from its base
            if call.view and any(id(t) in needed for t in call.results):
                outside.insert(0, call)
                needed |= {id(t) for t in _inputs(call)}
            inside.insert(0, call)
        after = [self._plain(call) for call in outside]
        outputs = [t for call in inside for t in call.results if id(t) in needed and not call.view]
        function, inputs = _function(inside, outputs)
        compiled = _compile(function, inputs) if outputs else None
        if compiled is None:
            return [self._plain(call) for call in calls]
        numbers = tuple(self._numbers[id(t)] for t in outputs)
        return [_Step("piece", compiled, tuple(map(self._value, inputs)), {}, numbers), *after]


def _inputs(step: RecordedOp | Break) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, torch.Tensor)]


def _results(step: RecordedOp | Break) -> Sequence[torch.Tensor]:
    return step.homes if isinstance(step, Break) else step.results


def written_by(call: RecordedOp) -> Iterable[Any]:
    """Arguments that an op writes to, according to its schema."""
    arguments = call.op._schema.arguments
    for at, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield call.args[at] if at < len(call.args) else call.kwargs.get(argument.name)


def _is_pure(call: RecordedOp, written: set[int]) -> bool:
    """Return True if the call changes no tensor, nothing changes its result later, and the result is exact."""
    if call.op._schema.is_mutable or call.op.namespace != "aten":
        return False
    if call.view:
        return True
    floats = any(t.is_floating_point() for t in (*_inputs(call), *call.results))
    if floats and call.kwargs.get("alpha", 1) != 1:  # a product and a sum, in one operation or two
        return False
    name = call.op._schema.name.removeprefix("aten::")
    return name in (EXACT if floats else EXACT_INTEGERS) and not storages(call.results) & written


def _function(calls: list[RecordedOp], outputs: list[torch.Tensor]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The calls as one function, and its input tensors."""
    graph, inputs = fx.Graph(), list[torch.Tensor]()
    nodes: dict[int, fx.Node] = {}
    for call in calls:  # all placeholders come first
        made = {id(t) for c in calls for t in c.results}
        for tensor in _inputs(call):
            if id(tensor) not in made and id(tensor) not in nodes:
                nodes[id(tensor)] = graph.placeholder(f"x{len(inputs)}")
                inputs.append(tensor)
    for call in calls:
        args, kwargs = tree_map(lambda leaf: nodes.get(id(leaf), leaf), (call.args, call.kwargs))
        node = graph.call_function(call.op, args, kwargs)
        if str(call.op._schema.returns[0].type) == "Tensor" and len(call.op._schema.returns) == 1:
            nodes[id(call.results[0])] = node
            continue
        for at, tensor in enumerate(call.results):
            nodes[id(tensor)] = graph.call_function(operator.getitem, (node, at))
    graph.output(tuple(nodes[id(t)] for t in outputs))
    return fx.GraphModule({}, graph), inputs


def _compile(function: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any] | None:
    """The function compiled for inputs of these layouts; None if the result would differ in bits."""
    layouts = [(t.dtype, tuple(t.shape), t.stride(), t.device) for t in inputs]
    name = f"{function.code}{layouts}"
    if name not in _compiled:
        compiled = torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)
        tried = inputs, _other_values(function, inputs)
        same = all(_same_bits(a, b) for x in tried for a, b in zip(function(*x), compiled(*x), strict=True))
        if not same:
            logger.warning("A compiled piece differs from eager and is not used:%s", function.code)
        _compiled[name] = compiled if same else None
    return _compiled[name]


WHOLE_NUMBERS = ((-1, 9), (0, 9), (0, 2), (0, 1))
"""Integer ranges to test a piece with; the first that it accepts is used."""


def _other_values(function: fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Random values in the layouts of ``inputs``. Integers stay as they are if no range is accepted.

    An index out of range would destroy a GPU's context, so it is detected on a CPU copy.
    """
    generator, on_cpu = torch.Generator().manual_seed(0), _on_cpu(function)
    device = torch.Generator(inputs[0].device).manual_seed(0) if inputs else None
    for bounds in WHOLE_NUMBERS:
        # Only the shape of floats matters there, and an embedding's is large.
        values = [
            torch.zeros((), dtype=t.dtype).expand(t.shape)
            if t.is_floating_point()
            else torch.randint(*bounds, t.shape, generator=generator).to(t.dtype)
            for t in inputs
        ]
        try:
            on_cpu(*values)
            break
        except (IndexError, RuntimeError):
            continue
    else:
        values = inputs
    return [
        _in_layout_of(
            t,
            torch.randn(t.shape, generator=device, dtype=t.dtype, device=t.device) if t.is_floating_point() else value,
        )
        for t, value in zip(inputs, values, strict=True)
    ]


def _on_cpu(function: fx.GraphModule) -> fx.GraphModule:
    """The function with its tensor constructors moved to the CPU."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(function.graph, {}))
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    return fx.GraphModule({}, graph)


def _in_layout_of(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` with the dtype, strides and device of ``tensor``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(values)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)
