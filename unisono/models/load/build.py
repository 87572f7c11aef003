"""Builder of a model's modules: shared sizes, dtype, device and formats, so that no block repeats them.

A loader makes one :class:`Builder` per model; specs (``models/blocks/layers.py``) build their modules with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unisono.attention.base import AttentionBackend
from unisono.distributed.gather import ALONE, Ranks
from unisono.layers.embedding import Embedding
from unisono.layers.formats.base import PLAIN, WHOLE, Share, WeightFormat, can_divide
from unisono.layers.linear import Linear
from unisono.layers.norm import RMS, LayerNorm, NormKind, RMSNorm
from unisono.layers.rotary import RotarySpec
from unisono.types import CheckpointError

AttentionFactory = Callable[[int, int], AttentionBackend]
"""Builds a backend for (query heads, KV heads)."""


def no_attention(num_heads: int, num_kv_heads: int) -> Any:
    """Attention factory for modules that are measured but never run."""
    return None


def plain(module: str) -> WeightFormat:
    """Choice of formats in which every module is plain."""
    return PLAIN


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise CheckpointError unless a value of config.json is supported by the blocks."""
    if not ok:
        raise CheckpointError(f"config.json: {name}={value!r}: {rule}.")


@dataclass(frozen=True)
class Builder:
    """Builds the modules of one model.

    hidden_size, rms_eps: of the residual stream and its norms.
    attention: builds backends.
    max_positions: length of rotary tables, in tokens.
    format: weight format of a module by its path in the model, such as ``layers.0.mixer.o``.
    zero_centered_norms, wide_norms: see :class:`RMSNorm`. norms: their kind.
    path: path of the module being built.
    ranks: processes that hold the model together, and the index of this one.
    undivided: paths of layers held whole by every rank, because their outputs cannot be divided.
    kv_dtype: of the KV cache of every attention layer; None: ``dtype``.
    """

    hidden_size: int
    rms_eps: float
    dtype: torch.dtype
    device: torch.device | str
    attention: AttentionFactory
    max_positions: int
    format: Callable[[str], WeightFormat] = plain
    zero_centered_norms: bool = False
    path: str = ""
    ranks: Ranks = ALONE
    undivided: list[str] = field(default_factory=list, repr=False)
    kv_dtype: torch.dtype | None = None
    wide_norms: bool = False
    norms: NormKind = RMS
    _tables: dict[RotarySpec, torch.Tensor] = field(default_factory=dict, repr=False)
    _axes: dict[RotarySpec, torch.Tensor] = field(default_factory=dict, repr=False)
    _backends: dict[tuple[int, int], AttentionBackend] = field(default_factory=dict, repr=False)

    def at(self, name: str) -> Builder:
        """Builder of the submodule ``name``."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    @property
    def format_here(self) -> WeightFormat:
        """Weight format of the module being built."""
        return self.format(self.path)

    def beside(
        self,
        attention: AttentionFactory,
        dtype: torch.dtype,
        hidden_size: int | None = None,
        zero_centered_norms: bool = False,
        ranks: Ranks = ALONE,
        wide_norms: bool = False,
    ) -> Builder:
        """Builder of a draft module for this model: plain, with this model's rotary tables.

        ranks: whole on each rank, unless it reads state of the target's layers.
        """
        return replace(
            self,
            hidden_size=hidden_size or self.hidden_size,
            dtype=dtype,
            attention=attention,
            format=plain,
            zero_centered_norms=zero_centered_norms,
            wide_norms=wide_norms,
            norms=RMS,
            path="",
            ranks=ranks,
            _backends={},
        )

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: int | Mapping[str, int],
        bias: bool = False,
        empty: bool = False,
        share: Share | Mapping[str, Share] = WHOLE,
    ) -> Linear:
        """The linear layer ``name`` of the module being built. empty: without memory, to be shared later.

        share: this rank's share of its outputs.
        """
        format = self._one_format(name, outputs)
        return Linear(inputs, outputs, bias, self.dtype, "meta" if empty else self.device, format, share)

    def joined(
        self, name: str, inputs: int, outputs: int, bias: bool = False, split_inputs: bool = True, empty: bool = False
    ) -> Linear:
        """A :meth:`linear` layer of which each rank computes an equal part of the outputs, and all ranks get all of
        them.

        split_inputs: its inputs are this rank's columns. With ordered sums (``--tp-reduce ordered``) the inputs are
            divided, if its format allows that and it has no bias. empty: as in :meth:`linear`, and whole.
        """
        if self.ranks.count == 1 or empty:
            return self.linear(name, inputs, outputs, bias, empty=empty)
        format = self._one_format(name, outputs)
        terms = self.ranks.ordered and split_inputs and not bias
        if terms and can_divide(format, self.dtype, self.ranks.count, inputs=inputs):
            made = Linear(inputs, outputs, False, self.dtype, self.device, format, input_share=self.share)
            return made.summed(self.ranks)
        share = self.share if self.can_divide({name: outputs}) else WHOLE
        return self.linear(name, inputs, outputs, bias, share=share).joined(self.ranks, split_inputs)

    @property
    def share(self) -> Share:
        """This rank's equal part of a projection's outputs."""
        return Share(self.ranks.index, self.ranks.count) if self.ranks.count > 1 else WHOLE

    def can_divide(self, layers: Mapping[str, int | Mapping[str, int]]) -> bool:
        """Return True if the outputs of these layers, in their formats, can be divided among the ranks; record those
        that cannot."""
        for name, outputs in layers.items():
            format = self._one_format(name, outputs)
            for size in [outputs] if isinstance(outputs, int) else outputs.values():
                if not can_divide(format, self.dtype, self.ranks.count, outputs=size):
                    self.undivided.append(self.at(name).path)
                    return False
        return True

    def _one_format(self, name: str, outputs: int | Mapping[str, int]) -> WeightFormat:
        path = self.at(name).path
        paths = [path] if isinstance(outputs, int) else [f"{path}.{projection}" for projection in outputs]
        formats = {self.format(each) for each in paths}
        if len(formats) > 1:
            names = ", ".join(sorted(f.name for f in formats))
            raise CheckpointError(f"{' and '.join(paths)} are computed as one product, but stored in formats {names}.")
        return formats.pop()

    def embedding(self, vocab_size: int, empty: bool = False, size: int | None = None, scale: float = 1.0) -> Embedding:
        """A table of token embeddings [vocab_size, size], by default the hidden size; scale: of its rows."""
        return Embedding(vocab_size, size or self.hidden_size, self.dtype, "meta" if empty else self.device, scale)

    def norm(self, size: int | None = None, factor: float = 1.0) -> RMSNorm:
        """An RMSNorm over ``size`` elements, by default the hidden size; factor: of its weight."""
        kind = self.zero_centered_norms, self.wide_norms, factor
        norm = RMSNorm(size or self.hidden_size, self.rms_eps, self.dtype, self.device, *kind)
        norm.stored = self.norms.weight
        return norm

    def stream_norm(self) -> RMSNorm | LayerNorm:
        """A norm of the residual stream, of the model's kind."""
        if not self.norms.centred:
            return self.norm()
        kind = self.norms, self.zero_centered_norms
        return LayerNorm(self.hidden_size, self.rms_eps, self.dtype, self.device, *kind)

    def backend(self, num_heads: int, num_kv_heads: int) -> AttentionBackend:
        """Backend of layers with these heads: one per pair."""
        heads = num_heads, num_kv_heads
        if heads not in self._backends:
            self._backends[heads] = self.attention(*heads)
        return self._backends[heads]

    def rotary(self, spec: RotarySpec) -> torch.Tensor:
        """Table of a spec, [max_positions + 1, rotated elements] fp32: one per distinct spec."""
        if spec not in self._tables:
            # one row more: drafters are a position ahead
            self._tables[spec] = spec.table(self.max_positions + 1, self.device, self.max_positions)
        return self._tables[spec]

    def rotary_axes(self, spec: RotarySpec) -> torch.Tensor | None:
        """Axis of each element of a row of :meth:`rotary`, [rotated elements] int64; None if there is only one axis."""
        if spec.axes and spec not in self._axes:
            self._axes[spec] = torch.tensor(2 * spec.axes, device=self.device)
        return self._axes.get(spec)
