"""No drafts: k = 0, plain decoding. The first entry of the catalog and the reference for all others."""

from __future__ import annotations

from typing import Any

import torch

from unisono.drafters.base import Host, PromptPass, Verified
from unisono.program import Needs


class NoDrafter:
    """Proposes nothing and has nothing to catch up with."""

    name = "none"
    num_drafts = 0
    needs = Needs()
    page_bytes = 0
    self_test = None

    def __init__(self, spec: Any = None, target: Any = None) -> None:
        pass

    def bind(self, host: Host) -> None:
        pass

    def allocate(self, num_pages: int) -> None:
        pass

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        pass

    def observe(self, verified: Verified) -> None:
        pass

    def observe_prompt(self, prompt: PromptPass) -> None:
        pass
