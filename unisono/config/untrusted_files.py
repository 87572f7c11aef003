"""Checks of a checkpoint's files before anything reads them: a checkpoint may be hostile.

Decides which files of a directory may be opened, and refuses numbers in config.json that would take all memory or time
before a check with more knowledge sees them. ``models`` and ``tokenizer`` call it. Raises CheckpointError.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.types import CheckpointError

MB = 1 << 20
SIZES = {".jinja": 4 * MB, ".json": 512 * MB, ".model": 512 * MB, ".txt": 512 * MB}
"""Largest size of a file that is read whole, bytes, by suffix."""

SMALL = {"config.json": 16 * MB, "generation_config.json": MB, "chat_template.json": 4 * MB}

HUB_BLOBS = ("snapshots", "blobs")
"""The hub's cache keeps snapshots/<revision>/<file> as links to blobs/<hash>."""

LARGEST = {
    "num_hidden_layers": 10_000,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "shared_expert_intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "max_position_embeddings": 1 << 31,
    "linear_num_value_heads": 1 << 14,
    "linear_num_key_heads": 1 << 14,
    "linear_key_head_dim": 1 << 14,
    "linear_value_head_dim": 1 << 14,
    "linear_conv_kernel_dim": 1 << 8,
    "depth": 10_000,
    "in_channels": 1 << 8,
    "num_heads": 1 << 14,
    "num_position_embeddings": 1 << 24,
    "out_hidden_size": 1 << 18,
    "patch_size": 1 << 10,
    "spatial_merge_size": 1 << 6,
    "temporal_patch_size": 1 << 8,
    "window_size": 1 << 16,
    "mtp_num_hidden_layers": 64,
    "num_nextn_predict_layers": 64,
}
"""Largest accepted values of config.json, far beyond any model."""

MAX_INTEGER = 1 << 63
MAX_TOKEN_IDS = 1024
"""Most end-of-sequence ids in one file."""
ROPE = ("rope_parameters", "rope_scaling")
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "mrope", "proportional", "su", "yarn")


def check_directory(directory: Path) -> None:
    """Refuse a directory with an entry that is not a file, leads out of it, or is too large to be read whole."""
    inside = directory.resolve()
    allowed = [inside]
    if inside.parent.name == HUB_BLOBS[0]:
        allowed.append(inside.parent.parent / HUB_BLOBS[1])
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        _check_file(Path(entry.path), allowed)


def _check_file(file: Path, allowed: list[Path]) -> None:
    try:
        status = file.stat()
    except (OSError, RuntimeError) as error:  # a broken or circular link
        if file.is_symlink():
            raise CheckpointError(f"{file} is a link that leads nowhere: {error}. Download it again.") from None
        raise CheckpointError(f"{file} cannot be opened: {error}.") from None
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a regular file (a pipe or device?): remove it.")
    if file.is_symlink() and not any(file.resolve().is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{file} is a link out of the checkpoint, to {file.resolve()}: copy the file into the directory."
        )
    limit = SMALL.get(file.name) or SIZES.get(file.suffix)
    if limit is not None and status.st_size > limit:
        raise CheckpointError(f"{file} has {status.st_size} bytes; at most {limit} are read.")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises CheckpointError for anything else."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(f"{file} is not a regular file.")
        content = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise CheckpointError(f"{file} cannot be read as JSON: it is nested too deeply.") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {str(error)[:300]}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def check_values(raw: Mapping[str, Any], file: Path) -> None:
    """Refuse dangerous values of config.json before transformers reads them."""
    check_numbers(raw, file)
    check_rope(raw, file)


def check_numbers(raw: Mapping[str, Any], file: Path) -> None:
    """Refuse numbers of config.json that are out of range."""
    for name, value, inside in _numbers(raw):
        if isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"{file}: {name} is NaN.")
        if isinstance(value, int) and abs(value) >= MAX_INTEGER:
            raise CheckpointError(f"{file}: {name} has more than 64 bits.")
        limit = LARGEST.get(name)
        if limit is not None and not 0 <= value <= limit:
            raise CheckpointError(f"{file}: {name}={value} is out of range: it must be from 0 to {limit}.")
        if name == "rope_theta" and not (value > 0 and math.isfinite(value)):
            raise CheckpointError(f"{file}: rope_theta={value} is out of range: it must be above 0.")
        if inside in ROPE and name in ("factor", "original_max_position_embeddings") and not 0 < value < 1e12:
            raise CheckpointError(f"{file}: {inside}.{name}={value} is out of range: it must be above 0.")


def check_rope(raw: Mapping[str, Any], file: Path) -> None:
    """Refuse rotary embeddings of an unsupported type."""
    text = {name: part for name, part in raw.items() if not (name.endswith("_config") and name != "text_config")}
    for name, value in _all_items(text):  # vision and audio towers are checked elsewhere
        if name in ROPE and isinstance(value, Mapping):
            _check_rope(name, value, file)


def _check_rope(name: str, value: Mapping[str, Any], file: Path) -> None:
    kind = value.get("rope_type", value.get("type", "default"))
    if isinstance(kind, Mapping):  # a mapping by kind of layer, each with parameters of its own
        return
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"{file}: {name} has rope_type={kind!r}, which is not supported; supported are {', '.join(ROPE_TYPES)}. "
            f"Within the context the model was first trained for, delete {name}."
        )
    theta = value.get("rope_theta", 1.0)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise CheckpointError(f"{file}: {name}.rope_theta={theta!r} must be a number.")


def check_token_ids(ids: tuple[int, ...], vocab_size: int, file: Path) -> None:
    """Refuse end-of-sequence ids outside the vocabulary."""
    if len(ids) > MAX_TOKEN_IDS:
        raise CheckpointError(f"{file} names {len(ids)} end-of-sequence ids; at most {MAX_TOKEN_IDS} are taken.")
    wrong = next((i for i in ids if i >= vocab_size), None)
    if wrong is not None:
        raise CheckpointError(
            f"{file}: eos_token_id={wrong} is outside of the vocabulary, whose ids are 0 to {vocab_size - 1}."
        )


def inside(directory: Path, name: object, index: Path) -> Path:
    """The file that an index names. Raises CheckpointError unless it is a file name in the index's directory."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(f"{index}: weight_map has {str(name)[:80]!r} for a file's name; download it again.")
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{index}: weight_map names {name[:200]!r}, which is not in {directory}.")
    return directory / path


def _all_items(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Each key with its value, of nested objects and lists."""
    if depth > 32:
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name), inner
            yield from _all_items(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _all_items(inner, depth + 1)


def _numbers(raw: Mapping[str, Any]) -> Iterator[tuple[str, int | float, str]]:
    """(name, value, name of the enclosing object) of each number."""
    todo: list[tuple[str, Any, str]] = [("", raw, "")]
    while todo:
        name, value, outside = todo.pop()
        if isinstance(value, Mapping):
            todo += [(str(key), inner, name) for key, inner in value.items()]
        elif isinstance(value, list):
            todo += [(name, inner, outside) for inner in value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value, outside
