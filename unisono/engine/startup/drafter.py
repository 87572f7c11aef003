"""The drafter of the configured method."""

from __future__ import annotations

from unisono.config import catalog
from unisono.drafters.base import DivisibleDrafter, Drafter, TreeDrafter
from unisono.models.config import DecoderConfig
from unisono.types import ConfigError, SpeculativeConfig

MEMBERS = (
    "name", "num_drafts", "features", "self_test", "bind", "state_specs", "propose", "observe", "observe_prompt",
)  # fmt: skip
"""Attributes and methods of every drafter."""


def make_drafter(spec: SpeculativeConfig, target: DecoderConfig) -> Drafter:
    """Return the drafter of the configured method, without its weights.

    Raises ConfigError if its class lacks members of ``Drafter``, or if it cannot draft the tree.
    """
    drafter: Drafter = catalog.drafters.load(spec.method)(spec, target)
    if missing := [name for name in MEMBERS if not hasattr(drafter, name)]:
        raise ConfigError(
            f"the drafter {spec.method!r} ({type(drafter).__module__}.{type(drafter).__name__}) has no "
            f"{', '.join(missing)}; docs/extend/drafter.md describes them."
        )
    if spec.paths and not isinstance(drafter, TreeDrafter):
        raise ConfigError(
            f"the method {spec.method!r}, as it is set up here, drafts chains only; a tree of {len(spec.paths)} "
            "paths is configured: leave out speculative_token_tree, or topk and num_draft_tokens."
        )
    if (spec.draft_tensor_parallel_size or 1) > 1 and not isinstance(drafter, DivisibleDrafter):
        raise ConfigError(
            f"draft_tensor_parallel_size={spec.draft_tensor_parallel_size}: the method {spec.method!r} has no layers "
            "that could be divided so; leave it out."
        )
    return drafter
