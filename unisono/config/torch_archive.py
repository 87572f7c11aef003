"""Plain tensors from archives of ``torch.save``, read without unpickling.

The archive's pickle is a list of opcodes. Opcodes that describe tensors are interpreted here, on a stack of plain
values; any other opcode, and any other function, is an error. Nothing is imported or called. No allocation depends on a
number in the archive: tensors are views of the bytes that are present.

Imports nothing of the project.
"""

from __future__ import annotations

import io
import math
import mmap
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_DIRECTORY_BYTES = 1 << 16
"""Largest list of files in an archive, bytes; zipfile reads all of it."""
MAX_PICKLE_BYTES = 1 << 14
"""Largest pickle of one tensor, bytes; about 200 are usual."""
MAX_STATE_BYTES = 1 << 24
"""Largest pickle, and largest list of files, of a checkpoint's state dict, bytes."""
MAX_DIMENSIONS = 8

DTYPES = {
    "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "DoubleStorage": "float64",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
END, LOCATOR64, END64 = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
END_BYTES, LOCATOR64_BYTES, END64_BYTES, COMMENT_BYTES = 22, 20, 56, 0xFFFF
"""Sizes of the records at the end of an archive, by which zipfile finds the list of files."""


class ArchiveError(ValueError):
    """An archive that does not hold plain tensors. Its text completes a sentence that begins with "it"."""


@dataclass(frozen=True)
class _Name:
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    count: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_MARK = object()


def read_tensor(data: bytes, limit: int) -> torch.Tensor:
    """The one dense tensor in an archive with files of at most ``limit`` bytes. Raises ArchiveError."""
    _check_directory(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(archive, limit)
    except ArchiveError:
        raise
    except Exception as error:  # zipfile raises many types, from BadZipFile to struct.error
        raise ArchiveError("is not what torch.save writes; send base64 of that") from error


def read_state_dict(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a state dict in an archive, by name, as views of the mapped file. Raises ArchiveError."""
    import torch

    size = file.stat().st_size
    with file.open("rb") as opened:
        opened.seek(max(0, size - END_BYTES - COMMENT_BYTES - LOCATOR64_BYTES - END64_BYTES))
        _check_directory(opened.read(), MAX_STATE_BYTES)
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        with zipfile.ZipFile(file) as archive:
            files, found = _opened(archive, MAX_STATE_BYTES)
    except ArchiveError:
        raise
    except Exception as error:  # zipfile raises many types, from BadZipFile to struct.error
        raise ArchiveError("is not what torch.save writes") from error
    if not isinstance(found, dict) or not all(isinstance(one, _Tensor) for one in found.values()):
        raise ArchiveError("does not hold named tensors")
    tensors = {}
    for name, one in found.items():
        entry = files.get(f"data/{one.storage.key}")
        if entry is None:
            raise ArchiveError(f"does not hold the numbers of {name}")
        names, extra = struct.unpack_from("<2H", mapped, entry.header_offset + 26)
        start = entry.header_offset + 30 + names + extra
        if start + entry.file_size > size:
            raise ArchiveError(f"ends within the numbers of {name}")
        dtype = getattr(torch, one.storage.dtype)
        tensors[name] = _view(one, dtype, _placed(one, entry.file_size, dtype.itemsize), mapped, start)
    return tensors


def _view(found: _Tensor, dtype: torch.dtype, shape: tuple[int, ...], data: Any, start: int = 0) -> torch.Tensor:
    """The tensor in the storage that begins at byte ``start`` of ``data``."""
    import torch

    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    whole = torch.frombuffer(data, dtype=dtype, count=found.storage.count, offset=start)
    return whole.as_strided(shape, found.stride, found.offset)


def _check_directory(data: bytes, most: int = MAX_DIRECTORY_BYTES) -> None:
    """Raise ArchiveError for a list of files that is not at the archive's end, or has more than ``most`` bytes."""
    at = data.rfind(END, max(0, len(data) - END_BYTES - COMMENT_BYTES))
    if at < 0 or len(data) - at < END_BYTES:
        raise ArchiveError("is not what torch.save writes; send base64 of that")
    (size,) = struct.unpack_from("<I", data, at + 12)
    locator = at - LOCATOR64_BYTES
    if locator >= END64_BYTES and data.startswith(LOCATOR64, locator):
        if not data.startswith(END64, locator - END64_BYTES):
            raise ArchiveError("is not what torch.save writes; send base64 of that")
        (size,) = struct.unpack_from("<Q", data, locator - END64_BYTES + 40)
    if size > most:
        raise ArchiveError(f"has a list of files of {size} bytes; {most} are the most")


def _read(archive: zipfile.ZipFile, limit: int) -> torch.Tensor:
    unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > limit:
        raise ArchiveError(f"unpacks to {unpacked} bytes; {limit} is the most for this model's context")
    files, found = _opened(archive, MAX_PICKLE_BYTES)
    if not isinstance(found, _Tensor):
        raise ArchiveError(f"holds a {type(found).__name__}; send one tensor")
    return _tensor(found, archive.read(files[f"data/{found.storage.key}"]))


def _opened(archive: zipfile.ZipFile, most: int) -> tuple[dict[str, zipfile.ZipInfo], Any]:
    """The archive's files by name, and the value that its pickle of at most ``most`` bytes describes."""
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
        raise ArchiveError("is compressed or encrypted, and torch.save writes neither")
    prefix = next((e.filename[: -len("data.pkl")] for e in entries if e.filename.endswith("data.pkl")), None)
    if prefix is None:
        raise ArchiveError("is not what torch.save writes; send base64 of that")
    files = {entry.filename.removeprefix(prefix): entry for entry in entries}
    order = files.get("byteorder")
    if order is not None and (order.file_size > 16 or archive.read(order) != b"little"):
        raise ArchiveError("has numbers in big-endian order; send little-endian ones")
    pickle = files["data.pkl"]
    if pickle.file_size > most:
        raise ArchiveError(f"cannot be loaded: its description has {pickle.file_size} bytes; at most {most} are read")
    return files, described(archive.read(pickle))


def _tensor(found: _Tensor, data: bytes) -> torch.Tensor:
    """The tensor as a view of a copy of ``data``. Raises ArchiveError if it exceeds it."""
    import torch

    dtype = getattr(torch, found.storage.dtype)
    return _view(found, dtype, _placed(found, len(data), dtype.itemsize), bytearray(data))


def _placed(found: _Tensor, size: int, itemsize: int) -> tuple[int, ...]:
    """The shape of a tensor that fits into ``size`` bytes. Raises ArchiveError for others."""
    count = size // itemsize
    if found.storage.count > count:
        raise ArchiveError(f"claims {found.storage.count} numbers, of which {count} were sent")
    numbers = math.prod(found.shape)
    if numbers > count:
        raise ArchiveError(
            f"is a tensor of shape {found.shape} that takes {numbers * itemsize} bytes, of which {size} "
            "were sent; save a contiguous copy"
        )
    last = found.offset + sum((n - 1) * step for n, step in zip(found.shape, found.stride, strict=True))
    if numbers and last >= found.storage.count:
        raise ArchiveError(f"is a tensor of shape {found.shape} that ends beyond its {found.storage.count} numbers")
    return found.shape


# ---- the pickle -----------------------------------------------------------------------------------


def described(pickle: bytes) -> Any:
    """Return the value of a pickle: tensors, and lists, dicts and numbers of them. Raises ArchiveError."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name == "STOP":
                return stack.pop()
            _follow(opcode.name, argument, stack, memo)
    except ArchiveError:
        raise
    except Exception as error:  # a stack that is too short, an unhashable key
        raise ArchiveError("cannot be loaded: send one tensor, as torch.save writes it") from error
    raise ArchiveError("cannot be loaded: it has no end")


def _follow(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Interpret one opcode."""
    if name in _VALUES:
        stack.append(_VALUES[name](argument))
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name == "TUPLE":
        stack.append(tuple(_marked(stack)))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name in ("APPEND", "APPENDS"):
        values = _marked(stack) if name == "APPENDS" else [stack.pop()]
        stack[-1].extend(values)
    elif name in ("SETITEM", "SETITEMS"):
        values = _marked(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
        stack[-1].update(zip(values[::2], values[1::2], strict=True))
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop()))
    elif name == "BUILD":
        stack.pop()  # attributes of the dict, such as _metadata of a state dict
        if not isinstance(stack[-1], dict):
            raise ArchiveError("cannot be loaded: it sets attributes of an object that is not a dict")
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_rebuilt(stack.pop(), arguments))
    elif name != "PROTO":
        raise ArchiveError(f"cannot be loaded: {name} describes no tensor. Send one tensor, as torch.save writes it")


_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), lambda value: value),
    "GLOBAL": lambda value: _Name(*value.split(" ", 1)),
    "MARK": lambda _: _MARK,
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
}
"""The value that each simple opcode pushes on the stack."""


def _marked(stack: list[Any]) -> list[Any]:
    """Pop the values above the last mark, and the mark."""
    at = max(i for i, value in enumerate(stack) if value is _MARK)
    values = stack[at + 1 :]
    del stack[at:]
    return values


def _storage(value: Any) -> _Storage:
    kind, name, key, _, count = value
    if kind != "storage" or not isinstance(name, _Name) or name.module != "torch" or name.name not in DTYPES:
        raise ArchiveError(f"holds numbers of {name}; send float32, float16 or bfloat16")
    if not isinstance(key, str) or not _is_size(count):
        raise ArchiveError("cannot be loaded: its numbers are not described")
    return _Storage(DTYPES[name.name], key, count)


def _rebuilt(function: Any, arguments: Any) -> Any:
    """The result of a call of one of the few known functions."""
    known = str(function) if isinstance(function, _Name) else ""
    if known == "collections.OrderedDict" and arguments == ():
        return {}
    if known == "torch._utils._rebuild_parameter" and isinstance(arguments[0], _Tensor):
        return arguments[0]
    if known != "torch._utils._rebuild_tensor_v2":
        raise ArchiveError(f"cannot be loaded: it holds what {function} makes; send one dense tensor")
    storage, offset, shape, stride = arguments[:4]
    sizes = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride) <= MAX_DIMENSIONS
    if not (isinstance(storage, _Storage) and sizes and all(map(_is_size, (offset, *shape, *stride)))):
        raise ArchiveError("cannot be loaded: its shape is not described")
    return _Tensor(storage, offset, shape, stride)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
