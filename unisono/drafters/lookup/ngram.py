"""Prompt lookup: draft the tokens that followed an earlier occurrence of the request's last tokens.

Saxena, "Prompt Lookup Decoding" (2023); vLLM's ``ngram``, which searches the request's own text. SGLang also searches
the outputs of other requests, and so does this (``shared_tokens``). It is a single kernel over data that is on the
device anyway, so a round stays one launch. No weights, no KV.

Among the earlier occurrences of the last ``prompt_lookup_min`` … ``prompt_lookup_max`` tokens, the longest match wins;
among equal ones the request's own text, then the latest (vLLM takes the earliest; recent text predicts the next tokens
better, and a vote of all matches was accepted less often). A copy that reaches the end of the text continues with its
own output, so that loops are drafted whole.

In a tree, each path copies the continuation of another match in the request's own text: the best whose tokens differ
from those of the paths before. The tree's digits only define the number of paths and their lengths.
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
"""Limit of the counted match length in tokens: in a text of one repeated token, every position is compared this far."""


class NgramDrafter:
    """The prompt-lookup drafter. Options, in tokens: ``prompt_lookup_max`` and ``prompt_lookup_min``, lengths of a
    match; ``shared_tokens``, ended outputs shared by all requests, 4 bytes each; 0 searches the request's own text
    only.

    Raises ConfigError for other options and for values out of range.
    """

    name = "ngram"
    drafts_trees = True
    drafts_at_once = True
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
        self._scratch = lookup_scratch(context.slots.history.shape[0], voters=1, device=context.device)
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
