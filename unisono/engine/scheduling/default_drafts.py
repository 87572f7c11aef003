"""Default speculation: a bundled model's head, the checkpoint's own modules, or the assistant beside it."""

from __future__ import annotations

from unisono.config import ResolvedConfig, catalog
from unisono.drafters.from_checkpoint import carried_speculation
from unisono.models.load.checkpoint import Checkpoint


def with_default_drafts(config: ResolvedConfig, checkpoint: Checkpoint) -> ResolvedConfig:
    """Return the configuration with default speculation, unless flags choose one or the weights are not read."""
    if config.requested.speculative is not None or config.requested.load_format == "dummy":
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
