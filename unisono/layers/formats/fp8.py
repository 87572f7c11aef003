"""fp8 weight formats: e4m3 weights with scales, activations quantised to e4m3 at run time.

* :class:`BlockFp8`: a scale per block of 128 × 128, activations by row and 128 columns (DeepSeek-V3, Qwen3-FP8 …).
* :class:`OnlineFp8`: the same, made from a floating-point weight at load time (``--quantization fp8``).
* :class:`RowFp8`: a scale per output or per projection, activations by row or with a fixed scale.

:func:`read` chooses formats from a ``quantization_config`` with quant_method "fp8"; ``formats/compressed_tensors.py``
reads compressed-tensors' configs. Embeddings, the LM head, norms and biases stay plain.

Shapes: N outputs, K inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.config.preflight.quantization import check_fbgemm, check_fp8
from unisono.kernels import rms_norm
from unisono.kernels.gemm.fp8 import SLICE, fp8_linear, fp8_product, prove_fp8, rehearse_fp8
from unisono.kernels.gemm.fp8_linear_norm import fp8_linear_norm
from unisono.kernels.gemm.fp8_quantize import E4M3, GROUP, LARGEST, SMALLEST, Quantised, quantize
from unisono.layers.activations import Activations, InputFormat, Operand
from unisono.layers.activations import plain as plain_rows
from unisono.layers.formats.base import (
    FLOATS,
    ONE_VALUE,
    PLAIN,
    WHOLE_PROJECTION,
    LinearLayer,
    StoredTensor,
    TensorLayout,
    WeightFormat,
)
from unisono.layers.formats.experts_quantised import Fp8Experts
from unisono.layers.formats.module_patterns import named

STORED_E4M3 = StoredTensor(E4M3, ("F8_E4M3",))

BY_OUTPUT = TensorLayout(lambda outputs, inputs: ((outputs, 1), (outputs,)), dim=0)
"""One number per output."""

PART = 64 * GROUP
"""Outputs quantised at a time."""


class _Fp8:
    """Shared part of the formats: product, norm and exactness check. Subclasses name the scales."""

    scale_kind: str
    fixed_kind: str | None

    def input_format(self, layer: LinearLayer) -> InputFormat | None:
        """Input format of a layer: e4m3 rows, unless its projections are products of their own or scales are fixed."""
        if self.fixed_kind or self._part(layer) is None:
            return None
        return InputFormat(self._group(layer))

    def linear(self, layer: LinearLayer, x: Operand, residual: torch.Tensor | None) -> torch.Tensor:
        weight, scales = self.operands(layer)
        part = self._part(layer)
        if isinstance(x, Quantised):
            return fp8_product(x, weight, scales, layer.bias, residual, part or 0)
        if part == 0:
            return fp8_linear(x, weight, scales, self._fixed(layer), layer.bias, residual)
        if part is not None:
            return fp8_product(quantize(x, GROUP), weight, scales, layer.bias, residual, part)
        parts = zip(weight.split(layer.held), scales.split([_blocks(n) for n in layer.held]), strict=True)
        y = torch.cat([fp8_linear(x, *part) for part in parts], 1)
        y = y if layer.bias is None else y + layer.bias
        return y if residual is None else y + residual

    def linear_norm(
        self, layer: LinearLayer, x: Operand, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear_norm_fp8(layer, x, residual, weight, eps, None)  # type: ignore[return-value]

    def linear_norm_fp8(
        self, layer: LinearLayer, x: Operand, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        input_format: InputFormat | None,
    ) -> tuple[torch.Tensor, Activations]:  # fmt: skip
        """``linear_norm`` whose norm is emitted in ``input_format``."""
        if self._part(layer) != 0:
            total = self.linear(layer, x, residual)
            return total, rms_norm(total, weight, eps)
        if isinstance(x, torch.Tensor):
            x = quantize(x, self._group(layer), self._fixed(layer))
        how = (None, True) if input_format is None else (input_format.group, input_format.keep)
        return fp8_linear_norm(x, *self.operands(layer), layer.bias, residual, weight, eps, *how)

    def _group(self, layer: LinearLayer) -> int:
        """Columns of activations that share a scale; 0: all."""
        return GROUP if getattr(layer, self.scale_kind).dim() == 2 else 0

    def _fixed(self, layer: LinearLayer) -> torch.Tensor | None:
        """Scales of activations, if the checkpoint fixes them."""
        return getattr(layer, self.fixed_kind) if self.fixed_kind else None

    def prove(self, layer: LinearLayer) -> bool:
        """See :func:`unisono.kernels.gemm.fp8.prove_fp8`."""
        part = self._part(layer)
        return True if part is None else prove_fp8(*self.operands(layer), layer.dtype, part)

    def rehearse(self, layer: LinearLayer) -> None:
        if (part := self._part(layer)) is not None:
            rehearse_fp8(*self.operands(layer), layer.dtype, part)

    @property
    def experts(self) -> Fp8Experts:
        """Format of stacks of experts."""
        return Fp8Experts(self)  # type: ignore[arg-type]

    def operands(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight and its scales."""
        return layer.weight, getattr(layer, self.scale_kind)

    def _part(self, layer: LinearLayer) -> int | None:
        """Argument ``part`` of :func:`fp8_product` for merged projections. None: each is a product of its own.

        0: their blocks are those of one weight, since each but the last fills its blocks. Gate and up are equal parts,
        which need not fill theirs.
        """
        by_block, first = getattr(layer, self.scale_kind).dim() == 2, layer.held[0]
        if not by_block or all(outputs % GROUP == 0 for outputs in layer.held[:-1]):
            return 0
        return first if first % SLICE == 0 and set(layer.held) == {first} else None


def _blocks(outputs: int) -> int:
    """Blocks of GROUP outputs in a projection; the last may be smaller."""
    return -(-outputs // GROUP)


@dataclass(frozen=True)
class BlockFp8(_Fp8):
    """e4m3 weight [N, K] and scales [ceil(N / 128), ceil(K / 128)]: weight = e4m3 * scale of its block.

    scale_kind: name of the scales in checkpoints.
    """

    scale_kind: str = "weight_scale_inv"
    name: str = "fp8 with scales of 128x128 blocks"
    fixed_kind: str | None = None

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        return {
            "weight": STORED_E4M3,
            self.scale_kind: StoredTensor(torch.float32, (*FLOATS, "F8_E8M0"), outputs=GROUP, inputs=GROUP),
        }

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        return stored.float() if stored.dtype is torch.float8_e8m0fnu else stored


@dataclass(frozen=True)
class OnlineFp8(_Fp8):
    """:class:`BlockFp8` made from a floating-point weight: a block's largest magnitude becomes 448."""

    name: str = "fp8, quantised while loading"
    scale_kind: str = "weight_scale_inv"
    fixed_kind: str | None = None

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        scales = StoredTensor(torch.float32, (), outputs=GROUP, inputs=GROUP)
        return {"weight": StoredTensor(E4M3, FLOATS), self.scale_kind: scales}

    def read(self, kind: str, stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
        weight, scales = quantize_blocks(stored)
        return {"weight": weight, self.scale_kind: scales}


@dataclass(frozen=True)
class RowFp8(_Fp8):
    """e4m3 weight [N, K] and a scale per output; activations by row.

    by_projection: the checkpoint has one scale for all outputs of a projection.
    fixed_kind: checkpoint name of the scale with which a projection's activations were calibrated; of merged
        projections, and of a stack of experts, the largest serves all. None: scales of activations are computed by row.
    """

    by_projection: bool = False
    fixed_kind: str | None = None
    name: str = "fp8 with scales of outputs"
    scale_kind: str = "weight_scale"

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        layout = ONE_VALUE if self.by_projection else BY_OUTPUT
        found = {"weight": STORED_E4M3, self.scale_kind: StoredTensor(torch.float32, FLOATS, inputs=0, layout=layout)}
        if self.fixed_kind:
            found[self.fixed_kind] = StoredTensor(torch.float32, FLOATS, WHOLE_PROJECTION, inputs=0, layout=ONE_VALUE)
        return found

    def read(self, kind: str, stored: torch.Tensor) -> torch.Tensor:
        return stored if kind == "weight" else stored.reshape(-1)


@dataclass(frozen=True)
class BoundedFp8(RowFp8):
    """:class:`RowFp8` of fbgemm: activations are clamped to ``bound`` before they are quantised by row."""

    name: str = "fp8 with scales of outputs, bounded activations"
    bound: float = 1200.0

    experts = None  # type: ignore[assignment]

    def input_format(self, layer: LinearLayer) -> InputFormat | None:
        """None: plain rows, to be clamped."""
        return None

    def linear(self, layer: LinearLayer, x: Operand, residual: torch.Tensor | None) -> torch.Tensor:
        return super().linear(layer, plain_rows(x).clamp(-self.bound, self.bound), residual)

    def linear_norm_fp8(
        self, layer: LinearLayer, x: Operand, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        input_format: InputFormat | None,
    ) -> tuple[torch.Tensor, Activations]:  # fmt: skip
        x = plain_rows(x).clamp(-self.bound, self.bound)
        return super().linear_norm_fp8(layer, x, residual, weight, eps, input_format)


ONLINE_FP8 = OnlineFp8()


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [N, K] of any floating-point dtype -> (e4m3 [N, K], fp32 scales [ceil(N / 128), ceil(K / 128)]).

    Processes PART outputs at a time: in fp32 an LM head is larger than the rest of a model.
    """
    parts = [_quantize_part(rows) for rows in weight.split(PART)]
    return torch.cat([part for part, _ in parts]), torch.cat([scales for _, scales in parts])


def _quantize_part(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_blocks` of whole blocks of outputs."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % GROUP, 0, -n % GROUP))
    blocks = padded.view(_blocks(n), GROUP, -1, GROUP)
    scales = blocks.abs().amax((1, 3)).clamp_min(SMALLEST) / LARGEST
    scaled = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
    return scaled.view(padded.shape)[:n, :k].to(E4M3), scales


def read(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module by its checkpoint name, from a ``quantization_config`` with quant_method "fp8".

    With ``weight_block_size`` [128, 128]: BlockFp8. Without: one scale per projection (``weight_scale``), and
    ``input_scale`` if ``activation_scheme`` is "static". Raises CheckpointError for anything else.
    """
    check_fp8(config)
    block = config.get("weight_block_size")
    scheme = config.get("activation_scheme", "dynamic")
    kept = (*(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ()), "lm_head")
    quantised: WeightFormat = BlockFp8() if block else RowFp8(True, "input_scale" if scheme == "static" else None)
    return lambda module: PLAIN if named(module, kept) else quantised


def read_fbgemm(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module, from a ``quantization_config`` with quant_method "fbgemm_fp8". Raises CheckpointError."""
    check_fbgemm(config)
    kept = (*(config.get("modules_to_not_convert") or ()), "lm_head")
    quantised = BoundedFp8(bound=float(config["activation_scale_ub"]))
    return lambda module: PLAIN if named(module, kept) else quantised
