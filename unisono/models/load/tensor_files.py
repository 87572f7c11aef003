"""Checkpoint files: their tensors, and the transfer of their bytes to a device.

Reads safetensors, tensors that other files decode (:mod:`unisono.models.load.gguf`), and the archives of the first
EAGLE repositories. On a CPU a tensor is a part of the mapped file. On
its way to a GPU it passes through pinned memory (:mod:`unisono.models.load.staging`); whole rows are read from the file
into that memory, without mapping pages.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from unisono.config.torch_archive import ArchiveError, read_state_dict
from unisono.layers.formats.base import Slice, Slices
from unisono.models.load.staging import FileBytes, Passing, Staging
from unisono.types import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""torch's dtypes by safetensors' names."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

HEADERS = 512
"""Number of files whose headers are cached."""

LENGTH = 8
"""Bytes at the start of a file that hold its header's length, little-endian; tensor data follows the header."""

PIECE = 1 << 26
"""Bytes a thread reads of a file before it takes the next run."""

AHEAD = 1 << 31
"""Bytes on a GPU that were read and await the copy to their parameters, or are being read."""

Part = Slice | Slices | None
"""Part of a tensor to read; None: all."""


@dataclass(frozen=True)
class TensorInfo:
    """Header of one tensor of a checkpoint.

    name: in its file.
    start: offset of its first byte in the file; for a pickle, its index among the tensors.
    data: the tensor, of a pickle (mapped) or received from another process.
    decoded: reads the tensor, if its bytes are not those of ``dtype``.
    readable: True if its bytes can be read at ``start``.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    data: torch.Tensor | None = None
    decoded: Callable[[], torch.Tensor] | None = None
    readable: bool = False


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Headers of the tensors in one safetensors file. Raises CheckpointError naming the file.

    Cached, since a start needs them for the target and for its drafter: an unchanged file is read once.
    """
    state = file.stat()
    return dict(_header(file, state.st_mtime_ns, state.st_size))


@lru_cache(HEADERS)
def _header(file: Path, changed: int, size: int) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        with file.open("rb") as raw:
            start = LENGTH + int.from_bytes(raw.read(LENGTH), "little")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or no safetensors file, it has {size} bytes: {error}. Download it again."
        ) from None
    # safetensors refuses files with holes between tensors, so each begins where the one before it ends
    infos, known = {}, all(dtype in DTYPES for dtype, _ in found.values())
    for name, (dtype, shape) in found.items():
        infos[name] = TensorInfo(file, name, dtype, shape, start, readable=known)
        start += nbytes(infos[name])
    if known and start != size:
        raise CheckpointError(f"{file} has {size} bytes; its header tells of {start}. Download it again.")
    return infos


def read_pickle(file: Path) -> dict[str, TensorInfo]:
    """Tensors of a state dict written by torch.save, without unpickling. Raises CheckpointError naming the file."""
    try:
        stored = read_state_dict(file)
    except (ArchiveError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: it {error}. Download it again, or convert it.") from None
    return {
        name: TensorInfo(file, name, NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape), number, t)
        for number, (name, t) in enumerate(stored.items())
    }


def read(
    parts: Mapping[str, Part], tensors: Mapping[str, TensorInfo], device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each named tensor, or the requested part of it, on ``device`` in its stored dtype.

    File by file, in the order of the bytes; nothing but these parts is read. On a CPU they are pages of the files, read
    on first access.
    """
    if torch.device(device).type == "cpu":
        yield from _mapped(parts, tensors)
    else:
        yield from read_ahead(parts, tensors, device, readers=1)


def read_ahead(
    parts: Mapping[str, Part], tensors: Mapping[str, TensorInfo], device: torch.device | str, readers: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """:func:`read` through pinned memory with ``readers`` threads, at most AHEAD bytes ahead of the caller.

    The caller's thread does the work per tensor: if all threads did it, they would wait for Python's lock. Tensors that
    are on a GPU already come first, as they are.
    """
    there = {name: data for name in parts if (data := tensors[name].data) is not None and data.is_cuda}
    for name, data in there.items():
        part = parts[name]
        yield name, data if part is None else part.of(data)
    parts = {name: part for name, part in parts.items() if name not in there}
    local = threading.local()

    def send(names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        if not hasattr(local, "staging"):
            local.staging = Staging(device)
        return _staged(names, parts, tensors, local.staging)

    waiting: deque[tuple[int, Future[list[tuple[str, torch.Tensor]]]]] = deque()
    held = 0
    with ThreadPoolExecutor(readers, thread_name_prefix="read") as pool:
        try:
            for names in pieces(parts, tensors):
                size = sum(nbytes(tensors[name]) for name in names)
                while waiting and held + size > AHEAD:
                    before, sent = waiting.popleft()
                    held -= before
                    yield from sent.result()
                waiting.append((size, pool.submit(send, names)))
                held += size
            for _, sent in waiting:
                yield from sent.result()
        finally:
            pool.shutdown(cancel_futures=True)


def pieces(parts: Mapping[str, Part], tensors: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """The names in the order of their bytes, in runs within one file of about PIECE bytes."""
    names: list[str] = []
    held = 0
    for name in in_order(parts, tensors):
        if names and (held >= PIECE or tensors[name].file != tensors[names[0]].file):
            yield names
            names, held = [], 0
        names.append(name)
        held += nbytes(tensors[name])
    if names:
        yield names


def in_order(names: Iterable[str], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Names in the order of their files and bytes."""
    return sorted(names, key=lambda name: (tensors[name].file, tensors[name].start))


def nbytes(info: TensorInfo) -> int:
    """Bytes of the whole tensor; for an unknown dtype, its elements."""
    dtype = DTYPES.get(info.dtype)
    return torch.Size(info.shape).numel() * (dtype.itemsize if dtype else 1)


def _staged(
    names: Sequence[str], parts: Mapping[str, Part], tensors: Mapping[str, TensorInfo], staging: Staging
) -> list[tuple[str, torch.Tensor]]:
    """Tensors of one file, sent together."""
    file = tensors[names[0]].file
    try:
        opened = os.open(file, os.O_RDONLY) if any(tensors[name].readable for name in names) else -1
        try:
            found = [_passing(opened, parts[name], tensors[name]) for name in names]
            rest = {name: parts[name] for name, each in zip(names, found, strict=True) if each is None}
            mapped = dict(_mapped(rest, tensors))
            passing = [each or Passing.of(mapped[name]) for name, each in zip(names, found, strict=True)]
            return list(zip(names, staging.to_device(passing), strict=True))
        finally:
            if opened >= 0:
                os.close(opened)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None


def _passing(opened: int, part: Part, info: TensorInfo) -> Passing | None:
    """File location of the bytes if they are runs of whole rows; else None."""
    if not info.readable or (part is not None and (part.dim != 0 or getattr(part, "transposed", False))):
        return None
    dtype, size = DTYPES[info.dtype], nbytes(info)
    if part is None:
        return Passing(dtype, info.shape, (FileBytes(opened, info.start, size),))
    row = size // max(info.shape[0], 1)
    runs = part.runs if isinstance(part, Slices) else ((part.start, part.stop),)
    sources = tuple(FileBytes(opened, info.start + first * row, (last - first) * row) for first, last in runs)
    return Passing(dtype, (sum(last - first for first, last in runs), *info.shape[1:]), sources)


def _mapped(parts: Mapping[str, Part], tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    """:func:`read` on a CPU."""
    for file, group in groupby(in_order(parts, tensors), lambda name: tensors[name].file):
        names = list(group)
        name = names[0]
        try:
            with ExitStack() as stack:
                if any(tensors[each].data is None and tensors[each].decoded is None for each in names):
                    opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                for name in names:
                    info, part = tensors[name], parts[name]
                    if (data := info.decoded() if info.decoded else info.data) is not None:
                        yield name, data if part is None else part.of(data)
                    elif part is None:
                        yield name, opened.get_tensor(info.name)
                    else:
                        yield name, part.of(opened.get_slice(info.name))
        except SafetensorError as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}. Download it again.") from None


def tensor(name: str, tensors: Mapping[str, TensorInfo]) -> torch.Tensor:
    """One whole tensor, on the CPU."""
    ((_, found),) = read({name: None}, tensors, "cpu")
    return found
