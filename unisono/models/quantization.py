"""Which weight format each of a model's modules has: what config.json says, or ``--quantization``.

Called by ``models/checkpoint.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono import catalog
from unisono.layers.formats import PLAIN, WeightFormat
from unisono.models.build import plain
from unisono.types import CheckpointError, ConfigError

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
    config = _config(raw)
    if asked is not None and asked not in catalog.formats:
        raise ConfigError(f"--quantization {asked!r} is unknown; choose one of {', '.join(catalog.formats.names)}.")
    if not config:
        if asked is None:
            return PLAIN_WEIGHTS
        if asked not in catalog.online_formats:
            online = ", ".join(catalog.online_formats.names)
            raise ConfigError(
                f"--quantization {asked}: {directory} is not quantised, and only {online} is made while loading. "
                f"Give a checkpoint with quant_method {asked!r}, or --quantization {online}."
            )
        return Quantization(asked, online=catalog.online_formats.load(asked))
    method = config.get("quant_method", "unknown") if isinstance(config, dict) else config
    if asked is not None and asked != method:
        raise ConfigError(
            f"--quantization {asked}: {directory} is quantised already, with quant_method {method!r}. "
            f"Leave the flag out, or give the unquantised checkpoint."
        )
    if method not in catalog.formats:
        raise CheckpointError(
            f"{directory} is quantised (quant_method={method!r}), which is not supported: weights are read in "
            f"bfloat16, float16, float32 and {', '.join(catalog.formats.names)}. Give the unquantised checkpoint."
        )
    try:
        return Quantization(method, catalog.formats.load(method)(config))
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: quantization_config: {error}") from None


def _config(raw: Mapping[str, Any]) -> Any:
    """The quantization_config of a model, also of one whose text model has a config of its own."""
    of_text = raw.get("text_config")
    inner = of_text.get("quantization_config") if isinstance(of_text, dict) else None
    return raw.get("quantization_config") or raw.get("compression_config") or inner
