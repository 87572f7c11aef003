"""From an opened checkpoint to a decoder, and its vision tower, with weights on a device.

The engine calls :func:`load_model` and :func:`load_tower`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from unisono.distributed.gather import ALONE, Ranks
from unisono.layers.experts import Stack
from unisono.layers.formats.base import PLAIN, Place, Slice, Slices, WeightFormat, part_of
from unisono.layers.norm import Factor, LayerNorm, RMSNorm
from unisono.models.blocks.decoder import Decoder
from unisono.models.config import TOWER_PREFIXES, Family, checkpoint_name
from unisono.models.load.build import AttentionFactory, Builder, no_attention
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.tensor_files import TensorInfo, read, tensor
from unisono.models.load.weights import check, fill, places, tensor_name
from unisono.models.vision.blocks import NORM_EPS
from unisono.models.vision.tower import VisionTower
from unisono.types import CheckpointError

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[str, float], None]
Built = TypeVar("Built", bound=nn.Module)

DUMMY_STD = 0.02

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""How the names of a text model's tensors begin in exports of the whole model, of the text model and of its base."""

EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""An expert's number in a checkpoint's names."""

SEED_NAMES = {".mixer.": ".attention.", ".feed_forward.": ".mlp."}
"""Parts of parameter names -> their names in the seeds of dummy weights, so that these stay what they were."""


def load_model(
    checkpoint: Checkpoint,
    *,
    attention: AttentionFactory,
    dtype: torch.dtype,
    device: torch.device | str,
    max_positions: int,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = lambda stage, share: None,
    ranks: Ranks = ALONE,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """Build the checkpoint's decoder on ``device`` in ``dtype`` (weights are converted) and fill it.

    attention: makes the backend for a pair of (query heads, KV heads). load_format: ``auto`` reads the checkpoint's
    safetensors; ``dummy`` needs config.json only and draws N(0, 0.02^2) from ``seed``, norms 1. max_positions: length
    of the rotary tables, in tokens. progress: called with ``"load"`` and the share of the elements that is in place,
    0 … 1, after each tensor. ranks: the processes that hold the model together; this one reads its part alone.
    kv_dtype: of the KV cache; None: ``dtype``.

    Raises ConfigError where the model cannot be divided among them, CheckpointError naming the file and the tensor that
    is missing, unexpected, misshapen or broken.
    """
    config = checkpoint.config
    builder = Builder(
        config.hidden_size,
        config.rms_eps,
        dtype,
        device,
        attention,
        max_positions,
        checkpoint.format_of_module,
        config.zero_centered_norms,
        ranks=ranks,
        kv_dtype=kv_dtype,
        wide_norms=config.wide_norms,
    )
    if load_format != "dummy":
        _check_sizes(checkpoint)
    decoder = _made(checkpoint, lambda: Decoder(config, builder))
    if load_format == "dummy":
        fill_randomly(decoder, seed)
    else:
        _fill_from_files(decoder, checkpoint, progress)
    return decoder.eval()


def load_tower(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = lambda stage, share: None,
) -> VisionTower | None:
    """Build and fill the checkpoint's vision tower; arguments and errors as for :func:`load_model`.

    None where config.json describes none, and where the checkpoint holds no tensor of it: the export of a text model.
    """
    config, family = checkpoint.config.vision, checkpoint.family
    tensors = checkpoint.tensors() if config is not None and load_format != "dummy" else {}
    prefix = next((p for p in TOWER_PREFIXES if any(name.startswith(p) for name in tensors)), None)
    if config is None or (prefix is None and load_format != "dummy"):
        return None

    # Publishers leave the tower plain and do not always say so.
    more = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] not in ("weight", "bias")}

    def format(module: str) -> WeightFormat:
        name = checkpoint_name(family.tower, module)
        if prefix is not None and prefix + name not in more:
            return PLAIN
        return checkpoint.quantization.format(f"tower.{module}", TOWER_PREFIXES[0] + name)

    def made_on(device: torch.device | str) -> VisionTower:
        builder = Builder(config.tower.width, NORM_EPS, dtype, device, no_attention, 0, format)
        return _made(checkpoint, lambda: VisionTower(config, builder))

    def named(tower: VisionTower, prefix: str) -> dict[str, Place]:
        names = ((prefix + checkpoint_name(family.tower, module), kind, p) for module, kind, p in places(tower))
        return {tensor_name(name, kind): place for name, kind, place in names}

    if prefix is None:
        tower = made_on(device)
        fill_randomly(tower, seed)
        return tower.eval()
    why = f"the vision tower of a {checkpoint.config.architecture} with this config.json has no place for it"
    if config.tower.depth > len(tensors):
        raise CheckpointError(
            f"{checkpoint.path}: vision_config asks for {config.tower.depth} blocks; there are {len(tensors)} tensors."
        )
    wanted = named(made_on("meta"), prefix)  # checked before memory is taken
    check(wanted, tensors, checkpoint.path, lambda name: why if name.startswith(prefix) else None)
    tower = made_on(device)
    fill(named(tower, prefix), tensors, device, lambda share: progress("load tower", share))
    _check_finite(tower, checkpoint)
    return tower.eval()


def _made(checkpoint: Checkpoint, make: Callable[[], Built]) -> Built:
    """What ``make`` builds. Raises CheckpointError where torch cannot allocate it, or even count its elements."""
    try:
        return make()
    except (RuntimeError, MemoryError, OverflowError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CheckpointError(f"{checkpoint.path}: a model of this config.json cannot be made: {error}") from None


def checkpoint_names(decoder: Decoder, family: Family, tensors: Container[str] = ()) -> dict[str, Place]:
    """What a checkpoint must hold: each tensor's name there -> where it goes. tensors: what it holds."""
    layers = decoder.config.layers

    def held(module: str, kind: str) -> bool:
        try:
            return tensor_name(family.name(module, layers), kind) in tensors
        except KeyError:  # the family does not store it so
            return False

    found: dict[str, Place] = {}
    for module, kind, place in places(decoder, held):
        if not (module == "lm_head" and decoder.config.tie_embeddings):
            name, rows = tensor_name(family.name(module, layers), kind), family.rows_of(module, layers)
            found[name] = place if rows is None else Shared.of(name, place, rows, found.get(name))
    return found


@dataclass(frozen=True)
class Shared(Place):
    """A checkpoint's tensor whose rows belong to several projections. parts: (place, its rows of the tensor)."""

    parts: tuple[tuple[Place, torch.Tensor], ...] = ()

    @classmethod
    def of(cls, name: str, place: Place, rows: torch.Tensor, others: Place | None) -> Shared:
        """``others``, or an empty one, with one more place. rows: of a weight with one row for each output.

        Raises CheckpointError where the format stores blocks of outputs that the rows cut or mix.
        """
        block = len(rows) // max(1, place.shape[0])
        blocks = rows.view(-1, block)
        if not torch.equal(blocks, blocks[:, :1] // block * block + torch.arange(block)):
            raise CheckpointError(
                f"tensor {name} has a value for each {block} outputs, which belong to different projections here. "
                "Give a checkpoint in which this layer is not quantised."
            )
        each = blocks[:, 0] // block
        held = each if place.part is None else place.part.of(each)
        parts = (*getattr(others, "parts", ()), (place, held))
        shape = (others.shape[0] if others else 0) + len(each), *place.shape[1:]
        return cls(place.parameter, shape, place.accepts, parts=parts)

    def part_of(self, shape: tuple[int, ...]) -> Slice | Slices | None:
        """The rows from the first to the last that is wanted."""
        if all(place.part is None for place, _ in self.parts):
            return None
        return Slice(0, self._first, 1 + max(int(rows.max()) for _, rows in self.parts))

    @property
    def _first(self) -> int:
        return min(int(rows.min()) for _, rows in self.parts)

    def fill(self, stored: torch.Tensor) -> None:
        first = 0 if all(place.part is None for place, _ in self.parts) else self._first
        for place, rows in self.parts:
            place.fill(stored[rows.to(stored.device) - first])


@torch.no_grad()
def fill_randomly(root: nn.Module, seed: int) -> None:
    """N(0, 0.02^2) in all parameters but norms; what has no memory yet, to be shared later, is passed over.

    A tensor's values depend on the seed and its name alone, so a model's first layers are a smaller model's, and a
    rank's parts are those of the whole tensors. A tensor that lies in another one, as a tied head does, fills that one.
    """
    first: dict[int, nn.Parameter] = {}
    for path, module in root.named_modules():
        if not isinstance(module, (Factor, LayerNorm, RMSNorm)):  # they are made as ones
            for kind, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    continue
                generator = torch.Generator(parameter.device)
                name = f"{path}.{kind}"
                for part, old in SEED_NAMES.items():
                    name = name.replace(part, old)
                generator.manual_seed(seed ^ zlib.crc32(name.encode()))
                held = first.setdefault(parameter.untyped_storage().data_ptr(), parameter)
                draw_held(held, generator, getattr(parameter, "drawn", None))


def draw_held(parameter: torch.Tensor, generator: torch.Generator, between: tuple[int, int] | None = None) -> None:
    """:func:`draw`; what is a part of a whole tensor, or turned, gets the values that it has there."""
    whole = part_of(parameter)
    if whole is None and parameter.is_contiguous():
        draw(parameter, generator, between)
        return
    shape = parameter.shape if whole is None else whole.shape
    drawn = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    draw(drawn, generator, between)
    parameter.copy_(drawn if whole is None else whole.of(drawn))


def draw(parameter: torch.Tensor, generator: torch.Generator, between: tuple[int, int] | None = None) -> None:
    """Random values. Those of a quantised weight are around 1 or any bits; its scales are floating-point parameters.

    between: the least value of integers and the one after the largest, where not all bits are meant.
    """
    if between is not None:
        parameter.random_(*between, generator=generator)
    elif not parameter.is_floating_point():
        signed = parameter.dtype is torch.int8
        parameter.random_(-8 if signed else 0, 8 if signed else 256, generator=generator)
    elif parameter.itemsize > 1:
        parameter.normal_(0, DUMMY_STD, generator=generator)
    else:
        parameter.copy_(torch.empty_like(parameter, dtype=torch.float32).normal_(generator=generator))


def _fill_from_files(decoder: Decoder, checkpoint: Checkpoint, progress: Progress) -> None:
    tensors = _as_named(checkpoint.tensors(), checkpoint.family)
    head = f"{checkpoint.family.name('lm_head')}.weight"
    tied, ranks = decoder.config.tie_embeddings, decoder.builder.ranks
    wanted = checkpoint_names(decoder, checkpoint.family, tensors)
    unread = (*_apart(tensors, checkpoint.family), *_passed_over(decoder, checkpoint.family))

    def unexpected(name: str) -> str | None:
        if name.startswith(unread) or (tied and name == head):
            return None
        if ranks.whole_experts and EXPERT.sub(str(ranks.part(experts_of(decoder))[0]), name) in wanted:
            return None  # another rank has it
        if checkpoint.quantization.method is not None and name.endswith(".bias") and not tensor(name, tensors).any():
            return None  # GPTQ's tools give every layer a bias, of zeros where the model has none
        return f"a {checkpoint.config.architecture} with this config.json has no place for it"

    check(wanted, tensors, checkpoint.path, unexpected)
    fill(wanted, tensors, decoder.embed.weight.device, lambda share: progress("load", share))
    if tied and head in tensors:
        _check_tied_head(decoder, head, tensors)
    _check_finite(decoder, checkpoint)


def _passed_over(decoder: Decoder, family: Family) -> list[str]:
    """The checkpoint's names of modules that blocks have no use for (``passed_over``)."""
    layers = decoder.config.layers
    found = ((n, name) for n, layer in enumerate(decoder.layers) for name in getattr(layer.mixer, "passed_over", ()))
    return [f"{family.name(f'layers.{number}.mixer.{name}', layers)}." for number, name in found]


def experts_of(decoder: Decoder) -> int:
    """How many experts a layer of the model has; 0: it has none."""
    return next((m.experts for m in decoder.modules() if isinstance(m, Stack)), 0)


def _check_sizes(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, before memory is taken, where embedding or layers are not those of config.json."""
    config, family = checkpoint.config, checkpoint.family
    tensors = _as_named(checkpoint.tensors(), family)
    name, shape = f"{family.name('embed')}.weight", (config.vocab_size, config.hidden_size)
    found = tensors.get(name)
    if found is not None and found.shape != shape:
        raise CheckpointError(
            f"{found.file}: tensor {name} has shape {list(found.shape)}; config.json asks for {list(shape)}."
        )
    if config.num_layers > len(tensors):
        raise CheckpointError(
            f"{checkpoint.path}: config.json asks for {config.num_layers} layers, and there are {len(tensors)} tensors."
        )


@torch.no_grad()
def _check_finite(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError naming the first weights that are NaN or infinite: every answer would be nonsense."""
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and weight.numel() and weight.element_size() > 1:
            low, high = torch.aminmax(weight)
            if not (low.isfinite() and high.isfinite()):
                raise CheckpointError(f"{checkpoint.path}: {name} has weights that are NaN or infinite.")


def _as_named(tensors: Mapping[str, TensorInfo], family: Family) -> Mapping[str, TensorInfo]:
    """The text model's tensors by the family's names: exports may have them under another prefix.

    The prefix is the one under which the token embedding is found.
    """
    own, _, embed = family.name("embed").rpartition(".")
    own = f"{own}." if own else ""
    prefix = next((p for p in (own, *PREFIXES) if f"{p}{embed}.weight" in tensors), own)
    apart = (f"{family.name('lm_head')}.", *_apart(tensors, family))
    if prefix == own:
        return tensors
    return {
        own + name[len(prefix) :] if name.startswith(prefix) and not name.startswith(apart) else name: info
        for name, info in tensors.items()
    }


def _apart(tensors: Iterable[str], family: Family) -> tuple[str, ...]:
    """How the names begin of what is not the text model's: draft modules, a tower, what the family passes over."""
    return (*draft_prefixes(tensors), *family.unread, *(TOWER_PREFIXES if family.tower else ()))


def draft_prefixes(tensors: Iterable[str]) -> tuple[str, ...]:
    """How the names begin of multi-token prediction modules that came with a model; a drafter may read them."""
    layers = {name.removesuffix("eh_proj.weight") for name in tensors if name.endswith(".eh_proj.weight")}
    return ("mtp.", "model.mtp.", "model.mtp_layers.", *sorted(layers))


def _check_tied_head(decoder: Decoder, head: str, tensors: Mapping[str, TensorInfo]) -> None:
    """A head stored beside the embedding it is tied to must equal it: dropping it must change nothing."""
    embedding = decoder.embed.weight
    ((_, stored),) = read({head: None}, tensors, embedding.device)
    if stored.shape != embedding.shape or not torch.equal(stored.to(embedding.dtype), embedding):
        raise CheckpointError(
            f"{tensors[head].file}: {head} differs from the token embedding, though config.json ties them. "
            "If the head is meant, set tie_word_embeddings to false."
        )
