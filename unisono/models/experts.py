"""A mixture of experts as data: a feed-forward whose spec says how many experts there are and which a token takes."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.layers.expert_formats import expert_format
from unisono.layers.experts import Experts, Stack
from unisono.layers.formats import WeightFormat
from unisono.models.blocks import MLPSpec
from unisono.models.build import Builder, require
from unisono.types import CheckpointError

MOST = 1024
"""Experts that the router's kernel chooses from, and the sort counts."""


@dataclass(frozen=True)
class ExpertsSpec:
    """``top_k`` of ``num_experts`` gated MLPs with SiLU, by softmax over all of them; ties go to the lower id.

    shared_intermediate_size: of an expert that every token takes; 0: there is none. shared_gate: a sigmoid of
    ``shared_gate(x)`` scales it. normalize: the weights of the chosen are divided by their sum.

    Modules, as families name them: ``router``; ``experts.gate_up`` and ``experts.down``, fused [E, 2 I, H] (gate rows
    first) and [E, H, I]; ``experts.each.gate``, ``.up`` and ``.down``, one by one, where a second ``*`` of the
    checkpoint's name is the expert's number; ``shared.gate_up.gate``, ``shared.gate_up.up``, ``shared.down``;
    ``shared_gate``. The loader takes fused or single tensors, whichever a checkpoint holds.

    Raises CheckpointError for values that cannot be computed.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    normalize: bool = True
    activation: str = "silu"

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
        each, apart = builder.at("experts.each.0"), builder.at("shared")
        format = _one_format(each, "gate", "up", "down")
        rides = shared == size and {apart.format(apart.at(n).path) for n in _SHARED} == {format}
        common = rides, builder.dtype, builder.device, expert_format(format)
        return Experts(
            Stack(self.num_experts, hidden, {"gate": size, "up": size}, *common),
            Stack(self.num_experts, size, {"": hidden}, *common),
            self.top_k,
            self.normalize,
            MLPSpec(shared).build(apart) if shared and not rides else None,
            self.shared_gate and shared > 0,
        )


_SHARED = ("gate_up.gate", "gate_up.up", "down")


def _one_format(builder: Builder, *names: str) -> WeightFormat:
    """The format of an expert's projections, which is one."""
    found = {name: builder.format(builder.at(name).path) for name in names}
    if len(set(found.values())) > 1:
        kinds = ", ".join(f"{name} {format.name}" for name, format in found.items())
        raise CheckpointError(f"{builder.path}: the projections of an expert are stored in several formats: {kinds}.")
    return found[names[0]]
