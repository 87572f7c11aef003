"""Header of a GGUF file: metadata and the place of each tensor. Reads no weight; imports types only.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Every count is compared with
the bytes that are present before anything of that size is made, because a file may be hostile.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from unisono.types import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_DEPTH = 4
"""Arrays of arrays."""

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Codes of struct by the number of a metadata type."""


@dataclass(frozen=True)
class TensorType:
    """A type of tensors: ``size`` elements take ``nbytes`` bytes."""

    name: str
    size: int = 1
    nbytes: int = 0


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""The types that are read, by their number."""

OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of types that are refused."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file. shape: outermost dimension first, as torch's. start: offset of its first byte in the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.size * self.type.nbytes


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key, and the tensors by name."""

    file: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GGUFTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``, which begins the model's keys; empty if it is absent."""
        return str(self.metadata.get("general.architecture", ""))


def is_gguf(path: Path) -> bool:
    """True for a file whose name ends like a GGUF file's."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def read_gguf(file: Path) -> GGUFHeader:
    """Read the header of a GGUF file; cached while the file is unchanged. Raises CheckpointError naming the file."""
    try:
        status = file.stat()
        return _header(file, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None


@lru_cache(4)
def _header(file: Path, changed: int, size: int) -> GGUFHeader:
    if size < len(MAGIC):
        raise _broken(file, size, "it is no GGUF file")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Parser(file, data).header()
        except _Damage as error:
            raise _broken(file, size, str(error)) from None


def _broken(file: Path, size: int, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is truncated or no GGUF file, it has {size} bytes: {reason}. Download it again.")


class _Damage(ValueError):
    """A header that cannot be parsed."""


class _Parser:
    """A place in the bytes of a file."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 0

    def header(self) -> GGUFHeader:
        """Parse from the beginning."""
        if self._take(len(MAGIC)) != MAGIC:
            raise _Damage("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise CheckpointError(f"{self._file}: GGUF version {version} is not supported; supported are 2 and 3.")
        tensors, pairs = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(self._count(pairs, 12)):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(self._count(tensors, 24))]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damage(f"general.alignment={str(alignment)[:40]}")
        start = -(-self._at // alignment) * alignment
        return GGUFHeader(self._file, metadata, {each.name: self._placed(each, start) for each in found})

    def _placed(self, tensor: GGUFTensor, start: int) -> GGUFTensor:
        placed = GGUFTensor(tensor.name, tensor.type, tensor.shape, start + tensor.start)
        if placed.start + placed.nbytes > len(self._data):
            raise _Damage(f"tensor {tensor.name[:80]} would end at byte {placed.start + placed.nbytes}")
        return placed

    def _tensor(self) -> GGUFTensor:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise _Damage(f"tensor {name[:80]} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        number, start = self._number("I"), self._number("Q")
        if (kind := TYPES.get(number)) is None:
            raise CheckpointError(
                f"{self._file}: tensor {name[:80]} has type {OTHER_TYPES.get(number, number)}, which is not supported; "
                f"supported are {', '.join(each.name for each in TYPES.values())}."
            )
        if shape[-1] % kind.size:
            raise _Damage(f"tensor {name[:80]} of type {kind.name} has rows of {shape[-1]} elements")
        return GGUFTensor(name, kind, shape, start)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind != ARRAY or depth == MAX_DEPTH:
            raise _Damage(f"metadata of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in NUMBERS:
            code = NUMBERS[inner]
            size = self._count(count, struct.calcsize(code))
            return list(struct.unpack(f"<{size}{code}", self._take(size * struct.calcsize(code))))
        return [self._value(inner, depth + 1) for _ in range(self._count(count, 8))]

    def _string(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            raise _Damage(f"the text before byte {self._at} is not UTF-8") from None

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _count(self, count: int, least: int) -> int:
        """``count`` things of at least ``least`` bytes each, which must fit into the rest of the file."""
        if count * least > len(self._data) - self._at:
            raise _Damage(f"its header tells of {count} entries after byte {self._at}")
        return count

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise _Damage(f"its header ends at byte {self._at}")
        self._at += count
        return self._data[self._at - count : self._at]
