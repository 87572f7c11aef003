"""The adapters in memory of a rank's host, and the commands with which rank 0 moves adapters on all ranks.

Every rank holds the same adapters, each its part of them. Reading may fail and is answered; after that, putting one
onto the device cannot.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import msgspec

from unisono.models.lora.adapters import AdapterLayers, AdapterWeights, read_adapter
from unisono.types import CheckpointError


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read this rank's part of an adapter into memory of the host, unless it is held. digest: of what rank 0 read."""

    directory: str
    digest: bytes


class KeepAdapters(msgspec.Struct, frozen=True, tag=True):
    """Forget the adapters in memory of the host, all but these digests."""

    digests: list[bytes]


class WriteAdapter(msgspec.Struct, frozen=True, tag=True):
    """Put an adapter that is held onto the device, into a place that no later pass reads for another one."""

    place: int
    digest: bytes


AdapterCommand = ReadAdapter | KeepAdapters | WriteAdapter


class HeldAdapters:
    """The adapters that a rank holds, by digest, and the layers that they are for."""

    def __init__(self, layers: AdapterLayers) -> None:
        self.layers = layers
        self._weights: dict[bytes, AdapterWeights] = {}

    @property
    def digests(self) -> Set[bytes]:
        """Of the adapters that are held."""
        return self._weights.keys()

    def read(self, directory: Path) -> AdapterWeights:
        """Read an adapter without holding it. Raises CheckpointError."""
        try:
            return read_adapter(directory, self.layers)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be read: {error}.") from None

    def hold(self, weights: AdapterWeights) -> None:
        """Hold an adapter."""
        self._weights[weights.digest] = weights

    def execute(self, command: AdapterCommand) -> None:
        """Execute a command of rank 0. Raises CheckpointError, having changed nothing, where reading fails."""
        if isinstance(command, WriteAdapter):
            self.layers.write(command.place, self._weights[command.digest])
        elif isinstance(command, KeepAdapters):
            self._weights = {digest: self._weights[digest] for digest in command.digests if digest in self._weights}
        elif command.digest not in self._weights:
            weights = self.read(Path(command.directory))
            if weights.digest != command.digest:
                raise CheckpointError(f"{command.directory} has changed while it was loaded; load it again.")
            self.hold(weights)
