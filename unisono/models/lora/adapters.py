"""Adapters (LoRA) in PEFT's format: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``.

Validates such a directory, and finds the linear layers of a decoder that can have adapters, by the checkpoint names of
its family. :func:`attach_adapters` allocates room on the device, :func:`read_adapter` reads a directory into host
memory, :meth:`AdapterLayers.write` copies it to the device. With several ranks, each has all of A and the rows of B for
the outputs it computes.

An adapter adds ``scaling · B · A`` to a weight; B is multiplied by the scaling in fp32 when read, and the result is
rounded once to the model's dtype. Source of names and formulas: PEFT, ``tuners/lora``.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.config.untrusted_files import check_directory, read_json
from unisono.layers.adapters import AdapterRows, LinearAdapter
from unisono.layers.formats.base import FLOATS, WHOLE, Slices
from unisono.layers.linear import Linear
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import DecoderLayer
from unisono.models.config import Family
from unisono.models.load.tensor_files import TensorInfo, read, read_header
from unisono.types import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KINDS = ("lora_A", "lora_B")

PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

PREFIX = re.compile(
    r"^(base_model\.model\.)?(model\.language_model\.|language_model\.model\.|language_model\.|model\.)?"
)
"""Prefixes of module names: PEFT's wrapper, and exports of whole models, of text models and of their bases."""

TENSOR = re.compile(r"^(?P<module>.+)\.(?P<kind>lora_A|lora_B)(\.[^.]+)?\.weight$")

WHOLE_INITS = ("pissa", "olora", "corda", "loftq")
"""Values of init_lora_weights whose training changes the base weights too."""

REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales whole columns of the merged weight, which no product of low rank adds",
    "modules_to_save": "modules that were trained whole stand in the base model's place; merge the adapter",
    "fan_in_fan_out": "weights are stored [outputs, inputs] here",
    "lora_bias": "biases of low-rank products are not added",
    "layer_replication": "layers are those of the base model",
    "trainable_token_indices": "the embedding is the base model's",
    "target_parameters": "adapters of experts' stacked weights are not supported; leave them out of the training",
    "use_qalora": "QALoRA pools the inputs of its products",
    "alora_invocation_tokens": "an adapter holds for a whole request, not from a token on",
    "arrow_config": "a request has one adapter, not a router over several",
}
"""Settings of adapter_config.json that must be unset, and why."""

PARTS = {
    "lora_magnitude_vector": REFUSED["use_dora"],
    "lora_embedding_": "adapters of embeddings are not supported; leave embed_tokens out of target_modules",
    "modules_to_save": REFUSED["modules_to_save"],
    ".bias": "biases of an adapter are not added; train with bias='none'",
}
"""Parts of tensor names that are not low-rank products, and why they are refused."""

MODULES = {
    "embed_tokens": "adapters of embeddings are not supported; leave it out of target_modules",
    "lm_head": "adapters of the LM head are not supported; leave it out of target_modules",
    r"\.experts\.": "adapters of experts are not supported; leave them out of target_modules",
    "shared_expert": "the shared expert lies in one stack with the others here; leave it out of target_modules",
    r"\.mlp\.gate$": "adapters of routers are not supported; leave it out of target_modules",
    r"\bvisual\.|vision": "adapters of vision towers are not supported; leave them out of target_modules",
}
"""Patterns of modules without adapters, and the reason."""


@dataclass(frozen=True)
class AdapterLimits:
    """loaded: adapters on the device at one time. rank: maximum rank. kept: adapters kept in host memory."""

    loaded: int
    rank: int
    kept: int


@dataclass(frozen=True)
class AdapterTarget:
    """A projection that can have adapters.

    layer: path of its linear layer.
    number: index among the layer's projections.
    inputs, outputs: of the whole projection.
    rows: rows of the checkpoint tensor computed by this rank, unless they are the projection's own ones.
    part: otherwise this rank's part; None for all.
    """

    layer: str
    number: int
    inputs: int
    outputs: int
    rows: torch.Tensor | None
    part: Slices | None


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter in host memory.

    digest: of its directory's name and its files; differs for another adapter, and for the same one elsewhere.
    rank: the largest of its modules.
    parts: by path of a linear layer, A [r, K] and B [outputs, r] of each of its projections, scaling included, or None;
        the outputs are those of this rank.
    """

    directory: Path
    digest: bytes
    rank: int
    parts: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor] | None]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        pairs = (pair for parts in self.parts.values() for pair in parts if pair is not None)
        return sum(a.nbytes + b.nbytes for a, b in pairs)


@dataclass(frozen=True)
class AdapterLayers:
    """Linear layers of a decoder with room for adapters, by path, and the projections named by files.

    rows: adapter of each row in the current pass.
    """

    rows: AdapterRows
    layers: Mapping[str, LinearAdapter]
    targets: Mapping[str, Sequence[AdapterTarget]]
    dtype: torch.dtype
    limits: AdapterLimits

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(layer.nbytes for layer in self.layers.values())

    @torch.inference_mode()
    def write(self, place: int, weights: AdapterWeights) -> None:
        """Copy an adapter to the device, in place of one that no pass reads any more."""
        for path, layer in self.layers.items():
            layer.write(place, weights.parts.get(path) or [None] * len(layer.projections))


def attach_adapters(model: Decoder, family: Family, limits: AdapterLimits) -> AdapterLayers:
    """Allocate room for adapters on every linear layer of the decoder's layers, for this rank's outputs.

    Raises ConfigError for a layer with more projections than the kernels support.
    """
    rows, layers, targets = AdapterRows(), dict[str, LinearAdapter](), dict[str, list[AdapterTarget]]()
    specs = model.config.layers
    for path, module in model.named_modules():
        if not isinstance(module, Linear) or not path.startswith("layers."):
            continue
        named = [f"{path}.{name}" if name else path for name in module.projections]
        try:
            names = [family.name(name, specs) for name in named]
        except KeyError:  # files cannot name it
            continue
        device = next(module.parameters()).device
        layers[path] = module.adapter = LinearAdapter(
            rows, limits.loaded, limits.rank, module.inputs, module.held, module.dtype, device
        )
        for number, (name, own) in enumerate(zip(names, named, strict=True)):
            targets.setdefault(_short(name), []).append(_target(path, number, module, family.rows_of(own, specs)))
    for layer in model.layers:
        if isinstance(layer, DecoderLayer):
            layer.set_norm_formats()
    return AdapterLayers(rows, layers, targets, model.embed.weight.dtype, limits)


def _target(path: str, number: int, module: Linear, rows: torch.Tensor | None) -> AdapterTarget:
    """A projection of a layer. rows: rows of the checkpoint tensor that form the whole projection; None: all."""
    (name, outputs) = list(module.projections.items())[number]
    share = module.shares[name]
    part = None if share == WHOLE else Slices(0, share.runs(outputs))
    if rows is not None and part is not None:
        rows, part = part.of(rows), None
    return AdapterTarget(path, number, module.inputs, outputs, rows, part)


# ---- reading ----------------------------------------------------------------------------------------


def check_adapter(directory: Path, layers: AdapterLayers) -> tuple[_Config, dict[str, dict[str, TensorInfo]]]:
    """Check a directory without reading its weights; return its config, and its tensors by module and kind.

    Raises CheckpointError naming the file, and the module or the setting.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory: give one with {CONFIG} and {WEIGHTS}, as PEFT saves them.")
    check_directory(directory)
    config, found = _config(directory), _tensors(directory)
    for module, pair in found.items():
        _check_product(directory, module, pair, config, layers)
    _check_complete(directory, config, found, layers)
    return config, found


def read_adapter(directory: Path, layers: AdapterLayers) -> AdapterWeights:
    """Check and read a directory, of each B only this rank's part. Raises CheckpointError as :func:`check_adapter`
    does, and for NaN or infinite weights."""
    config, found = check_adapter(directory, layers)
    infos = {f"{module}.{kind}": info for module, pair in found.items() for kind, info in pair.items()}
    parts_read = {f"{module}.{KINDS[1]}": layers.targets[_short(module)][0].part for module in found}
    stored = dict(read({**dict.fromkeys(infos), **parts_read}, infos, "cpu"))
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor] | None]] = {}
    for module in found:
        a, b = (stored[f"{module}.{kind}"] for kind in KINDS)
        a, b = a.to(layers.dtype, copy=True), (b.float() * config.scaling(module)).to(layers.dtype)
        for kind, values in zip(KINDS, (a, b), strict=True):
            if not values.isfinite().all():
                where = f"{directory / WEIGHTS}: {module}.{kind}"
                raise CheckpointError(f"{where} has weights that are NaN or infinite in {layers.dtype}.")
        for target in layers.targets[_short(module)]:
            own = b if target.rows is None else b[target.rows]
            of_layer = parts.setdefault(target.layer, [None] * len(layers.layers[target.layer].projections))
            of_layer[target.number] = a, own
    largest = max(config.rank_of(module) for module in found)
    return AdapterWeights(directory, _digest(directory), largest, parts)


@dataclass(frozen=True)
class _Config:
    """Scalings of adapter_config.json. ranks, alphas: of modules, by patterns of their names."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: Any
    some_layers: bool

    def scaling(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.ranks, module, self.rank))


def _config(directory: Path) -> _Config:
    file = directory / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}: give a directory as PEFT saves adapters.")
    raw = read_json(file)
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type={str(kind)[:40]!r} is not supported; LORA is.")
    for name, why in REFUSED.items():
        if raw.get(name):
            raise CheckpointError(f"{file}: {name}={str(raw[name])[:80]} is not supported: {why}.")
    if raw.get("bias", "none") != "none":
        raise CheckpointError(f"{file}: bias={str(raw['bias'])[:40]!r} is not supported: {PARTS['.bias']}.")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(WHOLE_INITS):
        raise CheckpointError(
            f"{file}: init_lora_weights={init[:40]!r} changes the base weights, too: convert the adapter while saving "
            "it (path_initial_model_for_weight_conversion), or merge it."
        )
    return _Config(
        rank=int(_number(file, "r", raw.get("r"), 1)),
        alpha=_number(file, "lora_alpha", raw.get("lora_alpha")),
        rslora=bool(raw.get("use_rslora")),
        ranks={key: int(value) for key, value in _patterns(file, "rank_pattern", raw, 1).items()},
        alphas=_patterns(file, "alpha_pattern", raw),
        targets=raw.get("target_modules"),
        some_layers=raw.get("layers_to_transform") is not None or bool(raw.get("exclude_modules")),
    )


def _number(file: Path, name: str, value: Any, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        rule = "a number" if least == -math.inf else f"a number from {least} on"
        raise CheckpointError(f"{file}: {name}={str(value)[:40]} must be {rule}.")
    return value


def _patterns(file: Path, name: str, raw: Mapping[str, Any], least: float = -math.inf) -> dict[str, float]:
    values = raw.get(name) or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{file}: {name}={str(values)[:40]} must be an object.")
    for key in values:
        try:
            re.compile(key)
        except re.error as error:
            raise CheckpointError(f"{file}: {name} has {key[:80]!r}, which is no pattern: {error}.") from None
    return {key: _number(file, f"{name}[{key[:80]!r}]", value, least) for key, value in values.items()}


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Value of the first pattern that matches the module's name, or its end after a dot, as in PEFT."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _tensors(directory: Path) -> dict[str, dict[str, TensorInfo]]:
    """Tensors of a directory: module, without PEFT's wrapper -> kind -> tensor."""
    file = directory / WEIGHTS
    if not file.is_file():
        pickled = next((name for name in PICKLES if (directory / name).exists()), None)
        why = f", only {pickled}, a pickle, which may run code: save it again with safe_serialization=True" * bool(
            pickled
        )
        raise CheckpointError(f"{directory} has no {WEIGHTS}{why}.")
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in read_header(file).items():
        match = TENSOR.match(name)
        if match is None:
            why = next((why for part, why in PARTS.items() if part in name), "it is no tensor of a low-rank product")
            raise CheckpointError(f"{file}: tensor {name}: {why}.")
        module = match["module"].removeprefix("base_model.model.")
        if match["kind"] in found.setdefault(module, {}):
            raise CheckpointError(f"{file}: {module} has two tensors {match['kind']}; keep one adapter in a file.")
        found[module][match["kind"]] = info
    if not found:
        raise CheckpointError(f"{file} has no tensors.")
    return found


def _check_product(
    directory: Path, module: str, pair: Mapping[str, TensorInfo], config: _Config, layers: AdapterLayers
) -> None:
    """Raise CheckpointError unless both tensors of a module exist and fit the whole base model and the limits."""
    file, limits = directory / WEIGHTS, layers.limits
    targets = layers.targets.get(_short(module))
    if targets is None:
        raise CheckpointError(f"{file}: {module}: {_why_not(module)}.")
    for kind in KINDS:
        if kind not in pair:
            raise CheckpointError(f"{file}: {module} has no {kind}: the file is incomplete.")
        if pair[kind].dtype not in FLOATS:
            raise CheckpointError(
                f"{file}: {module}.{kind} is of type {pair[kind].dtype}; {', '.join(FLOATS)} are read."
            )
    rank, inputs = config.rank_of(module), targets[0].inputs
    outputs = sum(target.outputs for target in targets)
    if rank > limits.rank:
        raise CheckpointError(f"{directory}: {module} has rank {rank}; --max-lora-rank is {limits.rank}. Raise it.")
    for kind, shape in zip(KINDS, ((rank, inputs), (outputs, rank)), strict=True):
        if pair[kind].shape != shape:
            raise CheckpointError(
                f"{file}: {module}.{kind} has shape {list(pair[kind].shape)}; rank {rank} and the base model's layer "
                f"ask for {list(shape)}."
            )


def _check_complete(directory: Path, config: _Config, found: Mapping[str, Any], layers: AdapterLayers) -> None:
    """Raise CheckpointError if target_modules lists a module of which some layers' tensors are missing."""
    if not isinstance(config.targets, list) or config.some_layers:
        return
    here = {_short(module) for module in found}
    endings = [str(target) for target in config.targets]
    listed = [name for name in layers.targets if any(_ends(name, ending) for ending in endings)]
    if missing := [name for name in listed if name not in here]:
        raise CheckpointError(
            f"{directory / WEIGHTS}: {CONFIG} names {missing[0]}, and there are no tensors of it "
            f"({len(missing)} of {len(listed)} modules are missing): the file is incomplete."
        )


def _ends(name: str, ending: str) -> bool:
    return name == _short(ending) or name.endswith("." + ending)


def _short(module: str) -> str:
    """A module's name without the prefixes of different export tools."""
    return PREFIX.sub("", module, count=1)


def _why_not(module: str) -> str:
    """Reason why a module has no room for an adapter."""
    known = next((why for part, why in MODULES.items() if re.search(part, module)), None)
    return known or "the base model has no linear layer of that name; the adapter is another model's"


def _digest(directory: Path) -> bytes:
    digest = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=16)
    for name in (CONFIG, WEIGHTS):
        with (directory / name).open("rb") as opened:
            digest.update(f"\0{name} {os.fstat(opened.fileno()).st_size}\0".encode())
            while block := opened.read(1 << 22):
                digest.update(block)
    return digest.digest()
