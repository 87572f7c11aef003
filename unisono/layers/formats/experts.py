"""Weight formats of experts: how a stack of E weights is stored, read from a checkpoint, and applied.

``layers/experts.py`` delegates to an :class:`ExpertFormat` as ``Linear`` does to a ``WeightFormat``. The two stacks of
a layer, gate with up and down, have the same format. The attribute ``experts`` of a weight format says how it stores
stacks; :func:`expert_format` finds it.

* **Stored**: :meth:`ExpertFormat.tensors` declares the tensors of *one* weight [N, K] (``StoredTensor``: a dtype, and
  how many outputs and inputs a value serves). A stack's parameter of that kind is [E (+ 1), rows, columns], the rows of
  gate before those of up; the extra weight is a riding shared expert.
* **Read**: from single tensors (``experts.7.gate_proj.<kind>``), each into its rows, or from a fused one
  (``experts.gate_up_proj``, for other kinds followed by ``kind.removeprefix("weight")``), which is split. Both pass
  through :meth:`ExpertFormat.read`, so that a format can repack: it gets one projection of one expert.
* **Applied**: :meth:`ExpertFormat.gate_up` and :meth:`ExpertFormat.down`. The plan maps each pair of a token and an
  expert to its expert; a format's kernel reads its rows by ``tile_rows``, ``tile_pairs`` and ``tokens_of`` of
  ``kernels/moe/plan.py``, its CPU twin by ``pairs_by_expert`` of ``kernels/moe/experts.py``.

Shapes: M tokens, H features, I of an expert, P = M * top_k pairs, N outputs and K inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unisono.kernels.moe.experts import (
    exact_experts,
    expert_down,
    expert_gate_up,
    expert_tile,
    expert_up,
)
from unisono.kernels.moe.plan import ExpertPlan
from unisono.kernels.norm.activation import SILU, ExpertGate
from unisono.layers.activations import Operand
from unisono.layers.formats.base import FLOATS, PLAIN, Share, StoredTensor, WeightFormat
from unisono.types import CheckpointError


class ExpertWeights(Protocol):
    """Attributes of a stack that every format may read, besides the parameters it declared.

    dtype: of activations.
    inputs: K.
    outputs: N, of gate and up together.
    bias: [E (+ 1), N], if the experts have biases.
    gate: how their gate and up are combined.
    gated: False: the stack has ``up`` alone, and its product ReLU².
    rows: this rank's share of each projection's outputs.
    """

    dtype: torch.dtype
    inputs: int
    outputs: int
    gate: ExpertGate
    gated: bool
    rows: Share

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def weight(self) -> torch.Tensor: ...


class ExpertFormat(Protocol):
    """Storage and products of a stack of weights [E, N, K]. One object serves all stacks of its kind.

    A pair's result may depend on its token's row and its expert's weight only: never on other rows, on their number, on
    the plan or its tile. A format whose products add biases and compute every :class:`ExpertGate` has an attribute
    ``biases`` that is true; the others get neither, except GELU's gate if their attribute ``gelu`` is true. One that
    computes experts without a gate has a true ``ungated``. One whose ``whole_stack`` is true reads tensors of all
    experts for each, so that ranks cannot hold whole experts. One that has several kernels for a product has ``prove``
    and ``rehearse``, as :class:`PlainExperts`: the first compares their bits when an engine starts.
    """

    @property
    def name(self) -> str: ...

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        """The tensors of one weight by the last part of their checkpoint names; dtype: of activations."""
        ...

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Value of the parameter's rows, from one projection of one expert. See ``WeightFormat.read``."""
        ...

    def tile(self, stack: ExpertWeights, pairs: int, experts: int) -> int:
        """Rows of a tile, in both products of a pass with this number of pairs. stack: of gate and up."""
        ...

    def gate_up(self, stack: ExpertWeights, x: torch.Tensor, plan: ExpertPlan) -> Operand:
        """x [M, H] -> ``silu(gate(x)) * up(x)`` of each pair, in x's dtype: [P, I], or [P + M, I] with a shared expert.

        Rounded after each product, after SiLU, and after its product with the other half. If a rank has all of gate's
        outputs, the result may be quantised as :meth:`down` reads it.
        """
        ...

    def down(self, stack: ExpertWeights, h: Any, plan: ExpertPlan) -> torch.Tensor:
        """Result of :meth:`gate_up` -> each row times its own expert's weight, [P (+ M), H] in h's dtype."""
        ...


@dataclass(frozen=True)
class PlainExperts:
    """Floating-point weights in the activations' dtype."""

    name: str = "plain"
    biases = True
    ungated = True

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        return {"weight": StoredTensor(dtype, FLOATS)}

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        return stored

    def tile(self, stack: ExpertWeights, pairs: int, experts: int) -> int:
        return expert_tile(pairs, experts, stack.weight, _is_plain(stack), stack.gated)

    def prove(self, gate_up: ExpertWeights, down: ExpertWeights, experts: int, top_k: int) -> bool:
        """See :data:`unisono.kernels.moe.experts.exact_experts`; False where the experts have more than weights."""
        return _is_plain(gate_up) and exact_experts.prove(gate_up.weight, down.weight, experts, top_k, gate_up.gated)

    def rehearse(self, gate_up: ExpertWeights, down: ExpertWeights, experts: int, top_k: int) -> None:
        if _is_plain(gate_up):
            exact_experts.rehearse(gate_up.weight, down.weight, experts, top_k, gate_up.gated)

    def gate_up(self, stack: ExpertWeights, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        if not stack.gated:
            return expert_up(x, stack.weight, plan)
        return expert_gate_up(x, stack.weight, plan, stack.bias, stack.gate)

    def down(self, stack: ExpertWeights, h: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        return expert_down(h, stack.weight, plan, stack.bias)


def _is_plain(stack: ExpertWeights) -> bool:
    """True if a stack of gate and up has no biases and SiLU's gate, or none."""
    return stack.bias is None and stack.gate == SILU


PLAIN_EXPERTS = PlainExperts()


def expert_format(format: WeightFormat, biases: bool = False, gelu: bool = False, gated: bool = True) -> ExpertFormat:
    """Expert format of a weight format. biases: the experts have biases, or a clamped gate. gelu: their gate is GELU's.
    gated: they have a gate.

    Raises CheckpointError if the format does not store stacks, or does not compute these.
    """
    found = PLAIN_EXPERTS if format is PLAIN else getattr(format, "experts", None)
    if found is None:
        raise CheckpointError(f"weights of experts in format {format.name!r} are not supported: it has no `experts`.")
    if not gated and not getattr(found, "ungated", False):
        raise CheckpointError(
            f"weights of experts in format {format.name!r} are not supported where experts have no gate (ReLU²): plain "
            "weights, fp8, NVFP4 and integers without quantised activations are."
        )
    every_gate = getattr(found, "biases", False)
    if (biases and not every_gate) or (gelu and not (every_gate or getattr(found, "gelu", False))):
        raise CheckpointError(
            f"weights of experts in format {format.name!r} are not supported where experts have biases or a clamped "
            "SwiGLU: plain weights and MXFP4 are."
        )
    return found
