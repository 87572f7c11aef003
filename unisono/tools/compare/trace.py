"""Records the result of every op of the target model in a request's eager passes, position by position.

A pass computes positions, some of which later passes compute again (rejected drafts). The result of a position is that
of the last pass that computed it from the committed tokens. An op is identified by its *place* (the parameter it reads
or the module it runs in), its name, and its number among the ops of that name there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.entrypoints.llm import LLM
from unisono.kv.specs import ALL
from unisono.models.blocks.layers import DecoderLayer
from unisono.types import SamplingParams

Place = tuple[str, str, int]
"""The source of an op's result: module or parameter, op, number."""


@dataclass
class PassRecord:
    """One pass.

    token_ids, positions [T]: of its tokens, -1 for none.

    last: for a prompt pass that computes only tokens with an output: token index -> row. ops: results by place, in
    order.
    """

    name: str
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    ops: dict[Place, list[torch.Tensor]] = field(default_factory=dict)

    def row(self, tensor: torch.Tensor, token: int) -> torch.Tensor | None:
        """The row of a result for the pass's token of this index; None if it has none."""
        if tensor.shape[0] == len(self.positions):
            return tensor[token]
        row = self.last.get(token, -1)
        return tensor[row] if 0 <= row < tensor.shape[0] else None


@dataclass
class Trace:
    """A request. prompt, output: token ids. computed: the pass of each position, and the token's index in it."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)

    @property
    def computed(self) -> dict[int, tuple[PassRecord, int]]:
        """By position. Tokens of a pass count up to the first one that was not committed."""
        tokens, found = self.prompt + self.output, {}
        for record in self.passes:
            before, follows = None, False
            for index, (position, token) in enumerate(zip(record.positions, record.token_ids, strict=True)):
                fits = 0 <= position < len(tokens) and tokens[position] == token
                follows = fits and (follows or before is None or position != before + 1)
                before = position
                if follows:
                    found[position] = record, index
        return found


class OpTracer(TorchDispatchMode):
    """Records the passes of an engine inside its context.

    The engine runs one request, and every pass eagerly.

    Fused ops are split, whatever the engine has chosen, so that each result has a name.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        worker = llm.engine.worker
        self.passes: list[PassRecord] = []
        self._model, self._graphs = worker.model, worker.graphs
        self._padding = worker.slots.padding
        self._record: PassRecord | None = None
        self._inside: list[str] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._names = {id(module): name for name, module in self._model.named_modules()}
        self._parameters: dict[int, str] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            self._parameters[parameter.data_ptr()] = name.rpartition(".")[0]  # the last of tied parameters: the LM head

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[PassRecord]]:
        """Record the passes inside the block; the list grows."""
        programs = dict(self._graphs.programs)
        hooks = [hook for module in self._model.modules() for hook in self._hooks(module)]
        for layer in self._model.modules():
            if isinstance(layer, DecoderLayer):
                layer.tail = None
        try:
            for name, program in programs.items():
                self._graphs.programs[name] = dataclasses.replace(program, run=self._recorded(name, program.run))
            yield self.passes
        finally:
            self._graphs.programs.update(programs)
            for hook in hooks:
                hook.remove()

    def _recorded(self, name: str, run: Callable[[Any], None]) -> Callable[[Any], None]:
        def recorded(buffers: Any) -> None:
            self._record, self._counts = PassRecord(name), {}
            if (last := buffers.find("last")) is not None and (slots := buffers.find("sample_slots")) is not None:
                ends = enumerate(zip(last.tolist(), slots.tolist(), strict=True))
                self._record.last = {token: row for row, (token, slot) in ends if slot != self._padding}
            try:
                with self:
                    run(buffers)
            finally:
                if self._record.positions:
                    self.passes.append(self._record)
                self._record = None

        return recorded

    def _hooks(self, module: nn.Module) -> list[Any]:
        name = self._names[id(module)]

        def enter(_: nn.Module, args: tuple) -> None:
            if module is self._model:
                self._begin(args[0], args[1])
            self._inside.append(name)

        def leave(*_: Any) -> None:
            self._inside.pop()

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

    def _begin(self, token_ids: torch.Tensor, context: Any) -> None:
        if self._record is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                self._record.token_ids = token_ids.tolist()
                self._record.positions = context.inputs(ALL).positions.tolist()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        record = self._record
        if record is not None and record.positions and (place := self._place(func, args)):
            with torch.utils._python_dispatch._disable_current_modes():
                self._keep(record, place, func, out)
        return out

    def _place(self, func: Any, args: tuple) -> str:
        """The parameter's module, or the innermost running module; empty outside of the target."""
        inside = self._inside[-1] if self._inside else ""
        read = [self._parameters[a.data_ptr()] for a in _tensors(args) if a.data_ptr() in self._parameters]
        if inside and read and "embed" in inside:
            return inside  # tied embeddings are the LM head's weight, too
        return read[0] if read else inside

    def _keep(self, record: PassRecord, place: str, func: Any, out: Any) -> None:
        rows = {len(record.positions), len(record.last)}
        results = (t for t in _tensors(out) if t.dim() and t.is_floating_point())
        found = [t for t in results if t.shape[0] in rows or place == "lm_head"]
        if not found or (func._schema.name.startswith("aten::") and any(r.alias_info for r in func._schema.returns)):
            return
        name = func._schema.name.replace("::", ".")
        number = self._counts[(place, name)] = self._counts.get((place, name), -1) + 1
        record.ops[(place, name, number)] = [t.detach().to("cpu", copy=True) for t in found]


def traced(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Trace:
    """Run a request on an engine without graphs and prefix cache, and record it."""
    trace, tracer = Trace(list(prompt)), OpTracer(llm)
    with tracer.recording() as passes:
        for delta in llm.stream(prompt, params):
            trace.output += delta.token_ids
    trace.passes = passes
    return trace


@dataclass(frozen=True)
class OpDifference:
    """The first op whose bits differ.

    position: of its token. largest: the largest difference of two elements. differing, elements: numbers of differing
    and of all elements. passes: the programs that ran it.
    """

    position: int
    place: str
    op: str
    number: int
    largest: float
    differing: int
    elements: int
    passes: tuple[str, str]


def first_difference(a: Trace, b: Trace, positions: int) -> OpDifference | None:
    """The first op, by position and then by order, whose bits differ below ``positions``.

    Ops that only one side ran are skipped. None: every op that both ran gave the same bits.
    """
    of_a, of_b = a.computed, b.computed
    for position in range(positions):
        if position in of_a and position in of_b and (found := _in_position(position, of_a, of_b)) is not None:
            return found
    return None


def compared_ops(a: Trace, b: Trace) -> int:
    """Number of different ops that both ran."""
    return len({p for r in a.passes for p in r.ops} & {p for r in b.passes for p in r.ops})


def _in_position(
    position: int, of_a: dict[int, tuple[PassRecord, int]], of_b: dict[int, tuple[PassRecord, int]]
) -> OpDifference | None:
    (record_a, token_a), (record_b, token_b) = of_a[position], of_b[position]
    for place, results in record_a.ops.items():
        for one, other in zip(results, record_b.ops.get(place, ()), strict=False):
            x, y = record_a.row(one, token_a), record_b.row(other, token_b)
            if x is None or y is None or x.shape != y.shape or _same_bits(x, y):
                continue
            gap = (x.double() - y.double()).abs()
            names = record_a.name, record_b.name
            differing = int((gap != 0).sum() | (gap.isnan()).sum())
            return OpDifference(position, *place, float(gap.max()), differing, gap.numel(), names)
    return None


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype != y.dtype:
        return torch.equal(x.double(), y.double())
    x, y = (torch.atleast_1d(each).contiguous().view(torch.uint8) for each in (x, y))
    return torch.equal(x, y)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
