"""The check of a model before anything slow is imported: its directory, config.json, weight headers and tokenizer.

The loader reads config.json with :func:`check_config`, too. Both raise CheckpointError or ConfigError with the cause
and the way out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from unisono.config import catalog, hub
from unisono.config.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    TOKENIZER_FILES,
    adapter_alone,
    names_in,
    read_object,
)
from unisono.config.preflight.draft_method import ASSISTANTS, draft_method
from unisono.config.preflight.formula import check_formula, check_model_type
from unisono.config.preflight.missing import MISSING
from unisono.config.preflight.quantization import quantization_method
from unisono.config.preflight.ranks import check_config_heads, check_gpus
from unisono.config.preflight.weights import check_weights
from unisono.config.untrusted_files import check_directory, check_numbers, check_rope, read_json
from unisono.types import CheckpointError, ConfigError, SpeculativeConfig

MODEL_FLAGS = (
    "quantization", "load_format", "tensor_parallel_size", "enable_dp_attention", "device", "hf_overrides", "tokenizer",
)  # fmt: skip
"""Flags of an engine that :func:`check_model` takes."""


def check_model(
    path: str | Path,
    *,
    quantization: str | None = None,
    load_format: str = "auto",
    tensor_parallel_size: int = 1,
    enable_dp_attention: bool = False,
    device: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    needs_text: bool = False,
    tokenizer: str | None = None,
    weights: bool = True,
) -> Path:
    """Check that a model can be served with these flags, as far as its files tell; returns its directory.

    path: a directory, a bundled name or a hub id; config.json of a hub id is checked before anything else is
    downloaded.
    needs_text: a tokenizer must be there, or in ``tokenizer``. weights: download the weights of a hub id; otherwise
    they may be absent. The other arguments are fields of ``EngineConfig``. Raises CheckpointError and ConfigError.
    """
    check_gpus(tensor_parallel_size, device)

    def check(directory: Path) -> Mapping[str, Any]:
        raw = check_config(directory, quantization, hf_overrides)
        check_config_heads(text_config(raw), 1 if enable_dp_attention else tensor_parallel_size)
        return raw

    directory = find_model(path, check, weights)
    check(directory)
    if load_format != "dummy" and (weights or remote_bytes(path) is None):
        check_weights(directory)
    if needs_text and not has_tokenizer(Path(tokenizer or directory)):
        raise CheckpointError(
            f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])} …), so it cannot take text: give --tokenizer."
        )
    return directory


def find_model(path: str | Path, check: Callable[[Path], object] | None = None, weights: bool = True) -> Path:
    """Call ``catalog.find_directory``. weights: download those of a hub id. Raises CheckpointError."""
    if not weights and isinstance(path, str) and is_remote(path):
        return hub.fetch(path, check, weights=False)
    return catalog.find_directory(path, check)


def is_remote(path: str) -> bool:
    """True if a PATH is the id of a checkpoint on the hub."""
    return path not in catalog.bundled and hub.is_id(path) and not Path(path).expanduser().exists()


def remote_bytes(path: str | Path) -> int | None:
    """Bytes of a hub id's weights that are not in the cache; None if they are, and for a directory."""
    if not isinstance(path, str) or not is_remote(path) or hub.is_cached(path):
        return None
    return hub.weight_bytes(path)


class EngineFlags(Protocol):
    """The fields of ``unisono.config.EngineConfig`` that are checked here."""

    @property
    def model(self) -> str: ...
    @property
    def quantization(self) -> str | None: ...
    @property
    def load_format(self) -> str: ...
    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def enable_dp_attention(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def hf_overrides(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer(self) -> str | None: ...
    @property
    def speculative(self) -> SpeculativeConfig | None: ...
    @property
    def lora_modules(self) -> tuple[tuple[str, str], ...]: ...


def check_engine_model(
    config: EngineFlags, needs_text: bool = False, weights: bool = True, headers: bool = True
) -> Path:
    """Check the model, drafter and adapters that an engine's flags name; returns the model's directory.

    needs_text, weights: see :func:`check_model`. headers: check the headers of the weight files. Raises CheckpointError
    and ConfigError.
    """
    flags = {name: getattr(config, name) for name in MODEL_FLAGS}
    if not headers:
        flags["load_format"] = "dummy"
    directory = check_model(config.model, needs_text=needs_text, weights=weights, **flags)
    check_drafter(config.speculative)
    check_adapters(config.lora_modules)
    return directory


def with_method(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the ``method`` to a speculative config with only a ``model`` whose config.json determines it.

    As in vLLM, for the assistants of Gemma 4; also for EAGLE-3 heads and block drafters. Raises CheckpointError for a
    hub id that cannot be downloaded.
    """
    model = settings.get("model")
    if settings.get("method") is not None or not isinstance(model, str):
        return settings
    method = draft_method(read_object(catalog.resolve_name(model) / CONFIG))
    return settings if method is None else {**settings, "method": method}


def is_assistant(directory: Path) -> bool:
    """True if a directory's config.json names a drafter that reads its target's keys."""
    config = read_object(directory / CONFIG)
    names = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(names, list) and bool(names) and str(names[0]).startswith(ASSISTANTS)


def assistant_beside(directory: Path) -> Path | None:
    """The assistant that lies beside a checkpoint: ``<directory>-assistant``, or its subdirectory ``assistant``."""
    places = directory.parent / f"{directory.name}-assistant", directory / "assistant"
    return next((place for place in places if is_assistant(place)), None)


def check_drafter(speculative: SpeculativeConfig | None) -> None:
    """Check the checkpoint of ``--speculative-model`` by its files.

    Raises CheckpointError.

    Options, and methods of other packages, are checked by the drafter itself.
    """
    if speculative is None or speculative.model is None:
        return
    if speculative.method == "standalone":
        check_model(speculative.model, load_format=str(speculative.options.get("load_format", "auto")))
    elif speculative.method in ("eagle", "eagle3") and not speculative.options:
        catalog.find_directory(speculative.model)


def check_adapters(modules: Iterable[tuple[str, str]]) -> None:
    """Check the directories of ``--lora-modules``, (name, directory) each. Raises CheckpointError."""
    for name, path in modules:
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"--lora-modules {name}={path}: it does not exist: give an adapter's directory.")
        if not (directory / ADAPTER_CONFIG).is_file():
            holds = "a model, not an adapter" if (directory / CONFIG).is_file() else "no adapter"
            raise CheckpointError(f"--lora-modules {name}={path}: it holds {holds}: there is no {ADAPTER_CONFIG}.")


def check_config(
    directory: Path, quantization: str | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a model, with ``overrides``, after every check that needs no other file.

    quantization: ``--quantization``. Raises CheckpointError for files that must not be opened, and for an architecture,
    model type, field or quantization that is not supported; ConfigError for a flag that the checkpoint contradicts.
    """
    check_directory(directory)
    file = directory / CONFIG
    raw = overridden(read_json(file), overrides)
    names = names_in(directory)
    if reason := adapter_alone(names, read_object(directory / ADAPTER_CONFIG)):
        raise CheckpointError(f"{directory} {reason}.")
    architecture = architecture_of(raw, directory)
    check_model_type(architecture, raw, file)
    check_numbers(raw, file)
    check_rope(raw, file)
    check_formula(architecture, raw, file)
    quantization_method(raw, directory, quantization, catalog.formats.names, catalog.online_formats.names)
    return raw


def overridden(raw: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """``raw`` with the values of ``overrides``; nested objects are merged."""
    merged = dict(raw)
    for name, value in (overrides or {}).items():
        inner = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(inner, dict)
        merged[name] = overridden(inner, value) if both and isinstance(inner, dict) else value
    return merged


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model."""
    text = raw.get("text_config")
    return text if isinstance(text, Mapping) else raw


def architecture_of(raw: Mapping[str, Any], directory: Path) -> str:
    """``architectures[0]``. Raises CheckpointError listing the supported ones."""
    names = raw.get("architectures")
    supported = ", ".join(catalog.models.names)
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        shown = str(names)[:80]
        raise CheckpointError(
            f"{directory / CONFIG}: architectures={shown}; it must name a model's class, for example "
            f"Qwen3ForCausalLM. docs/reference/models.md lists the {len(catalog.models.names)} that are supported."
        )
    if _is_draft_head(names[0], raw):
        raise CheckpointError(
            f"{directory} is a draft head ({names[0][:80]}), not a model: give its target as the model, and this with "
            f"--speculative-method {draft_method(raw) or 'eagle3 (or eagle)'} --speculative-model PATH."
        )
    if names[0] not in catalog.models:
        block = MISSING.get(names[0])
        why = f": missing is {block}" if block else ""
        raise CheckpointError(
            f"{directory}: architecture {names[0][:80]!r} is not supported{why}. Supported: {supported}."
        )
    return names[0]


def _is_draft_head(architecture: str, raw: Mapping[str, Any]) -> bool:
    fields = ("speculators_model_type", "eagle_config", "draft_vocab_size", "dflash_config")
    marked = any(kind in architecture for kind in ("Eagle", "DFlash", "DSpark", *ASSISTANTS))
    return marked or any(raw.get(name) is not None for name in fields)


def has_tokenizer(directory: Path) -> bool:
    """True if a directory has a tokenizer's files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def read_overrides(flag: str, value: Any) -> dict[str, Any]:
    """Parse ``--hf-overrides``: a JSON object, or a mapping. Raises ConfigError."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}.") from None
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        kind = "a function" if callable(found) else f"{str(found)[:80]}"
        raise ConfigError(f'{flag}: {kind}: give an object of config.json\'s fields, {{"rope_theta": 1000000}}.')
    try:
        return dict(json.loads(json.dumps(found)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag}: {error}: give values that JSON has.") from None
