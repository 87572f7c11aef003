"""A draft model with prompt lookup in front of it: a long match in the text takes the place of the model's drafts.

Where the request's last tokens have occurred before, the tokens that followed are a better guess than a head's: code
that is edited, documents that are quoted, calls that are repeated. The lookup is one kernel, so it costs next to
nothing. One :class:`unisono.drafters.base.Drafter` made of two; the engine knows of neither. Loaded by the catalog.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from unisono.config import catalog
from unisono.config.checkpoint_files import CONFIG, read_object
from unisono.config.preflight.draft_method import draft_method
from unisono.distributed.gather import Ranks
from unisono.drafters.base import DivisibleDrafter, Drafter, DrafterContext, PausableDrafter, PromptPass, Verified
from unisono.drafters.lookup.ngram import LONGEST_MATCH, NgramDrafter
from unisono.drafters.lookup.shared_outputs import SHARED_TOKENS
from unisono.graphs import Features
from unisono.kv.specs import Tree
from unisono.models.config import DecoderConfig
from unisono.types import ConfigError, SpeculativeConfig

SHORTEST = 8
"""Default of ``prompt_lookup_min``: tokens of a match that replaces a model's drafts."""

LOOKUP = {"prompt_lookup_min": SHORTEST, "prompt_lookup_max": 16, "shared_tokens": SHARED_TOKENS}
OWN = ("draft_method", *LOOKUP)


class CombinedDrafter:
    """A draft model whose drafts are replaced, row by row, where prompt lookup finds a match.

    Options: ``draft_method``, the method of the model (default: by its directory); ``prompt_lookup_min``,
    ``prompt_lookup_max``, ``shared_tokens``: as in ``ngram``, default 8, 16 and 65536 tokens. All other settings are
    those of the model's method. Raises ConfigError as both do.
    """

    name = "combined"

    model: Drafter

    def __new__(cls, spec: SpeculativeConfig, target: DecoderConfig) -> CombinedDrafter:
        """A drafter that is pausable if its model is."""
        model = _model_of(spec, target)
        made = super().__new__(PausableCombinedDrafter if isinstance(model, PausableDrafter) else CombinedDrafter)
        made.model = model
        return made

    def __init__(self, spec: SpeculativeConfig, target: DecoderConfig) -> None:
        self.lookup = _lookup_of(spec, target)
        divided = spec.draft_tensor_parallel_size or 1
        if divided > 1 and not isinstance(self.model, DivisibleDrafter):
            raise ConfigError(
                f"draft_tensor_parallel_size={divided}: the method {self.model.name!r} has no layers that could be "
                "divided so; leave it out."
            )
        self.num_drafts = spec.num_speculative_tokens
        self.features: Features = self.model.features
        self.self_test = self.model.self_test

    @property
    def keeps_drafts(self) -> bool:
        """True if the model keeps keys and values of its own drafts, which others would not have."""
        return bool(getattr(self.model, "keeps_drafts", False))

    @property
    def drafts_at_once(self) -> bool:
        """True if the model's drafts cost the same in any number."""
        return bool(getattr(self.model, "drafts_at_once", False))

    def divides(self, ranks: Ranks) -> bool:
        return isinstance(self.model, DivisibleDrafter) and self.model.divides(ranks)

    def bind(self, context: DrafterContext) -> None:
        parts = {name: _PartOfState(context.state, name) for name in ("model", "lookup")}
        self.model.bind(replace(context, state=cast(Any, parts["model"])))
        self.lookup.bind(replace(context, state=cast(Any, parts["lookup"])))
        why = f"a match of {self.lookup.shortest} tokens or more takes the place of a request's drafts"
        context.decide("drafts", f"{self.model.name}, after ngram", why)

    def state_specs(self) -> Tree:
        return {"model": self.model.state_specs(), "lookup": self.lookup.state_specs()}

    def propose(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Let the model draft for all rows; rows with a match get what followed it, and nothing after its end."""
        self.model.propose(slots, drafts)
        found = torch.full_like(drafts, -1)
        self.lookup.propose(slots, found)
        drafts.copy_(torch.where(found[:, :1] >= 0, found, drafts))

    def observe(self, verified: Verified) -> None:
        self.model.observe(verified)
        self.lookup.observe(verified)

    def observe_prompt(self, prompt: PromptPass) -> None:
        self.model.observe_prompt(prompt)
        self.lookup.observe_prompt(prompt)


class PausableCombinedDrafter(CombinedDrafter):
    """A :class:`CombinedDrafter` of a model that can pause."""

    @property
    def unlimited(self) -> bool:
        return cast(PausableDrafter, self.model).unlimited

    def remember(self, verified: Verified) -> None:
        cast(PausableDrafter, self.model).remember(verified)
        self.lookup.observe(verified)

    def resume(self, slots: torch.Tensor) -> None:
        cast(PausableDrafter, self.model).resume(slots)


class _PartOfState:
    """The state of one of the two, in place of :class:`unisono.kv.store.StateView`."""

    def __init__(self, state: Any, name: str) -> None:
        self._state, self._name = state, name

    @property
    def tree(self) -> Any:
        return self._state[self._name]

    def __getitem__(self, name: str) -> Any:
        return self.tree[name]


def _model_of(spec: SpeculativeConfig, target: DecoderConfig) -> Drafter:
    """The drafter with a model."""
    method = spec.options.get("draft_method")
    if method is None:
        directory = None if spec.model is None else catalog.find_directory(spec.model)
        method = "mtp" if directory is None else draft_method(read_object(directory / CONFIG))
    if method is None or method in ("combined", "none", "ngram", "suffix"):
        raise ConfigError(
            f'"draft_method": {method!r} of the method combined: name the method of the draft model, such as eagle3, '
            "dflash or mtp."
        )
    options = {name: value for name, value in spec.options.items() if name not in OWN}
    drafter: Drafter = catalog.drafters.load(method)(replace(spec, method=method, options=options), target)
    return drafter


def _lookup_of(spec: SpeculativeConfig, target: DecoderConfig) -> NgramDrafter:
    """The drafter without one."""
    options = {name: spec.options.get(name, default) for name, default in LOOKUP.items()}
    shortest, longest = options["prompt_lookup_min"], options["prompt_lookup_max"]
    if "prompt_lookup_max" not in spec.options and isinstance(shortest, int):
        options["prompt_lookup_max"] = min(max(shortest, longest), LONGEST_MATCH)
    return NgramDrafter(SpeculativeConfig("ngram", None, spec.num_speculative_tokens, options), target)
