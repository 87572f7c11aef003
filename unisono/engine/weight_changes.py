"""Change of an engine's weights while it serves: every rank writes them in place, and what the old ones computed is
forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.engine.worker.weight_updates import EndUpdate, UpdateWeights
from unisono.types import CheckpointError, ConfigError

if TYPE_CHECKING:
    from unisono.engine.engine import Engine


def change_weights(engine: Engine, directory: str, draft_directory: str, version: str | None) -> dict[str, Any]:
    """Replace the weights by those of directories with the same tensors. No pass may be in flight. Graphs stay.

    directory: the target's, with its MTP modules if it drafts with them; empty: the target stays. draft_directory: the
    drafter's. version: its name in answers; None counts updates.

    Cached prefixes and encoded pictures are forgotten. Running requests keep their tokens; the new weights compute the
    rest of their texts, from all of their tokens. Returns JSON-ready data. Raises CheckpointError and ConfigError with
    the old weights in place.
    """
    requested, spec = engine.config.requested, engine.config.speculative
    if requested.exchanges_pages or requested.kv_offload_dir is not None:
        raise ConfigError(
            "weights cannot be updated while pages are in files or shared with other engines: restart without "
            "--kv-offload-dir, and without prefill and decode apart."
        )
    if not directory and not draft_directory:
        raise ConfigError("name a directory of weights.")
    if directory and not draft_directory and spec is not None and spec.method == "mtp" and spec.model is None:
        draft_directory = directory
    try:
        engine.runner.send(UpdateWeights(directory, draft_directory))
    except (CheckpointError, ConfigError):
        engine.runner.send(EndUpdate(False))
        raise
    engine.runner.send(EndUpdate(True))
    recomputed = engine.scheduler.recompute()
    for feature in engine.runner.request_features:
        feature.weights_changed()
    freed = engine.reset_prefix_cache()
    engine.weight_updates += 1
    engine.weight_version = str(engine.weight_updates) if version is None else version
    return {"weight_version": engine.weight_version, "recomputed_requests": recomputed, "freed_pages": freed}
