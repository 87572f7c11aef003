"""Mixture of experts: a router, stacks of gated MLPs of which each token uses some, and optionally a shared one.

Built by ``models``, filled by its loader. A shared expert with the experts' size and format is stored as the stacks'
last weight ("riding"); any other is a gated MLP of its own. A token's sum follows the order of its choices, the shared
expert last.

Shapes: M tokens, H features, E experts, I features of an expert, P = M * top_k pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.distributed.gather import ALONE, Ranks
from unisono.kernels.moe.combine import combine_experts, combine_experts_norm, combine_experts_norm_fp8
from unisono.kernels.moe.plan import plan_experts
from unisono.kernels.moe.router import route
from unisono.kernels.norm.activation import SILU, ExpertGate
from unisono.layers.activations import Activations, InputFormat, in_format, plain
from unisono.layers.formats.base import FLOATS, WHOLE, PartOf, Runs, Share, Slice, Slices, StoredTensor, WeightTarget
from unisono.layers.formats.experts import ExpertFormat
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import Factor, RMSNorm


@dataclass(frozen=True)
class ExpertKind:
    """Variants of a mixture's experts.

    gate: how gate and up are combined.
    bias: each product adds a bias.
    interleaved: fused checkpoint tensors alternate the rows of gate and up; otherwise gate's come first.
    transposed: fused plain weights are [E, inputs, outputs].
    """

    gate: ExpertGate = SILU
    bias: bool = False
    interleaved: bool = False
    transposed: bool = False


SILU_EXPERTS = ExpertKind()


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
        self.kind, self.gate = kind, kind.gate
        self.held = {name: rows.size(outputs) for name, outputs in projections.items()}
        self.outputs = sum(self.held.values())
        self.register_parameter("bias", None)
        tensors = {**format.tensors(dtype), **({"bias": StoredTensor(dtype, FLOATS, inputs=0)} if kind.bias else {})}
        for name, stored in tensors.items():
            if stored.dtype is not None:
                self.register_parameter(name, self._made(stored, device))

    def _made(self, stored: StoredTensor, device: torch.device | str) -> nn.Parameter:
        """An uninitialised parameter, marked with its part of the whole tensor."""
        first, end = self.share.part(self.experts)
        of_one = stored.shape(self.outputs, self.inputs)[1:]
        shape = (end - first + self.rides, sum(self._rows(stored)), *of_one)
        made = nn.Parameter(torch.empty(shape, dtype=stored.dtype, device=device), requires_grad=False)
        made.drawn = stored.drawn  # type: ignore[attr-defined]
        if self.share != WHOLE or self.rows != WHOLE:
            made.part_of = self._part_of(stored, shape)  # type: ignore[attr-defined]
        return made

    def _part_of(self, stored: StoredTensor, shape: tuple[int, ...]) -> PartOf:
        """The parameter's part of the whole stack's tensor."""
        count, (first, end) = self.experts + self.rides, self.share.part(self.experts)
        if self.share != WHOLE:
            rides = ((self.experts, count),) if self.rides else ()
            return PartOf((count, *shape[1:]), 0, ((first, end), *rides))
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
        first, end = self.share.part(self.experts)
        return end - first

    @property
    def input_format(self) -> InputFormat | None:
        """Input format of the stack's product with a pass's tokens: see ``layers/activations.py``."""
        input_format = getattr(self.format, "input_format", None)
        return input_format(self) if input_format else None

    def fused(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name suffix, target) of each tensor of a checkpoint that stores the whole stack fused.

        Empty if the rows of the projections cannot be told apart.
        """
        first, end = self.share.part(self.experts)
        experts = self._places()[: end - first]
        *but_last, _ = self.projections.values()
        for kind, stored in self.format.tensors(self.dtype).items():
            as_one = stored.layout is None or stored.layout.stacked
            if stored.accepts and as_one and all(n % stored.outputs == 0 for n in but_last):
                each = [[place for _, of, place in expert if of == kind] for expert in experts]
                yield kind.removeprefix("weight"), self._fused(kind, stored, each)
        if self.bias is not None:
            stored = StoredTensor(self.dtype, FLOATS, inputs=0)
            each = [[WeightTarget(rows, rows.shape) for rows in expert] for expert in self._rows_of("bias", stored)]
            yield "_bias", self._fused("bias", stored, each[: end - first])

    def _fused(self, kind: str, stored: StoredTensor, each: Sequence[Sequence[WeightTarget]]) -> Fused:
        """Target of the tensor of all experts; each: targets of an expert's projections."""
        first, end = self.share.part(self.experts)
        part = None if self.share == WHOLE else Slice(0, first, end)
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
            getattr(self, kind)[: end - first],
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
        for expert, places in zip(range(*self.share.part(self.experts)), self._places("single"), strict=False):
            for each in places:
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
                for index, places in enumerate(found):
                    others = {other: rows[other][index][number] for other in made}
                    places.append(
                        (projection, kind, WeightTarget(rows[kind][index][number], *common, others, tuple(also)))
                    )
        return found

    def _rows_of(self, kind: str, stored: StoredTensor) -> list[Sequence[torch.Tensor]]:
        """Rows of each projection in a parameter, for each weight; empty tensors if there is no parameter."""
        first, end = self.share.part(self.experts)
        weights, each = end - first + self.rides, len(self.projections)
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
        for places, expert in zip(self.each, stored, strict=True):
            for place, rows in zip(places, self._projections(expert, places), strict=True):
                place.fill(rows)

    def _projections(self, expert: torch.Tensor, places: Sequence[WeightTarget]) -> Sequence[torch.Tensor]:
        """The rows of each projection of one expert."""
        if self.interleaved:
            return [expert[first :: len(places)] for first in range(len(places))]
        return expert.split([len(place.parameter) for place in places])


class Mixed(NamedTuple):
    """Expert outputs for M tokens, before the weighted sum.

    y [P, H]: a token's rows in the order of its choices; weights [M, top_k] fp32; shared [M, H] and its gates [M] fp32.
    """

    y: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None
    gates: torch.Tensor | None


class Experts(nn.Module):
    """Feed-forward (``models/blocks/layers.py``): ``sum of weight * expert(x)`` over a token's ``top_k`` choices, plus
    ``gate * shared(x)``.

    gate_up, down: the experts' stacks.
    shared: the shared expert unless it rides in them.
    gated: the shared expert has a gate, sigmoid of a product with x; otherwise its weight is 1.
    normalize: a token's weights sum to 1. The router's weight [E, H] is followed by the gate's.
    router_bias: the router adds a bias.
    router_factors: each expert's weight is multiplied by a learnt number.
    counts [E]: tokens per expert, see :func:`expert_counts`.
    ranks: processes that hold the experts together; a rank computes its own part.
    """

    counts: torch.Tensor

    def __init__(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        top_k: int,
        normalize: bool,
        shared: GatedMLP | None = None,
        gated: bool = False,
        ranks: Ranks = ALONE,
        router_bias: bool = False,
        router_factors: bool = False,
    ) -> None:
        super().__init__()
        self.top_k, self.normalize, self.gated, self.ranks = top_k, normalize, gated, ranks
        router = torch.empty(
            gate_up.experts + gated, gate_up.inputs, dtype=gate_up.dtype, device=next(gate_up.parameters()).device
        )
        self.router = nn.Parameter(router, requires_grad=False)
        self.router_bias = nn.Parameter(router.new_zeros(len(router)), requires_grad=False) if router_bias else None
        self.factors = Factor(gate_up.experts, gate_up.dtype, router.device) if router_factors else None
        self.register_buffer("counts", torch.zeros(gate_up.experts, dtype=torch.int64, device=router.device), False)
        self.experts, self.shared = nn.ModuleDict({"gate_up": gate_up, "down": down}), shared

    @property
    def stacks(self) -> tuple[ExpertStack, ExpertStack]:
        return self.experts["gate_up"], self.experts["down"]  # type: ignore[return-value]

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input: the experts, the shared one, and the router, which takes plain rows."""
        shared = () if self.shared is None else self.shared.consumers
        return self.stacks[0], *shared, None

    def forward(
        self, x: Activations, positions: torch.Tensor | None = None, router_input: torch.Tensor | None = None
    ) -> Mixed:
        """x [M, H] -> the input of :meth:`project`.

        positions [M] i32: rows below 0 are padding and go to no expert; None: no padding.
        router_input [M, H]: rows that the router reads; None: x.
        """
        gate_up, down = self.stacks
        chosen = positions, self.counts, gate_up.experts, self.top_k, self.normalize
        factors = None if self.factors is None else self.factors.weight
        read = plain(x) if router_input is None else router_input
        ids, weights, gates = route(read, self.router, *chosen, self.router_bias, factors)
        pairs, format, held = ids.numel(), gate_up.format, gate_up.experts_held
        own = ids if held == gate_up.experts else self._own(ids, held)
        plan = plan_experts(own, held, format.tile(gate_up, pairs, held))
        h = format.gate_up(gate_up, in_format(x, gate_up.input_format), plan)  # type: ignore[arg-type]
        if gate_up.rows != WHOLE:
            h = self.ranks.gather(plain(h))
        y = format.down(down, h, plan)
        shared = y[pairs:] if gate_up.rides else None
        if own is not ids:
            y = self._collected(y[:pairs], ids, held)
        if self.shared is not None:
            shared = self._columns(self.shared.down(self.shared(x)))
        return Mixed(y[:pairs], weights, shared, gates if self.gated else None)

    def reference(self, x: torch.Tensor, router_input: torch.Tensor | None = None) -> torch.Tensor:
        """Plain formula in x's dtype, [M, H] -> [M, H], one expert after the other: the tests' oracle."""
        read = x if router_input is None else router_input
        experts, bias = self.stacks[0].experts, None if self.router_bias is None else self.router_bias.to(x.dtype)
        scores = nn.functional.linear(read, self.router.to(x.dtype), bias)
        weights, ids = scores[:, :experts].softmax(-1).topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.factors is not None:
            weights = weights * self.factors.weight.to(x.dtype)[ids]
        out = torch.zeros_like(x)
        for expert in range(experts):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            out[token] += weights[token, choice, None] * self._expert(x[token], expert)
        if self.shared is None and not self.stacks[0].rides:
            return out
        shared = self._expert(x, experts) if self.shared is None else self.shared.reference(x)
        return out + (scores[:, experts:].sigmoid() * shared if self.gated else shared)

    def _expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """One expert's MLP for :meth:`reference`, x [n, H] -> [n, H]."""
        gate_up, down = self.stacks
        biases = [None if stack.bias is None else stack.bias[number].to(x.dtype) for stack in self.stacks]
        gate, up = nn.functional.linear(x, gate_up.weight[number].to(x.dtype), biases[0]).chunk(2, dim=-1)
        alpha, limit, gelu = gate_up.gate
        if limit:  # gpt-oss's clamped SwiGLU
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        gated = nn.functional.gelu(gate, approximate="tanh") if gelu else gate * (alpha * gate).sigmoid()
        return nn.functional.linear(gated * up, down.weight[number].to(x.dtype), biases[1])

    def _own(self, ids: torch.Tensor, held: int) -> torch.Tensor:
        """ids [M, top_k] as indices of this rank's ``held`` experts; ``held``, the index of padding, for other ranks'
        experts."""
        own = ids - self.ranks.index * held
        return own.masked_fill((own < 0) | (own >= held), held)

    def _collected(self, y: torch.Tensor, ids: torch.Tensor, held: int) -> torch.Tensor:
        """y [P, H] of this rank's pairs -> y of all pairs, each row from the rank that has its expert."""
        of_ranks = self.ranks.gather(y).view(len(y), self.ranks.count, -1)
        owner = (ids.view(-1, 1, 1) // held).clamp_max(self.ranks.count - 1).long()
        return of_ranks.gather(1, owner.expand(-1, 1, y.shape[1])).squeeze(1)

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of x [M, H] that this rank sums."""
        down = self.stacks[1]
        if down.rows == WHOLE:
            return x
        start, stop = self.ranks.part(x.shape[1])
        return x[:, start:stop].contiguous()

    def project(self, y: Mixed, residual: torch.Tensor, norm: nn.Module | None) -> tuple[torch.Tensor, Activations]:
        """(residual + the weighted sum, ``norm`` of it); without a norm, the sum twice."""
        if self.stacks[1].rows != WHOLE:  # the sum over choices is per column, so the sum is gathered
            total = self.ranks.gather(combine_experts(*y, self._columns(residual)))
            return total, total if norm is None else norm(total)
        if isinstance(norm, RMSNorm) and norm.input_format is not None:
            input_format = norm.input_format
            return combine_experts_norm_fp8(*y, residual, norm.weight, norm.eps, input_format.group, input_format.keep)
        if isinstance(norm, RMSNorm):
            return combine_experts_norm(*y, residual, norm.weight, norm.eps)
        total = combine_experts(*y, residual)
        return total, total if norm is None else norm(total)

    def output(self, y: Mixed) -> torch.Tensor:
        """The weighted sum alone, [M, H]."""
        rows = self.router.new_zeros(len(y.weights), self.stacks[1].whole_outputs)
        return self.project(y, rows, None)[0]

    @property
    def idle_share(self) -> float:
        """Fraction of the stacks' weights that a token is not multiplied with."""
        gate_up = self.stacks[0]
        return 1 - (self.top_k + gate_up.rides) / (gate_up.experts + gate_up.rides)  # also a rank's average

    def places(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name inside the layer, target) of each checkpoint tensor. Experts are stored fused or one by one."""
        count = self.stacks[0].experts
        for name, rows in (("router", self.router[:count]), ("shared_gate", self.router[count:])):
            if len(rows):
                yield f"{name}.weight", WeightTarget(rows, tuple(rows.shape))
        if self.router_bias is not None:
            yield "router.bias", WeightTarget(self.router_bias[:count], (count,))
        if self.factors is not None:
            yield "factors.", WeightTarget(self.factors.weight, (count,))
        for name, stack in self.experts.items():
            assert isinstance(stack, ExpertStack)
            for kind, place in stack.fused():
                yield f"experts.{name}.{kind}", place
            for expert, projection, kind, place in stack.single():
                yield f"experts.each.{expert}.{projection or name}.{kind}", place
            if stack.rides:
                for projection, kind, place in stack.riding():
                    yield ".".join(filter(None, ("shared", name, projection, kind))), place
        if self.shared is not None:
            for name, linear in (("gate_up", self.shared.gate_up), ("down", self.shared.down)):
                for inside, place in linear.places():
                    yield f"shared.{name}.{inside}", place


def products_per_token(module: nn.Module) -> int:
    """Number of weight elements in ``module`` that a token is multiplied with: of experts, only the chosen ones."""
    total = float(sum(parameter.numel() for parameter in module.parameters()))
    for experts in (each for each in module.modules() if isinstance(each, Experts)):
        total -= experts.idle_share * sum(p.numel() for stack in experts.stacks for p in stack.parameters())
    return round(total)


def prove_experts(modules: Iterable[nn.Module]) -> list[bool]:
    """Run the format's exactness check for each kind of experts among ``modules`` whose format has one. Call it before
    any capture."""
    return [stacks[0].format.prove(*stacks, *sizes) for stacks, sizes in _provable(modules)]


def rehearse_experts(modules: Iterable[nn.Module]) -> None:
    """Launch the kernels of :func:`prove_experts` and ignore the results, to compile them ahead of time."""
    for stacks, sizes in _provable(modules):
        stacks[0].format.rehearse(*stacks, *sizes)


def _provable(modules: Iterable[nn.Module]) -> Iterable[tuple[tuple[Any, Any], tuple[int, int]]]:
    """Yield (stacks, (experts held by a rank, top_k)), once for each kind of stacks."""
    layers = [m for m in modules if isinstance(m, Experts) and hasattr(m.stacks[0].format, "prove")]
    found = {(*((p.shape, p.dtype) for stack in m.stacks for p in stack.parameters()), m.top_k): m for m in layers}
    return [(m.stacks, (m.stacks[0].experts_held, m.top_k)) for m in found.values()]


def expert_counts(model: nn.Module) -> dict[str, list[int]]:
    """Tokens per expert since :func:`reset_expert_counts`, without padding, by path of each module with experts. Waits
    for the device."""
    counts = {path: module.counts for path, module in model.named_modules() if isinstance(module, Experts)}
    if not counts:
        return {}
    sizes = [len(each) for each in counts.values()]
    together = torch.cat(list(counts.values())).cpu().split(sizes)
    return {path: each.tolist() for path, each in zip(counts, together, strict=True)}


def reset_expert_counts(model: nn.Module) -> None:
    """Reset the counts of tokens per expert."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.counts.zero_()
