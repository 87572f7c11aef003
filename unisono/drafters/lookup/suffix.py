"""Suffix decoding on the device: draft the tokens that followed earlier matches in this request's text and in other
outputs.

After Oliaro et al., "SuffixDecoding" (arXiv 2411.04975), as offered by vLLM and ArcticInference. Here it needs no host:
one kernel drafts, one adds to the shared outputs, both inside the round's graph.

As in the paper, matches come from the request's own prompt and output and from outputs of earlier requests; a
continuation is scored by the frequencies of its tokens, its expected accepted length; the match length and the
frequencies bound the number of drafts. Differences:

* No suffix tree. Every position of the texts is compared in every round, so there is nothing to insert, evict or
  rebalance, and ``shared_tokens`` sets the memory.
* Frequencies come from a sample: the best match of each of 16 residue classes of positions, not from all nodes.
* One vote over both texts, where the paper takes the better of two trees. A continuation is judged once, among the
  matches at least as long as its longest, where the paper tries every length.
* Chains only. Shared outputs: ``drafters/lookup/shared_outputs.py``.
"""

from __future__ import annotations

import torch

from unisono.drafters.base import DrafterContext, PromptPass, Verified
from unisono.drafters.lookup.shared_outputs import MOST_SHARED, SHARED_TOKENS, SharedTexts
from unisono.drafters.options import in_range, read_options
from unisono.graphs import Features
from unisono.kernels.speculation.lookup import lookup, lookup_scratch
from unisono.kv.specs import Tree
from unisono.models.config import DecoderConfig
from unisono.types import SpeculativeConfig

VOTERS = 16
"""Matches weighed against each other in each round. 64, or all, were accepted no more often."""

OPTIONS = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_spec_factor": 4.0,  # vLLM's is 1; here a round is 1 + k wide however few are drafted
    "suffix_decoding_min_token_prob": 0.1,
    "shared_tokens": SHARED_TOKENS,
}


class SuffixDrafter:
    """The suffix-decoding drafter. Options, with vLLM's names if they mean the same:

    suffix_decoding_max_tree_depth: tokens of a match and its drafts together.
    suffix_decoding_max_spec_factor: drafts per matched token.
    suffix_decoding_min_token_prob: draft while the fraction of matches that agree is at least this, 0 … 1.
    shared_tokens: tokens of ended outputs shared by all requests, 4 bytes each; 0 shares none.

    Raises ConfigError for other options and for values out of range.
    """

    name = "suffix"
    drafts_at_once = True
    features = Features()
    self_test = None

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        options = read_options(spec, OPTIONS)
        self.num_drafts = k = spec.num_speculative_tokens
        in_range(options, "suffix_decoding_max_tree_depth", k + 1, k + 64)
        in_range(options, "suffix_decoding_max_spec_factor", 0.0, 64.0)
        in_range(options, "suffix_decoding_min_token_prob", 0.0, 1.0)
        in_range(options, "shared_tokens", 0, MOST_SHARED)
        self.longest = int(options["suffix_decoding_max_tree_depth"]) - k
        self.factor = options["suffix_decoding_max_spec_factor"]
        self.share = options["suffix_decoding_min_token_prob"]
        self.shared_tokens = int(options["shared_tokens"])

    def bind(self, context: DrafterContext) -> None:
        self._slots = context.slots
        self._scratch = lookup_scratch(context.slots.history.shape[0], VOTERS, context.device)
        self.shared = SharedTexts(self.shared_tokens, context)

    def state_specs(self) -> Tree:
        return self.shared.state_specs()

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        s = self._slots
        lookup(
            drafts, slots, s.history, s.length, self._scratch, self.longest, 1, self.factor, self.share,
            self.shared.ring, self.shared.head,
        )  # fmt: skip

    def observe(self, verified: Verified) -> None:
        self.shared.observe(verified)

    def observe_prompt(self, prompt: PromptPass) -> None:
        self.shared.observe_prompt(prompt)
