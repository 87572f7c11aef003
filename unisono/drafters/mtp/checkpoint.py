"""Multi-token prediction modules in checkpoints: beside the target's weights or in a directory of their own.

Owns the tensor names, infers a block's sizes from tensor shapes, and checks that modules fit their target. Called by
drafters. A block attends as the target's attention layers do and has their kind of norm; if it has experts, it routes
as the target does. Nemotron-H's two layers of one block each are one block of attention and a feed-forward. Other
blocks are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from unisono.config import catalog
from unisono.distributed.gather import ALONE, Ranks
from unisono.drafters.mtp.model import MTPModule
from unisono.layers.formats.base import FLOATS, PLAIN, WeightFormat, WeightTarget
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.latent_attention import LatentSpec
from unisono.models.blocks.latent_experts import LatentExpertsSpec
from unisono.models.blocks.layers import AttentionSpec, BlockSpec, LayerSpec, MLPSpec
from unisono.models.blocks.one_block import ABSENT
from unisono.models.config import DecoderConfig, Family, Name, checkpoint_name
from unisono.models.families.qwen3 import QWEN3
from unisono.models.families.qwen3_5_moe import EXPERTS
from unisono.models.load import weights
from unisono.models.load.build import AttentionFactory, Builder, no_attention, plain
from unisono.models.load.checkpoint import formats_in, read_tensors
from unisono.models.load.loader import Shared, fill_randomly
from unisono.models.load.tensor_files import TensorInfo
from unisono.models.load.update import WeightUpdate, check_shared, require_all
from unisono.types import CheckpointError

LAYER = "layers.*."
"""Prefix of a decoder layer's modules."""

MODULE = "mtp."
"""Prefix of an MTP module's parts around its block in a family's names."""

BLOCK: dict[str, Name] = {
    ours.removeprefix("layers.*."): str(theirs).removeprefix("model.layers.*.")
    for ours, theirs in {**QWEN3.names, **EXPERTS}.items()
    if ours.startswith("layers.*.")
}
"""Names inside a decoder block, relative to it: Llama's, Qwen3's head norms, and Qwen's experts."""

SECOND_HALF = ("norm", "layer.feed_forward")
"""Modules in the second layer of a block of two."""

SHARED = ("embed", "lm_head")
"""Modules shared with the target, even if the checkpoint stores them."""


@dataclass(frozen=True)
class MTPLayout:
    """Tensor names of a family of checkpoints; ``*`` is a module's number in ``block`` and ``names``.

    block: prefix of a decoder block's names.
    names: names of the rest of the module, and exceptions within the block.
    root: prefix of all modules' tensors and of no others.
    a_layer: the block is a decoder layer of the target, named as its family names one (:meth:`of`).
    within: names within the block.
    rows: projection within the block -> the rows of its tensor that form it, by its layer's spec (``Family.rows``).
    halves: the block is two numbered layers, and the second one has the feed-forward and the module's last norm. A
        module's number is that of its first layer.
    """

    block: str
    names: Mapping[str, str]
    hidden_first: bool = False
    root: str = ""
    a_layer: bool = False
    within: Mapping[str, Name] = field(default_factory=lambda: BLOCK)
    halves: bool = False
    rows: Mapping[str, Callable[[LayerSpec], torch.Tensor]] = field(default_factory=dict)

    def of(self, architecture: str) -> MTPLayout:
        """The layout for a target of this architecture."""
        if not self.a_layer or architecture not in catalog.models:
            return self
        family: Family = catalog.models.load(architecture)
        within = dict(BLOCK)
        for ours, theirs in family.names.items():
            name = theirs if isinstance(theirs, str) else theirs.get(AttentionSpec)
            if ours.startswith(LAYER) and name is not None:
                within[ours.removeprefix(LAYER)] = name.partition(LAYER)[2]
        own = {ours.removeprefix(MODULE): str(name) for ours, name in family.names.items() if ours.startswith(MODULE)}
        rows = {ours.removeprefix(LAYER): of_layer for ours, of_layer in family.rows.items()}
        return replace(self, names={**self.names, **own}, within=within, rows=rows)

    def name(self, module: str, number: int) -> str:
        """Checkpoint name of a module of ours in MTP module ``number``."""
        if self.halves and module.startswith(SECOND_HALF):
            number += 1
        if module in self.names:
            return self.names[module].replace("*", str(number))
        return self.block.replace("*", str(number)) + checkpoint_name(self.within, module.removeprefix("layer."))

    def blocks(self, number: int) -> tuple[str, ...]:
        """Prefixes of the names within the block of module ``number``."""
        return tuple(self.block.replace("*", str(each)) for each in range(number, number + 1 + self.halves))

    def targets(
        self, module: MTPModule, number: int, shared: Sequence[str] = SHARED, tensors: Container[str] = ()
    ) -> dict[str, WeightTarget]:
        """Checkpoint names of a module's tensors -> the parameters they fill, except ``shared`` parts.

        tensors: tensors in the checkpoint.
        """

        def named(path: str, kind: str) -> str:
            return weights.tensor_name(self.name(path, number), kind)

        def held(path: str, kind: str) -> bool:
            return path not in SHARED and named(path, kind) in tensors

        found: dict[str, WeightTarget] = {}
        for path, kind, place in weights.places(module, held):
            if path in shared:
                continue
            name, rows = named(path, kind), self.rows.get(path.removeprefix("layer."))
            layer = module.config.layers[0]
            found[name] = place if rows is None else Shared.of(name, place, rows(layer), found.get(name))
        return found

    def numbers(self, tensors: Mapping[str, TensorInfo]) -> list[int]:
        """Numbers of the modules in the checkpoint, in order."""
        pattern = re.compile(re.escape(self.block).replace(r"\*", r"(\d+)"))
        found = {int(match[1]) for match in map(pattern.match, tensors) if match}
        return sorted(n for n in found if self.name("project", n) + ".weight" in tensors)


def _nextn(block: str, **names: str) -> MTPLayout:
    """A layout whose projection and norms lie in the module, with DeepSeek's names unless ``names`` differ."""
    inside = {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "final_layernorm"}
    of_block = {ours: block + theirs for ours, theirs in {**inside, **names}.items()}
    return MTPLayout(block, of_block, a_layer=block == f"model.{LAYER}")


QWEN = "Qwen3-Next, Qwen3.5"

LAYOUTS = {
    "DeepSeek-V3, GLM": _nextn(
        "model.layers.*.", norm="shared_head.norm", embed="embed_tokens", lm_head="shared_head.head"
    ),
    QWEN: MTPLayout(
        "mtp.layers.*.",
        {
            "embed_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "project": "mtp.fc",
            "norm": "mtp.norm",
        },
        root="mtp.",
    ),
    "Nemotron-H": replace(
        _nextn("mtp.layers.*.", **{"layer.mixer_norm": "norm", "layer.feed_forward_norm": "norm"}),
        root="mtp.",
        a_layer=True,
        halves=True,
    ),
    "MiMo": replace(
        _nextn(
            "model.mtp_layers.*.", embed_norm="token_layernorm", hidden_norm="hidden_layernorm", project="input_proj"
        ),
        hidden_first=True,
    ),
    "MiMo-V2": _nextn("model.mtp.layers.*.", **{"layer.feed_forward_norm": "pre_mlp_layernorm"}),
}
"""Layouts by the models that use them. Sources: the models' files in vLLM and SGLang, and transformers'
``MtpModel``."""

EXPERTS_NAMES = r"\.(mlp\.experts|mlp\.gate\.|mlp\.shared_expert|moe\.|mixer\.experts|mixer\.gate\.)"
"""Tensors of a mixture of experts."""

MLA = "multi-head latent attention (MLA), unlike its target,"
UNSUPPORTED = {
    r"\.self_attn\.(q_a_proj|kv_a_proj|kv_b_proj)": MLA,
    r"\.(linear_attn|mamba)\.|\.mixer\.(A_log|conv1d|in_proj)": "linear attention",
}

QUANTISED = r"\.(weight_scale_inv|weight_scale|weight_packed|qweight)$"
"""Tensors of quantised weights."""


@dataclass(frozen=True)
class MTPCheckpoint:
    """Opened modules, checked against the target's shapes. Make one with :meth:`open`.

    config: a decoder of one layer with the shapes of a module's block; vocabulary, head size, rotary angles, window and
        kind of norms are those of the target('s last attention layer).
    numbers: each module's number in the checkpoint's names, first step first; see :class:`MTPLayout`.
    tensors: headers; None for random weights.
    formats: weight format of a module by its name in the checkpoint.
    """

    path: Path
    layout: MTPLayout = field(repr=False)
    config: DecoderConfig
    numbers: tuple[int, ...]
    tensors: Mapping[str, TensorInfo] | None = field(repr=False)
    formats: Callable[[str], WeightFormat] = field(default=plain, repr=False)

    @property
    def depth(self) -> int:
        """Number of modules."""
        return len(self.numbers)

    @classmethod
    def open(cls, path: str | Path, target: DecoderConfig, *, dummy: bool = False) -> MTPCheckpoint:
        """Find the modules in a directory, which may be the target's own, from its safetensors headers.

        dummy: random weights. Nothing is read; the target's config gives the number of modules. Their blocks then copy
            the target's last feed-forward, after the mixer of its last attention layer.

        Raises CheckpointError: no directory, no modules, unsupported blocks, a hidden size other than the target's,
        missing or unexpected tensors.
        """
        directory = catalog.resolve_name(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is no directory: give the one that holds the MTP modules.")
        if dummy:
            return cls._made_up(directory, target)
        tensors = read_tensors(directory)
        for layout in LAYOUTS.values():
            numbers = layout.numbers(tensors)
            if numbers:
                layout = layout.of(target.architecture)
                formats = formats_in(directory)
                config = _block_config(directory, layout, numbers[0], tensors, target, formats)
                opened = cls(directory, layout, config, tuple(numbers), tensors, formats)
                opened._check()
                return opened
        keys = "; ".join(f"{models}: {layout.name('project', 0)}" for models, layout in LAYOUTS.items())
        raise CheckpointError(
            f"{directory} has no MTP modules. Looked for, with any number: {keys}. "
            "Name the directory that has them (--speculative-model), or choose another --speculative-method."
        )

    @classmethod
    def _made_up(cls, directory: Path, target: DecoderConfig) -> MTPCheckpoint:
        if not target.mtp_modules:
            raise CheckpointError(
                f"{directory / 'config.json'} declares no MTP modules (mtp_num_hidden_layers), so there are none to "
                "give random weights. Leave load_format out to read modules."
            )
        block = LayerSpec(target.attention, target.feed_forward)
        config = replace(target, layers=(block,))
        return cls(directory, LAYOUTS[QWEN], config, tuple(range(target.mtp_modules)), None)

    def load(
        self,
        target: Decoder,
        step: int,
        attention: AttentionFactory,
        dtype: torch.dtype,
        progress: Callable[[float], None] = lambda share: None,
        format: Callable[[str], WeightFormat] = plain,
        ranks: Ranks = ALONE,
    ) -> MTPModule:
        """Load the module of a step, from 0, with its weights in ``dtype`` on the target's device.

        Its embedding and LM head are the target's, unless the checkpoint stores different ones.

        progress: called with the fraction of its elements that is loaded, 0 … 1.
        format: weight format of linear layers, by their paths in the module; a checkpoint that declares a quantisation
            keeps it.
        ranks: ranks among which its layers are divided.
        """
        number, kinds = self.numbers[step], (self.config.zero_centered_norms, ranks, self.config.wide_norms)
        builder = target.builder.beside(attention, dtype, None, *kinds)
        module = self._module(number, builder, format)
        if self.tensors is None:
            fill_randomly(module, seed=step)
        else:
            weights.fill(self._targets(module, number), self.tensors, target.embed.weight.device, progress)
        for part in SHARED:
            if not self._stores(part, number) or weights.same_as(getattr(module, part), getattr(target, part)):
                setattr(module, part, getattr(target, part))
        return module.eval()

    def random_bytes(self, target: Decoder) -> int:
        """Bytes of the modules of ``load_format="dummy"``, which share embedding and LM head with a target on any
        device."""
        beside = replace(target.builder, device="meta").beside(no_attention, target.builder.dtype)
        modules = [self._module(number, beside) for number in self.numbers]
        owned = (p for m in modules for name, p in m.named_parameters() if not name.startswith(SHARED))
        return sum(parameter.nbytes for parameter in owned)

    def update(self, module: MTPModule, step: int, target: Decoder, shares_head: bool) -> WeightUpdate:
        """This checkpoint's weights for the module of a step that another one made. shares_head: its LM head is the
        target's.

        Raises CheckpointError if the other one has another config.
        """
        if self.config != module.config or step >= self.depth:
            raise CheckpointError(f"{self.path}: its MTP modules are not of the config of those that are served.")
        number, tensors = self.numbers[step], self.tensors or {}
        shared = ["embed"] if module.embed is target.embed else []
        shared += ["lm_head"] if shares_head else []
        targets = self.layout.targets(module, number, shared, tensors)
        require_all(targets, tensors, self.path)
        named = (part for part in shared if part in self.layout.names)
        stored = {f"{self.layout.name(part, number)}.weight": getattr(target, part).weight for part in named}
        return WeightUpdate(module, targets, tensors, lambda: check_shared(stored, tensors))

    def choices(self, modules: Sequence[MTPModule], target: Decoder) -> list[tuple[str, str, str]]:
        """(name, value, reason) of the inferred settings of modules made by :meth:`load`."""
        kind = self.layout.block, self.layout.halves
        layout = next(models for models, layout in LAYOUTS.items() if (layout.block, layout.halves) == kind)
        used = f"{len(modules)} of {self.depth}, named as by {layout}"
        found = [("draft modules", used, "one for each step" if len(modules) > 1 else "reused for every step")]
        for name, part in (("embedding", "embed"), ("LM head", "lm_head")):
            own = [getattr(module, part) is not getattr(target, part) for module in modules]
            reason = "the checkpoint stores another" if any(own) else "the checkpoint stores none, or a copy of it"
            found.append((f"draft {name}", "its own" if any(own) else "the target's", reason))
        return found

    def _stores(self, part: str, number: int) -> bool:
        """True if the checkpoint stores a module's embedding or LM head, which may be a copy of the target's."""
        return part in self.layout.names and f"{self.layout.name(part, number)}.weight" in (self.tensors or {})

    def _module(self, number: int, builder: Builder, format: Callable[[str], WeightFormat] = plain) -> MTPModule:
        """A module, uninitialised; shared parts take no memory."""
        config, hidden = self.config, self.config.hidden_size
        builder = replace(builder, format=format if self.formats is plain else partial(self._format, number))
        embed = builder.embedding(config.vocab_size, empty=not self._stores("embed", number))
        shared = not self._stores("lm_head", number)
        lm_head = builder.joined("lm_head", hidden, config.vocab_size, split_inputs=False, empty=shared)
        return MTPModule(config, embed, lm_head, builder, self.layout.hidden_first)

    def _format(self, number: int, module: str) -> WeightFormat:
        """Weight format of a submodule of module ``number``; shared parts have the target's.

        In DeepSeek's layout the projection, embedding and head are plain if they are stored in a floating-point dtype:
        its fp8 checkpoints do not list them.
        """
        if module in SHARED and not self._stores(module, number):
            return PLAIN
        name = self.layout.name(module, number)
        stored = (self.tensors or {}).get(f"{name}.weight")
        around = self.layout.a_layer and module in ("project", *SHARED)
        return PLAIN if around and stored is not None and stored.dtype in FLOATS else self.formats(name)

    def _targets(self, module: MTPModule, number: int) -> dict[str, WeightTarget]:
        shared = [part for part in SHARED if not self._stores(part, number)]
        return self.layout.targets(module, number, shared, self.tensors or {})

    def _check(self) -> None:
        """Compare every module's tensors with its parameters. Raises CheckpointError naming the first misfit."""
        c, layout = self.config, self.layout
        zero_centered = c.zero_centered_norms
        builder = Builder(
            c.hidden_size, c.rms_eps, torch.float32, "meta", no_attention, 1, zero_centered_norms=zero_centered
        )
        for number in self.numbers:
            targets = self._targets(self._module(number, builder), number)
            weights.check(targets, self.tensors or {}, self.path, partial(_unexpected, layout, number))


def _unexpected(layout: MTPLayout, number: int, name: str) -> str | None:
    """Reason why a tensor of module ``number`` is unexpected; None for tensors of other modules and of the target."""
    own, of_blocks = layout.blocks(number), layout.block.partition("*")[0]
    common = layout.root and name.startswith(layout.root) and not name.startswith(of_blocks)
    return "an MTP module has none like it" if common or name.startswith(own) else None


def _block_config(
    directory: Path,
    layout: MTPLayout,
    number: int,
    tensors: Mapping[str, TensorInfo],
    target: DecoderConfig,
    formats: Callable[[str], WeightFormat],
) -> DecoderConfig:
    """Shapes of a module's block, from its tensors; everything else is the target's."""
    prefix = layout.root or layout.block.replace("*", str(number))

    def like(pattern: str) -> list[str]:
        return [name for name in tensors if name.startswith(prefix) and re.search(pattern, name)]

    last = target.layers[-1]
    latent = layout.a_layer and isinstance(last.mixer, LatentSpec)
    _refuse(directory, layout, target, like, formats, MLA if latent else "")

    def shape(module: str, kind: str = "weight") -> tuple[int, ...]:
        name = f"{layout.name(module, number)}.{kind}"
        if name not in tensors:
            raise CheckpointError(f"{directory}: tensor {name} is missing.")
        return tensors[name].shape

    def has(module: str, kind: str = "weight") -> bool:
        return f"{layout.name(module, number)}.{kind}" in tensors

    hidden = target.hidden_size
    if shape("project") != (hidden, 2 * hidden):
        raise CheckpointError(
            f"{directory}: {layout.name('project', number)}.weight has shape {list(shape('project'))}; a target of "
            f"hidden size {hidden} needs {[hidden, 2 * hidden]}. These modules belong to another model."
        )
    if latent:
        return replace(target, layers=(last,))
    attention = target.attention
    if not isinstance(attention, AttentionSpec):
        raise CheckpointError(f"{directory}: the MTP module attends over heads; a {target.architecture} over latents.")
    dim, queries = attention.head_dim, shape("layer.mixer.o")[1]
    of_queries, of_keys = shape("layer.mixer.qkv.q")[0], shape("layer.mixer.qkv.k")[0]
    if layout.name("layer.mixer.qkv.q", number) == layout.name("layer.mixer.qkv.k", number):
        of_queries, of_keys = queries, (of_queries - queries) // 2
    mixer = replace(
        attention,
        num_heads=queries // dim,
        num_kv_heads=of_keys // dim,
        qkv_bias=has("layer.mixer.qkv.q", "bias"),
        o_bias=has("layer.mixer.o", "bias"),
        qk_norm=has("layer.mixer.q_norm"),
        output_gate=of_queries == 2 * queries,
    )
    down, router = "layer.feed_forward.down", "layer.feed_forward.router"
    feed_forward: BlockSpec
    if layout.halves:
        feed_forward = _second_half(directory, target, bool(like(EXPERTS_NAMES)))
    elif of_experts := like(EXPERTS_NAMES):
        feed_forward = replace(_experts(directory, target, of_experts[0]), num_experts=shape(router)[0])
    else:
        feed_forward = MLPSpec(shape(down)[1], has(down, "bias"))
    return replace(target, layers=(LayerSpec(mixer, feed_forward),))


def _second_half(directory: Path, target: DecoderConfig, experts: bool) -> BlockSpec:
    """Spec of the feed-forward of a block of two layers: the target's last one of its kind. The layers must be
    attention, then a feed-forward."""
    kinds = getattr(target.hf_config, "mtp_layers_block_type", None)
    wanted = ["full_attention", "moe" if experts else "mlp"]
    if kinds is not None and list(kinds) != wanted:
        raise CheckpointError(
            f"{directory}: mtp_layers_block_type={list(kinds)} in config.json is not supported, or does not fit the "
            f"tensors: an MTP module of these is {wanted}."
        )
    routed = ExpertsSpec, LatentExpertsSpec
    for spec in (layer.feed_forward for layer in reversed(target.layers)):
        if spec is not ABSENT and isinstance(spec, routed) == experts:
            return spec
    raise CheckpointError(
        f"{directory}: the MTP module has {'experts' if experts else 'an MLP'}, and a {target.architecture} with this "
        "config.json has none whose shape it could take."
    )


def _refuse(
    directory: Path,
    layout: MTPLayout,
    target: DecoderConfig,
    like: Callable[[str], list[str]],
    formats: Callable[[str], WeightFormat],
    computed: str,
) -> None:
    """Raise CheckpointError for parts of a module that are not supported.

    like: pattern -> the module's tensors that match it. computed: one of UNSUPPORTED that is supported here, or "".
    """
    refused = {what: like(pattern) for pattern, what in UNSUPPORTED.items() if what != computed}
    undeclared = [name for name in like(QUANTISED) if formats(name.rpartition(".")[0]) is PLAIN]
    refused["quantised weights that config.json does not declare"] = undeclared
    for what, names in refused.items():
        if names:
            raise CheckpointError(f"{directory}: the MTP module has {what} ({names[0]}), which is not supported yet.")
    if layout.root and getattr(target.hf_config, "mtp_use_dedicated_embeddings", False):
        raise CheckpointError(
            f"{directory}: mtp_use_dedicated_embeddings=True in the target's config.json is not supported: the modules "
            "share the target's embedding."
        )


def _experts(directory: Path, target: DecoderConfig, name: str) -> ExpertsSpec:
    """Spec of the target's last mixture of experts, whose routing the module uses. ``name``: a tensor of the module,
    for the message."""
    for layer in reversed(target.layers):
        if isinstance(layer.feed_forward, ExpertsSpec):
            return layer.feed_forward
    raise CheckpointError(
        f"{directory}: the MTP module has a mixture of experts ({name}), and a {target.architecture} with this "
        "config.json has none, so nothing says how the module routes."
    )
