"""Speculation with modules included in a checkpoint: MTP modules beside the target's weights.

The engine calls this before it builds the model. The decision depends on the headers of the safetensors files only,
never on a name.
"""

from __future__ import annotations

from pathlib import Path

from unisono.drafters.mtp.checkpoint import LAYOUTS, MTPCheckpoint
from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import read_tensors
from unisono.models.load.tensor_files import nbytes
from unisono.types import CheckpointError, SpeculativeConfig

METHOD = "mtp"


def carried_speculation(directory: Path, target: DecoderConfig) -> tuple[SpeculativeConfig | None, str] | None:
    """The speculation possible with a checkpoint's own modules, and the reason; None if it has none.

    If its modules cannot be used, the result is no speculation, with the reason. Raises CheckpointError for files that
    cannot be read at all.
    """
    tensors = read_tensors(directory)
    found = {models: numbers for models, layout in LAYOUTS.items() if (numbers := layout.numbers(tensors))}
    if not found:
        return None
    models, numbers = next(iter(found.items()))
    modules = f"{len(numbers)} MTP module{'s' if len(numbers) > 1 else ''}, named as by {models}"
    try:
        MTPCheckpoint.open(directory, target)
    except CheckpointError as error:
        return None, f"the checkpoint carries {modules}, which cannot be used: {error}"
    return SpeculativeConfig(METHOD), f"the checkpoint carries {modules}; --speculative-method none turns it off"


def carried_bytes(directory: Path) -> int:
    """Bytes of the modules in a checkpoint besides its target's weights. Raises CheckpointError."""
    tensors = read_tensors(directory)
    found = [layout for layout in LAYOUTS.values() if layout.numbers(tensors)]
    if not found:
        return 0
    numbers = found[0].numbers(tensors)
    starts = tuple(found[0].block.replace("*", str(number), 1) for number in numbers)
    starts += (found[0].root,) if found[0].root else ()
    return sum(nbytes(info) for name, info in tensors.items() if name.startswith(starts))
