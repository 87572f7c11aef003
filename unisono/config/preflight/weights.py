"""Weight files of a checkpoint: found, and compared with their headers, without reading a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unisono.config import mistral
from unisono.config.checkpoint_files import (
    INDEX,
    LFS,
    MOST_HEADER,
    NATIVE_INDEX,
    NATIVE_WEIGHTS,
    WEIGHTS,
    names_in,
    no_weights,
    weight_map,
)
from unisono.config.gguf.directory import source as gguf_source
from unisono.config.gguf.header import read_gguf
from unisono.config.untrusted_files import inside, read_json
from unisono.types import CheckpointError

LENGTH = 8
"""Bytes of the length field at the start of a file: the header's length, little-endian.

Tensor data follows the header.
"""


def weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a model's directory, and the file name of each tensor in the index.

    Raises CheckpointError: no safetensors, an index without files, a missing shard.
    """
    names = WEIGHTS, INDEX
    if (native := mistral.source(directory)) is not None:
        directory, names = native, (NATIVE_WEIGHTS, NATIVE_INDEX)
    single, index = (directory / name for name in names)
    if single.exists():
        return [single], {}
    if not index.exists():
        raise CheckpointError(f"{directory} has neither {names[0]} nor {names[1]}{no_weights(names_in(directory))}.")
    tensors = weight_map(read_json(index), index)
    files: dict[str, Path] = {}
    for name in tensors.values():
        if not isinstance(name, str) or name not in files:
            files[name] = inside(directory, name, index)
    lost = [name for name in sorted(files) if not files[name].is_file()]
    if lost:
        held = sum(file == lost[0] for file in tensors.values())
        others = f" {len(lost) - 1} other files are missing too." if len(lost) > 1 else ""
        raise CheckpointError(
            f"{directory / lost[0]} is missing; {index.name} says that it holds {held} of "
            f"{len(tensors)} tensors.{others} Download it again."
        )
    return [files[name] for name in sorted(files)], tensors


def check_weights(directory: Path) -> int:
    """Compare each weight file's size with its header; returns the bytes of all tensors. Raises CheckpointError."""
    if (file := gguf_source(directory)) is not None:
        return sum(tensor.nbytes for tensor in read_gguf(file).tensors.values())
    return sum(check_header(file) for file in weight_files(directory)[0])


def check_header(file: Path) -> int:
    """Bytes of the tensors in a safetensors file.

    Raises CheckpointError for a truncated file, or one of another format.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(LENGTH)
        length = int.from_bytes(first, "little")
        if first + opened.read(len(LFS) - LENGTH) == LFS:
            raise CheckpointError(
                f"{file} is truncated to {size} bytes, the pointer of a Git LFS file: run git lfs pull, or download it "
                "again."
            )
        if len(first) < LENGTH or not 2 <= length <= min(MOST_HEADER, size - LENGTH):
            raise _broken(file, size, "its header does not fit into it")
        opened.seek(LENGTH)
        end = _end(_header(opened.read(length), file, size))
    if end is None:
        raise _broken(file, size, "its header does not list tensors")
    if LENGTH + length + end != size:
        raise _broken(file, size, f"its header tells of {LENGTH + length + end}")
    return end


def _header(content: bytes, file: Path, size: int) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _broken(file, size, f"its header is not JSON ({str(error)[:100]})") from None


def _end(header: Any) -> int | None:
    """End of the last tensor's bytes; None for a header that is not one of safetensors."""
    if not isinstance(header, dict):
        return None
    ends = [0]
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(each, int) for each in offsets)):
            return None
        ends.append(offsets[1])
    return max(ends)


def _broken(file: Path, size: int, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is truncated or no safetensors file, it has {size} bytes: {reason}. Download it again."
    )
