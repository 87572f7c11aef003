"""Compiled ("piecewise") passes: what a segment dispatches is recorded, cut into pieces, and these are torch.compiled.

A piece is a longest run of recorded PyTorch ops that change nothing (no op that writes into its arguments, no eager
break, no buffer that is written later) and whose results are exact (:data:`EXACT`). It becomes one function of
tensors, so the compiler sees neither Python nor aliases nor mutation. What lies between pieces runs as it was recorded:
most of all the project's own kernels, which the compiler could only call. So a model written in plain PyTorch gains
most, and one written in fused kernels next to nothing.

The bytes stay those of eager: intermediate roundings are kept (``emulate_precision_casts``); sums of floats,
exponentials and their like, which a compiler may order or approximate in its own way, are not compiled; and a piece
whose results differ in one bit from the uncompiled ones, on the recorded values or on random ones (numbers of tokens
and rows among them, as far as they index nothing out of range), is not used.

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
from unisono.graphs.recorder import Call, Recorder
from unisono.graphs.segments import Break, storages, tensors

logger = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""The compiler may fuse across roundings to bfloat16, but not leave them out, nor contract a product and a sum."""
if hasattr(getattr(inductor, "eager_numerics", None), "disable_ftz"):
    OPTIONS["eager_numerics.disable_ftz"] = True  # and keep denormals

_EXACT = """
    abs add bitwise_and bitwise_not bitwise_or bitwise_xor clamp clamp_max clamp_min eq ge gt le logical_and logical_not
    logical_or lt maximum minimum mul ne neg rsub sign sub where masked_fill
    _to_copy arange cat clone constant_pad_nd contiguous copy embedding fill flip full full_like gather index
    index_fill index_select new_full new_ones new_zeros ones ones_like pad repeat reshape roll stack
    to tril triu type_as zeros zeros_like
"""
EXACT = frozenset(_EXACT.split())
"""Ops that have one right result, to the bit: they move data, compare, or round one IEEE operation. Not index_copy and
scatter: of places that are named twice either source may win."""

EXACT_INTEGERS = EXACT | {"all", "any", "cumsum", "floor_divide", "prod", "remainder", "sum"}
"""The same for ops whose arguments are whole numbers. Not searchsorted: on GPUs the compiler takes a slice of the
boundaries for the whole (pytorch issues 160964, 182343; seen here with 2.11)."""

Caller = Callable[[Callable[..., Any], tuple], tuple[torch.Tensor, ...]]
"""How a capture calls a compiled piece; see ``Recorder.call``."""

_compiled: dict[str, Callable[..., Any] | None] = {}
"""Pieces by code and inputs' layouts: layers, and passes of one size, share them. None: differs from eager."""


@dataclass(frozen=True)
class _Value:
    """A tensor that the pass makes, by number."""

    number: int


@dataclass
class _Step:
    """Something to do: ``run(*args)`` in which values stand for tensors; ``results`` are the values that it makes, None
    for a tensor that is not the pass's own.

    kind: "call", "piece" or "break".
    """

    kind: str
    run: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    drops: list[int] = field(default_factory=list)


class Pieces:
    """A recorded pass with its pieces compiled. ``compiled`` counts them; ``steps`` is all that :meth:`run` does."""

    def __init__(self, steps: Sequence[_Step], pinned: dict[int, torch.Tensor]) -> None:
        self.steps, self._pinned = steps, pinned
        self.compiled = sum(step.kind == "piece" for step in steps)
        seen: set[int] = set(pinned)
        for step in reversed(steps):
            used = {leaf.number for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, _Value)}
            step.drops = sorted((used | {n for n in step.results if n is not None}) - seen)
            seen |= used

    def run(self, call: Caller) -> None:
        """The pass, on the buffers of the recording. Every tensor that it makes is new, or pinned."""
        held: dict[int, torch.Tensor] = dict(self._pinned)

        def given(leaf: Any) -> Any:
            return held[leaf.number] if isinstance(leaf, _Value) else leaf

        for step in self.steps:
            args, kwargs = tree_map(given, step.args), tree_map(given, step.kwargs)
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
    """From recorded steps to :class:`Pieces`."""

    def __init__(self, steps: Sequence[Call | Break]) -> None:
        self._recorded = steps
        self._numbers: dict[int, int] = {}  # id of a tensor that the pass makes -> its value's number
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
        # What a break finds inside its arguments, rather than among them, has to stay where it was.
        for step in steps:
            if isinstance(step, Break):
                direct = {id(leaf) for leaf in tree_leaves((step.args, step.kwargs))}
                for tensor in tensors((step.args, step.kwargs)):
                    if id(tensor) not in direct and id(tensor) in self._numbers:
                        self._pinned[self._numbers[id(tensor)]] = tensor
        self._pure = [isinstance(step, Call) and _is_pure(step, written) for step in steps]

    def pieces(self) -> Pieces:
        done: list[_Step] = []
        at = 0
        while at < len(self._recorded):
            end = at
            while end < len(self._recorded) and self._pure[end]:
                end += 1
            if end > at:
                done += self._piece([step for step in self._recorded[at:end] if isinstance(step, Call)], end)
                at = end
            else:
                done.append(self._plain(self._recorded[at]))
                at += 1
        return Pieces(done, self._pinned)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) in self._numbers:
            return _Value(self._numbers[id(leaf)])
        return leaf

    def _plain(self, step: Call | Break) -> _Step:
        run = eager_break(step.function) if isinstance(step, Break) else step.op
        args, kwargs = tree_map(self._value, step.args), tree_map(self._value, step.kwargs)
        numbers = tuple(self._numbers.get(id(t)) for t in _results(step))
        return _Step("break" if isinstance(step, Break) else "call", run, args, kwargs, numbers)

    def _piece(self, calls: list[Call], end: int) -> list[_Step]:
        """The steps of a run of pure calls that ends before recorded step ``end``."""
        if sum(not call.view for call in calls) < 2:  # nothing to fuse
            return [self._plain(call) for call in calls]
        wanted = {id(t) for step in self._recorded[end:] for t in tree_leaves(_inputs(step))}
        wanted |= {id(t) for t in self._pinned.values()}
        inside, outside = list[Call](), list[Call]()
        for call in reversed(calls):  # a view that outlives the piece is taken again outside, from what it views
            if call.view and any(id(t) in wanted for t in call.results):
                outside.insert(0, call)
                wanted |= {id(t) for t in _inputs(call)}
            inside.insert(0, call)
        after = [self._plain(call) for call in outside]
        outputs = [t for call in inside for t in call.results if id(t) in wanted and not call.view]
        function, inputs = _function(inside, outputs)
        compiled = _compile(function, inputs) if outputs else None
        if compiled is None:
            return [self._plain(call) for call in calls]
        numbers = tuple(self._numbers[id(t)] for t in outputs)
        return [_Step("piece", compiled, tuple(map(self._value, inputs)), {}, numbers), *after]


def _inputs(step: Call | Break) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, torch.Tensor)]


def _results(step: Call | Break) -> Sequence[torch.Tensor]:
    return step.homes if isinstance(step, Break) else step.results


def written_by(call: Call) -> Iterable[Any]:
    """The arguments that an op writes into, by its schema."""
    arguments = call.op._schema.arguments
    for at, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield call.args[at] if at < len(call.args) else call.kwargs.get(argument.name)


def _is_pure(call: Call, written: set[int]) -> bool:
    """Whether the call changes no tensor, nothing changes its result later, and the result is exact."""
    if call.op._schema.is_mutable or call.op.namespace != "aten":
        return False
    if call.view:
        return True
    floats = any(t.is_floating_point() for t in (*_inputs(call), *call.results))
    if floats and call.kwargs.get("alpha", 1) != 1:  # a product and a sum, in one operation or two
        return False
    name = call.op._schema.name.removeprefix("aten::")
    return name in (EXACT if floats else EXACT_INTEGERS) and not storages(call.results) & written


def _function(calls: list[Call], outputs: list[torch.Tensor]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The calls as one function, and the tensors to call it with."""
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
    """The function compiled for inputs of these layouts, or None where it would not give the same bits."""
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
"""Ranges of whole numbers that a piece is tried on: the first that it can take."""


def _other_values(function: fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Random values in the layouts of ``inputs``; where no range of whole numbers will do, these stay as they are.

    An index out of range, which would be the end of a GPU's context, is seen on a copy on the CPU.
    """
    generator, on_cpu = torch.Generator().manual_seed(0), _on_cpu(function)
    device = torch.Generator(inputs[0].device).manual_seed(0) if inputs else None
    for bounds in WHOLE_NUMBERS:
        # Of floats only the shape matters there, and that of an embedding is large.
        given = [
            torch.zeros((), dtype=t.dtype).expand(t.shape)
            if t.is_floating_point()
            else torch.randint(*bounds, t.shape, generator=generator).to(t.dtype)
            for t in inputs
        ]
        try:
            on_cpu(*given)
            break
        except (IndexError, RuntimeError):
            continue
    else:
        given = inputs
    return [
        _in_layout_of(
            t,
            torch.randn(t.shape, generator=device, dtype=t.dtype, device=t.device) if t.is_floating_point() else value,
        )
        for t, value in zip(inputs, given, strict=True)
    ]


def _on_cpu(function: fx.GraphModule) -> fx.GraphModule:
    """The function with what it makes on a device made on the CPU."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(function.graph, {}))
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    return fx.GraphModule({}, graph)


def _in_layout_of(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` in dtype, strides and place of ``tensor``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(values)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)
