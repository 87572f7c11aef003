"""Speculation with what a checkpoint brings along: MTP modules among the target's weights, or an assistant beside it.

The engine calls this before it builds the model. The decision on modules depends on the headers of the safetensors
files only, never on a name; an assistant is found by its directory's name and checked against the target.
"""

from __future__ import annotations

from pathlib import Path

from unisono.config.preflight.model import assistant_beside
from unisono.drafters.mtp.checkpoint import LAYOUTS, MTPCheckpoint
from unisono.drafters.mtp.frozen_kv_model import FrozenCheckpoint
from unisono.drafters.quantization import copied_head_bytes
from unisono.models.blocks.decoder import Decoder
from unisono.models.config import DecoderConfig
from unisono.models.load.checkpoint import read_tensors
from unisono.models.load.tensor_files import nbytes
from unisono.types import CheckpointError, SpeculativeConfig

METHOD = "mtp"
ASSISTANT_METHOD = "mtp_frozen"
OFF = "--speculative-method none turns it off"


def carried_speculation(directory: Path, target: DecoderConfig) -> tuple[SpeculativeConfig | None, str] | None:
    """The speculation possible with a checkpoint's own modules or its assistant, and the reason; None if it has none.

    If these cannot be used, the result is no speculation, with the reason. Raises CheckpointError for files that cannot
    be read at all.
    """
    tensors = read_tensors(directory)
    found = {models: numbers for models, layout in LAYOUTS.items() if (numbers := layout.numbers(tensors))}
    if not found:
        return _beside(directory, target)
    models, numbers = next(iter(found.items()))
    modules = f"{len(numbers)} MTP module{'s' if len(numbers) > 1 else ''}, named as by {models}"
    other = assistant_beside(directory)
    passed_over = "" if other is None else f"; they come before the assistant {other}, which {ASSISTANT_METHOD} reads"
    try:
        MTPCheckpoint.open(directory, target)
    except CheckpointError as error:
        return None, f"the checkpoint carries {modules}, which cannot be used: {error}"
    return SpeculativeConfig(METHOD), f"the checkpoint carries {modules}{passed_over}; {OFF}"


def _beside(directory: Path, target: DecoderConfig) -> tuple[SpeculativeConfig | None, str] | None:
    """The speculation with the assistant beside a checkpoint."""
    assistant = assistant_beside(directory)
    if assistant is None:
        return None
    try:
        FrozenCheckpoint.open(assistant, target)
    except CheckpointError as error:
        return None, f"the assistant {assistant} cannot be used: {error}"
    return SpeculativeConfig(ASSISTANT_METHOD, str(assistant)), f"the assistant beside the checkpoint; {OFF}"


def carried_bytes(directory: Path) -> int:
    """Bytes of the modules in a checkpoint besides its target's weights. Raises CheckpointError."""
    tensors = read_tensors(directory)
    found = [layout for layout in LAYOUTS.values() if layout.numbers(tensors)]
    if not found:
        return 0
    numbers = found[0].numbers(tensors)
    starts = tuple(prefix for number in numbers for prefix in found[0].blocks(number))
    starts += (found[0].root,) if found[0].root else ()
    return sum(nbytes(info) for name, info in tensors.items() if name.startswith(starts))


def drafting_bytes(directory: Path, spec: SpeculativeConfig, target: Decoder, e4m3: bool) -> int:
    """Bytes of the modules that ``spec`` takes from a target's checkpoint, or gives random weights, and of the fp8 copy
    of the target's LM head.

    target: may be on the meta device. e4m3: the device multiplies e4m3. Raises CheckpointError.
    """
    if spec.method != METHOD:
        return 0
    if spec.options.get("load_format") == "dummy":
        modules = MTPCheckpoint.open(directory, target.config, dummy=True).random_bytes(target)
    else:
        modules = carried_bytes(directory)
    return modules + copied_head_bytes(spec.options.get("draft_quantization", "auto"), target.lm_head, e4m3)
