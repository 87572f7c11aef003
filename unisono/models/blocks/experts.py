"""Spec of a mixture of experts: the number of experts, and how a token chooses some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.distributed.gather import Ranks
from unisono.kernels.moe.scored_router import RouterScores
from unisono.kernels.norm.activation import GATES, SILU
from unisono.layers.expert_stacks import SILU_EXPERTS, ExpertKind, ExpertStack
from unisono.layers.experts import Experts
from unisono.layers.formats.base import WHOLE, Share, WeightFormat
from unisono.layers.formats.experts import expert_format
from unisono.models.blocks.layers import MLPSpec
from unisono.models.blocks.plain_mlp import PlainMLPSpec
from unisono.models.load.build import Builder, require
from unisono.types import CheckpointError, ConfigError

MOST = 1024
"""Maximum number of experts, set by the kernels of router and sort."""


@dataclass(frozen=True)
class ExpertsSpec:
    """``top_k`` of ``num_experts`` gated MLPs, by softmax over all of them; ties go to the lower id.

    shared_intermediate_size: of an expert that every token uses; 0: none.
    shared_bias: its products have biases; of experts without a gate alone.
    shared_gate: a sigmoid of ``shared_gate(x)`` scales the shared expert.
    normalize: the chosen experts' weights are divided by their sum.
    kind: variant of the experts, by default with the gate of ``activation`` and without biases. Experts without a gate
        have the activation "relu2", and so has the shared one.
    router_bias: the router adds a bias to the logits; it changes the choice and the weights.
    router_factors: each expert's weight is multiplied by a learnt number, after normalisation.
    weighs_inputs: an expert's input, not its output, is multiplied by its weight; for one expert a token alone.
    scores: another score than the softmax, a correction of the choice, groups and a scale
        (:class:`unisono.kernels.moe.scored_router.RouterScores`); None: softmax alone.

    Modules, as named by families: ``router``; ``experts.gate_up`` and ``experts.down``, fused [E, 2 I, H] (gate rows
    first) and [E, H, I] or as ``kind`` says, with biases if it has them; ``experts.each.gate``, ``.up`` and ``.down``,
    one by one, with a second ``*`` of the checkpoint's name for the expert's number; ``shared.gate_up.gate``,
    ``shared.gate_up.up``, ``shared.down``; ``shared_gate``; ``correction``. The loader takes fused or single tensors,
    whichever a checkpoint has; those with biases are fused.

    A new rule of choice is a field of ``RouterScores``, with its branch in the kernel and the CPU twin of
    ``kernels/moe/scored_router.py`` and in the tests' oracle (``layers/experts.py``, ``_chosen``). Its fields of
    config.json have to be allowed (``config/preflight/formula.py``).

    Raises CheckpointError for values that cannot be computed.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    normalize: bool = True
    activation: str = "silu"
    kind: ExpertKind = SILU_EXPERTS
    router_bias: bool = False
    router_factors: bool = False
    scores: RouterScores | None = None
    shared_bias: bool = False
    weighs_inputs: bool = False

    def __post_init__(self) -> None:
        count, top_k = self.num_experts, self.top_k
        require(1 <= count <= MOST, "num_experts", count, f"it must be 1 to {MOST}")
        require(1 <= top_k <= count, "num_experts_per_tok", top_k, f"it must be 1 to num_experts={count}")
        require(self.intermediate_size >= 1, "moe_intermediate_size", self.intermediate_size, "it must be at least 1")
        shared = self.shared_intermediate_size
        require(shared >= 0, "shared_expert_intermediate_size", shared, "it must be at least 0")
        known = GATES if self.kind.gated else ("relu2",)
        require(self.activation in known, "hidden_act", self.activation, f"supported are {', '.join(known)}")
        require(not (self.shared_bias and self.kind.gated), "mlp_bias", True, "a shared expert with a gate has none")
        self._check_groups()
        rule = "one expert a token is computed where its input is multiplied by its weight"
        require(not self.weighs_inputs or top_k == 1, "num_experts_per_tok", top_k, rule)
        if self.kind.gated and self.kind.gate == SILU:
            object.__setattr__(self, "kind", replace(self.kind, gate=GATES[self.activation]))

    def build(self, builder: Builder) -> Experts:
        size, hidden, shared = self.intermediate_size, builder.hidden_size, self.shared_intermediate_size
        each, apart = builder.at("experts" if self.kind.bias else "experts.each.0"), builder.at("shared")
        first, gated = {"gate": size, "up": size} if self.kind.gated else {"up": size}, self.kind.gated
        sizes = {"gate_up": size, "down": hidden} if self.kind.bias else {**first, "down": hidden}
        format = _one_format(each, *sizes)
        may_ride = gated and not self.weighs_inputs and shared == size
        rides = may_ride and {apart.format(apart.at(n).path) for n in _SHARED} == {format}
        gelu = self.kind.gate.gelu
        gate = SILU if gelu else self.kind.gate
        biased = replace(self.kind, gate=gate, transposed=False, gated=True) != SILU_EXPERTS
        found = expert_format(format, biased, gelu, gated)
        common = rides, builder.dtype, builder.device, found
        ranks, share, rows = builder.ranks, WHOLE, WHOLE
        if ranks.whole_experts:
            if getattr(found, "whole_stack", False):
                raise ConfigError(
                    f"--enable-expert-parallel: {format.name} has calibrated scales of activations, of which the "
                    "largest serves all experts of a layer: leave --enable-expert-parallel out."
                )
            share = self._of_experts(ranks, ranks.order_of(builder.path))
        elif ranks.count > 1 and each.can_divide(sizes):
            rows = builder.share
        made = Experts(
            ExpertStack(self.num_experts, hidden, first, *common, share, rows, self.kind),
            ExpertStack(self.num_experts, size, {"": hidden}, *common, share, rows, self.kind),
            self.top_k,
            self.normalize,
            self._shared().build(apart) if shared and not rides else None,
            self.shared_gate and shared > 0,
            ranks,
            self.router_bias,
            self.router_factors,
            self.scores,
        )
        made.weighs_inputs = self.weighs_inputs
        if share.order:
            made.set_placement(share.order)
        return made

    def _shared(self) -> MLPSpec | PlainMLPSpec:
        """The shared expert, if it is not computed as one of the routed experts."""
        size = self.shared_intermediate_size
        if self.kind.gated:
            return MLPSpec(size, activation=self.activation)
        return PlainMLPSpec(size, self.shared_bias, self.activation)

    def _check_groups(self) -> None:
        """Raise CheckpointError for groups that do not divide the experts or hold too few."""
        count, s = self.num_experts, self.scores
        if s is None:
            return
        require(s.groups >= 1 and count % s.groups == 0, "n_group", s.groups, f"it must divide {count} experts")
        require(1 <= s.top_groups <= s.groups, "topk_group", s.top_groups, f"it must be 1 to n_group={s.groups}")
        size = count // s.groups
        rule = f"{s.top_groups} groups of {size} experts must hold num_experts_per_tok={self.top_k}"
        require(s.top_groups * size >= self.top_k, "topk_group", s.top_groups, rule)
        rule = f"a group of {size} experts must have {s.group_best} whose scores are added"
        require(s.groups == 1 or size >= s.group_best, "n_group", s.groups, rule)
        require(not self.router_factors, "per_expert_scale", True, "routers with scores have no factors")

    def of(self, ranks: Ranks) -> ExpertsSpec:
        """The spec itself. Raises ConfigError if the experts cannot be divided among the ranks."""
        if ranks.whole_experts:
            self._of_experts(ranks)
        return self

    def _of_experts(self, ranks: Ranks, order: tuple[int, ...] = ()) -> Share:
        """This rank's share of the experts. Raises ConfigError if they cannot be divided."""
        if not ranks.divides(self.num_experts):
            raise ConfigError(
                f"--enable-expert-parallel: {self.num_experts} experts cannot be divided among {ranks.count} ranks: "
                "give another --tensor-parallel-size, or leave --enable-expert-parallel out."
            )
        if order and len(order) != self.num_experts:
            raise ConfigError(f"--expert-placement: it orders {len(order)} experts of a layer with {self.num_experts}.")
        return Share(ranks.index, ranks.count, order=order)


_SHARED = ("gate_up.gate", "gate_up.up", "down")


def _one_format(builder: Builder, *names: str) -> WeightFormat:
    """The common format of an expert's projections."""
    found = {name: builder.format(builder.at(name).path) for name in names}
    if len(set(found.values())) > 1:
        kinds = ", ".join(f"{name} {format.name}" for name, format in found.items())
        raise CheckpointError(f"{builder.path}: the projections of an expert are stored in several formats: {kinds}.")
    return found[names[0]]
