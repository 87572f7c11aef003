"""fp8 weights of draft modules, and an fp8 copy of the LM head for drafting.

Drafts need not have the target's precision, since the target verifies them: the text does not depend on how they are
made. A module's step reads little besides its LM head, and fp8 halves that. Called by drafters
(``drafters/hidden.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.config.hardware import E4M3_CAPABILITY
from unisono.kernels.gemm.fp8 import multiplies_e4m3
from unisono.layers.formats.base import PLAIN, WeightFormat
from unisono.layers.formats.fp8 import ONLINE_FP8
from unisono.layers.linear import Linear
from unisono.models.blocks.decoder import Decoder
from unisono.models.load.update import WeightUpdate
from unisono.types import ConfigError

CHOICES = ("auto", "fp8", "none")
"""Values of ``draft_quantization``, the default first."""

LARGE = 1 << 26
"""Bytes of an LM head from which ``auto`` drafts in fp8."""


@dataclass
class DraftWeights:
    """Weight format of a drafter's modules. One object serves all its modules, so that they share one copy of the LM
    head.

    format: format of linear layers that the checkpoint does not quantise.
    why: reason of the choice.
    """

    target: Decoder = field(repr=False)
    format: WeightFormat = PLAIN
    why: str = ""
    _copy: Linear | None = field(default=None, repr=False)

    @classmethod
    def choose(cls, choice: str, target: Decoder, *, own_head: int | None = None) -> DraftWeights:
        """Choose the format. Raises ConfigError for fp8 on a GPU without e4m3 products.

        choice: one of CHOICES; ``auto`` is fp8 if that pays: with a large 16-bit LM head, on a GPU with e4m3 products.
        own_head: bytes that a step reads of the drafter's own LM head, on all ranks together; None: the modules draft
            with the target's.
        """
        device = target.embed.weight.device
        able = multiplies_e4m3(device)
        if choice == "fp8" and device.type == "cuda" and not able:
            raise ConfigError(
                f'"draft_quantization": "fp8": this GPU has compute capability '
                f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, and e4m3 products need "
                f"{'.'.join(map(str, E4M3_CAPABILITY))}: "
                'give "none", or leave it out.'
            )
        if choice != "auto":
            return cls(target, ONLINE_FP8 if choice == "fp8" else PLAIN, f"draft_quantization={choice!r}")
        against = "" if own_head is not None else _against_copy(target.lm_head)
        if not against and target.embed.weight.itemsize != 2:
            against = f"weights are {target.embed.weight.dtype}, not of 16 bits"
        against = against or _against_fp8(target.lm_head.weight.nbytes if own_head is None else own_head, able)
        if against:
            return cls(target, PLAIN, against)
        return cls(target, ONLINE_FP8, "a large LM head is what drafts read most")

    def of(self, module: str) -> WeightFormat:
        """Format of a module by its path in a drafter's module; embedding and LM head are plain until :meth:`head`."""
        return PLAIN if module in ("embed", "lm_head") else self.format

    def head(self, head: Linear) -> Linear:
        """LM head to draft with, in place of a loaded module's: a copy, or the head itself if it stays."""
        if self.format is PLAIN or head.format is not PLAIN:
            return head
        if head is not self.target.lm_head:
            return _converted(head, self.format)
        self._copy = self._copy or _converted(head, self.format)
        return self._copy

    def update(self) -> list[WeightUpdate]:
        """The update of the LM head's copy, from the target's LM head once that has new weights."""
        if self._copy is None:
            return []
        copy = self._copy
        return [WeightUpdate(copy, {}, {}, lambda: _fill(copy, self.target.lm_head))]

    def shares(self, head: Linear) -> bool:
        """True if an LM head is the target's, or the copy of it."""
        return head is self.target.lm_head or head is self._copy

    def decision(self) -> tuple[str, str]:
        """(value, reason) of the choice, with the bytes of the copy. Call it after modules have their heads."""
        if self.format is PLAIN:
            return "as the checkpoint has them", self.why
        nbytes = sum(p.nbytes for p in self._copy.parameters()) if self._copy else 0
        copied = f"the copy of the LM head takes {nbytes} bytes" if nbytes else "the LM head is the drafter's own"
        return "fp8", f"{self.why}; {copied}; the text does not depend on it"


def copied_head_bytes(choice: str, head: Linear, e4m3: bool) -> int:
    """Bytes of the copy that :class:`DraftWeights` makes of a target's LM head. e4m3: the device multiplies e4m3."""
    if head.format is not PLAIN or choice == "none":
        return 0
    against = choice == "auto" and (_against_copy(head) or _against_fp8(head.weight.nbytes, e4m3))
    return 0 if against else head.weight.numel()


def _against_copy(head: Linear) -> str:
    """Reason why ``auto`` makes no fp8 copy of a target's LM head, by its weights; empty if there is none."""
    if head.format is not PLAIN:
        return f"the LM head is stored as {head.format.name}"
    return "" if head.weight.itemsize == 2 else f"the LM head is {head.weight.dtype}, not of 16 bits"


def _against_fp8(nbytes: int, e4m3: bool) -> str:
    """Reason why fp8 does not pay with ``nbytes`` of an LM head, by size and device; empty if there is none."""
    if nbytes < LARGE:
        return f"a step reads {nbytes} bytes of the LM head; fp8 pays from {LARGE} on"
    return "" if e4m3 else "the device has no products of e4m3"


@torch.no_grad()
def _converted(head: Linear, format: WeightFormat) -> Linear:
    """Copy of a plain linear layer in another format that is made from plain weights."""
    copy = Linear(head.inputs, head.outputs, head.bias is not None, head.dtype, head.weight.device, format)
    _fill(copy, head)
    copy.ranks, copy.joins = head.ranks, head.joins
    return copy.eval()


def _fill(copy: Linear, head: Linear) -> None:
    """Convert the weights of a plain linear layer."""
    for kind, target in copy.weight_targets():
        target.fill(getattr(head, kind))
