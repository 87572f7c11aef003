"""Sleep of an engine: its memory is freed while it serves nobody, and got back at the same addresses.

Requests that run keep their tokens and are computed again after the wake. Graphs stay captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from unisono.config import ResolvedConfig
from unisono.engine.scheduling.scheduler import Scheduler
from unisono.engine.worker.runner import Runner
from unisono.engine.worker.sleeping import Sleep, WakeUp
from unisono.engine.worker.weight_updates import ReloadWeights
from unisono.types import BadRequest, ConfigError

WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")
"""Parts of the memory, by vLLM's names."""


@dataclass
class SleepState:
    """asleep: tags whose memory is free. held: passes were held before the sleep. directory: of the target's weights:
    empty: those of the start; None: they were pushed, and are in no directory."""

    asleep: set[str] = field(default_factory=set)
    held: bool = False
    directory: str | None = ""

    def check_awake(self) -> None:
        """Raise BadRequest while the engine sleeps."""
        if self.asleep:
            raise BadRequest(f"the engine sleeps ({', '.join(sorted(self.asleep))}); wake it up first.")


class SleepingEngine(Protocol):
    """The parts of an engine that sleep reaches. paused: True while no pass may be launched."""

    runner: Runner
    scheduler: Scheduler
    sleep: SleepState
    weight_version: str
    paused: bool

    @property
    def config(self) -> ResolvedConfig: ...
    def reset_prefix_cache(self) -> int: ...
    def finish_pass(self) -> None: ...


def sleep_commands(engine: SleepingEngine) -> Mapping[str, Callable[..., Any]]:
    """Commands that free the memory and get it back; names and tags are vLLM's."""
    return {
        "sleep": torch.inference_mode()(lambda level=1: fall_asleep(engine, level)),
        "wake_up": torch.inference_mode()(lambda tags=None, reload=True: wake_up(engine, tags, reload)),
    }


def fall_asleep(engine: SleepingEngine, level: int) -> dict[str, Any]:
    """Free weights and KV cache; cached prefixes are forgotten.

    level: 1: weights go to host memory. 2: the target's weights are dropped; a drafter's and a vision tower's go to
    host memory. Returns freed bytes by tag, of rank 0. Raises ConfigError if the engine cannot sleep.
    """
    requested = engine.config.requested
    if level not in (1, 2):
        raise ConfigError(f"level={level}: give 1 (weights to host memory) or 2 (weights dropped).")
    if not requested.enable_sleep_mode:
        raise ConfigError("this engine cannot free its memory: start it with --enable-sleep-mode.")
    if requested.exchanges_pages:
        raise ConfigError("an engine that exchanges pages with others cannot sleep: they would read freed memory.")
    if engine.sleep.asleep:
        raise ConfigError(f"the engine sleeps already ({', '.join(sorted(engine.sleep.asleep))}).")
    engine.finish_pass()
    recomputed = engine.scheduler.recompute()
    freed_pages = engine.reset_prefix_cache()
    engine.runner.send(Sleep(level))
    engine.sleep.held, engine.paused = engine.paused, True
    engine.sleep.asleep = set(TAGS)
    memory = engine.runner.worker.memory
    assert memory is not None
    return {
        "level": level, "freed_bytes": dict(memory.freed), "freed_pages": freed_pages,
        "recomputed_requests": recomputed,
    }  # fmt: skip


def wake_up(engine: SleepingEngine, tags: Sequence[str] | None, reload: bool) -> dict[str, Any]:
    """Get memory back; without sleeping parts left, go on.

    tags: parts to wake; None: all. reload: read weights that level 2 dropped from their directory; False: the caller
    writes all of them with an update before it wakes the KV cache. Raises ConfigError, with the rest asleep, if memory
    or weights are missing, CheckpointError if the weights cannot be read.
    """
    state, slept = engine.sleep, bool(engine.sleep.asleep)
    chosen = set(TAGS if tags is None else tags)
    if unknown := sorted(chosen.difference(TAGS)):
        raise ConfigError(f"tag {unknown[0]!r}: give {' or '.join(TAGS)}.")
    updater = engine.runner.worker.updater
    assert updater is not None
    if WEIGHTS in chosen & state.asleep:
        _get_back(engine, WakeUp(True, False))
        state.asleep.discard(WEIGHTS)
    if reload and updater.void and WEIGHTS in chosen:
        if state.directory is None:
            raise ConfigError(
                f"the weights of version {engine.weight_version} were pushed and are in no directory: push all of "
                "them again, or update from a directory, then wake the KV cache."
            )
        engine.runner.send(ReloadWeights(state.directory))
    if KV_CACHE in chosen & state.asleep:
        if WEIGHTS in state.asleep and not updater.void:
            raise ConfigError("the KV cache wakes after the weights (all missing): wake or update them first.")
        updater.check_filled()
        _get_back(engine, WakeUp(False, True))
        state.asleep.discard(KV_CACHE)
    if slept and not state.asleep:
        engine.paused = state.held
    return {
        "is_sleeping": bool(state.asleep), "asleep": sorted(state.asleep), "weight_version": engine.weight_version,
        "missing_weights": len(updater.void),
    }  # fmt: skip


def _get_back(engine: SleepingEngine, command: WakeUp) -> None:
    try:
        engine.runner.send(command)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the memory is in use by others: free it and wake up again ({error}).") from None
