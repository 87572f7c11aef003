"""Update of a worker's weights in two steps, so that all ranks change or none.

Sources: directories, safetensors files (of shared memory), a trainer's process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch

from unisono.config.checkpoint_files import CONFIG
from unisono.distributed.cuda_ipc import OpenedTensors
from unisono.distributed.weight_group import WeightGroup
from unisono.drafters.base import Drafter, UpdatableDrafter
from unisono.models.blocks.decoder import Decoder
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import (
    check_finite,
    checkpoint_names,
    decoder_update,
    drawn_parameters,
    fill_randomly,
    held_by,
    partial_update,
    tower_update,
)
from unisono.models.load.slices import whole_name, with_slices
from unisono.models.load.tensor_files import NAMES, TensorInfo, read_header
from unisono.models.load.update import Changes, WeightUpdate
from unisono.models.load.weights import check_tensor
from unisono.models.vision.tower import AnyTower
from unisono.types import CheckpointError, ConfigError
from unisono.types.shared_tensor import SharedTensor


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Write the weights of directories over the served ones; an empty name leaves a part as it is.

    Answered. If a rank fails, it has its old weights. All ranks then get EndUpdate.
    """

    directory: str
    draft_directory: str


class UpdateTensors(msgspec.Struct, frozen=True, tag=True):
    """Write the tensors of safetensors files over the weights of these names. Answered as UpdateWeights.

    draft: those of the drafter, by the names of its checkpoint; otherwise the target's. shared: tensors in the GPU
    memory of another process, by name.
    """

    files: tuple[str, ...]
    draft: bool = False
    shared: dict[str, SharedTensor] = {}


class ReceiveWeights(msgspec.Struct, frozen=True, tag=True):
    """Receive tensors through a group and write them over weights. Answered as UpdateWeights.

    dtypes: torch's names without ``torch.``. draft: as of UpdateTensors.
    """

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    draft: bool = False


class JoinWeightGroup(msgspec.Struct, frozen=True, tag=True):
    """Join a trainer's group as rank ``rank_offset`` plus the rank in the engine. Answered; waits for all members."""

    group: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout: float


class LeaveWeightGroup(msgspec.Struct, frozen=True, tag=True):
    """Leave a trainer's group. Answered."""

    group: str


class EndUpdate(msgspec.Struct, frozen=True, tag=True):
    """End an update. keep: keep the new weights; otherwise put the old ones back."""

    keep: bool


class ReloadWeights(msgspec.Struct, frozen=True, tag=True):
    """Load the target's weights after sleep level 2 has dropped them. Answered; an error leaves them void.

    directory: with the tensors of the served checkpoint; empty: the checkpoint of the start, or its dummy weights.
    """

    directory: str


UPDATES = UpdateWeights, UpdateTensors, ReceiveWeights, ReloadWeights
"""Commands that write weights."""

UpdateCommand = (
    UpdateWeights | UpdateTensors | ReceiveWeights | ReloadWeights | JoinWeightGroup | LeaveWeightGroup | EndUpdate
)


@dataclass
class WeightUpdater:
    """Updates the weights of one worker's modules.

    checkpoint: of the start. dummy_seed: seed of its dummy weights; None if they were read. scratch: returns memory for
    old values, see :class:`Changes`. draft_directory: of the drafter's checkpoint; empty: it has none. void: names of
    the target's tensors of this rank that sleep has dropped, or that an update after it has written in part.
    """

    model: Decoder
    tower: AnyTower | None
    drafter: Drafter
    checkpoint: Checkpoint
    dummy_seed: int | None = None
    scratch: Callable[[], Sequence[torch.Tensor]] = tuple
    draft_directory: str = ""
    void: set[str] = field(default_factory=set)
    opened: OpenedTensors = field(default_factory=OpenedTensors)
    _changes: Changes | None = None
    _groups: dict[str, WeightGroup] = field(default_factory=dict)

    def execute(self, command: UpdateCommand) -> None:
        """Execute a command. Raises CheckpointError and ConfigError with the old weights in place."""
        if isinstance(command, JoinWeightGroup):
            self._join(command)
        elif isinstance(command, LeaveWeightGroup):
            self._group(command.group).close()
            del self._groups[command.group]
        elif isinstance(command, ReloadWeights):
            self._reload(command)
        elif isinstance(command, UPDATES):
            updates = self._updates(command) if isinstance(command, UpdateWeights) else self._partial(command)
            changes = Changes(updates, self.scratch(), self.model if self.void else None)
            try:
                changes.write()
            except BaseException:
                self._lose(changes)
                raise
            self._changes = changes
        else:
            self._end(command)

    def _end(self, command: EndUpdate) -> None:
        changes, self._changes = self._changes, None
        try:
            if changes is not None and command.keep:
                self.void.difference_update(*(update.targets for update in changes.updates if self._in_target(update)))
                changes.keep()
            elif changes is not None:
                changes.revert()
                self._lose(changes)
        finally:
            self.opened.close()

    def _in_target(self, update: WeightUpdate) -> bool:
        """Return True for an update of the target, whose names ``void`` has. A drafter's names may be the same."""
        return update.module is self.model

    def _lose(self, changes: Changes) -> None:
        """Count the target's tensors of a failed update as void, if their old values were not kept.

        Values that are not finite become 0: the check of the next update would find them.
        """
        if self.void:
            for update in filter(self._in_target, changes.updates):
                self.void.update(map(whole_name, update.targets))
            for parameter in self.model.parameters():
                if parameter.is_floating_point() and parameter.element_size() > 1:
                    torch.nan_to_num_(parameter.data, 0.0, 0.0, 0.0)

    def check_filled(self) -> None:
        """Raise ConfigError if weights of this rank are void."""
        if self.void:
            raise ConfigError(
                f"the KV cache wakes after the weights ({len(self.void)} dropped tensors, such as {min(self.void)} "
                "missing): wake or update them first."
            )

    def loaded(self) -> Iterator[torch.Tensor]:
        """Yield the target's weights that :class:`ReloadWeights` and complete updates write, and count them as void.

        Raises CheckpointError if the checkpoint of the start cannot be opened any more.
        """
        if self.dummy_seed is not None:
            self.void = set(checkpoint_names(self.model, self.checkpoint.family))
            yield from (parameter for _, parameter in drawn_parameters(self.model))
            return
        targets = decoder_update(self.model, self.checkpoint).targets
        self.void = set(targets)
        waiting = list(targets.values())
        while waiting:
            target = waiting.pop()
            yield from (target.parameter, *target.others.values())
            waiting += [part for part, _ in held_by(target)]

    def _reload(self, command: ReloadWeights) -> None:
        if self.dummy_seed is not None and not command.directory:
            fill_randomly(self.model, self.dummy_seed)
        else:
            checkpoint = self._opened(Path(command.directory)) if command.directory else self.checkpoint
            Changes([decoder_update(self.model, checkpoint)], void=self.model).write()
        self.void = set()

    def _join(self, command: JoinWeightGroup) -> None:
        if command.group in self._groups:
            raise ConfigError(f"group {command.group!r} exists; destroy it first, or name another.")
        rank = command.rank_offset + self.model.builder.ranks.index
        self._groups[command.group] = WeightGroup(
            command.address, command.port, rank, command.world_size, command.backend, command.timeout
        )

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise ConfigError(f"group {name!r} does not exist; the groups are {sorted(self._groups)}.")
        return self._groups[name]

    def _partial(self, command: UpdateTensors | ReceiveWeights) -> Sequence[WeightUpdate]:
        """The updates of the weights that a command names. Receives all tensors before it checks them, so that
        a trainer never waits for an engine that refused."""
        tensors: dict[str, TensorInfo] = {}
        if isinstance(command, UpdateTensors):
            for file in map(Path, command.files):
                if not file.is_file():
                    raise CheckpointError(f"{file} is no file of weights.")
                tensors.update(read_header(file))
            tensors |= self._received("CUDA IPC", {name: self.opened.open(one) for name, one in command.shared.items()})
        else:
            group = self._group(command.group)
            dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
            if wrong := [name for name in command.dtypes if name not in dtypes]:
                raise ConfigError(f"dtype {wrong[0]!r}: give one of {', '.join(dtypes)}.")
            received = group.receive(command.names, [dtypes[name] for name in command.dtypes], command.shapes)
            tensors |= self._received(f"group {command.group}", received)
        if not tensors:
            raise ConfigError("name at least one tensor.")
        if command.draft:
            return self._partial_draft(tensors)
        return [partial_update(self.model, self.checkpoint, tensors)]

    @staticmethod
    def _received(source: str, received: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
        """Tensors that are in memory. Raises ConfigError for a dtype without a place in checkpoints."""
        found = {}
        for number, (name, tensor) in enumerate(received.items()):
            if tensor.dtype not in NAMES:
                raise ConfigError(f"tensor {name}: {tensor.dtype} is no dtype of checkpoints.")
            found[name] = TensorInfo(Path(source), name, NAMES[tensor.dtype], tuple(tensor.shape), number, tensor)
        return found

    def _partial_draft(self, tensors: Mapping[str, TensorInfo]) -> Sequence[WeightUpdate]:
        """The updates of some of the drafter's weights; copies of the target's are made again."""
        if not isinstance(self.drafter, UpdatableDrafter) or not self.draft_directory:
            raise ConfigError(f"the {self.drafter.name} drafter has no weights that can be updated.")
        found, left = list[WeightUpdate](), dict(tensors)
        for whole in self.drafter.weight_updates(Path(self.draft_directory)):
            stored = {whole.tensors[name].name: target for name, target in whole.targets.items()}
            pushed = {name: left.pop(name) for name in list(left) if whole_name(name) in stored}
            every, named = with_slices(stored, pushed)
            for name, info in named.items():
                check_tensor(name, info, every[name])
            targets = {name: every[name] for name in named}
            if named:
                found.append(WeightUpdate(whole.module, targets, named, partial(check_finite, whole.module, "a push")))
            elif not whole.targets:
                found.append(whole)
        if left:
            name, info = next(iter(left.items()))
            raise CheckpointError(
                f"{info.file}: tensor {name} {list(info.shape)} has no place in the {self.drafter.name} drafter. Give "
                f"names of {self.draft_directory}."
            )
        return found

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
