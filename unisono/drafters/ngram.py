"""Prompt lookup: what followed the request's last tokens when they stood in its own text before.

Saxena, "Prompt Lookup Decoding" (2023); vLLM's ``ngram``. The whole of it is one kernel over the history that
slots keep on the device, so a round stays one launch. No weights, no KV, nothing to catch up with.

Of the earlier places where the last ``prompt_lookup_min`` … ``prompt_lookup_max`` tokens stand, the longest match
counts, of equals the latest (vLLM takes the earliest: recent text resembles what comes next more). A copy that
reaches the end of the text goes on with what it has just copied, so that loops are drafted whole.

Of a tree each path copies what followed another match: the best whose tokens differ from those of the paths before.
The tree's digits say how many paths there are and how long each is, no more.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import Host, PromptPass, Span, Verified
from unisono.drafters.options import in_range, read_options
from unisono.kernels.lookup import lookup, lookup_scratch
from unisono.kernels.lookup_paths import lookup_path
from unisono.models.config import DecoderConfig
from unisono.program import Needs
from unisono.types import ConfigError, SpeculativeConfig

LONGEST_MATCH = 64
"""Tokens that a match is counted up to, at most: in a text of one token, every position is compared so far."""


class NgramDrafter:
    """See the module. Options: ``prompt_lookup_max`` and ``prompt_lookup_min``, tokens.

    Raises ConfigError for other options and for values out of range.
    """

    name = "ngram"
    needs = Needs()
    page_bytes = 0
    self_test = None

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        options = read_options(spec, {"prompt_lookup_max": 4, "prompt_lookup_min": 1})
        in_range(options, "prompt_lookup_max", 1, LONGEST_MATCH)
        in_range(options, "prompt_lookup_min", 1, LONGEST_MATCH)
        self.longest, self.shortest = int(options["prompt_lookup_max"]), int(options["prompt_lookup_min"])
        if self.shortest > self.longest:
            raise ConfigError(f"prompt_lookup_min={self.shortest} is above prompt_lookup_max={self.longest}; lower it.")
        self.num_drafts = spec.num_speculative_tokens
        self._sizes = [len(path) for path in spec.paths]

    def bind(self, host: Host) -> None:
        self._slots = host.slots
        self._scratch = lookup_scratch(host.slots.history.shape[0], 1, host.device)

    def allocate(self, num_pages: int) -> None:
        pass

    def fork(self, span: Span) -> None:
        """Nothing: there is no KV."""

    adopt = fork

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor | None = None) -> None:
        s = self._slots
        if tables is None:
            lookup(drafts, slots, s.history, s.length, self._scratch, self.longest, self.shortest)
            return
        paths = len(self._sizes)
        rows, each = slots[::paths].contiguous(), drafts.view(-1, paths, drafts.shape[1])
        for path, size in enumerate(self._sizes):
            lookup_path(each, path, size, rows, s.history, s.length, self._scratch, self.longest, self.shortest)

    def observe(self, verified: Verified) -> None:
        pass

    def observe_prompt(self, prompt: PromptPass) -> None:
        pass
