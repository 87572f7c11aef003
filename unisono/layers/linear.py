"""Linear layers: one product for one or several projections of the same input, in a weight format.

Built by ``models``, filled by its loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, ClassVar, cast

import torch
from torch import nn

from unisono.distributed.columns import Columns
from unisono.distributed.gather import ALONE, Ranks
from unisono.kernels.lora.adapters import AdapterPlan
from unisono.layers.activations import Activations, InputFormat, OfAllRanks, Projected, in_format, plain
from unisono.layers.adapters import LinearAdapter, LowRank
from unisono.layers.formats.base import (
    FLOATS,
    PLAIN,
    WHOLE,
    WHOLE_PROJECTION,
    JointFormat,
    JointReading,
    JointTarget,
    PartOf,
    Plain,
    Share,
    Slices,
    StoredTensor,
    WeightFormat,
    WeightTarget,
)
from unisono.layers.norm import RMSNorm


class Linear(nn.Module):
    """``x [M, inputs] -> [M, outputs]``; its parameters are uninitialised.

    outputs: their number; or, by name, those of several projections of one input, computed as one product and stored
        separately.
    format: how the weight is stored and applied.
    share: this rank's share of the outputs, of each projection if it is a mapping; the layer computes only these.
    input_share: this rank's share of the inputs; the layer's product is then a term of a sum over ranks.
    ranks: processes with which inputs and outputs are gathered.
    split_inputs: the layer's inputs are this rank's columns.
    joins: its outputs are gathered, so that every rank has all of them.
    sums: its outputs are terms, gathered and added in the order of ranks.
    adapter: added to the outputs of rows with an adapter, before this rank's outputs are gathered; None if the layer
        takes none.
    """

    weight: nn.Parameter
    ranks: Ranks = ALONE
    split_inputs = joins = sums = False
    adapter: LinearAdapter | None = None

    def __init__(
        self,
        inputs: int,
        outputs: int | Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        format: WeightFormat = PLAIN,
        share: Share | Mapping[str, Share] = WHOLE,
        input_share: Share = WHOLE,
    ) -> None:
        super().__init__()
        self.inputs, self.dtype, self.format = inputs, dtype, format
        self.input_share = input_share
        self.projections = {"": outputs} if isinstance(outputs, int) else dict(outputs)
        self.shares = dict(share) if isinstance(share, Mapping) else dict.fromkeys(self.projections, share)
        self.held = tuple(self.shares[name].size(outputs) for name, outputs in self.projections.items())
        self.outputs = sum(self.held)
        for kind, stored in format.tensors(dtype).items():
            if stored.dtype is not None:
                rows = sum(stored.shape(each, inputs)[0] for each in self.held)
                shape = (rows, *stored.shape(self.outputs, input_share.size(inputs))[1:])
                self.register_parameter(kind, self._made(_parameter(shape, stored.dtype, device), stored))
        self.bias = _parameter((self.outputs,), dtype, device) if bias else None
        if self.bias is not None:
            self._made(self.bias, StoredTensor(dtype, FLOATS, inputs=0))

    def joined(self, ranks: Ranks, split_inputs: bool) -> Linear:
        """Gather the outputs, and the inputs with ``split_inputs``, among ``ranks``; return the layer."""
        self.ranks, self.split_inputs, self.joins = ranks, split_inputs, self.divided
        return self

    def summed(self, ranks: Ranks) -> Linear:
        """Gather the outputs among ``ranks`` as terms of a sum; return the layer."""
        self.ranks, self.sums = ranks, True
        return self

    @property
    def divided(self) -> bool:
        """True if this rank holds only a part of the outputs."""
        return any(share != WHOLE for share in self.shares.values())

    @property
    def input_format(self) -> InputFormat | None:
        """Input format of the layer: see ``layers/activations.py``. Plain rows if it gathers its inputs."""
        input_format = getattr(self.format, "input_format", None)
        declared: InputFormat | None = input_format(self) if input_format and not self.split_inputs else None
        return declared and replace(declared, keep=declared.keep or self.adapter is not None)  # for adapters

    def forward(self, x: Activations, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Product plus bias; ``residual [M, outputs]`` is added to the rounded product."""
        if isinstance(x, Projected) and x.consumer is self and residual is None:
            return x.product
        if (y := self._apart(x)) is not None:
            return y if residual is None else y + residual
        return self.format.linear(self, in_format(x, self.input_format), residual)  # type: ignore[arg-type]

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Plain product in x's dtype, for a plain weight held whole: the tests' oracle. Raises TypeError for others."""
        if self.format is not PLAIN or self.divided or self.sums:
            raise TypeError(f"a {self.format.name} layer, or a rank's part of one, has no reference")
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)

    def _apart(self, x: Activations) -> torch.Tensor | None:
        """The product if another step comes between it and the residual's sum; otherwise None."""
        if not (self.joins or self.sums or self.split_inputs):
            return self._adapted(x)
        y = self._part(x)
        if self.sums:
            return self.ranks.sum(y)
        return self.ranks.gather(y) if self.joins else y

    def _part(self, x: Activations) -> torch.Tensor:
        """This rank's outputs with the bias, or its terms of all outputs. Divided inputs are gathered."""
        inputs: Activations = x.x if isinstance(x, OfAllRanks) else x
        if self.split_inputs and inputs is x:
            inputs = self.ranks.gather(plain(x))
        if (y := self._adapted(inputs)) is None:
            y = self.format.linear(self, in_format(inputs, self.input_format), None)  # type: ignore[arg-type]
        return y

    def columns(self, x: Activations) -> torch.Tensor | Columns:
        """``self(x)`` without gathering divided outputs, for a consumer that may need only some of them."""
        if not self.joins:
            product: torch.Tensor = self(x)
            return product
        return Columns(self._part(x), self.ranks)

    def then_norm(
        self, x: Activations, residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Activations]:
        """(sum, norm(sum)) for the sum of the product and ``residual``; without a norm, the sum twice.

        The norm is quantised if its consumers read that format and the weight format has such a kernel.
        """
        if (self.joins or self.sums) and isinstance(norm, RMSNorm):
            return norm.of_parts(self._part(x), residual, self.ranks, self.sums)
        if (y := self._apart(x)) is not None:
            if isinstance(norm, RMSNorm):
                return norm.of_sum(y, residual)
            total = y + residual
            return total, total if norm is None else norm(total)
        if isinstance(norm, RMSNorm):
            fused = getattr(self.format, "linear_norm_fp8", None) if norm.input_format else None
            operand: Any = in_format(x, self.input_format)
            if fused is not None:
                return fused(self, operand, residual, norm.weight, norm.eps, norm.input_format)
            return self.format.linear_norm(self, operand, residual, norm.weight, norm.eps)
        total = self(x, residual)
        return total, total if norm is None else norm(total)

    def _adapted(self, x: Activations) -> torch.Tensor | None:
        """This rank's product with the rows' adapters, without a residual; None in a pass without adapters."""
        if (plan := self._plan(x)) is None:
            return None
        y, low = self._with_adapters(x, plan)
        return y if low is None else low.added(y)

    def product(self, x: Activations) -> tuple[torch.Tensor, LowRank | None]:
        """(``self(x)``, None), or (product, pending adapter part), for a consumer that can add the adapters itself."""
        if self.joins or self.sums or self.split_inputs or (plan := self._plan(x)) is None:
            return self(x), None
        return self._with_adapters(x, plan)

    def _with_adapters(self, x: Activations, plan: AdapterPlan) -> tuple[torch.Tensor, LowRank | None]:
        """x [M, all inputs] -> this rank's product, and the pending adapter part; None if there is none."""
        assert self.adapter is not None
        rows = plain(x).contiguous()
        if isinstance(self.format, Plain):
            y = self.adapter.linear(rows, self.weight, self.bias, plan)
            if y is not None:
                return y, None
        plan.sort()  # before the product: the kernel after it reads the plan early
        y = self.format.linear(self, in_format(x, self.input_format), None)  # type: ignore[arg-type]
        return y, self.adapter.shrunk(rows, plan)

    def _plan(self, x: Activations) -> AdapterPlan | None:
        """Adapter of each row; None in a pass without adapters."""
        return None if self.adapter is None else self.adapter.plan(plain(x).shape[0])

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name inside the layer, target) of each checkpoint tensor."""
        tensors = self.format.tensors(self.dtype)
        made = {kind: stored for kind, stored in tensors.items() if not stored.accepts}
        rows = {kind: self._rows(kind, stored) for kind, stored in tensors.items()}
        readings = self._joint_readings(rows)
        for kind, stored in tensors.items():
            if stored.accepts:
                for number, (name, target) in enumerate(self._places(kind, stored, self.format)):
                    if kind in getattr(self.format, "joint", ()):
                        fields = {field: getattr(target, field) for field in WeightTarget.__dataclass_fields__}
                        yield name, JointTarget(**fields, reading=readings[number])
                    else:
                        yield name, replace(target, others={other: rows[other][number] for other in made})
        if self.bias is not None:
            yield from self._places("bias", StoredTensor(self.dtype, FLOATS, inputs=0), None)

    def _joint_readings(self, rows: Mapping[str, Sequence[torch.Tensor]]) -> list[JointReading]:
        """One for each projection, if the format reads several tensors at once. rows: parameters by kind."""
        kinds = getattr(self.format, "joint", ())
        if not kinds:
            return []
        first: dict[str, torch.Tensor] = {}
        lock, format = Lock(), cast(JointFormat, self.format)
        of_each = ({kind: rows[kind][number] for kind in kinds} for number in range(len(self.projections)))
        return [JointReading(format, parameters, first, lock) for parameters in of_each]

    def _places(
        self, kind: str, stored: StoredTensor, format: WeightFormat | None
    ) -> Iterator[tuple[str, WeightTarget]]:
        """Targets of one tensor, one for each projection."""
        for (projection, outputs), into in zip(self.projections.items(), self._rows(kind, stored), strict=True):
            share = self.shares[projection]
            part: Slices | None = stored.part(share.runs(outputs)) if share != WHOLE else None
            if self.input_share != WHOLE and stored.inputs:
                part = Slices(1, stored.columns(self.input_share.runs(self.inputs)))
            shape, *also = stored.stored_shapes(outputs, self.inputs)
            target = WeightTarget(into, shape, stored.accepts, part, format, kind, also=tuple(also))
            yield f"{projection}.{kind}" if projection else kind, target

    def _made(self, parameter: nn.Parameter, stored: StoredTensor) -> nn.Parameter:
        """The parameter, marked with its part of the whole tensor and the range of its dummy values."""
        if stored.drawn is not None:
            parameter.drawn = stored.drawn  # type: ignore[attr-defined]
        if self.input_share != WHOLE and stored.inputs:
            columns = stored.columns(self.input_share.runs(self.inputs))
            parameter.part_of = PartOf(stored.shape(self.outputs, self.inputs), 1, columns)  # type: ignore[attr-defined]
        if self.divided and stored.outputs < WHOLE_PROJECTION:
            runs, at = [], 0
            for name, outputs in self.projections.items():
                own = self.shares[name].runs(outputs)
                stored.check(own, stored.outputs)
                runs += [(at + start, at + stop) for start, stop in stored.rows(own)]
                at += stored.shape(outputs, self.inputs)[0]
            shape = (at, *parameter.shape[1:])
            parameter.part_of = PartOf(shape, 0, tuple(runs))  # type: ignore[attr-defined]
        return parameter

    def _rows(self, kind: str, stored: StoredTensor) -> list[torch.Tensor]:
        """Rows of a parameter that serve each projection; empty tensors if there is no parameter."""
        if stored.dtype is None:
            return [torch.empty(0) for _ in self.held]
        counts = [stored.shape(outputs, self.inputs)[0] for outputs in self.held]
        return list(getattr(self, kind).split(counts))


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def prove_linears(modules: Iterable[nn.Module]) -> dict[tuple[int, int], bool]:
    """Run the format's exactness check for each distinct shape [outputs, inputs] of the linear layers among
    ``modules``.

    If it fails, one exact kernel serves every length; the same holds for fused adapters. For the start, before any
    capture.
    """
    proven: dict[tuple[int, int], bool] = {}
    layers = [module for module in modules if isinstance(module, Linear)]
    for layer in _one_of_each(layers):
        shape = layer.outputs, layer.input_share.size(layer.inputs)
        proven[shape] = layer.format.prove(layer) and proven.get(shape, True)
    for layer in layers:
        if layer.adapter is not None and isinstance(layer.format, Plain):
            layer.adapter.prove(layer.weight)
    return proven


def rehearse_proofs(modules: Iterable[nn.Module]) -> None:
    """Launch the kernels of :func:`prove_linears` and ignore the results, to compile them ahead of time."""
    for layer in _one_of_each(modules):
        layer.format.rehearse(layer)


def _one_of_each(modules: Iterable[nn.Module]) -> Iterable[Linear]:
    """One layer of each shape and format."""
    layers = (m for m in modules if isinstance(m, Linear))
    return {(m.outputs, m.inputs, m.format): m for m in layers}.values()


class EndsInLinear(nn.Module):
    """Base of mixers and MLPs that end in one linear layer. last: name of its attribute.

    y: the result of ``forward``, the layer's input [M, K].
    """

    last: ClassVar[str] = "o"

    def project(
        self, y: Activations, residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Activations]:
        """Return (residual + layer(y), ``norm`` of it), each [M, hidden]; without a norm, the sum twice."""
        layer: Linear = getattr(self, self.last)
        return layer.then_norm(y, residual, norm)

    def output(self, y: Activations) -> torch.Tensor:
        """Return layer(y) [M, hidden]."""
        out: torch.Tensor = getattr(self, self.last)(y)
        return out
