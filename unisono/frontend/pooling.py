"""Pooling of a prompt's hidden states to one vector, by the checkpoint's configuration.

Checkpoints for embeddings carry sentence-transformers' ``1_Pooling/config.json``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODES = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
"""sentence-transformers' names of the supported pooling modes."""
GENERATIVE = (
    "This checkpoint is generative: it has no 1_Pooling/config.json, so these are the normalised last hidden states of "
    "each text's last token, which nobody trained to be near for similar texts. Checkpoints meant for it are decoders "
    "with such a file, like Qwen3-Embedding."
)


@dataclass(frozen=True)
class Pooling:
    """The pooling of a checkpoint.

    mode: ``last``, ``mean`` or ``cls`` (the first token). meant: the checkpoint is for embeddings. problem: the reason
    why its pooling is not supported, if it is not.
    """

    mode: str = "last"
    meant: bool = False
    problem: str | None = None

    def pool(self, states: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
        """One vector [dimensions] of a prompt's hidden states [tokens, hidden], both float32."""
        vector = {"last": states[-1], "cls": states[0]}.get(self.mode)
        vector = states.mean(0, np.float64).astype(np.float32) if vector is None else vector
        if dimensions is not None:
            vector = vector[:dimensions]
        return vector / max(np.linalg.norm(vector), np.float32(1e-12)) if normalize else vector


def pooling_of(directory: Path) -> Pooling:
    """The pooling of a checkpoint's configuration; the last token's state by default."""
    file = directory / "1_Pooling" / "config.json"
    if not file.is_file():
        return Pooling()
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Pooling(meant=True, problem=f"1_Pooling/config.json cannot be read: {error}")
    if not isinstance(config, Mapping):
        return Pooling(meant=True, problem="1_Pooling/config.json is not an object")
    named = config.get("pooling_mode")
    value = (
        [named]
        if isinstance(named, str)
        else [
            key.removeprefix("pooling_mode_")
            for key, on in config.items()
            if key.startswith("pooling_mode_") and on is True
        ]
    )
    if len(value) != 1 or value[0] not in MODES:
        known = ", ".join(MODES)
        return Pooling(meant=True, problem=f"1_Pooling/config.json asks for {value}; one of {known} is supported")
    return Pooling(MODES[value[0]], meant=True)


def encoded(vector: np.ndarray, form: str) -> list[float] | str:
    """A vector in JSON: numbers, or base64 of little-endian float32."""
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
