"""The worker: one rank's device state, and the commands that change it.

A worker owns the model, the drafter, the state store, the slots and the captured graphs. ``engine/worker/build.py``
makes one. After that it executes commands (``engine/worker/commands.py``) and decides nothing itself.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from unisono.drafters.base import Drafter
from unisono.engine.disaggregation.page_bytes import PageBytes
from unisono.engine.worker.commands import (
    Arrived,
    Command,
    FileCommand,
    FileOutcomes,
    KeepAdapters,
    LoadSnapshot,
    MoveIn,
    MoveOut,
    PackPages,
    ReadAdapter,
    ReadFile,
    RemoveFiles,
    ResetRecurrent,
    ResetSlots,
    SaveSnapshot,
    UnpackPages,
    WriteAdapter,
    WriteFile,
    WritePages,
    WriteSlot,
)
from unisono.engine.worker.sleeping import Sleep, SleepCommand, SleepingMemory
from unisono.engine.worker.slots import Slots
from unisono.engine.worker.weight_updates import UpdateCommand, WeightUpdater
from unisono.graphs import PendingOutputs
from unisono.graphs.graph_set import GraphSet
from unisono.kernels.gemm.persistent import release
from unisono.kv.offload.host_index import Part
from unisono.kv.offload.host_pages import HostPages
from unisono.kv.offload.part_files import PartFiles
from unisono.kv.store import StateStore
from unisono.layers.experts import reset_expert_counts
from unisono.models.blocks.decoder import Decoder
from unisono.models.lora.host_adapters import HeldAdapters
from unisono.models.vision.tower import AnyTower
from unisono.passes.advance_snapshot import advance_snapshots


class Worker:
    """One device with everything on it. Use it in inference mode.

    tower: the vision encoder; None for a text model. num_pages: pages of the pool by window group; path_pages: further
    pages of each group for the paths of trees. snapshots: capacity for snapshots of recurrent state. host_pages: host
    memory for evicted pages, or None. files: disk storage for these, or None. file_sizes: bytes of this rank's files
    for the parts that all ranks had at the start, least recently used first. adapters: adapters for the model's adapter
    slots; None if it has none. page_bytes: reads and writes pages for other engines; None if no engine exchanges pages
    with this one. updater: replaces the weights while they are served. memory: holds weights and pages so that they can
    be freed; None without ``--enable-sleep-mode``.
    """

    def __init__(
        self,
        model: Decoder,
        drafter: Drafter,
        store: StateStore,
        slots: Slots,
        graphs: GraphSet,
        tower: AnyTower | None = None,
    ) -> None:
        self.model, self.drafter, self.store, self.slots, self.graphs = model, drafter, store, slots, graphs
        self.tower = tower
        self.num_pages: Mapping[int, int] = {}
        self.path_pages = self.snapshots = 0
        self.host_pages: HostPages | None = None
        self.files: PartFiles | None = None
        self.file_sizes: Mapping[Part, int] = {}
        self.adapters: HeldAdapters | None = None
        self.page_bytes: PageBytes | None = None
        self.updater: WeightUpdater | None = None
        self.memory: SleepingMemory | None = None

    @property
    def page_ranks(self) -> int:
        """Number of ranks among which the pages are divided."""
        return self.model.builder.ranks.page_ranks

    def hold_pages(self, num_pages: Mapping[int, int], path_pages: int = 0, snapshots: int = 0) -> None:
        """Allocate the pages of target and drafter, in place of fewer ones."""
        self.num_pages, self.path_pages, self.snapshots = num_pages, path_pages, snapshots
        if self.memory is not None:
            self.memory.free_pages()
        self.store.allocate({window_group: n + path_pages for window_group, n in num_pages.items()}, snapshots)

    def unused_pages(self) -> list[torch.Tensor]:
        """Memory of all pages, uint8, for use while nothing holds a page; none while they sleep."""
        asleep = self.memory is not None and self.memory.pages_asleep
        return [] if asleep else self.store.page_memory()

    def execute(self, command: Command) -> PendingOutputs | None:
        """Execute a command and return at once, with the outputs of a launched pass on their way to the host.

        Raises torch.OutOfMemoryError if a graph to be captured does not fit, CheckpointError if an adapter cannot be
        read.
        """
        if isinstance(command, WriteSlot):
            self.slots.write(command)
        elif isinstance(command, WritePages):
            self.slots.write_pages(command)
        elif isinstance(command, SaveSnapshot):
            if command.position:
                advance_snapshots(self.model, self.store, command.slot, command.position)
            self.store.save_snapshot(command.slot, command.snapshot)
        elif isinstance(command, LoadSnapshot):
            self.store.load_snapshot(command.slot, command.snapshot, command.position)
        elif isinstance(command, ResetRecurrent):
            self.store.reset_recurrent(command.slot)
        elif isinstance(command, MoveOut | MoveIn | Arrived):
            self._move(command)
        elif isinstance(command, WriteFile | ReadFile | RemoveFiles):
            self._execute_on_files(command)
        elif isinstance(command, PackPages | UnpackPages):
            assert self.page_bytes is not None
            self.page_bytes.execute(command)
        elif isinstance(command, ReadAdapter | KeepAdapters | WriteAdapter):
            assert self.adapters is not None
            self.adapters.execute(command)
        elif isinstance(command, UpdateCommand):
            assert self.updater is not None
            self.updater.execute(command)
        elif isinstance(command, SleepCommand):
            self._sleep(command)
        elif isinstance(command, ResetSlots):
            self.slots.reset()
            reset_expert_counts(self.model)
        else:
            return self.graphs.execute(command)
        return None

    def _sleep(self, command: SleepCommand) -> None:
        assert self.memory is not None
        assert self.updater is not None
        if isinstance(command, Sleep):
            self.memory.sleep(command.level, self.updater.loaded() if command.level == 2 else ())
            return
        if command.weights:
            self.memory.wake_weights()
        if command.pages:
            self.updater.check_filled()  # rank 0 does not know which experts of other ranks are missing
            self.memory.wake_pages()

    def _move(self, command: MoveOut | MoveIn | Arrived) -> None:
        assert self.host_pages is not None
        if isinstance(command, MoveOut):
            self.host_pages.move_out(command.moves)
        elif isinstance(command, MoveIn):
            self.host_pages.move_in(command.ticket, command.moves)
        else:
            self.host_pages.arrived(command.ticket)

    def _execute_on_files(self, command: FileCommand) -> None:
        assert self.files is not None
        if isinstance(command, WriteFile):
            self.files.write(command.part, command.slot, command.complete)
        elif isinstance(command, ReadFile):
            self.files.read(command.part, command.slot)
        else:
            self.files.remove(command.parts)

    def answer(self, command: FileOutcomes) -> list[int]:
        """Answer a query."""
        assert self.files is not None
        return self.files.outcomes(command.parts)

    def modules(self) -> Iterator[nn.Module]:
        """Iterate over every module of the target."""
        yield from self.model.modules()
        if self.tower is not None:
            yield from self.tower.modules()

    def close(self) -> None:
        """Free the graphs, then everything that they were captured on."""
        on_gpu = self.graphs.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()  # the drafter's part of the last pass may still run
            release(self)
        if self.files is not None:
            self.files.close()
        if self.host_pages is not None:
            self.host_pages.close()
        self.graphs.close()
        self.adapters = self.page_bytes = self.updater = None
        large = [weakref.ref(each) for each in (self.model, self.drafter, self.store)]
        del self.model, self.tower, self.drafter, self.store, self.slots
        if on_gpu or any(each() is not None for each in large):
            gc.collect()  # 0.1 s, which many short-lived engines on a CPU need not spend
        if self.memory is not None:
            self.memory.close()
        if on_gpu:
            torch.cuda.empty_cache()
