"""Linear layers: one product for one or several projections of the same input, in a weight format.

Built by ``models``, filled by its loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unisono.layers.activations import Activations, Wish, fitting
from unisono.layers.formats import FLOATS, PLAIN, WHOLE, Place, Share, Stored, WeightFormat
from unisono.layers.norm import RMSNorm


class Linear(nn.Module):
    """``x [M, inputs] -> [M, outputs]``; its parameters are uninitialised.

    outputs: their number, or by name those of several projections of one input, which are computed as one product and
        stored apart. format: how the weight is stored and applied. share: what a rank holds of the outputs; the layer
        computes these alone.
    """

    weight: nn.Parameter

    def __init__(
        self,
        inputs: int,
        outputs: int | Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        format: WeightFormat = PLAIN,
        share: Share = WHOLE,
    ) -> None:
        super().__init__()
        self.inputs, self.dtype, self.format, self.share = inputs, dtype, format, share
        self.projections = {"": outputs} if isinstance(outputs, int) else dict(outputs)
        self.held = tuple(stop - start for start, stop in map(share.part, self.projections.values()))
        self.outputs = sum(self.held)
        for kind, stored in format.tensors(dtype).items():
            if stored.dtype is not None:
                rows = sum(stored.shape(each, inputs)[0] for each in self.held)
                shape = (rows, *stored.shape(self.outputs, inputs)[1:])
                self.register_parameter(kind, _parameter(shape, stored.dtype, device))
        self.bias = _parameter((self.outputs,), dtype, device) if bias else None

    @property
    def wish(self) -> Wish | None:
        """What the layer wants of its inputs: see ``layers/activations.py``."""
        wish = getattr(self.format, "wish", None)
        return wish(self) if wish else None

    def forward(self, x: Activations, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``residual [M, outputs]`` is added to the rounded product."""
        return self.format.linear(self, fitting(x, self.wish), residual)  # type: ignore[arg-type]

    def then_norm(
        self, x: Activations, residual: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, Activations]:
        """(sum, norm(sum)) for the sum of the product and ``residual``; without a norm the sum twice.

        The norm is quantised where its readers want that and the format has such a kernel.
        """
        if isinstance(norm, RMSNorm):
            fused = getattr(self.format, "linear_norm_fp8", None) if norm.wish else None
            given: Any = fitting(x, self.wish)
            if fused is not None:
                return fused(self, given, residual, norm.weight, norm.eps, norm.wish)
            return self.format.linear_norm(self, given, residual, norm.weight, norm.eps)
        total = self(x, residual)
        return total, total if norm is None else norm(total)

    def places(self) -> Iterator[tuple[str, Place]]:
        """What a checkpoint stores of the layer: (name inside the layer, where it goes)."""
        tensors = self.format.tensors(self.dtype)
        made = {kind: stored for kind, stored in tensors.items() if not stored.accepts}
        rows = {kind: self._rows(kind, stored) for kind, stored in tensors.items()}
        for kind, stored in tensors.items():
            if stored.accepts:
                for number, (name, place) in enumerate(self._places(kind, stored, self.format)):
                    yield name, replace(place, others={other: rows[other][number] for other in made})
        if self.bias is not None:
            yield from self._places("bias", Stored(self.dtype, FLOATS, inputs=0), None)

    def _places(self, kind: str, stored: Stored, format: WeightFormat | None) -> Iterator[tuple[str, Place]]:
        """The places of one tensor, one for each projection."""
        for (projection, outputs), into in zip(self.projections.items(), self._rows(kind, stored), strict=True):
            part = stored.part(*self.share.part(outputs)) if self.share != WHOLE else None
            shape, *also = stored.stored_shapes(outputs, self.inputs)
            place = Place(into, shape, stored.accepts, part, format, kind, also=tuple(also))
            yield f"{projection}.{kind}" if projection else kind, place

    def _rows(self, kind: str, stored: Stored) -> list[torch.Tensor]:
        """The rows of a parameter that serve each projection; empty tensors where there is no parameter."""
        if stored.dtype is None:
            return [torch.empty(0) for _ in self.held]
        counts = [stored.shape(outputs, self.inputs)[0] for outputs in self.held]
        return list(getattr(self, kind).split(counts))


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def prove_linears(modules: Iterable[nn.Module]) -> dict[tuple[int, int], bool]:
    """The format's proof for each distinct shape [outputs, inputs] of the linear layers among ``modules``.

    Where it fails, one exact kernel serves every length. For the start, before any capture.
    """
    proven: dict[tuple[int, int], bool] = {}
    for layer in _one_of_each(modules):
        shape = layer.outputs, layer.inputs
        proven[shape] = layer.format.prove(layer) and proven.get(shape, True)
    return proven


def rehearse_proofs(modules: Iterable[nn.Module]) -> None:
    """Launch the kernels of :func:`prove_linears` and learn nothing: for compiling them ahead."""
    for layer in _one_of_each(modules):
        layer.format.rehearse(layer)


def _one_of_each(modules: Iterable[nn.Module]) -> Iterable[Linear]:
    """A layer of each shape and format."""
    layers = (m for m in modules if isinstance(m, Linear))
    return {(m.outputs, m.inputs, m.format): m for m in layers}.values()
