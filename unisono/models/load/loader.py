"""Loader: from an opened checkpoint to a decoder, and its vision tower, with weights on a device.

The engine calls :func:`load_model` and :func:`load_tower`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from unisono.distributed.gather import ALONE, Ranks
from unisono.layers.experts import Experts
from unisono.layers.formats.base import PLAIN, Slice, Slices, StoredTensor, WeightFormat, WeightTarget, part_of
from unisono.layers.norm import Factor, LayerNorm, RMSNorm
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.latent_weights import UpProjections
from unisono.models.config import TOWER_PREFIXES, Family, checkpoint_name
from unisono.models.load.build import AttentionFactory, Builder, no_attention
from unisono.models.load.checkpoint import Checkpoint
from unisono.models.load.quantization import KV_SCALE
from unisono.models.load.slices import whole_name, with_slices
from unisono.models.load.tensor_files import TensorInfo, read, tensor
from unisono.models.load.update import WeightUpdate
from unisono.models.load.weights import check, check_tensor, fill, places, tensor_name
from unisono.models.vision.blocks import NORM_EPS
from unisono.models.vision.tower import AnyTower, make_tower
from unisono.types import CheckpointError, ConfigError

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[str, float], None]
Built = TypeVar("Built", bound=nn.Module)

DUMMY_STD = 0.02

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""Prefixes of a text model's tensors in exports of the whole model, of the text model and of its base."""

EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""An expert's number in checkpoint names."""

SEED_NAMES = {".mixer.": ".attention.", ".feed_forward.": ".mlp."}
"""Parts of parameter names -> their older names in the seeds of dummy weights, so that these stay unchanged."""


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

    attention: builds the backend for a pair of (query heads, KV heads).
    load_format: ``auto`` reads the checkpoint's safetensors; ``dummy`` needs config.json only and draws N(0, 0.02^2)
        from ``seed``, norms 1.
    max_positions: length of the rotary tables, in tokens.
    progress: called with ``"load"`` and the fraction of elements loaded, 0 … 1, after each tensor.
    ranks: processes that hold the model together; this one reads only its part.
    kv_dtype: of the KV cache; None: ``dtype``.

    Raises ConfigError if the model cannot be divided among them, CheckpointError naming the file and the tensor that is
    missing, unexpected, misshapen or broken.
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
        norms=config.norms,
    )
    if load_format != "dummy":
        _check_sizes(checkpoint)
    decoder = _made(checkpoint, lambda: Decoder(config, builder))
    _check_placement(decoder, ranks)
    if load_format == "dummy":
        fill_randomly(decoder, seed)
    else:
        update = decoder_update(decoder, checkpoint)
        fill(update.targets, update.tensors, decoder.embed.weight.device, lambda share: progress("load", share))
        update.check()
    return decoder.eval()


def load_tower(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = lambda stage, share: None,
) -> AnyTower | None:
    """Build and fill the checkpoint's vision tower; arguments and errors as for :func:`load_model`.

    Returns None if config.json describes none, or if the checkpoint has no tensor of it: the export of a text model.
    """
    config, family = checkpoint.config.vision, checkpoint.family
    tensors = _tower_tensors(checkpoint) if config is not None and load_format != "dummy" else {}
    prefix = next((p for p in TOWER_PREFIXES if any(name.startswith(p) for name in tensors)), None)
    if config is None or (prefix is None and load_format != "dummy"):
        return None

    # Publishers leave the tower plain without always declaring it.
    more = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] not in ("weight", "bias")}

    def format(module: str) -> WeightFormat:
        name = checkpoint_name(family.tower, module)
        if prefix is not None and prefix + name not in more:
            return PLAIN
        return checkpoint.quantization.format(f"tower.{module}", TOWER_PREFIXES[0] + name)

    def made_on(device: torch.device | str) -> AnyTower:
        builder = Builder(config.tower.width, NORM_EPS, dtype, device, no_attention, 0, format)
        return _made(checkpoint, lambda: make_tower(config, builder))

    if prefix is None:
        tower = made_on(device)
        fill_randomly(tower, seed)
        return tower.eval()
    if config.tower.depth > len(tensors):
        raise CheckpointError(
            f"{checkpoint.path}: vision_config asks for {config.tower.depth} blocks; there are {len(tensors)} tensors."
        )
    tower_update(made_on("meta"), checkpoint)  # check before allocating memory
    tower = made_on(device)
    update = tower_update(tower, checkpoint)
    fill(update.targets, tensors, device, lambda share: progress("load tower", share))
    update.check()
    return tower.eval()


def _tower_tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """The checkpoint's tensors, those of a tower by their names inside one prefix."""
    named = ((checkpoint.family.tower_name(name), info) for name, info in checkpoint.tensors().items())
    return {name: info for name, info in named if name is not None}


def tower_update(tower: AnyTower, checkpoint: Checkpoint) -> WeightUpdate:
    """The checkpoint's weights for a vision tower. Raises CheckpointError unless it has each tensor in its shape."""
    tensors, names = _tower_tensors(checkpoint), checkpoint.family.tower
    prefix = next((p for p in TOWER_PREFIXES if any(name.startswith(p) for name in tensors)), TOWER_PREFIXES[0])
    targets: dict[str, WeightTarget] = {}
    for module, kind, place in places(tower):
        name = tensor_name(prefix + checkpoint_name(names, module), kind)
        rows = checkpoint.family.tower_rows_of(module, tower.config.tower)
        targets[name] = place if rows is None else Shared.of(name, place, rows, None)
    why = f"the vision tower of a {checkpoint.config.architecture} with this config.json has no place for it"
    check(targets, tensors, checkpoint.path, lambda name: why if name.startswith(prefix) else None)
    return WeightUpdate(tower, targets, tensors, lambda: check_finite(tower, checkpoint.path))


def _made(checkpoint: Checkpoint, make: Callable[[], Built]) -> Built:
    """Result of ``make``. Raises CheckpointError if torch cannot allocate it, or even count its elements."""
    try:
        return make()
    except (RuntimeError, MemoryError, OverflowError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CheckpointError(f"{checkpoint.path}: a model of this config.json cannot be made: {error}") from None


def checkpoint_names(decoder: Decoder, family: Family, tensors: Container[str] = ()) -> dict[str, WeightTarget]:
    """Target of each tensor that a checkpoint must hold, by its name there. tensors: tensors in the checkpoint."""
    layers = decoder.config.layers

    def held(module: str, kind: str) -> bool:
        try:
            return tensor_name(family.name(module, layers), kind) in tensors
        except KeyError:  # the family does not store it in this form
            return False

    found: dict[str, WeightTarget] = {}
    for module, kind, place in places(decoder, held):
        if not (module == "lm_head" and decoder.config.tie_embeddings):
            name, rows = tensor_name(family.name(module, layers), kind), family.rows_of(module, layers)
            found[name] = place if rows is None else Shared.of(name, place, rows, found.get(name))
    return found


@dataclass(frozen=True)
class Shared(WeightTarget):
    """A checkpoint tensor whose rows belong to several projections, or lie in another order.

    parts: (target, its rows of the tensor; None: the whole tensor).
    """

    parts: tuple[tuple[WeightTarget, torch.Tensor | None], ...] = ()

    @classmethod
    def of(cls, name: str, place: WeightTarget, rows: torch.Tensor, others: WeightTarget | None) -> Shared:
        """``others``, or an empty one, with one more target. rows: of a weight with one row per output.

        Raises CheckpointError if the format stores blocks of outputs that the rows would cut or mix.
        """
        stored = _stored(place)
        if stored is not None and stored.layout is not None and stored.layout.dim is None:  # it serves all outputs
            parts: tuple[tuple[WeightTarget, torch.Tensor | None], ...] = (*held_by(others), (place, None))
            return cls(place.parameter, place.shape, place.accepts, also=place.also, parts=parts)
        block = len(rows) // max(1, place.shape[0])
        blocks = rows.view(-1, block)
        other_way = stored is not None and stored.layout is not None and stored.layout.dim != 0
        whole = torch.equal(blocks.sort().values, blocks.amin(1, keepdim=True) // block * block + torch.arange(block))
        if other_way or not whole:
            raise CheckpointError(
                f"tensor {name} has a value for each {block} outputs, which belong to different projections here. "
                "Give a checkpoint in which this layer is not quantised."
            )
        each = blocks[:, 0] // block
        held = each if place.part is None else place.part.of(each)
        parts = (*held_by(others), (place, held))
        shape = (others.shape[0] if others else 0) + len(each), *place.shape[1:]
        return cls(place.parameter, shape, place.accepts, parts=parts)

    def part_of(self, shape: tuple[int, ...]) -> Slice | Slices | None:
        """Rows from the first to the last one needed."""
        if all(place.part is None for place, _ in self.parts):
            return None
        return Slice(0, self._first, 1 + max(int(rows.max()) for _, rows in self.parts if rows is not None))

    @property
    def _first(self) -> int:
        return min(int(rows.min()) for _, rows in self.parts if rows is not None)

    def fill(self, stored: torch.Tensor) -> None:
        first = 0 if all(place.part is None for place, _ in self.parts) else self._first
        for place, rows in self.parts:
            place.fill(stored if rows is None else stored[rows.to(stored.device) - first])


def held_by(shared: WeightTarget | None) -> tuple[tuple[WeightTarget, torch.Tensor | None], ...]:
    """The parts of a :class:`Shared`; empty for None."""
    return shared.parts if isinstance(shared, Shared) else ()


def _stored(place: WeightTarget) -> StoredTensor | None:
    """Tensor of the target's format; None without a format."""
    tensors = getattr(place.format, "tensors", None)
    return None if tensors is None else tensors(place.parameter.dtype).get(place.kind)


@torch.no_grad()
def fill_randomly(root: nn.Module, seed: int) -> None:
    """Fill all parameters but norms with N(0, 0.02^2); parameters without memory, to be shared later, are skipped.

    A tensor's values depend only on the seed and its name, so a model's first layers are those of a smaller model, and
    a rank's parts are those of the whole tensors. A tensor inside another one, such as a tied head, fills that one.
    """
    first: dict[int, nn.Parameter] = {}
    for name, parameter in drawn_parameters(root):
        generator = torch.Generator(parameter.device)
        for part, old in SEED_NAMES.items():
            name = name.replace(part, old)
        generator.manual_seed(seed ^ zlib.crc32(name.encode()))
        held = first.setdefault(parameter.untyped_storage().data_ptr(), parameter)
        draw_held(held, generator, getattr(parameter, "drawn", None))


def drawn_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that :func:`fill_randomly` fills, by name: norms keep their initial ones."""
    for path, module in root.named_modules():
        if not isinstance(module, (Factor, LayerNorm, RMSNorm)):
            for kind, parameter in module.named_parameters(recurse=False):
                if not parameter.is_meta:
                    yield f"{path}.{kind}", parameter


def draw_held(parameter: torch.Tensor, generator: torch.Generator, between: tuple[int, int] | None = None) -> None:
    """:func:`draw`; a part of a whole tensor, or a transposed one, gets the values it has there."""
    whole = part_of(parameter)
    if whole is None and parameter.is_contiguous():
        draw(parameter, generator, between)
        return
    shape = parameter.shape if whole is None else whole.shape
    drawn = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    draw(drawn, generator, between)
    parameter.copy_(drawn if whole is None else whole.of(drawn))


def draw(parameter: torch.Tensor, generator: torch.Generator, between: tuple[int, int] | None = None) -> None:
    """Draw random values. Those of a quantised weight are around 1 or any bits; its scales are floating-point
    parameters.

    between: range (least, end) of integers, if not all bits are valid.
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


def decoder_update(decoder: Decoder, checkpoint: Checkpoint) -> WeightUpdate:
    """The checkpoint's weights for a decoder. Raises CheckpointError unless it has each tensor in its shape."""
    tensors = _as_named(checkpoint.tensors(), checkpoint.family)
    head = f"{checkpoint.family.name('lm_head')}.weight"
    tied, ranks = decoder.config.tie_embeddings, decoder.builder.ranks
    targets = checkpoint_names(decoder, checkpoint.family, tensors)
    unread = (*_apart(tensors, checkpoint.family), *_passed_over(decoder, checkpoint.family))

    kinds = {EXPERT.sub("*", name) for name in targets} if ranks.whole_experts else set[str]()

    def unexpected(name: str) -> str | None:
        if name.startswith(unread) or (tied and name == head):
            return None
        if checkpoint.quantization.method is not None and KV_SCALE.search(name):
            return None  # noted by explain
        if ranks.whole_experts and EXPERT.sub("*", name) in kinds:
            return None  # held by another rank
        if checkpoint.quantization.method is not None and name.endswith(".bias") and not tensor(name, tensors).any():
            return None  # GPTQ's tools store a zero bias for layers without one
        return f"a {checkpoint.config.architecture} with this config.json has no place for it"

    check(targets, tensors, checkpoint.path, unexpected)

    def check_values() -> None:
        if tied and head in tensors and not head.startswith(unread):
            _check_tied_head(decoder, head, tensors)
        check_finite(decoder, checkpoint.path)

    return WeightUpdate(decoder, targets, tensors, check_values)


class ExpertNames(Container[str]):
    """Names of tensors, any expert's for one expert's: a rank learns the form in which others' experts are stored."""

    def __init__(self, names: Iterable[str]) -> None:
        self._kinds = {EXPERT.sub("*", name) for name in names}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and EXPERT.sub("*", name) in self._kinds


def partial_update(decoder: Decoder, checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> WeightUpdate:
    """Some of a decoder's weights, by their names in ``checkpoint``; the others stay.

    tensors: whole ones, and slices (``models/load/slices.py``). Raises CheckpointError for a name without a place in
    the model, and for a wrong shape or dtype.
    """
    tensors = _as_named(dict(tensors), checkpoint.family)
    names = ExpertNames(map(whole_name, tensors))
    every, tensors = with_slices(checkpoint_names(decoder, checkpoint.family, names), tensors)
    targets = dict[str, WeightTarget]()
    kinds = {EXPERT.sub("*", name) for name in every} if decoder.builder.ranks.whole_experts else set[str]()
    head = f"{checkpoint.family.name('lm_head')}.weight"
    tied_head = head if decoder.config.tie_embeddings and head in tensors else None
    for name, info in tensors.items():
        if name in every:
            check_tensor(name, info, every[name])
            targets[name] = every[name]
        elif name != tied_head and EXPERT.sub("*", name) not in kinds:
            raise CheckpointError(
                f"{info.file}: tensor {name} {list(info.shape)} has no place in the {checkpoint.config.architecture} "
                "that is served. Give names of its checkpoint; draft=true pushes a drafter's weights."
            )

    def check_values() -> None:
        if tied_head is not None:
            _check_tied_head(decoder, tied_head, tensors)
        check_finite(decoder, checkpoint.path)

    return WeightUpdate(decoder, targets, tensors, check_values)


def _passed_over(decoder: Decoder, family: Family) -> list[str]:
    """The checkpoint's names of modules that blocks have no use for (``passed_over``)."""
    layers = decoder.config.layers
    found = ((n, name) for n, layer in enumerate(decoder.layers) for name in getattr(layer.mixer, "passed_over", ()))
    return [f"{family.name(f'layers.{number}.mixer.{name}', layers)}." for number, name in found]


def _check_placement(decoder: Decoder, ranks: Ranks) -> None:
    """Raise ConfigError for an order of experts that are not there."""
    layers = {path for path, module in decoder.named_modules() if isinstance(module, Experts)}
    if unknown := sorted(path for path, _ in ranks.placement if path not in layers):
        raise ConfigError(f"--expert-placement: the model has no experts at {', '.join(unknown[:4])}.")


def _check_sizes(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, before allocating memory, if embedding or layers do not match config.json."""
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
def check_finite(module: nn.Module, where: object) -> None:
    """Raise CheckpointError, naming ``where``, for weights that are NaN or infinite: every output would be nonsense.

    Also for weights that were written without their scales.
    """
    for part in module.modules():
        if isinstance(part, UpProjections):
            part.check_complete()
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and weight.numel() and weight.element_size() > 1:
            low, high = torch.aminmax(weight)
            if not (low.isfinite() and high.isfinite()):
                raise CheckpointError(f"{where}: {name} has weights that are NaN or infinite.")


def _as_named(tensors: Mapping[str, TensorInfo], family: Family) -> Mapping[str, TensorInfo]:
    """The text model's tensors by the family's names: exports may have another prefix.

    The prefix is the one under which the token embedding is found.
    """
    own, _, embed = family.name("embed").rpartition(".")
    own = f"{own}." if own else ""
    prefix = next((p for p in (own, *PREFIXES) if f"{p}{embed}.weight" in tensors), own)
    head = f"{family.name('lm_head')}."
    apart = (head, *_apart(tensors, family))
    if prefix == own:
        return tensors

    def named(name: str) -> str:
        if name.startswith(f"language_model.{head}"):  # beside ``language_model.model.``
            return name.removeprefix("language_model.")
        return own + name[len(prefix) :] if name.startswith(prefix) and not name.startswith(apart) else name

    return {named(name): info for name, info in tensors.items()}


def _apart(tensors: Iterable[str], family: Family) -> tuple[str, ...]:
    """Name prefixes of tensors outside the text model: draft modules, a tower, tensors that the family skips."""
    return (*draft_prefixes(tensors), *family.unread, *family.tower_prefixes)


def draft_prefixes(tensors: Iterable[str]) -> tuple[str, ...]:
    """Name prefixes of multi-token prediction modules in a model's checkpoint; a drafter may read them."""
    layers = {name.removesuffix("eh_proj.weight") for name in tensors if name.endswith(".eh_proj.weight")}
    return ("mtp.", "model.mtp.", "model.mtp_layers.", *sorted(layers))


def _check_tied_head(decoder: Decoder, head: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that a head stored beside the embedding it is tied to equals it, so that dropping it changes nothing."""
    embedding = decoder.embed.weight
    ((_, stored),) = read({head: None}, tensors, embedding.device)
    if stored.shape != embedding.shape or not torch.equal(stored.to(embedding.dtype), embedding):
        raise CheckpointError(
            f"{tensors[head].file}: {head} differs from the token embedding, though config.json ties them. "
            "If the head is meant, set tie_word_embeddings to false."
        )
