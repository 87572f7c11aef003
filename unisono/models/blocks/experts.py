"""Spec of a mixture of experts: the number of experts, and how a token chooses some of them."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.distributed.gather import Ranks
from unisono.layers.experts import SILU_EXPERTS, ExpertKind, Experts, ExpertStack
from unisono.layers.formats.base import WHOLE, Share, WeightFormat
from unisono.layers.formats.experts import expert_format
from unisono.models.blocks.layers import MLPSpec
from unisono.models.load.build import Builder, require
from unisono.types import CheckpointError, ConfigError

MOST = 1024
"""Maximum number of experts, set by the kernels of router and sort."""


@dataclass(frozen=True)
class ExpertsSpec:
    """``top_k`` of ``num_experts`` gated MLPs, by softmax over all of them; ties go to the lower id.

    shared_intermediate_size: of an expert that every token uses; 0: none.
    shared_gate: a sigmoid of ``shared_gate(x)`` scales the shared expert.
    normalize: the chosen experts' weights are divided by their sum, which equals the softmax over the chosen.
    kind: variant of the experts, by default with SiLU and without biases.
    router_bias: the router adds a bias.

    Modules, as named by families: ``router``; ``experts.gate_up`` and ``experts.down``, fused [E, 2 I, H] (gate rows
    first) and [E, H, I] or as ``kind`` says, with biases if it has them; ``experts.each.gate``, ``.up`` and ``.down``,
    one by one, with a second ``*`` of the checkpoint's name for the expert's number; ``shared.gate_up.gate``,
    ``shared.gate_up.up``, ``shared.down``; ``shared_gate``. The loader takes fused or single tensors, whichever a
    checkpoint has; those with biases are fused.

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

    def __post_init__(self) -> None:
        count, top_k = self.num_experts, self.top_k
        require(1 <= count <= MOST, "num_experts", count, f"it must be 1 to {MOST}")
        require(1 <= top_k <= count, "num_experts_per_tok", top_k, f"it must be 1 to num_experts={count}")
        require(self.intermediate_size >= 1, "moe_intermediate_size", self.intermediate_size, "it must be at least 1")
        shared = self.shared_intermediate_size
        require(shared >= 0, "shared_expert_intermediate_size", shared, "it must be at least 0")
        require(self.activation == "silu", "hidden_act", self.activation, "only 'silu' is supported")

    def build(self, builder: Builder) -> Experts:
        size, hidden, shared = self.intermediate_size, builder.hidden_size, self.shared_intermediate_size
        each, apart = builder.at("experts" if self.kind.bias else "experts.each.0"), builder.at("shared")
        sizes = {"gate_up": size, "down": hidden} if self.kind.bias else {"gate": size, "up": size, "down": hidden}
        format = _one_format(each, *sizes)
        rides = shared == size and {apart.format(apart.at(n).path) for n in _SHARED} == {format}
        common = rides, builder.dtype, builder.device, expert_format(format, self.kind != SILU_EXPERTS)
        ranks, share, rows = builder.ranks, WHOLE, WHOLE
        if ranks.whole_experts:
            share = self._of_experts(ranks)
        elif ranks.count > 1 and each.can_divide(sizes):
            rows = builder.share
        return Experts(
            ExpertStack(self.num_experts, hidden, {"gate": size, "up": size}, *common, share, rows, self.kind),
            ExpertStack(self.num_experts, size, {"": hidden}, *common, share, rows, self.kind),
            self.top_k,
            self.normalize,
            MLPSpec(shared).build(apart) if shared and not rides else None,
            self.shared_gate and shared > 0,
            ranks,
            self.router_bias,
        )

    def of(self, ranks: Ranks) -> ExpertsSpec:
        """The spec itself. Raises ConfigError if the experts cannot be divided among the ranks."""
        if ranks.whole_experts:
            self._of_experts(ranks)
        return self

    def _of_experts(self, ranks: Ranks) -> Share:
        """This rank's share of the experts. Raises ConfigError if they cannot be divided."""
        if not ranks.divides(self.num_experts):
            raise ConfigError(
                f"--enable-expert-parallel: {self.num_experts} experts cannot be divided among {ranks.count} ranks: "
                "give another --tensor-parallel-size, or leave --enable-expert-parallel out."
            )
        return Share(ranks.index, ranks.count)


_SHARED = ("gate_up.gate", "gate_up.up", "down")


def _one_format(builder: Builder, *names: str) -> WeightFormat:
    """The common format of an expert's projections."""
    found = {name: builder.format(builder.at(name).path) for name in names}
    if len(set(found.values())) > 1:
        kinds = ", ".join(f"{name} {format.name}" for name, format in found.items())
        raise CheckpointError(f"{builder.path}: the projections of an expert are stored in several formats: {kinds}.")
    return found[names[0]]
