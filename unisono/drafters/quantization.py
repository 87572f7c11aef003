"""The weights of drafters' modules in fp8, and a copy of the LM head that they draft with.

Drafts need not have the target's precision, for the target verifies them: the text does not depend on how they are
made. A module's step reads little but its LM head, and fp8 halves that. Drafters call it (``drafters/hidden.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.kernels.gemm.fp8 import multiplies_e4m3
from unisono.layers.formats.base import PLAIN, WeightFormat
from unisono.layers.formats.fp8 import ONLINE_FP8
from unisono.layers.linear import Linear
from unisono.models.blocks.decoder import Decoder
from unisono.types import ConfigError

CHOICES = ("auto", "fp8", "none")
"""What ``draft_quantization`` may be, the default first."""

LARGE = 1 << 26
"""Bytes of an LM head from which on ``auto`` makes a copy."""


@dataclass
class DraftWeights:
    """How a drafter's modules are stored. One object for all its modules, so that they share one copy of the LM head.

    format: what linear layers get that the checkpoint does not quantise. why: it was chosen.
    """

    target: Decoder = field(repr=False)
    format: WeightFormat = PLAIN
    why: str = ""
    _copy: Linear | None = field(default=None, repr=False)

    @classmethod
    def choose(cls, asked: str, target: Decoder, *, shares_head: bool = True) -> DraftWeights:
        """asked: one of CHOICES; ``auto`` is fp8 where it pays: with a large 16-bit LM head that is the target's, on a
        GPU that multiplies e4m3. shares_head: whether the modules draft with the target's LM head.

        Raises ConfigError where fp8 is asked of a GPU that does not.
        """
        weight, device = target.lm_head.weight, target.embed.weight.device
        able = multiplies_e4m3(device)
        if asked == "fp8" and device.type == "cuda" and not able:
            raise ConfigError(
                f'"draft_quantization": "fp8": this GPU has compute capability '
                f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, and e4m3 products need 8.9: "
                'give "none", or leave it out.'
            )
        if asked != "auto":
            return cls(target, ONLINE_FP8 if asked == "fp8" else PLAIN, f"draft_quantization={asked!r}")
        reasons = {
            "the drafter has an LM head of its own": not shares_head,
            f"the LM head is stored as {target.lm_head.format.name}": target.lm_head.format is not PLAIN,
            f"the LM head is {weight.dtype}, not of 16 bits": weight.itemsize != 2,
            f"the LM head has {weight.nbytes} bytes; a copy is made from {LARGE} on": weight.nbytes < LARGE,
            "the device has no products of e4m3": not able,
        }
        for against, holds in reasons.items():
            if holds:
                return cls(target, PLAIN, against)
        return cls(target, ONLINE_FP8, "a large LM head is what drafts read most")

    def of(self, module: str) -> WeightFormat:
        """The format of a module by its path in a drafter's; embedding and LM head are plain until :meth:`head`."""
        return PLAIN if module in ("embed", "lm_head") else self.format

    def head(self, head: Linear) -> Linear:
        """What to draft with in place of a loaded module's LM head: a copy, or the head itself where it stays."""
        if self.format is PLAIN or head.format is not PLAIN:
            return head
        if head is not self.target.lm_head:
            return _converted(head, self.format)
        self._copy = self._copy or _converted(head, self.format)
        return self._copy

    def decision(self) -> tuple[str, str]:
        """(value, reason) of what was chosen, with the bytes of the copy. For when modules have their heads."""
        if self.format is PLAIN:
            return "as the checkpoint has them", self.why
        nbytes = sum(p.nbytes for p in self._copy.parameters()) if self._copy else 0
        copied = f"the copy of the LM head takes {nbytes} bytes" if nbytes else "the LM head is the drafter's own"
        return "fp8", f"{self.why}; {copied}; the text does not depend on it"


@torch.no_grad()
def _converted(head: Linear, format: WeightFormat) -> Linear:
    """A plain linear layer in another format that is made of plain weights."""
    copy = Linear(head.inputs, head.outputs, head.bias is not None, head.dtype, head.weight.device, format)
    for kind, place in copy.places():
        place.fill(getattr(head, kind))
    copy.ranks, copy.joins = head.ranks, head.joins
    return copy.eval()
