"""Update of a worker's weights from directories, in two steps, so that all ranks change or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from unisono.config.checkpoint_files import CONFIG
from unisono.drafters.base import Drafter, UpdatableDrafter
from unisono.models.blocks.decoder import Decoder
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import decoder_update, tower_update
from unisono.models.load.update import Changes, WeightUpdate
from unisono.models.vision.tower import VisionTower
from unisono.types import CheckpointError, ConfigError


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Write the weights of directories over the served ones; an empty name leaves a part as it is.

    Answered. If a rank fails, it has its old weights. All ranks then get EndUpdate.
    """

    directory: str
    draft_directory: str


class EndUpdate(msgspec.Struct, frozen=True, tag=True):
    """End an update. keep: keep the new weights; otherwise put the old ones back."""

    keep: bool


UpdateCommand = UpdateWeights | EndUpdate


@dataclass
class WeightUpdater:
    """Updates the weights of one worker's modules. checkpoint: of the start."""

    model: Decoder
    tower: VisionTower | None
    drafter: Drafter
    checkpoint: Checkpoint
    _changes: Changes | None = None

    def execute(self, command: UpdateCommand) -> None:
        """Execute a command. Raises CheckpointError and ConfigError with the old weights in place."""
        if isinstance(command, UpdateWeights):
            changes = Changes(self._updates(command))
            changes.write()
            self._changes = changes
        elif self._changes is not None:
            self._changes.keep() if command.keep else self._changes.revert()
            self._changes = None

    def _updates(self, command: UpdateWeights) -> Sequence[WeightUpdate]:
        found: list[WeightUpdate] = []
        if command.directory:
            checkpoint = self._opened(Path(command.directory))
            found.append(decoder_update(self.model, checkpoint))
            if self.tower is not None:
                found.append(tower_update(self.tower, checkpoint))
        if command.draft_directory:
            if not isinstance(self.drafter, UpdatableDrafter):
                raise ConfigError(f"the {self.drafter.name} drafter has no weights that can be updated.")
            found += self.drafter.weight_updates(Path(command.draft_directory))
        return found

    def _opened(self, directory: Path) -> Checkpoint:
        """The checkpoint of a directory with the served model's config. A config.json there may be missing."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is no directory of weights.")
        served = self.checkpoint
        found = Checkpoint(
            directory, served.family, served.config, served.generation, served.eos_token_ids, served.dtype,
            served.quantization,
        )  # fmt: skip
        if (directory / CONFIG).is_file():
            stored = Checkpoint.open(directory)
            if stored.config != served.config:
                raise CheckpointError(f"{directory / CONFIG} is not the config of the {served.path} that is served.")
        return found
