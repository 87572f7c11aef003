"""Default speculation: a bundled model's head, the checkpoint's own modules, or the assistant beside it."""

from __future__ import annotations

from unisono.config import ResolvedConfig, catalog
from unisono.config.checkpoint_files import CONFIG, read_object
from unisono.config.preflight.draft_method import draft_method
from unisono.drafters.from_checkpoint import carried_speculation
from unisono.models.load.checkpoint import Checkpoint
from unisono.types import SpeculativeConfig


def with_default_drafts(config: ResolvedConfig, checkpoint: Checkpoint) -> ResolvedConfig:
    """Return the configuration with default speculation, unless flags choose one or the weights are not read.

    If flags name a head, add the decision that says why its method is used.
    """
    if (requested := config.requested.speculative) is not None:
        return _with_head(config, requested)
    if config.requested.load_format == "dummy":
        return config
    if (head := catalog.drafts_of(checkpoint.path)) is not None:
        value = f"{head.method} ({head.model}), k = {head.num_speculative_tokens}"
        reason = f"the bundled head {head.model}; --speculative-method none turns it off"
        return config.decide("speculative", value, reason, speculative=head)
    found = carried_speculation(checkpoint.path, checkpoint.config)
    if found is None:
        return config
    spec, reason = found
    model = "" if spec is None or spec.model is None else f" ({spec.model})"
    value = "none" if spec is None else f"{spec.method}{model}, k = {spec.num_speculative_tokens}"
    return config.decide("speculative", value, reason, speculative=spec)


def _with_head(config: ResolvedConfig, spec: SpeculativeConfig) -> ResolvedConfig:
    """Add the reason for the method of the head that flags name."""
    if spec.model is None or spec.method == "none":
        return config
    named = draft_method(read_object(catalog.resolve_name(spec.model) / CONFIG))
    reason = "set by flags; config.json of the head names no method"
    if named is not None:
        reason = "config.json of the head names it" if named == spec.method else f"set by flags; config.json: {named}"
    return config.decide("speculative", f"{spec.method} ({spec.model}), k = {spec.num_speculative_tokens}", reason)
