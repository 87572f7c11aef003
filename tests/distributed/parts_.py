"""A rank's part of a model, without the other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unisono.distributed.gather import Ranks
from unisono.models.load.build import no_attention
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.loader import load_model


def loaded(path: Path | str, ranks: Ranks, quantised: str | None = None, **options: Any) -> Any:
    checkpoint = Checkpoint.open(path, quantised)
    return load_model(
        checkpoint, attention=no_attention, dtype=torch.float32, device="cpu", max_positions=64, ranks=ranks, **options
    )
