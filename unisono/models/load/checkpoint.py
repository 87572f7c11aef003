"""A Hugging Face checkpoint directory, opened and checked before any weights are read.

Reads config.json, generation_config.json and the shard index, and reports every error in them. It holds no weights:
``weights`` reads them. Called by the engine and the loader.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unisono.config import catalog, mistral
from unisono.config.checkpoint_files import CONFIG, INDEX, names_in
from unisono.config.checkpoint_files import WEIGHTS as WEIGHTS
from unisono.config.gguf.directory import source as gguf_source
from unisono.config.gguf.packed import METHOD as GGUF_METHOD
from unisono.config.preflight.families import read_as
from unisono.config.preflight.model import architecture_of, check_config
from unisono.config.preflight.weights import weight_files
from unisono.config.sentence_files import text_rules
from unisono.config.transformers_names import from_transformers
from unisono.config.untrusted_files import check_directory, check_token_ids, check_values, read_json
from unisono.layers.formats.base import PLAIN, WeightFormat
from unisono.models.config import DecoderConfig, Family
from unisono.models.load import gguf
from unisono.models.load.build import plain
from unisono.models.load.quantization import PLAIN_WEIGHTS, Quantization, find_quantization
from unisono.models.load.stored_config import stored_config
from unisono.models.load.tensor_files import TensorInfo, read_header
from unisono.types import CheckpointError


@dataclass(frozen=True)
class GenerationDefaults:
    """Values of generation_config.json; None (or no ids) if not set."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """An opened directory. Make one with :meth:`open`.

    dtype: dtype declared by config.json, or None.
    eos_token_ids: end-of-sequence ids of config.json and generation_config.json together, sorted; callers add the
        tokenizer's own.
    quantization: how its weights are stored on the device.
    """

    path: Path
    family: Family = field(repr=False)
    config: DecoderConfig
    generation: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype | None
    quantization: Quantization = PLAIN_WEIGHTS

    @classmethod
    def open(
        cls, path: str | Path, quantization: str | None = None, overrides: Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """Read the configs of a directory or a bundled name; weights may be absent (``--load-format dummy``).

        quantization: ``--quantization``; None: as the checkpoint is. overrides: values that replace config.json's
            (``--hf-overrides``). Raises CheckpointError: no such directory, a hub id that cannot be downloaded,
            config.json missing or unparsable, an unsupported architecture or quantisation, unsupported values;
            ConfigError: a ``quantization`` that contradicts the checkpoint's.
        """
        directory = catalog.find_directory(path, lambda found: check_config(found, quantization, overrides))
        raw = check_config(directory, quantization, overrides)
        family = catalog.models.load(architecture_of(raw, directory))
        try:
            quantized = find_quantization(raw, directory, quantization)
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # the file may come from any tool
            raise CheckpointError(f"{directory / 'config.json'}: quantization_config: {error!r}.") from None
        hf_config, config = _parse_config(directory, family, raw, overrides)
        generation_file = directory / "generation_config.json"
        generation = generation_defaults(generation_file) if generation_file.exists() else GenerationDefaults()
        text = config.hf_config
        declared = [getattr(each, "eos_token_id", None) for each in (hf_config, text)]
        eos = {i for ids in declared for i in _token_ids(ids, directory / "config.json")}
        check_token_ids(tuple(eos), config.vocab_size, directory / "config.json")
        check_token_ids(generation.eos_token_ids, config.vocab_size, generation_file)
        dtype = hf_config.dtype or text.dtype
        if family.tied_unless_stored and {*names_in(directory)} & {WEIGHTS, INDEX}:
            head = any(name.endswith("lm_head.weight") for name in read_tensors(directory))
            config = replace(config, tie_embeddings=not head)
        longest = text_rules(directory).longest
        if longest is not None:
            config = replace(config, max_positions=min(config.max_positions, longest))
        return cls(
            path=directory,
            family=family,
            config=config,
            generation=generation,
            eos_token_ids=tuple(sorted({*eos, *generation.eos_token_ids})),
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
            quantization=quantized,
        )

    def format_of_module(self, module: str) -> WeightFormat:
        """Weight format of one of the decoder's modules."""
        tied = module == "lm_head" and self.config.tie_embeddings
        return PLAIN if tied else self.quantization.format(module, self.family.name(module, self.config.layers))

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the checkpoint; see :func:`read_tensors`."""
        return read_tensors(self.path, packed=self.quantization.method == GGUF_METHOD)

    def unread(self) -> list[tuple[str, str, str]]:
        """(name prefix, count, reason) of tensors that its family skips.

        Includes a tower described by config.json but not stored.
        """
        beginnings = self.family.unread
        names = self.tensors() if beginnings or self.config.vision is not None else ()
        counts = {b: sum(name.startswith(b) for name in names) for b in beginnings}
        found = [(f"{b}*", f"{counts[b]} tensors not read", why) for b, why in beginnings.items() if counts[b]]
        prefixes = self.family.tower_prefixes
        if self.config.vision is not None and not any(name.startswith(prefixes) for name in names):
            why = "config.json describes a vision tower, which the checkpoint does not hold: pictures are refused"
            found.append((f"{prefixes[0]}*", "no tensors", why))
        return found


def read_tensors(directory: Path, packed: bool = False) -> dict[str, TensorInfo]:
    """Header of every tensor in a checkpoint's directory, from its shards.

    packed: of a GGUF file, see :func:`unisono.models.load.gguf.read_tensors`.

    Raises CheckpointError: no safetensors, a missing shard of the index, a file truncated or not safetensors, a tensor
    of the index that its shard lacks.
    """
    if (file := gguf_source(directory)) is not None:
        return gguf.read_tensors(file, packed)
    files, weight_map = weight_files(directory)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(file))
    for tensor, name in weight_map.items():
        if tensor not in tensors:
            raise CheckpointError(f"{directory / name}: tensor {tensor} is missing, though {INDEX} promises it.")
    if mistral.source(directory) is not None:
        return {mistral.tensor_name(name): info for name, info in tensors.items()}
    return tensors


def formats_in(directory: Path) -> Callable[[str], WeightFormat]:
    """Weight format of each module in a directory, by its name there. Without a config.json all are plain.

    Raises CheckpointError for a quantisation that is not supported.
    """
    file = directory / "config.json"
    return find_quantization(read_json(file), directory).by_name if file.is_file() else plain


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json, after checking all files of its directory. Raises CheckpointError."""
    check_directory(directory)
    raw = read_json(directory / CONFIG)
    check_values(raw, directory / CONFIG)
    return raw


def _parse_config(
    directory: Path, family: Family, raw: Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> tuple[Any, DecoderConfig]:
    """(transformers' configuration, the family's DecoderConfig) of config.json contents ``raw`` with ``overrides``."""

    known = read_as(raw)

    def by_transformers() -> Any:
        auto_config = from_transformers("AutoConfig")
        if not overrides and known is None:
            return auto_config.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with tempfile.TemporaryDirectory() as changed:
            Path(changed, CONFIG).write_text(json.dumps(raw if known is None else known))
            config = auto_config.from_pretrained(changed, local_files_only=True, trust_remote_code=False)
        config.name_or_path = str(directory)
        return config

    try:
        whole = overrides or known is not None
        read = json.dumps(known or raw, sort_keys=True).encode() if whole else (directory / CONFIG).read_bytes()
        hf_config = stored_config(read, str(directory), by_transformers)
        if raw.get("vision_config") is None and hasattr(hf_config, "vision_config"):
            hf_config.vision_config = None  # transformers fills in a default
        return hf_config, family.read(hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    except Exception as error:  # transformers validates with many exception types
        raise CheckpointError(f"{directory / 'config.json'} is not a valid config: {error}") from error


def generation_defaults(file: Path) -> GenerationDefaults:
    raw = read_json(file)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = raw.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not number:
            raise CheckpointError(f"{file}: {name}={str(value)[:80]!s} must be a number.")
    return GenerationDefaults(
        eos_token_ids=_token_ids(raw.get("eos_token_id"), file),
        temperature=raw.get("temperature"),
        top_p=raw.get("top_p"),
        top_k=raw.get("top_k"),
        min_p=raw.get("min_p"),
    )


def sampling_defaults(stored: GenerationDefaults, source: str) -> dict[str, float]:
    """Sampling defaults by name. source: as in ``EngineConfig.generation_config``; "auto" takes the ``stored`` ones."""
    if source == "vllm":
        return {}
    found = stored if source == "auto" else generation_defaults(Path(source) / "generation_config.json")
    values = {"temperature": found.temperature, "top_p": found.top_p, "top_k": found.top_k, "min_p": found.min_p}
    return {name: value for name, value in values.items() if value is not None}


def _token_ids(value: Any, file: Path) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{file}: eos_token_id={value!r} must be a token id or a list of them.")
    return tuple(ids)
