"""Adapters in a rank's host memory, and the commands with which rank 0 moves adapters on all ranks.

Every rank holds its part of the same adapters. Reading may fail and is answered; copying a held adapter to the device
cannot fail.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import msgspec

from unisono.models.lora.adapters import AdapterLayers, AdapterWeights, read_adapter
from unisono.types import CheckpointError


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read this rank's part of an adapter into host memory, unless it is held. digest: of the files read by rank 0."""

    directory: str
    digest: bytes


class KeepAdapters(msgspec.Struct, frozen=True, tag=True):
    """Forget all adapters in host memory except these digests."""

    digests: list[bytes]


class WriteAdapter(msgspec.Struct, frozen=True, tag=True):
    """Copy a held adapter to the device, to a place that no later pass reads for another adapter."""

    place: int
    digest: bytes


AdapterCommand = ReadAdapter | KeepAdapters | WriteAdapter


class HeldAdapters:
    """Adapters held by a rank, by digest, and the layers they are for."""

    def __init__(self, layers: AdapterLayers) -> None:
        self.layers = layers
        self._weights: dict[bytes, AdapterWeights] = {}

    @property
    def digests(self) -> Set[bytes]:
        """Digests of the held adapters."""
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
        """Execute a command of rank 0. Raises CheckpointError, without changing anything, if reading fails."""
        if isinstance(command, WriteAdapter):
            self.layers.write(command.place, self._weights[command.digest])
        elif isinstance(command, KeepAdapters):
            self._weights = {digest: self._weights[digest] for digest in command.digests if digest in self._weights}
        elif command.digest not in self._weights:
            weights = self.read(Path(command.directory))
            if weights.digest != command.digest:
                raise CheckpointError(f"{command.directory} has changed while it was loaded; load it again.")
            self.hold(weights)
