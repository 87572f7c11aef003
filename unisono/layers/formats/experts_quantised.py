"""Stacks of experts in fp8, in 4 bits and in MXFP4: the formats of linear layers store a weight, a plan applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unisono.kernels.gemm.fp8_quantize import GROUP
from unisono.kernels.moe.fp8 import (
    expert_fp8_down,
    expert_fp8_gate_up,
    expert_fp8_gate_up_fp8,
    fp8_expert_tile,
    fp8_tile_rows,
    prove_fp8_experts,
    rehearse_fp8_experts,
)
from unisono.kernels.moe.gluon import TILE_PAIRS
from unisono.kernels.moe.int4 import expert_int4_down, expert_int4_gate_up, packed_tile_rows
from unisono.kernels.moe.mxfp4 import expert_mxfp4_down, expert_mxfp4_gate_up
from unisono.kernels.moe.plan import Plan
from unisono.layers.activations import Operand, Wish
from unisono.layers.formats.base import WHOLE, Stored
from unisono.layers.formats.experts import Stack


class Weights(Protocol):
    """What the formats here take of a weight format, beside its products' operands."""

    @property
    def name(self) -> str: ...
    def tensors(self, dtype: torch.dtype) -> Mapping[str, Stored]: ...
    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]: ...


class Fp8Weights(Weights, Protocol):
    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales, from the parameters of a layer or of a stack."""
        ...


class Int4Weights(Weights, Protocol):
    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
        """Weight, scales, zeros and group, from the parameters of a layer or of a stack."""
        ...


class MXFP4Weights(Weights, Protocol):
    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales, from the parameters of a stack."""
        ...


@dataclass(frozen=True)
class _Stacks:
    """A stack is stored as ``weights`` stores one weight."""

    weights: Weights

    @property
    def name(self) -> str:
        return self.weights.name

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Stored]:
        return self.weights.tensors(dtype)

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        return self.weights.read(kind, stored)


@dataclass(frozen=True)
class Fp8Experts(_Stacks):
    """e4m3 stacks with scales of blocks or of outputs."""

    weights: Fp8Weights
    gelu = True

    def wish(self, stack: Stack) -> Wish:
        """What the product with a pass's tokens wants of them: see ``layers/activations.py``."""
        return Wish(GROUP if self.weights.operands(stack)[1].dim() == 3 else 0)

    def tile(self, stack: Stack, pairs: int, experts: int) -> int:
        if stack.gate.gelu:  # the kernel of prompts has SiLU only
            return fp8_tile_rows(pairs, experts)
        return fp8_expert_tile(pairs, experts, self.weights.operands(stack), stack.dtype)

    def prove(self, gate_up: Stack, down: Stack, experts: int, top_k: int) -> bool:
        """See :func:`unisono.kernels.moe.fp8.prove_fp8_experts`."""
        if gate_up.gate.gelu:
            return False
        stacks = self.weights.operands(gate_up), self.weights.operands(down)
        return prove_fp8_experts(*stacks, gate_up.dtype, experts, top_k)

    def rehearse(self, gate_up: Stack, down: Stack, experts: int, top_k: int) -> None:
        if gate_up.gate.gelu:
            return
        stacks = self.weights.operands(gate_up), self.weights.operands(down)
        rehearse_fp8_experts(*stacks, gate_up.dtype, experts, top_k)

    def gate_up(self, stack: Stack, x: Operand, plan: Plan) -> Operand:
        """Quantised where the kernel of prompts can, and the ranks' parts are not gathered."""
        weight, scales = self.weights.operands(stack)
        if plan.tile == TILE_PAIRS and scales.dim() == 3 and stack.rows == WHOLE:
            return expert_fp8_gate_up_fp8(x, weight, scales, plan)
        return expert_fp8_gate_up(x, weight, scales, plan, stack.gate.gelu)

    def down(self, stack: Stack, h: Operand, plan: Plan) -> torch.Tensor:
        return expert_fp8_down(h, *self.weights.operands(stack), plan)


@dataclass(frozen=True)
class Int4Experts(_Stacks):
    """Packed stacks."""

    weights: Int4Weights
    gelu = True

    def tile(self, stack: Stack, pairs: int, experts: int) -> int:
        return packed_tile_rows(pairs, experts, stack.dtype)

    def gate_up(self, stack: Stack, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        return expert_int4_gate_up(x, *self.weights.operands(stack), plan, stack.gate.gelu)

    def down(self, stack: Stack, h: torch.Tensor, plan: Plan) -> torch.Tensor:
        return expert_int4_down(h, *self.weights.operands(stack), plan)


@dataclass(frozen=True)
class MXFP4Experts(_Stacks):
    """Packed stacks with a power of two for each 32 inputs."""

    weights: MXFP4Weights
    biases = True

    def tile(self, stack: Stack, pairs: int, experts: int) -> int:
        return packed_tile_rows(pairs, experts, stack.dtype)

    def gate_up(self, stack: Stack, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        return expert_mxfp4_gate_up(x, *self.weights.operands(stack), plan, stack.bias, stack.gate)

    def down(self, stack: Stack, h: torch.Tensor, plan: Plan) -> torch.Tensor:
        return expert_mxfp4_down(h, *self.weights.operands(stack), plan, stack.bias)
