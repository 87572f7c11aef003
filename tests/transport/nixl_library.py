"""The library NIXL in tests: the real one where it is installed, and one of the same calls within this process.

The latter checks what the real one checks: lengths that match, and memory that was registered.
"""

from __future__ import annotations

import ctypes
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest

NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="the package nixl is not installed")
LIBRARIES = ["imitated", pytest.param("real", marks=NEEDS_NIXL)]

Region = tuple[int, int]


class Imitation:
    """``nixl._api.nixl_agent``. Reads are done when they are first checked after :attr:`polls` checks."""

    agents: ClassVar[dict[bytes, Imitation]] = {}
    polls = 1
    reaches = True
    """Whether a read ever gets an answer."""

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.backends = name, {"UCX": 0}
        self.memory: list[Region] = []
        self.known: set[str] = set()
        Imitation.agents[name.encode()] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> list[Region]:
        assert kind == "DRAM"
        self.memory += [(address, size) for address, size, _, _ in regions]
        return list(self.memory)

    def deregister_memory(self, regions: list[Region]) -> None:
        self.memory = [one for one in self.memory if one not in regions]
        Imitation.agents.pop(self.name.encode(), None)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata not in Imitation.agents:
            raise RuntimeError("NIXL_ERR_MISMATCH")
        self.known.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> list[Region]:
        return [(address, size) for address, size, _ in regions]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def initialize_xfer(self, operation: str, here: list[Region], there: list[Region], name: str) -> dict[str, Any]:
        peer = Imitation.agents.get(name.encode())
        if name not in self.known or peer is None:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        for agent, regions in ((self, here), (peer, there)):
            for address, size in regions:
                if not any(start <= address and address + size <= start + all for start, all in agent.memory):
                    raise RuntimeError("NIXL_ERR_NOT_FOUND")
        assert operation == "READ"
        return {"here": here[0], "there": there[0], "peer": peer, "polls": Imitation.polls}

    def transfer(self, read: dict[str, Any]) -> str:
        return "PROC"

    def check_xfer_state(self, read: dict[str, Any]) -> str:
        if not read["peer"].memory:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        read["polls"] -= 1
        if read["polls"] >= 0 or not Imitation.reaches:
            return "PROC"
        ctypes.memmove(read["here"][0], read["there"][0], read["here"][1])
        return "DONE"

    def release_xfer_handle(self, read: dict[str, Any]) -> None:
        pass


def use_library(which: str, patch: pytest.MonkeyPatch) -> type[Imitation]:
    """Make ``import nixl`` find the library that a test is for."""
    patch.setattr(Imitation, "agents", {})
    patch.setattr(Imitation, "polls", 1)
    patch.setattr(Imitation, "reaches", True)
    if which == "imitated":
        package, api = types.ModuleType("nixl"), types.ModuleType("nixl._api")
        package.__spec__ = ModuleSpec("nixl", None)
        api.nixl_agent, api.nixl_agent_config = Imitation, types.SimpleNamespace  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "nixl", package)
        patch.setitem(sys.modules, "nixl._api", api)
    return Imitation


def without_library(patch: pytest.MonkeyPatch) -> None:
    """Make ``import nixl`` fail."""
    patch.setitem(sys.modules, "nixl", None)
    patch.setitem(sys.modules, "nixl._api", None)
