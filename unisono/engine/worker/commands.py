"""The commands that a worker executes, and their bytes.

Rank 0's scheduler, planner and engine loop send them. Workers that were built alike and execute the same commands have
the same device state and the same outputs. With one rank no command is encoded.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from unisono.graphs.graph_set import Capture, GraphCommand, Launch, Measure, Release
from unisono.models.lora.host_adapters import AdapterCommand, KeepAdapters, ReadAdapter, WriteAdapter

__all__ = [
    "ANSWERED",
    "Arrived",
    "Capture",
    "Command",
    "FileOutcomes",
    "KeepAdapters",
    "Launch",
    "LoadTail",
    "Measure",
    "MoveIn",
    "MoveOut",
    "PackPages",
    "ReadAdapter",
    "ReadFile",
    "Release",
    "RemoveFiles",
    "ResetSlots",
    "ResetTail",
    "SaveTail",
    "UnpackPages",
    "WriteAdapter",
    "WriteFile",
    "WritePages",
    "WriteSlot",
    "decode",
    "encode",
]


class WriteSlot(msgspec.Struct, frozen=True, tag=True):
    """Write what a request's slot begins with. All arrays are int32.

    row: the slot's row of its schema (``slots.slot_schema``). history: the committed tokens. pages: the page table's
    first columns. edits: the slot's row of the edit table; None where the request edits no logits.
    """

    slot: int
    row: np.ndarray
    history: np.ndarray
    pages: np.ndarray
    edits: np.ndarray | None


class WritePages(msgspec.Struct, frozen=True, tag=True):
    """Write pages of a window lifetime into a slot's page table, from ``column`` on. pages: int32."""

    slot: int
    lifetime: int
    column: int
    pages: np.ndarray


class ResetTail(msgspec.Struct, frozen=True, tag=True):
    """Begin a slot's recurrences at position 0."""

    slot: int


class SaveTail(msgspec.Struct, frozen=True, tag=True):
    """Keep the snapshots of a slot's recurrences under an id.

    position: tokens after which the snapshots are to be, from remembered inputs; 0: where they are.
    """

    slot: int
    snapshot: int
    position: int = 0


class LoadTail(msgspec.Struct, frozen=True, tag=True):
    """Give a slot's recurrences the snapshots of an id, which were taken after ``position`` tokens."""

    slot: int
    snapshot: int
    position: int


class ResetSlots(msgspec.Struct, frozen=True, tag=True):
    """Make every slot free and every row blank."""


class MoveOut(msgspec.Struct, frozen=True, tag=True):
    """Copy pages and snapshots to host slots: (kind, pages, slots), see ``kv/offload/host_pages.py``."""

    moves: list[tuple[int, np.ndarray, np.ndarray]]


class MoveIn(msgspec.Struct, frozen=True, tag=True):
    """Begin to copy host slots to pages and snapshots, which no pass reads before Arrived with this ticket."""

    ticket: int
    moves: list[tuple[int, np.ndarray, np.ndarray]]


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """Passes from now on may read what all tickets up to this one brought; they wait on the device where they must."""

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
    """Tell what came of files: parts, and whether they were written. No command, but a question to every rank."""

    asked: list[tuple[tuple[int, bytes], bool]]


FileCommand = WriteFile | ReadFile | RemoveFiles


class PackPages(msgspec.Struct, frozen=True, tag=True):
    """Read pages and snapshots into bytes, for another engine: see ``engine/disaggregation/page_bytes.py``. parts:
    kind, numbers.
    """

    number: int
    parts: list[tuple[int, np.ndarray]]


class UnpackPages(msgspec.Struct, frozen=True, tag=True):
    """Write the bytes that came under this number into pages and snapshots; a number of -1 leaves its bytes out."""

    number: int
    parts: list[tuple[int, np.ndarray]]


PageCommand = PackPages | UnpackPages

Command = (
    GraphCommand
    | WriteSlot
    | WritePages
    | ResetTail
    | SaveTail
    | LoadTail
    | ResetSlots
    | OffloadCommand
    | FileCommand
    | PageCommand
    | AdapterCommand
)

ANSWERED = Capture, ReadAdapter
"""Commands that may fail on any rank, which rank 0 waits for."""

_ARRAY = 1
"""The code of the msgpack extension for an array: (dtype, shape, bytes)."""


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
_decoder = msgspec.msgpack.Decoder(Command | FileOutcomes, ext_hook=_decode_array, dec_hook=lambda kind, value: value)


def encode(command: Command | FileOutcomes) -> bytes:
    """The command as bytes for another rank."""
    return _encoder.encode(command)


def decode(data: bytes) -> Command | FileOutcomes:
    """The command that :func:`encode` made these bytes of. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(data)
