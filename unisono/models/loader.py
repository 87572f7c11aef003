"""From an opened checkpoint to a decoder with weights on a device.

Every tensor's name, shape and dtype is checked against the decoder before the first byte is read; then shards
are streamed (memory-mapped, straight to the device) into the parameters. The engine calls :func:`load_model`.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from unisono.attention.base import AttentionBackend
from unisono.layers.linear import MergedLinear
from unisono.layers.norm import RMSNorm
from unisono.models.checkpoint import SUPPORTED_DTYPES, Checkpoint, TensorInfo
from unisono.models.config import Family
from unisono.models.decoder import Decoder
from unisono.types import CheckpointError

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[str, float], None]

DUMMY_STD = 0.02
IGNORED = re.compile(r"rotary_emb\.inv_freq$")
"""Buffers that old exports kept; the rotary table is computed from the config."""


def load_model(
    checkpoint: Checkpoint,
    *,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device | str,
    max_positions: int,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = lambda stage, share: None,
) -> Decoder:
    """Build the checkpoint's decoder on ``device`` in ``dtype`` (weights are converted) and fill it.

    load_format: ``auto`` reads the checkpoint's safetensors; ``dummy`` needs config.json only and draws
    N(0, 0.02^2) from ``seed``, norms 1. max_positions: length of the rotary table, in tokens.
    progress: called with ``"load"`` and the share of the bytes that is in place, 0 … 1, after each tensor.

    Raises CheckpointError naming the file and the tensor that is missing, unexpected, misshapen or broken.
    """
    decoder = Decoder(checkpoint.config, backend, max_positions, dtype, device)
    if load_format == "dummy":
        _fill_randomly(decoder, seed)
    else:
        _fill_from_files(decoder, checkpoint, progress)
    return decoder.eval()


def checkpoint_names(decoder: Decoder, family: Family) -> dict[str, torch.Tensor]:
    """What a checkpoint must hold: each tensor's name there -> the parameter, or rows of one, it fills."""
    targets = {}
    for module, kind, parameter in shards(decoder):
        if module == "lm_head" and decoder.config.tie_embeddings:
            continue
        layer = re.search(r"\.(\d+)\.", module)
        theirs = family.names[re.sub(r"\.\d+\.", ".*.", module)]
        targets[f"{theirs.replace('*', layer[1]) if layer else theirs}.{kind}"] = parameter
    return targets


def shards(root: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """``(module, kind, tensor)`` of every parameter; a merged linear yields each shard as if a module."""
    for path, module in root.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                rows = parameter.split(list(module.shards.values()))
                yield from ((f"{path}.{shard}", kind, part) for shard, part in zip(module.shards, rows, strict=True))
            else:
                yield path, kind, parameter


@torch.no_grad()
def _fill_randomly(decoder: Decoder, seed: int) -> None:
    """A tensor's values depend on the seed and its name alone, so a model's first layers are a smaller model's."""
    generator = torch.Generator(decoder.embed.weight.device)
    for path, module in decoder.named_modules():
        if not isinstance(module, RMSNorm):  # norms are born as ones
            for kind, parameter in module.named_parameters(recurse=False):
                generator.manual_seed(seed ^ zlib.crc32(f"{path}.{kind}".encode()))
                parameter.normal_(0, DUMMY_STD, generator=generator)


@torch.no_grad()
def _fill_from_files(decoder: Decoder, checkpoint: Checkpoint, progress: Progress) -> None:
    targets, tensors = checkpoint_names(decoder, checkpoint.family), checkpoint.tensors()
    head = f"{checkpoint.family.names['lm_head']}.weight"
    if not any(name.startswith("model.") for name in tensors):  # the base model's export
        targets = {name.removeprefix("model."): target for name, target in targets.items()}
    _check(targets, tensors, checkpoint, optional={head} if decoder.config.tie_embeddings else set())
    total, done = sum(tensors[name].nbytes for name in targets), 0
    for name, tensor in stream(targets, tensors, decoder.embed.weight.device):
        targets[name].copy_(tensor)
        done += tensors[name].nbytes
        progress("load", done / total)
    if head in tensors and head not in targets:
        _check_tied_head(decoder, head, tensors)


def stream(
    names: Iterable[str], tensors: Mapping[str, TensorInfo], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each named tensor on ``device`` in its stored dtype, file by file, in the order of the file."""
    by_file = defaultdict(list)
    for name in sorted(names, key=lambda name: (tensors[name].file, tensors[name].end)):
        by_file[tensors[name].file].append(name)
    for file, names_in_file in by_file.items():
        name = names_in_file[0]
        try:
            with safe_open(file, framework="pt", device=str(device)) as shard:
                for name in names_in_file:
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}. Download it again.") from None


def _check(
    targets: Mapping[str, torch.Tensor],
    tensors: Mapping[str, TensorInfo],
    checkpoint: Checkpoint,
    optional: set[str],
) -> None:
    missing = [name for name in targets if name not in tensors]
    if missing:
        files = {info.file for info in tensors.values()}
        where = files.pop() if len(files) == 1 else f"{checkpoint.path} ({len(files)} shards)"
        raise CheckpointError(
            f"{where}: tensor {missing[0]} {list(targets[missing[0]].shape)} is missing, and "
            f"{len(missing) - 1} more of the {len(targets)} that config.json asks for."
        )
    drafting = draft_prefixes(tensors)
    for name, info in tensors.items():
        if name in targets:
            check_tensor(name, info, targets[name])
        elif name not in optional and not name.startswith(drafting) and not IGNORED.search(name):
            raise CheckpointError(
                f"{info.file}: tensor {name} {list(info.shape)} is unexpected: "
                f"a {checkpoint.config.architecture} with this config.json has no place for it."
            )


def draft_prefixes(tensors: Iterable[str]) -> tuple[str, ...]:
    """How the names begin of multi-token prediction modules that came with a model; a drafter may read them."""
    layers = {name.removesuffix("eh_proj.weight") for name in tensors if name.endswith(".eh_proj.weight")}
    return ("mtp.", "model.mtp.", "model.mtp_layers.", *sorted(layers))


def check_tensor(name: str, info: TensorInfo, target: torch.Tensor) -> None:
    if info.shape != target.shape:
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}; config.json asks for {list(target.shape)}."
        )
    if info.dtype not in SUPPORTED_DTYPES:
        raise CheckpointError(
            f"{info.file}: tensor {name} has dtype {info.dtype}; supported are {', '.join(SUPPORTED_DTYPES)}."
        )


def _check_tied_head(decoder: Decoder, head: str, tensors: Mapping[str, TensorInfo]) -> None:
    """A head stored beside the embedding it is tied to must equal it: dropping it must change nothing."""
    embedding = decoder.embed.weight
    ((_, stored),) = stream([head], tensors, embedding.device)
    if stored.shape != embedding.shape or not torch.equal(stored.to(embedding.dtype), embedding):
        raise CheckpointError(
            f"{tensors[head].file}: {head} differs from the token embedding, though config.json ties them. "
            "If the head is meant, set tie_word_embeddings to false."
        )
