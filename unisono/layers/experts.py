"""Mixture of experts: a router, stacks of gated MLPs of which each token uses some, and optionally a shared one.

Built by ``models``, filled by its loader. A shared expert with the experts' size and format is stored as the stacks'
last weight ("riding"); any other is a gated MLP of its own. A token's sum follows the order of its choices, the shared
expert last.

Shapes: M tokens, H features, E experts, I features of an expert, P = M * top_k pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from unisono.distributed.gather import ALONE, Ranks
from unisono.kernels.moe.combine import combine_experts, combine_experts_norm, combine_experts_norm_fp8
from unisono.kernels.moe.plan import plan_experts
from unisono.kernels.moe.router import Routing, route
from unisono.kernels.moe.scored_router import RouterScores, route_scored
from unisono.layers.activations import Activations, in_format, plain
from unisono.layers.expert_stacks import ExpertStack
from unisono.layers.formats.base import WHOLE, WeightTarget
from unisono.layers.linear import Linear
from unisono.layers.mlp import GatedMLP
from unisono.layers.norm import Factor, RMSNorm


class SharedMLP(Protocol):
    """A shared expert that has weights of its own: a feed-forward (``models/blocks/layers.py``)."""

    down: Linear

    @property
    def consumers(self) -> tuple[object, ...]: ...

    def __call__(self, x: Activations) -> Any: ...

    def reference(self, x: torch.Tensor) -> torch.Tensor: ...


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
    scores: how experts are scored and chosen; None: by softmax. With a ``correction`` they have one fp32 number each.
    counts [E]: tokens per expert, see :func:`expert_counts`.
    physical_ids [E + 1] int32: index of each expert in the stacks of all ranks, set by :meth:`set_placement`; None: its
        id.
    observer: called with the choices [M, top_k] int32 of each pass; None: not called.
    ranks: processes that hold the experts together; a rank computes its own part.
    weighs_inputs: the input of a token's expert is multiplied by its weight, and its output is not.
    """

    counts: torch.Tensor
    physical_ids: torch.Tensor | None
    weighs_inputs = False
    observer: Callable[[torch.Tensor], None] | None = None

    def __init__(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        top_k: int,
        normalize: bool,
        shared: SharedMLP | None = None,
        gated: bool = False,
        ranks: Ranks = ALONE,
        router_bias: bool = False,
        router_factors: bool = False,
        scores: RouterScores | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.normalize, self.gated, self.ranks, self.scores = top_k, normalize, gated, ranks, scores
        router = torch.empty(
            gate_up.experts + gated, gate_up.inputs, dtype=gate_up.dtype, device=next(gate_up.parameters()).device
        )
        self.router = nn.Parameter(router, requires_grad=False)
        self.router_bias = nn.Parameter(router.new_zeros(len(router)), requires_grad=False) if router_bias else None
        self.factors = Factor(gate_up.experts, gate_up.dtype, router.device) if router_factors else None
        corrected = scores is not None and scores.correction
        correction = torch.zeros(gate_up.experts, dtype=torch.float32, device=router.device) if corrected else None
        self.correction = None if correction is None else nn.Parameter(correction, requires_grad=False)
        self.register_buffer("physical_ids", None, False)
        self.register_buffer("counts", torch.zeros(gate_up.experts, dtype=torch.int64, device=router.device), False)
        self.experts, self.shared = nn.ModuleDict({"gate_up": gate_up, "down": down}), shared

    @property
    def stacks(self) -> tuple[ExpertStack, ExpertStack]:
        return self.experts["gate_up"], self.experts["down"]  # type: ignore[return-value]

    @property
    def consumers(self) -> tuple[object, ...]:
        """Consumers of the block's input: the experts, the shared one, and the router, which takes plain rows."""
        shared = () if self.shared is None else self.shared.consumers
        return (*shared, None) if self.weighs_inputs else (self.stacks[0], *shared, None)

    def forward(
        self, x: Activations, positions: torch.Tensor | None = None, router_input: torch.Tensor | None = None
    ) -> Mixed:
        """x [M, H] -> the input of :meth:`project`.

        positions [M] i32: rows below 0 are padding and go to no expert; None: no padding.
        router_input [M, H]: rows that the router reads; None: x.
        """
        gate_up, down = self.stacks
        ids, weights, gates = self._route(plain(x) if router_input is None else router_input, positions)
        if self.observer is not None:
            self.observer(ids)
        rows = x
        if self.weighs_inputs:
            x = plain(x) * weights.to(plain(x).dtype)
            weights = (weights > 0).to(weights.dtype)  # 0 for padding
        pairs, format, held = ids.numel(), gate_up.format, gate_up.experts_held
        physical = ids if self.physical_ids is None else self.physical_ids.index_select(0, ids.flatten()).view_as(ids)
        own = ids if held == gate_up.experts else self._own(physical, held)
        plan = plan_experts(own, held, format.tile(gate_up, pairs, held))
        h = format.gate_up(gate_up, in_format(x, gate_up.input_format), plan)  # type: ignore[arg-type]
        if gate_up.rows != WHOLE:
            h = self.ranks.gather(plain(h))
        y = format.down(down, h, plan)
        shared = y[pairs:] if gate_up.rides else None
        if own is not ids:
            y = self._collected(y[:pairs], physical, held)
        if self.shared is not None:
            shared = self._columns(self.shared.down(self.shared(rows)))
        return Mixed(y[:pairs], weights, shared, gates if self.gated else None)

    def reference(self, x: torch.Tensor, router_input: torch.Tensor | None = None) -> torch.Tensor:
        """Plain formula in x's dtype, [M, H] -> [M, H], one expert after the other: the tests' oracle."""
        read = x if router_input is None else router_input
        experts, bias = self.stacks[0].experts, None if self.router_bias is None else self.router_bias.to(x.dtype)
        scores = nn.functional.linear(read, self.router.to(x.dtype), bias)
        weights, ids = self._chosen(scores[:, :experts])
        if self.factors is not None:
            weights = weights * self.factors.weight.to(x.dtype)[ids]
        out = torch.zeros_like(x)
        for expert in range(experts):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            weight = weights[token, choice, None]
            if self.weighs_inputs:
                out[token] += self._expert(weight * x[token], expert)
            else:
                out[token] += weight * self._expert(x[token], expert)
        if self.shared is None and not self.stacks[0].rides:
            return out
        shared = self._expert(x, experts) if self.shared is None else self.shared.reference(x)
        return out + (scores[:, experts:].sigmoid() * shared if self.gated else shared)

    def _route(self, x: torch.Tensor, positions: torch.Tensor | None) -> Routing:
        """Route x [M, H]; see ``kernels/moe/router.py``."""
        chosen = positions, self.counts, self.stacks[0].experts, self.top_k, self.normalize
        if self.scores is not None:
            return route_scored(x, self.router, self.correction, *chosen, self.scores, self.router_bias)
        factors = None if self.factors is None else self.factors.weight
        return route(x, self.router, *chosen, self.router_bias, factors)

    def _chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, ids) [M, top_k] of logits [M, E], for :meth:`reference`."""
        s = self.scores or RouterScores(sigmoid=False)
        if s.margin:
            return self._near(logits, s.margin)
        shares = logits.sigmoid() if s.sigmoid else logits.softmax(-1)
        choice = shares if self.correction is None else shares + self.correction.to(logits.dtype)
        if s.groups > 1:
            grouped = choice.unflatten(1, (s.groups, -1))
            best = grouped.topk(s.group_best, dim=2)[0].sum(2).topk(s.top_groups)[1]
            others = torch.ones_like(grouped, dtype=torch.bool).scatter_(
                1, best[..., None].expand(-1, -1, grouped.shape[2]), False
            )
            choice = grouped.masked_fill(others, -torch.inf).flatten(1)
        ids = choice.topk(self.top_k)[1]
        weights = shares.gather(1, ids)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * s.scale, ids

    def _near(self, logits: torch.Tensor, margin: float) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_chosen` by ``RouterScores.margin``: a softmax for each choice, over the near ones of those left."""
        weights, ids, left = [], [], logits
        for _ in range(self.top_k):
            top, best = left.max(-1, keepdim=True)
            far = (top - logits) / torch.maximum(logits.abs(), top) > margin
            weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
            ids.append(best)
            left = left.scatter(1, best, -torch.inf)
        return torch.cat(weights, 1), torch.cat(ids, 1)

    def _expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """One expert's MLP for :meth:`reference`, x [n, H] -> [n, H]."""
        gate_up, down = self.stacks
        biases = [None if stack.bias is None else stack.bias[number].to(x.dtype) for stack in self.stacks]
        first = nn.functional.linear(x, gate_up.weight[number].to(x.dtype), biases[0])
        if not gate_up.gated:
            return nn.functional.linear(first.relu().square(), down.weight[number].to(x.dtype), biases[1])
        gate, up = first.chunk(2, dim=-1)
        alpha, limit, gelu = gate_up.gate
        if limit:  # gpt-oss's clamped SwiGLU
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        gated = nn.functional.gelu(gate, approximate="tanh") if gelu else gate * (alpha * gate).sigmoid()
        return nn.functional.linear(gated * up, down.weight[number].to(x.dtype), biases[1])

    def set_placement(self, order: tuple[int, ...]) -> None:
        """Hold the experts in this order, equally many on each rank. The order does not affect the output."""
        physical = torch.arange(len(order) + 1, dtype=torch.int32)  # the last is that of padding
        physical[torch.tensor(order)] = torch.arange(len(order), dtype=torch.int32)
        self.physical_ids = physical.to(self.router.device)

    def _own(self, ids: torch.Tensor, held: int) -> torch.Tensor:
        """Convert physical ids [M, top_k] to indices of this rank's ``held`` experts; experts of other ranks have the
        index of padding, ``held``.
        """
        own = ids - self.ranks.index * held
        return own.masked_fill((own < 0) | (own >= held), held)

    def _collected(self, y: torch.Tensor, ids: torch.Tensor, held: int) -> torch.Tensor:
        """Gather y [P, H] from all ranks and take each pair's row from the rank that holds its expert. ids: physical
        ids."""
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

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name inside the layer, target) of each checkpoint tensor. Experts are stored fused or one by one."""
        count = self.stacks[0].experts
        for name, rows in (("router", self.router[:count]), ("shared_gate", self.router[count:])):
            if len(rows):
                yield f"{name}.weight", WeightTarget(rows, tuple(rows.shape))
        if self.router_bias is not None:
            yield "router.bias", WeightTarget(self.router_bias[:count], (count,))
        if self.factors is not None:
            yield "factors.", WeightTarget(self.factors.weight, (count,))
        if self.correction is not None:
            yield "correction.", _Flat(self.correction, (count,), also=((1, count),))
        for name, stack in self.experts.items():
            assert isinstance(stack, ExpertStack)
            for kind, target in stack.fused():
                yield f"experts.{name}.{kind}", target
            for expert, projection, kind, target in stack.single():
                yield f"experts.each.{expert}.{projection or name}.{kind}", target
            if stack.rides:
                for projection, kind, target in stack.riding():
                    yield ".".join(filter(None, ("shared", name, projection, kind))), target
        if self.shared is not None:
            first = "gate_up" if isinstance(self.shared, GatedMLP) else "up"
            for name in (first, "down"):
                for inside, target in getattr(self.shared, name).weight_targets():
                    yield f"shared.{name}.{inside}", target


class _Flat(WeightTarget):
    """Target of a stored vector that may have a leading dimension of 1."""

    def fill(self, stored: torch.Tensor) -> None:
        self.parameter.copy_(stored.flatten())


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
