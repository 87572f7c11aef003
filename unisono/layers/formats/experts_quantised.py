"""Stacks of experts in fp8, int8, integers, MXFP4 and NVFP4: stored as in a linear layer, and applied by a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from unisono.kernels.gemm.fp8_quantize import GROUP, quantize
from unisono.kernels.moe.fp8 import (
    exact_fp8_experts,
    expert_fp8_down,
    expert_fp8_gate_up,
    expert_fp8_gate_up_fp8,
    expert_fp8_up,
    fp8_expert_tile,
    fp8_tile_rows,
)
from unisono.kernels.moe.gluon import TILE_PAIRS
from unisono.kernels.moe.int8 import expert_int8_down, expert_int8_gate_up, int8_tile_rows
from unisono.kernels.moe.integers import (
    exact_int4_experts,
    expert_integer_down,
    expert_integer_gate_up,
    expert_integer_up,
    packed_tile_rows,
)
from unisono.kernels.moe.mxfp4 import expert_mxfp4_down, expert_mxfp4_gate_up
from unisono.kernels.moe.nvfp4 import exact_nvfp4_experts, expert_nvfp4_down, expert_nvfp4_gate_up, expert_nvfp4_up
from unisono.kernels.moe.packed_gluon import PackedExperts
from unisono.kernels.moe.plan import ExpertPlan
from unisono.kernels.norm.activation import SILU
from unisono.layers.activations import InputFormat, Operand
from unisono.layers.formats.base import WHOLE, StoredTensor
from unisono.layers.formats.experts import ExpertWeights


class Weights(Protocol):
    """Part of a weight format used by the expert formats here, besides its products' operands."""

    @property
    def name(self) -> str: ...
    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]: ...
    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]: ...


class Fp8Weights(Weights, Protocol):
    @property
    def fixed_kind(self) -> str | None:
        """Name of the parameter with calibrated scales of activations; None: they are computed."""
        ...

    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales, from the parameters of a layer or of a stack."""
        ...


class Int8Weights(Weights, Protocol):
    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales by output, from the parameters of a stack."""
        ...


class IntegerWeights(Weights, Protocol):
    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
        """Weight, scales, zeros and group, from the parameters of a layer or of a stack."""
        ...


class MXFP4Weights(Weights, Protocol):
    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales, from the parameters of a stack."""
        ...


class NVFP4Weights(Weights, Protocol):
    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight, scales and multipliers, from the parameters of a layer or of a stack."""
        ...


@dataclass(frozen=True)
class _Stacks:
    """A stack stored as ``weights`` stores one weight."""

    weights: Weights

    @property
    def name(self) -> str:
        return self.weights.name

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        return self.weights.tensors(dtype)

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        return self.weights.read(kind, stored)


@dataclass(frozen=True)
class Fp8Experts(_Stacks):
    """e4m3 stacks with scales per block or per output. With calibrated scales of activations, the largest of a stack
    serves all its experts."""

    weights: Fp8Weights
    gelu = True
    ungated = True

    @property
    def whole_stack(self) -> bool:
        """True if a rank needs the tensors of all experts."""
        return self.weights.fixed_kind is not None

    def input_format(self, stack: ExpertWeights) -> InputFormat | None:
        """Input format of the product with a pass's tokens: see ``layers/activations.py``."""
        if self.weights.fixed_kind:
            return None
        return InputFormat(GROUP if self.weights.operands(stack)[1].dim() == 3 else 0)

    def tile(self, stack: ExpertWeights, pairs: int, experts: int) -> int:
        if stack.gate.gelu or not stack.gated:  # the kernel of prompts computes SiLU's gate only
            return fp8_tile_rows(pairs, experts)
        return fp8_expert_tile(pairs, experts, self.weights.operands(stack), stack.dtype)

    def prove(self, gate_up: ExpertWeights, down: ExpertWeights, experts: int, top_k: int) -> bool:
        """See :data:`unisono.kernels.moe.fp8.exact_fp8_experts`."""
        if gate_up.gate.gelu or not gate_up.gated:
            return False
        stacks = self.weights.operands(gate_up), self.weights.operands(down)
        return exact_fp8_experts.prove(*stacks, gate_up.dtype, experts, top_k)

    def rehearse(self, gate_up: ExpertWeights, down: ExpertWeights, experts: int, top_k: int) -> None:
        if gate_up.gate.gelu or not gate_up.gated:
            return
        stacks = self.weights.operands(gate_up), self.weights.operands(down)
        exact_fp8_experts.rehearse(*stacks, gate_up.dtype, experts, top_k)

    def gate_up(self, stack: ExpertWeights, x: Operand, plan: ExpertPlan) -> Operand:
        """Quantised where the kernel of prompts can, and the ranks' parts are not gathered."""
        weight, scales = self.weights.operands(stack)
        x = self._calibrated(stack, x)
        if not stack.gated:
            return expert_fp8_up(x, weight, scales, plan)
        if plan.tile == TILE_PAIRS and scales.dim() == 3 and stack.rows == WHOLE:
            return expert_fp8_gate_up_fp8(x, weight, scales, plan)
        return expert_fp8_gate_up(x, weight, scales, plan, stack.gate.gelu)

    def down(self, stack: ExpertWeights, h: Operand, plan: ExpertPlan) -> torch.Tensor:
        return expert_fp8_down(self._calibrated(stack, h), *self.weights.operands(stack), plan)

    def _calibrated(self, stack: ExpertWeights, x: Operand) -> Operand:
        """x, quantised with the stack's calibrated scale if it has one."""
        kind = self.weights.fixed_kind
        return quantize(x, 0, getattr(stack, kind)) if kind and isinstance(x, torch.Tensor) else x


@dataclass(frozen=True)
class Int8Experts(_Stacks):
    """int8 stacks with a scale per output; activations are quantised by row."""

    weights: Int8Weights
    gelu = True

    def tile(self, stack: ExpertWeights, pairs: int, experts: int) -> int:
        return int8_tile_rows(pairs, experts)

    def gate_up(self, stack: ExpertWeights, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        return expert_int8_gate_up(x, *self.weights.operands(stack), plan, stack.gate.gelu)

    def down(self, stack: ExpertWeights, h: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        return expert_int8_down(h, *self.weights.operands(stack), plan)


class _Packed(_Stacks):
    """4-bit stacks: where an engine's start finds the same bits, they run on the kernel of
    ``kernels/moe/packed_gluon.py``."""

    exact: ClassVar[PackedExperts]

    def prove(self, gate_up: ExpertWeights, down: ExpertWeights, experts: int, top_k: int) -> bool:
        """See :class:`PackedExperts`."""
        arguments = self._comparison(gate_up, down, experts, top_k)
        return arguments is not None and self.exact.prove(*arguments)

    def rehearse(self, gate_up: ExpertWeights, down: ExpertWeights, experts: int, top_k: int) -> None:
        if (arguments := self._comparison(gate_up, down, experts, top_k)) is not None:
            self.exact.rehearse(*arguments)

    def _comparison(
        self, gate_up: ExpertWeights, down: ExpertWeights, experts: int, top_k: int
    ) -> tuple[Any, ...] | None:
        """Arguments of the comparison; None where gates are not SiLU's, which the kernel does not compute."""
        if gate_up.gated and gate_up.gate != SILU:
            return None
        weights: Any = self.weights
        return *(weights.operands(stack) for stack in (gate_up, down)), gate_up.dtype, experts, top_k, gate_up.gated


@dataclass(frozen=True)
class IntegerExperts(_Stacks):
    """Stacks of integers of 4 or 8 bits; activations are not quantised."""

    weights: IntegerWeights
    gelu = True
    ungated = True

    def tile(self, stack: ExpertWeights, pairs: int, experts: int) -> int:
        return packed_tile_rows(pairs, experts, stack.dtype)

    def gate_up(self, stack: ExpertWeights, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        if not stack.gated:
            return expert_integer_up(x, *self.weights.operands(stack), plan)
        return expert_integer_gate_up(x, *self.weights.operands(stack), plan, stack.gate.gelu)

    def down(self, stack: ExpertWeights, h: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        return expert_integer_down(h, *self.weights.operands(stack), plan)


@dataclass(frozen=True)
class Int4Experts(IntegerExperts, _Packed):
    """Stacks of integers of 4 bits."""

    exact = exact_int4_experts


@dataclass(frozen=True)
class MXFP4Experts(_Stacks):
    """Packed stacks with a power of two per 32 inputs."""

    weights: MXFP4Weights
    biases = True

    def tile(self, stack: ExpertWeights, pairs: int, experts: int) -> int:
        return packed_tile_rows(pairs, experts, stack.dtype)

    def gate_up(self, stack: ExpertWeights, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        return expert_mxfp4_gate_up(x, *self.weights.operands(stack), plan, stack.bias, stack.gate)

    def down(self, stack: ExpertWeights, h: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        return expert_mxfp4_down(h, *self.weights.operands(stack), plan, stack.bias)


@dataclass(frozen=True)
class NVFP4Experts(_Packed):
    """Packed stacks with an e4m3 scale per 16 inputs and a multiplier per output."""

    exact = exact_nvfp4_experts

    weights: NVFP4Weights
    gelu = True
    ungated = True

    def tile(self, stack: ExpertWeights, pairs: int, experts: int) -> int:
        return packed_tile_rows(pairs, experts, stack.dtype)

    def gate_up(self, stack: ExpertWeights, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        if not stack.gated:
            return expert_nvfp4_up(x, *self.weights.operands(stack), plan)
        return expert_nvfp4_gate_up(x, *self.weights.operands(stack), plan, stack.gate.gelu)

    def down(self, stack: ExpertWeights, h: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        return expert_nvfp4_down(h, *self.weights.operands(stack), plan)
