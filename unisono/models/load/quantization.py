"""Which weight format each of a model's modules has: what config.json says, or ``--quantization``.

Called by ``models/load/checkpoint.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.config import catalog
from unisono.config.preflight.quantization import quantization_config, quantization_method
from unisono.layers.formats.base import PLAIN, WeightFormat
from unisono.models.load.build import plain
from unisono.types import CheckpointError

ONLINE = re.compile(r"layers\.\d+\.(mixer|feed_forward)\.")
"""Modules, by their paths in the model, that are quantised while a plain checkpoint is loaded …"""

KEPT_PLAIN = ("gates", "router", "shared_gate")
"""… unless a part of their path is one of these: small, and what they compute is sensitive."""


@dataclass(frozen=True)
class Quantization:
    """How a model's weights are stored on the device.

    method: a name of ``catalog.formats``; None: plain. by_name: a module's format by its name in the checkpoint.
    online: the format that weights get while they are loaded; None: they stay as the checkpoint has them.
    """

    method: str | None = None
    by_name: Callable[[str], WeightFormat] = field(default=plain, repr=False)
    online: WeightFormat | None = None

    def format(self, module: str, name: str) -> WeightFormat:
        """Of the module with this path in the model and this name in the checkpoint."""
        if self.online is None:
            return self.by_name(name)
        return self.online if ONLINE.match(module) and not {*module.split(".")} & {*KEPT_PLAIN} else PLAIN

    def decision(self) -> tuple[str, str]:
        """What is said of it at the start: the method, and why."""
        if self.method is None:
            return "plain", "the checkpoint is not quantised; --quantization fp8 quantises while loading"
        if self.online is None:
            return self.method, "quantization_config of config.json"
        stay = "embeddings, LM head, routers, norms and gates stay plain"
        return self.method, f"linear layers of mixers and feed-forwards are quantised while loading; {stay}"


PLAIN_WEIGHTS = Quantization()


def find_quantization(raw: Mapping[str, Any], directory: Path, asked: str | None = None) -> Quantization:
    """From config.json, and ``--quantization`` where it is given.

    Raises CheckpointError for a quantization_config that is not supported, ConfigError for a flag that it contradicts.
    """
    methods, online = catalog.formats.names, catalog.online_formats.names
    method = quantization_method(raw, directory, asked, methods, online)
    if method is None:
        return PLAIN_WEIGHTS if asked is None else Quantization(asked, online=catalog.online_formats.load(asked))
    try:
        return Quantization(method, catalog.formats.load(method)(quantization_config(raw)))
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: quantization_config: {error}") from None
