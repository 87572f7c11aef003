"""Rules for --tensor-parallel-size: heads must divide among ranks, and each rank needs a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.types import ConfigError

GPUS = Path("/proc/driver/nvidia/gpus")
"""A directory with an entry for each GPU that the driver knows."""


def fitting_sizes(heads: int, kv_heads: int) -> str:
    """The rank counts that heads can be divided among, for a message."""
    sizes = [n for n in range(1, heads + 1) if _divides(heads, kv_heads, n)]
    return " or ".join((", ".join(map(str, sizes[:-1])), str(sizes[-1]))) if len(sizes) > 1 else str(sizes[0])


def _divides(heads: int, kv_heads: int, count: int) -> bool:
    return heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)


def check_heads(layer: str, heads: tuple[int, str], kv_heads: tuple[int, str], count: int) -> None:
    """Raise ConfigError unless the heads of a kind of layer can be divided among ``count`` ranks.

    layer: its name in the message. heads, kv_heads: (number, name).
    """
    (queries, name), (keys, key_name) = heads, kv_heads
    if not _divides(queries, keys, count):
        raise ConfigError(
            f"--tensor-parallel-size {count}: {layer} has {queries} {name} over {keys} {key_name}, which cannot be "
            f"divided among {count} ranks: give {fitting_sizes(queries, keys)}."
        )


def check_attention_heads(heads: int, kv_heads: int, count: int) -> None:
    """Check the heads of an attention layer; see :func:`check_heads`."""
    check_heads("a layer", (heads, "query heads"), (kv_heads, "KV heads"), count)


def check_recurrent_heads(values: int, keys: int, count: int) -> None:
    """Check the heads of a Gated DeltaNet layer; see :func:`check_heads`."""
    check_heads("a recurrent layer", (values, "value heads"), (keys, "key heads"), count)


def check_mamba_heads(heads: int, groups: int, count: int) -> None:
    """Check the heads of a Mamba2 layer; see :func:`check_heads`."""
    check_heads("a Mamba2 layer", (heads, "heads"), (groups, "groups"), count)


def check_config_heads(config: Mapping[str, Any], count: int) -> None:
    """Raise ConfigError if the heads in a text model's config.json cannot be divided among ranks.

    Missing or wrong numbers are left to the family's reader.
    """
    if count <= 1:
        return
    heads, kv_heads = _size(config, "num_attention_heads"), _size(config, "num_key_value_heads")
    if heads:
        check_attention_heads(heads, kv_heads or heads, count)
    values, keys = _size(config, "linear_num_value_heads"), _size(config, "linear_num_key_heads")
    types = config.get("layer_types")
    recurs = not isinstance(types, list) or "linear_attention" in types or "mamba" in types
    if values and keys and recurs:
        check_recurrent_heads(values, keys, count)
    heads = _size(config, "mamba_n_heads") or _size(config, "mamba_num_heads")
    groups = _size(config, "mamba_n_groups") or _size(config, "n_groups")
    if heads and groups and recurs:
        check_mamba_heads(heads, groups, count)


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def most_gpus(device: str) -> int | None:
    """Number of GPUs from ``device`` on, as an upper bound; None if it cannot be known without the driver's library.

    device: ``--device``.
    """
    if device == "cpu":
        return None
    try:
        count = len(list(GPUS.iterdir()))
    except OSError:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, len([each for each in visible.split(",") if each.strip() not in ("", "-1")]))
    first = device.partition(":")[2]
    return max(0, count - int(first)) if first.isdecimal() else count


def check_gpus(count: int, device: str) -> None:
    """Raise ConfigError for more ranks than GPUs. Without any GPU, ranks run on the CPU."""
    known = most_gpus(device)
    if known and count > known:
        raise ConfigError(_too_many(count, known, "here"))


def _too_many(count: int, known: int, where: str) -> str:
    return (
        f"--tensor-parallel-size {count}: it takes a GPU for each rank, and {known} "
        f"{'is' if known == 1 else 'are'} visible {where}; lower it."
    )


def check_visible(count: int, known: int | None, device: object) -> None:
    """Raise ConfigError for more ranks than visible GPUs. known: GPUs from ``device`` on; None on a CPU."""
    if known is not None and count > known:
        raise ConfigError(_too_many(count, known, f"from {device} on"))
