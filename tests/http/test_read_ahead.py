"""A server has its weights read before it starts the engine process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.http.fake_engine import FakeConfig
from unisono.cluster.replicas.plan import ReplicaSettings
from unisono.config import EngineConfig
from unisono.http import server
from unisono.http.server import ServerSettings
from unisono.types import SpeculativeConfig

DRAFT = SpeculativeConfig(method="eagle3", model="/models/draft")


class Stopped(Exception):
    """The engine process would start now."""


@pytest.mark.parametrize(
    ("config", "scale", "directories"),
    [
        (EngineConfig("/models/target"), ReplicaSettings(), ["target"]),
        (EngineConfig("/models/target", speculative=DRAFT), ReplicaSettings(), ["target", "draft"]),
        (EngineConfig("/models/target"), ReplicaSettings(data_parallel_size=2), ["target"]),
        (EngineConfig("/models/target"), ReplicaSettings(distributed_executor_backend="ray"), None),
        (EngineConfig("/models/target", load_format="dummy"), ReplicaSettings(), None),
        (FakeConfig(), ReplicaSettings(), None),
    ],
    ids=["target", "draft", "replicas", "other machines", "random weights", "no weights"],
)
def test_files_are_read_before_the_engine_starts(
    config: Any, scale: ReplicaSettings, directories: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []

    def read_ahead(requested: Sequence[Path]) -> None:
        found.append([directory.name for directory in requested])

    class Client:
        def start(self) -> None:
            raise Stopped

    monkeypatch.setattr(server, "read_ahead", read_ahead)
    monkeypatch.setattr(ServerSettings, "client", lambda *arguments: Client())
    with pytest.raises(Stopped):
        server.serve(config, ServerSettings(Path("/models/target"), ("target",), port=0, scale=scale))
    assert found == ([] if directories is None else [directories])
