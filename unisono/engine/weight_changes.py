"""Change of an engine's weights while it serves: every rank writes them in place, and what the old ones computed is
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from unisono.config import ResolvedConfig
from unisono.distributed.weight_group import TIMEOUT
from unisono.drafters.base import UpdatableDrafter
from unisono.engine.scheduling.scheduler import Scheduler
from unisono.engine.sleep import WEIGHTS, SleepState, sleep_commands
from unisono.engine.worker.runner import Runner
from unisono.engine.worker.weight_updates import (
    EndUpdate,
    JoinWeightGroup,
    LeaveWeightGroup,
    ReceiveWeights,
    UpdateTensors,
    UpdateWeights,
)
from unisono.types import ConfigError
from unisono.types.shared_tensor import SharedTensor


class ChangedEngine(Protocol):
    """The parts of an engine that a change of weights reaches. weight_updates: number of changes so far.
    paused: True while no pass may be launched."""

    runner: Runner
    scheduler: Scheduler
    weight_updates: int
    weight_version: str
    paused: bool
    sleep: SleepState

    @property
    def config(self) -> ResolvedConfig: ...
    def reset_prefix_cache(self) -> int: ...
    def finish_pass(self) -> None: ...


def change_weights(engine: ChangedEngine, directory: str, draft_directory: str, version: str | None) -> dict[str, Any]:
    """Replace the weights by those of directories with the same tensors. No pass may be in flight. Graphs stay.

    directory: the target's, with the drafter's modules if these are in it; empty: the target stays. draft_directory:
    the drafter's. version: its name in answers; None counts updates.

    Cached prefixes and encoded pictures are forgotten. Running requests keep their tokens; the new weights compute the
    rest of their texts, from all of their tokens. Returns JSON-ready data. Raises CheckpointError and ConfigError with
    the old weights in place.
    """
    spec = engine.config.speculative
    if not directory and not draft_directory:
        raise ConfigError("name a directory of weights.")
    in_target = spec is not None and spec.model is None and isinstance(engine.runner.worker.drafter, UpdatableDrafter)
    if directory and not draft_directory and in_target:
        draft_directory = directory
    return _changed(engine, UpdateWeights(directory, draft_directory), version)


def weight_commands(engine: ChangedEngine) -> Mapping[str, Callable[..., Any]]:
    """Commands that write some of the weights by name, and that hold or resume passes; names are SGLang's."""

    def from_tensor(
        files: Sequence[str] = (), version: str | None = None, draft: bool = False,
        handles: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        try:
            shared = msgspec.convert(handles or {}, dict[str, SharedTensor], from_attributes=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"handles: {error}") from None
        if shared and engine.config.device.type != "cuda":
            raise ConfigError(f"handles: CUDA shares memory of GPUs, and the engine runs on {engine.config.device}.")
        return _changed(engine, UpdateTensors(tuple(files), draft, shared), version)

    def from_distributed(
        names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group_name: str,
        version: str | None = None, draft: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        if not len(names) == len(dtypes) == len(shapes):
            raise ConfigError(f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes: give one of each.")
        sizes = tuple(tuple(shape) for shape in shapes)
        return _changed(engine, ReceiveWeights(group_name, tuple(names), tuple(dtypes), sizes, draft), version)

    def join(
        master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        where = (
            group_name,
            master_address,
            master_port,
            rank_offset,
            world_size,
            backend,
            TIMEOUT if timeout is None else timeout,
        )
        engine.runner.send(JoinWeightGroup(*where))

    def leave(group_name: str) -> None:
        engine.runner.send(LeaveWeightGroup(group_name))

    def pause(paused: bool) -> None:
        engine.finish_pass()
        if engine.sleep.asleep:
            engine.sleep.held = paused
        else:
            engine.paused = paused

    return {
        "update_weights_from_tensor": torch.inference_mode()(from_tensor),
        "update_weights_from_distributed": torch.inference_mode()(from_distributed),
        "init_weights_update_group": join,
        "destroy_weights_update_group": leave,
        "pause": torch.inference_mode()(pause),
        **sleep_commands(engine),
    }


def _changed(
    engine: ChangedEngine, command: UpdateWeights | UpdateTensors | ReceiveWeights, version: str | None
) -> dict[str, Any]:
    """Have all ranks write weights, and forget what the old ones computed."""
    requested = engine.config.requested
    if requested.exchanges_pages or requested.kv_offload_dir is not None:
        raise ConfigError(
            "weights cannot be updated while pages are in files or shared with other engines: restart without "
            "--kv-offload-dir, and without prefill and decode apart."
        )
    if WEIGHTS in engine.sleep.asleep:
        raise ConfigError('the weights sleep: wake them up first, with tags=["weights"].')
    engine.finish_pass()
    recomputed = engine.scheduler.recompute()
    freed = engine.reset_prefix_cache()  # now no page is in use, and ranks keep the old weights in them
    try:
        engine.runner.send(command)
    except Exception:
        engine.runner.send(EndUpdate(False))
        raise
    engine.runner.send(EndUpdate(True))
    for feature in engine.runner.request_features:
        feature.weights_changed()
    if isinstance(command, UpdateWeights):
        engine.sleep.directory = command.directory or engine.sleep.directory
    elif not command.draft:
        engine.sleep.directory = None  # no directory has the pushed weights, so wake-up cannot read them again
    engine.weight_updates += 1
    engine.weight_version = str(engine.weight_updates) if version is None else version
    return {"weight_version": engine.weight_version, "recomputed_requests": recomputed, "freed_pages": freed}
