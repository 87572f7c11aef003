"""Prompt lookup: what followed the request's last tokens when they stood in a text before.

Saxena, "Prompt Lookup Decoding" (2023); vLLM's ``ngram``, which looks in the request's own text. SGLang's also looks in
what other requests were answered, and so does this (``shared_tokens``). The whole of it is one kernel over what the
device holds anyway, so a round stays one launch. No weights, no KV.

Of the earlier places where the last ``prompt_lookup_min`` … ``prompt_lookup_max`` tokens stand, the longest match
counts, of equals the request's own, and the latest (vLLM takes the earliest: recent text resembles what comes next
more; a vote of all of them was accepted less often). A copy that reaches the end of the text goes on with what it has
just copied, so that loops are drafted whole.

Of a tree each path copies what followed another match in the request's own text: the best whose tokens differ from
those of the paths before. The tree's digits say how many paths there are and how long each is, no more.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import DrafterContext, PromptPass, Verified
from unisono.drafters.lookup.shared_outputs import MOST_SHARED, SHARED_TOKENS, SharedTexts
from unisono.drafters.options import in_range, read_options
from unisono.graphs import Features
from unisono.kernels.speculation.lookup import lookup, lookup_scratch
from unisono.kernels.speculation.lookup_tree import lookup_path
from unisono.kv.specs import Tree
from unisono.models.config import DecoderConfig
from unisono.types import ConfigError, SpeculativeConfig

LONGEST_MATCH = 64
"""Tokens that a match is counted up to, at most: in a text of one token, every position is compared so far."""


class NgramDrafter:
    """See the module. Options, in tokens: ``prompt_lookup_max`` and ``prompt_lookup_min``, of a match;
    ``shared_tokens``, of ended outputs that all requests share, 4 bytes each; 0 looks in the request's own text alone.

    Raises ConfigError for other options and for values out of range.
    """

    name = "ngram"
    drafts_trees = True
    features = Features()
    self_test = None

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        defaults = {"prompt_lookup_max": 4, "prompt_lookup_min": 1, "shared_tokens": SHARED_TOKENS}
        options = read_options(spec, defaults)
        in_range(options, "shared_tokens", 0, MOST_SHARED)
        in_range(options, "prompt_lookup_max", 1, LONGEST_MATCH)
        in_range(options, "prompt_lookup_min", 1, LONGEST_MATCH)
        self.longest, self.shortest = int(options["prompt_lookup_max"]), int(options["prompt_lookup_min"])
        if self.shortest > self.longest:
            raise ConfigError(f"prompt_lookup_min={self.shortest} is above prompt_lookup_max={self.longest}; lower it.")
        self.shared_tokens = int(options["shared_tokens"])
        self.num_drafts = spec.num_speculative_tokens
        self._sizes = [len(path) for path in spec.paths]

    def bind(self, context: DrafterContext) -> None:
        self._slots = context.slots
        self._scratch = lookup_scratch(context.slots.history.shape[0], 1, context.device)
        self.shared = SharedTexts(self.shared_tokens, context)

    def state_specs(self) -> Tree:
        return self.shared.state_specs()

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor, tables: torch.Tensor | None = None) -> None:
        s = self._slots
        if tables is None:
            lookup(
                drafts, slots, s.history, s.length, self._scratch, self.longest, self.shortest,
                ring=self.shared.ring, head=self.shared.head,
            )  # fmt: skip
            return
        paths = len(self._sizes)
        rows, each = slots[::paths].contiguous(), drafts.view(-1, paths, drafts.shape[1])
        for path, size in enumerate(self._sizes):
            lookup_path(each, path, size, rows, s.history, s.length, self._scratch, self.longest, self.shortest)

    def observe(self, verified: Verified) -> None:
        self.shared.observe(verified)

    def observe_prompt(self, prompt: PromptPass) -> None:
        self.shared.observe_prompt(prompt)
