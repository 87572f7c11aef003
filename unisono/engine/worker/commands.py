"""Commands of a worker, and their bytes.

Rank 0's scheduler, planner and engine loop send them. Workers that were built alike and execute the same commands have
the same device state and the same outputs. With one rank no command is encoded.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from unisono.engine.worker.sleeping import Sleep, SleepCommand, WakeUp
from unisono.engine.worker.weight_updates import (
    UPDATES,
    EndUpdate,
    JoinWeightGroup,
    LeaveWeightGroup,
    UpdateCommand,
    UpdateWeights,
)
from unisono.graphs.graph_set import Capture, GraphCommand, Launch, Measure, Release
from unisono.models.lora.host_adapters import AdapterCommand, KeepAdapters, ReadAdapter, WriteAdapter

__all__ = [
    "ANSWERED",
    "Arrived",
    "Capture",
    "Command",
    "EndUpdate",
    "FileOutcomes",
    "KeepAdapters",
    "Launch",
    "LoadSnapshot",
    "Measure",
    "MoveIn",
    "MoveOut",
    "PackPages",
    "ReadAdapter",
    "ReadFile",
    "Release",
    "RemoveFiles",
    "ResetSlots",
    "ResetRecurrent",
    "SaveSnapshot",
    "UnpackPages",
    "UpdateWeights",
    "WriteAdapter",
    "WriteFile",
    "WritePages",
    "WriteSlot",
    "decode",
    "encode",
]


class WriteSlot(msgspec.Struct, frozen=True, tag=True):
    """Write the initial state of a request's slot. All arrays are int32.

    row: the slot's row of its schema (``slots.slot_schema``). history: the committed tokens. pages: the page table's
    first columns. edits: the slot's row of the edit table; None if the request edits no logits.
    """

    slot: int
    row: np.ndarray
    history: np.ndarray
    pages: np.ndarray
    edits: np.ndarray | None


class WritePages(msgspec.Struct, frozen=True, tag=True):
    """Write pages of a window group into a slot's page table, from ``column`` on. pages: int32."""

    slot: int
    window_group: int
    column: int
    pages: np.ndarray


class ResetRecurrent(msgspec.Struct, frozen=True, tag=True):
    """Reset a slot's recurrent state to position 0."""

    slot: int


class SaveSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Save the snapshots of a slot's recurrent state under an id.

    position: tokens after which the snapshots are taken, computed from the remembered inputs; 0: the current position.
    """

    slot: int
    snapshot: int
    position: int = 0


class LoadSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Load the snapshots of an id, taken after ``position`` tokens, into a slot's recurrent state."""

    slot: int
    snapshot: int
    position: int


class ResetSlots(msgspec.Struct, frozen=True, tag=True):
    """Free every slot and clear every row."""


class MoveOut(msgspec.Struct, frozen=True, tag=True):
    """Copy pages and snapshots to host slots: (kind, pages, slots), see ``kv/offload/host_pages.py``."""

    moves: list[tuple[int, np.ndarray, np.ndarray]]


class MoveIn(msgspec.Struct, frozen=True, tag=True):
    """Begin to copy host slots to pages and snapshots, which no pass reads before Arrived with this ticket."""

    ticket: int
    moves: list[tuple[int, np.ndarray, np.ndarray]]


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """Let later passes read the pages of all tickets up to this one; they wait on the device if necessary."""

    ticket: int


OffloadCommand = MoveOut | MoveIn | Arrived


class WriteFile(msgspec.Struct, frozen=True, tag=True):
    """Begin to write a host slot to the file of a part of a prefix, see ``kv/offload/part_files.py``."""

    part: tuple[int, bytes]
    slot: int
    complete: bool


class ReadFile(msgspec.Struct, frozen=True, tag=True):
    """Begin to read a part's file into a host slot."""

    part: tuple[int, bytes]
    slot: int


class RemoveFiles(msgspec.Struct, frozen=True, tag=True):
    """Remove the files of parts."""

    parts: list[tuple[int, bytes]]


class FileOutcomes(msgspec.Struct, frozen=True, tag=True):
    """Report finished file operations: parts, and True for those that were written. A query to every rank, not a
    command.
    """

    parts: list[tuple[tuple[int, bytes], bool]]


FileCommand = WriteFile | ReadFile | RemoveFiles


class PackPages(msgspec.Struct, frozen=True, tag=True):
    """Read pages and snapshots into bytes for another engine (``engine/disaggregation/page_bytes.py``).

    parts: kind, ids.
    """

    number: int
    parts: list[tuple[int, np.ndarray]]


class UnpackPages(msgspec.Struct, frozen=True, tag=True):
    """Write the bytes that arrived under this number into pages and snapshots; an id of -1 skips its bytes."""

    number: int
    parts: list[tuple[int, np.ndarray]]


PageCommand = PackPages | UnpackPages

Command = (
    GraphCommand
    | WriteSlot
    | WritePages
    | ResetRecurrent
    | SaveSnapshot
    | LoadSnapshot
    | ResetSlots
    | OffloadCommand
    | FileCommand
    | PageCommand
    | AdapterCommand
    | UpdateCommand
    | SleepCommand
)

ANSWERED = Capture, ReadAdapter, *UPDATES, JoinWeightGroup, LeaveWeightGroup, Sleep, WakeUp
"""Commands that may fail on any rank; rank 0 waits for their results."""

_ARRAY = 1
"""Code of the msgpack extension for an array: (dtype, shape, bytes)."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        parts = value.dtype.str, value.shape, value.tobytes()
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(parts))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a command holds a {type(value).__name__}")


def _decode_array(code: int, data: memoryview) -> np.ndarray:
    dtype, shape, values = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    return np.frombuffer(bytearray(values), dtype).reshape(shape)  # writable, as torch expects


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[Command | FileOutcomes] = msgspec.msgpack.Decoder(
    Command | FileOutcomes, ext_hook=_decode_array, dec_hook=lambda kind, value: value
)


def encode(command: Command | FileOutcomes) -> bytes:
    """Encode a command for another rank."""
    return _encoder.encode(command)


def decode(data: bytes) -> Command | FileOutcomes:
    """Decode a command from :func:`encode`. Raises msgspec.DecodeError for other bytes."""
    return _decoder.decode(data)
