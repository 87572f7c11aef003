"""An engine for the replicas of ``test_together.py`` that notes the features which its requests meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.engine.helpers import draw_pauses
from tests.engine.late_pages import arrive_late
from tests.engine.observed import Watch
from unisono.config import EngineConfig
from unisono.engine.engine import Engine
from unisono.engine.scheduling.mixing import Mixing


class ObservedEngine(Engine):
    """A replica's engine. The command ``observed`` returns the pairs that its requests met, and the features."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] = lambda stage, share: None
    ) -> None:
        patch = pytest.MonkeyPatch()  # until the process ends
        draw_pauses(patch)
        arrive_late(patch)
        patch.setattr(Mixing, "pays", lambda *_: True)
        super().__init__(config, progress)
        self.watch = Watch(self)

    def command(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """Run a command; see Engine.command."""
        if command != "observed":
            return super().command(command, arguments)
        self.watch.end_run("data parallel")
        return [sorted(pair) for pair in self.watch.exercised], sorted(self.watch.seen)
