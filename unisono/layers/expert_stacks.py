"""Stacks of experts' weights, filled by the loader: fused tensors of a whole stack, or single ones of each expert.

Two stacks, gate with up and down, are the weights of a mixture (``layers/experts.py``). A shared expert of the same
size and format is stored as their last weight ("riding").

Shapes: E experts, N outputs and K inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unisono.kernels.norm.activation import SILU, ExpertGate
from unisono.layers.activations import InputFormat
from unisono.layers.formats.base import FLOATS, WHOLE, PartOf, Runs, Share, Slice, Slices, StoredTensor, WeightTarget
from unisono.layers.formats.experts import ExpertFormat


@dataclass(frozen=True)
class ExpertKind:
    """Variants of a mixture's experts.

    gate: how gate and up are combined.
    bias: each product adds a bias.
    interleaved: fused checkpoint tensors alternate the rows of gate and up; otherwise gate's come first.
    transposed: fused plain weights are [E, inputs, outputs].
    gated: False: an expert is ``down(relu(up(x))²)``, and its first stack has ``up`` alone.
    """

    gate: ExpertGate = SILU
    bias: bool = False
    interleaved: bool = False
    transposed: bool = False
    gated: bool = True


SILU_EXPERTS = ExpertKind()
RELU2_EXPERTS = ExpertKind(gated=False)


class ExpertStack(nn.Module):
    """E weights [N, K] of one kind, followed by a shared expert's with ``rides``; parameters are uninitialised.

    projections: outputs of each projection by name ("gate", "up"); a single one has the name "".
    share: experts held by a rank.
    rows: outputs of each expert's projections held by a rank.
    kind: variant of the experts.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        inputs: int,
        projections: Mapping[str, int],
        rides: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        format: ExpertFormat,
        share: Share = WHOLE,
        rows: Share = WHOLE,
        kind: ExpertKind = SILU_EXPERTS,
    ) -> None:
        super().__init__()
        self.inputs, self.dtype, self.format, self.share, self.rows = inputs, dtype, format, share, rows
        self.experts, self.rides, self.projections = experts, rides, dict(projections)
        self.kind, self.gate, self.gated = kind, kind.gate, kind.gated
        self.held = {name: rows.size(outputs) for name, outputs in projections.items()}
        self.outputs = sum(self.held.values())
        self.register_parameter("bias", None)
        tensors = {**format.tensors(dtype), **({"bias": StoredTensor(dtype, FLOATS, inputs=0)} if kind.bias else {})}
        for name, stored in tensors.items():
            if stored.dtype is not None:
                self.register_parameter(name, self._made(stored, device))

    def _made(self, stored: StoredTensor, device: torch.device | str) -> nn.Parameter:
        """An uninitialised parameter, marked with its part of the whole tensor."""
        of_one = stored.shape(self.outputs, self.inputs)[1:]
        shape = (self.experts_held + self.rides, sum(self._rows(stored)), *of_one)
        made = nn.Parameter(torch.empty(shape, dtype=stored.dtype, device=device), requires_grad=False)
        made.drawn = stored.drawn  # type: ignore[attr-defined]
        if self.share != WHOLE or self.rows != WHOLE:
            made.part_of = self._part_of(stored, shape)  # type: ignore[attr-defined]
        return made

    def _part_of(self, stored: StoredTensor, shape: tuple[int, ...]) -> PartOf:
        """The parameter's part of the whole stack's tensor."""
        count = self.experts + self.rides
        if self.share != WHOLE:
            rides = ((self.experts, count),) if self.rides else ()
            return PartOf((count, *shape[1:]), 0, (*self._held_runs, *rides))
        whole, runs = self._runs(stored)
        return PartOf((count, whole, *shape[2:]), 1, runs)

    def _runs(self, stored: StoredTensor) -> tuple[int, Runs]:
        """(rows of a whole weight's tensor, the runs held by this rank)."""
        found, at = list[tuple[int, int]](), 0
        for outputs in self.projections.values():
            own = self.rows.runs(outputs)
            stored.check(own, stored.outputs)
            found += [(at + start, at + stop) for start, stop in stored.rows(own)]
            at += stored.shape(outputs, self.inputs)[0]
        return at, tuple(found)

    @property
    def whole_outputs(self) -> int:
        """Outputs of a whole weight, including those held by other ranks."""
        return sum(self.projections.values())

    @property
    def experts_held(self) -> int:
        """Number of experts held by this rank, without the shared one."""
        return len(self.share.members(self.experts))

    @property
    def _held_runs(self) -> Runs:
        """The experts held by this rank, as runs."""
        if not self.share.order:
            return (self.share.part(self.experts),)
        return tuple((expert, expert + 1) for expert in self.share.members(self.experts))

    @property
    def input_format(self) -> InputFormat | None:
        """Input format of the stack's product with a pass's tokens: see ``layers/activations.py``."""
        input_format = getattr(self.format, "input_format", None)
        return input_format(self) if input_format else None

    def fused(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name suffix, target) of each tensor of a checkpoint that stores the whole stack fused.

        Empty if the rows of the projections cannot be told apart.
        """
        experts = self._places()[: self.experts_held]
        *but_last, _ = self.projections.values()
        for kind, stored in self.format.tensors(self.dtype).items():
            as_one = stored.layout is None or stored.layout.stacked
            if stored.accepts and as_one and all(n % stored.outputs == 0 for n in but_last):
                each = [[target for _, of, target in expert if of == kind] for expert in experts]
                yield kind.removeprefix("weight"), self._fused(kind, stored, each)
        if self.bias is not None:
            stored = StoredTensor(self.dtype, FLOATS, inputs=0)
            each = [[WeightTarget(rows, rows.shape) for rows in expert] for expert in self._rows_of("bias", stored)]
            yield "_bias", self._fused("bias", stored, each[: self.experts_held])

    def _fused(self, kind: str, stored: StoredTensor, each: Sequence[Sequence[WeightTarget]]) -> Fused:
        """Target of the tensor of all experts; each: targets of an expert's projections."""
        part = None if self.share == WHOLE else Slices(0, self._held_runs)
        whole, runs = self._runs(stored)
        (_, *of_one), *_ = stored.stored_shapes(self.outputs, self.inputs)
        shape = (self.experts, whole, *of_one)
        also = ((shape[0], shape[2], shape[1]),) if len(shape) == 3 and stored.layout is None else ()
        if self.kind.transposed and also and kind == "weight":
            shape, also = also[0], ()
        if self.kind.interleaved and len(self.projections) > 1:
            count = len(self.projections)
            runs = tuple((count * start, count * stop) for start, stop in runs[:1])
        return Fused(
            getattr(self, kind)[: self.experts_held],
            shape,
            stored.accepts,
            part,
            form="fused",
            also=also,
            each=each,
            runs=runs if self.rows != WHOLE else None,
            interleaved=self.kind.interleaved,
            transposed=self.kind.transposed and kind == "weight",
        )

    def single(self) -> Iterator[tuple[int, str, str, WeightTarget]]:
        """(expert, projection, kind, target) of each tensor of this rank in a checkpoint that stores experts one by
        one.

        Empty if they have biases: no family stores these so.
        """
        if self.bias is not None:
            return
        for expert, targets in zip(self.share.members(self.experts), self._places("single"), strict=False):
            for each in targets:
                yield expert, *each

    def riding(self) -> Iterator[tuple[str, str, WeightTarget]]:
        """(projection, kind, target) of the riding shared expert."""
        return iter(self._places()[-1])

    def _places(self, form: str = "") -> list[list[tuple[str, str, WeightTarget]]]:
        """(projection, kind, target) of each weight of the stack. A model may have tens of thousands."""
        tensors = self.format.tensors(self.dtype)
        rows = {kind: self._rows_of(kind, stored) for kind, stored in tensors.items()}
        made = [kind for kind, stored in tensors.items() if not stored.accepts]
        found: list[list[tuple[str, str, WeightTarget]]] = [[] for _ in next(iter(rows.values()))]
        for kind, stored in tensors.items():
            for number, (projection, outputs) in enumerate(self.projections.items() if stored.accepts else ()):
                shape, *also = stored.stored_shapes(outputs, self.inputs)
                part = stored.part(self.rows.runs(outputs)) if self.rows != WHOLE else None
                common = shape, stored.accepts, part, self.format, kind, form
                for index, targets in enumerate(found):
                    others = {other: rows[other][index][number] for other in made}
                    targets.append(
                        (projection, kind, WeightTarget(rows[kind][index][number], *common, others, tuple(also)))
                    )
        return found

    def _rows_of(self, kind: str, stored: StoredTensor) -> list[Sequence[torch.Tensor]]:
        """Rows of each projection in a parameter, for each weight; empty tensors if there is no parameter."""
        weights, each = self.experts_held + self.rides, len(self.projections)
        if stored.dtype is None:
            return [[torch.empty(0)] * each] * weights
        parts = getattr(self, kind).flatten(0, 1).split(self._rows(stored) * weights)
        return [parts[start : start + each] for start in range(0, len(parts), each)]

    def _rows(self, stored: StoredTensor) -> list[int]:
        """Rows of each projection in a tensor."""
        return [stored.shape(outputs, self.inputs)[0] for outputs in self.held.values()]


@dataclass(frozen=True)
class Fused(WeightTarget):
    """Target of a tensor [E, rows, columns] of a whole stack; ``each``: targets of an expert's projections.

    Some checkpoints (Qwen3-VL's) store [E, columns, rows]; a tensor that fits as it is is not transposed, as in
    transformers.

    runs: rows of each expert that are read; None: all.
    interleaved: the rows of an expert's projections alternate.
    transposed: [E, columns, rows] is the only shape.
    """

    each: Sequence[Sequence[WeightTarget]] = ()
    runs: Runs | None = None
    interleaved: bool = False
    transposed: bool = False

    def lies_transposed(self, shape: tuple[int, ...]) -> bool:
        """True if a tensor of this shape has its rows last."""
        return self.transposed or shape[1:] != self.shape[1:]

    def part_of(self, shape: tuple[int, ...]) -> Slice | Slices | None:
        """The rows held by this rank, in either orientation."""
        if self.runs is None:
            return self.part
        transposed = self.lies_transposed(shape)
        return Slices(2 if transposed else 1, self.runs, transposed)

    def fill(self, stored: torch.Tensor) -> None:
        if self.runs is None and self.lies_transposed(tuple(stored.shape)):
            stored = stored.mT
        for targets, expert in zip(self.each, stored, strict=True):
            for target, rows in zip(targets, self._projections(expert, targets), strict=True):
                target.fill(rows)

    def _projections(self, expert: torch.Tensor, targets: Sequence[WeightTarget]) -> Sequence[torch.Tensor]:
        """The rows of each projection of one expert."""
        if self.interleaved:
            return [expert[first :: len(targets)] for first in range(len(targets))]
        return expert.split([len(target.parameter) for target in targets])
