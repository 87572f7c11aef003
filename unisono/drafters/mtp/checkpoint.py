"""Multi-token prediction modules as checkpoints keep them: beside the target's weights or in a directory alone.

Owns the key layouts, what a block's shapes tell, and every way in which modules do not fit their target. Drafters
call it. A block attends as the target's attention layers do and has their norms; where it has experts, it routes as the
target does. Other blocks are refused by name.
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
from unisono.layers.formats.base import PLAIN, Place, WeightFormat
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.experts import ExpertsSpec
from unisono.models.blocks.layers import BlockSpec, LayerSpec, MLPSpec
from unisono.models.config import DecoderConfig, checkpoint_name
from unisono.models.families.qwen3 import QWEN3
from unisono.models.families.qwen3_5_moe import EXPERTS
from unisono.models.load import weights
from unisono.models.load.build import AttentionFactory, Builder, no_attention, plain
from unisono.models.load.checkpoint import formats_in, read_tensors
from unisono.models.load.loader import fill_randomly
from unisono.models.load.tensor_files import TensorInfo
from unisono.types import CheckpointError

BLOCK = {
    ours.removeprefix("layers.*."): str(theirs).removeprefix("model.layers.*.")
    for ours, theirs in {**QWEN3.names, **EXPERTS}.items()
    if ours.startswith("layers.*.")
}
"""Names inside a decoder block, relative to it: Llama's, Qwen3's head norms, the experts of Qwen's."""

SHARED = ("embed", "lm_head")
"""What a module shares with the target, though its checkpoint may store it."""


@dataclass(frozen=True)
class Layout:
    """Where a family of checkpoints keeps its modules; ``*`` is a module's number in ``block`` and ``names``.

    block: what a decoder block's names begin with. names: the rest of the module, and what the block renames. root:
    what the names of all modules' tensors begin with, where nothing else's do.
    """

    block: str
    names: Mapping[str, str]
    hidden_first: bool = False
    root: str = ""

    def name(self, module: str, number: int) -> str:
        """The checkpoint's name of one of our modules in MTP module ``number``."""
        if module in self.names:
            return self.names[module].replace("*", str(number))
        return self.block.replace("*", str(number)) + checkpoint_name(BLOCK, module.removeprefix("layer."))

    def targets(
        self, module: MTPModule, number: int, shared: Sequence[str] = SHARED, tensors: Container[str] = ()
    ) -> dict[str, Place]:
        """The checkpoint's names of a module's tensors -> where they go, but for those of ``shared`` parts.

        tensors: what the checkpoint holds.
        """

        def named(path: str, kind: str) -> str:
            return weights.tensor_name(self.name(path, number), kind)

        def held(path: str, kind: str) -> bool:
            return path not in SHARED and named(path, kind) in tensors

        found = weights.places(module, held)
        return {named(path, kind): place for path, kind, place in found if path not in shared}

    def numbers(self, tensors: Mapping[str, TensorInfo]) -> list[int]:
        """The numbers of the modules that the checkpoint holds, in order."""
        pattern = re.compile(re.escape(self.block).replace(r"\*", r"(\d+)"))
        found = {int(match[1]) for match in map(pattern.match, tensors) if match}
        return sorted(n for n in found if self.name("project", n) + ".weight" in tensors)


def _nextn(block: str, **names: str) -> Layout:
    """A layout whose projection and norms lie in the module, named as DeepSeek's unless ``names`` say otherwise."""
    inside = {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "final_layernorm"}
    return Layout(block, {ours: block + theirs for ours, theirs in {**inside, **names}.items()})


QWEN = "Qwen3-Next, Qwen3.5"

LAYOUTS = {
    "DeepSeek-V3, GLM": _nextn(
        "model.layers.*.", norm="shared_head.norm", embed="embed_tokens", lm_head="shared_head.head"
    ),
    QWEN: Layout(
        "mtp.layers.*.",
        {
            "embed_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "project": "mtp.fc",
            "norm": "mtp.norm",
        },
        root="mtp.",
    ),
    "MiMo": replace(
        _nextn(
            "model.mtp_layers.*.", embed_norm="token_layernorm", hidden_norm="hidden_layernorm", project="input_proj"
        ),
        hidden_first=True,
    ),
    "MiMo-V2": _nextn("model.mtp.layers.*.", **{"layer.feed_forward_norm": "pre_mlp_layernorm"}),
}
"""By the models that use it. Sources: the models' files in vLLM and SGLang, and transformers' ``MtpModel``."""

EXPERTS_NAMES = r"\.(mlp\.experts|mlp\.gate\.|mlp\.shared_expert|moe\.)"
"""Tensors of a mixture of experts."""

UNSUPPORTED = {
    r"\.self_attn\.(q_a_proj|kv_a_proj|kv_b_proj)": "multi-head latent attention (MLA)",
    r"\.(linear_attn|mamba)\.": "linear attention",
}

QUANTISED = r"\.(weight_scale_inv|weight_scale|weight_packed|qweight)$"
"""Tensors of quantised weights."""


@dataclass(frozen=True)
class MTPCheckpoint:
    """Opened modules, checked against the target's shapes. Make one with :meth:`open`.

    config: a decoder of one layer with the shapes of a module's block; vocabulary, head size, rotary angles, window and
    kind of norms are those of the target('s last layer that attends). numbers: each module's in the checkpoint's names,
    first step first. tensors: None for random weights. formats: the weight format of a module by its name in the
    checkpoint.
    """

    path: Path
    layout: Layout = field(repr=False)
    config: DecoderConfig
    numbers: tuple[int, ...]
    tensors: Mapping[str, TensorInfo] | None = field(repr=False)
    formats: Callable[[str], WeightFormat] = field(default=plain, repr=False)

    @property
    def depth(self) -> int:
        """How many modules there are."""
        return len(self.numbers)

    @classmethod
    def open(cls, path: str | Path, target: DecoderConfig, *, dummy: bool = False) -> MTPCheckpoint:
        """Find the modules in a directory, which may be the target's own, from its safetensors' headers.

        dummy: random weights; reads nothing, for the target's config says how many modules there are. Their blocks are
        then as the target's last layer, but for its mixer, which is that of its last layer that attends.

        Raises CheckpointError: no directory, no modules, blocks of a kind that is not supported, a hidden size that
        is not the target's, tensors that are missing or have no place.
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
        block = LayerSpec(target.attention, target.layers[-1].feed_forward)
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
        """The module of a step, from 0, with its weights in ``dtype`` on the target's device.

        Its embedding and LM head are the target's, unless the checkpoint stores others. ``progress`` is called with the
        share of its elements that is in place, 0 … 1. format: what linear layers get while they are loaded, by their
        paths in the module; a checkpoint that declares a quantisation is loaded as it is. ranks: among which its layers
        are divided.
        """
        number, kind = self.numbers[step], self.config.zero_centered_norms
        builder = target.builder.beside(attention, dtype, zero_centered_norms=kind, ranks=ranks)
        module = self._module(number, builder, format)
        if self.tensors is None:
            fill_randomly(module, seed=step)
        else:
            weights.fill(self._targets(module, number), self.tensors, target.embed.weight.device, progress)
        for part in SHARED:
            if not self._stores(part, number) or weights.same_as(getattr(module, part), getattr(target, part)):
                setattr(module, part, getattr(target, part))
        return module.eval()

    def choices(self, modules: Sequence[MTPModule], target: Decoder) -> list[tuple[str, str, str]]:
        """(name, value, reason) of what was inferred for the modules that :meth:`load` made."""
        layout = next(models for models, layout in LAYOUTS.items() if layout is self.layout)
        used = f"{len(modules)} of {self.depth}, named as by {layout}"
        found = [("draft modules", used, "one for each step" if len(modules) > 1 else "reused for every step")]
        for name, part in (("embedding", "embed"), ("LM head", "lm_head")):
            own = [getattr(module, part) is not getattr(target, part) for module in modules]
            reason = "the checkpoint stores another" if any(own) else "the checkpoint stores none, or a copy of it"
            found.append((f"draft {name}", "its own" if any(own) else "the target's", reason))
        return found

    def _stores(self, part: str, number: int) -> bool:
        """Whether the checkpoint stores an embedding or LM head of a module, which may be a copy of the target's."""
        return part in self.layout.names and f"{self.layout.name(part, number)}.weight" in (self.tensors or {})

    def _module(self, number: int, builder: Builder, format: Callable[[str], WeightFormat] = plain) -> MTPModule:
        """A module, uninitialised; what it is to share takes no memory."""
        config, hidden = self.config, self.config.hidden_size
        builder = replace(builder, format=format if self.formats is plain else partial(self._format, number))
        embed = builder.embedding(config.vocab_size, empty=not self._stores("embed", number))
        shared = not self._stores("lm_head", number)
        lm_head = builder.joined("lm_head", hidden, config.vocab_size, split_inputs=False, empty=shared)
        return MTPModule(config, embed, lm_head, builder, self.layout.hidden_first)

    def _format(self, number: int, module: str) -> WeightFormat:
        """Of one of module ``number``'s modules; what it shares is the target's."""
        shared = module in SHARED and not self._stores(module, number)
        return PLAIN if shared else self.formats(self.layout.name(module, number))

    def _targets(self, module: MTPModule, number: int) -> dict[str, Place]:
        shared = [part for part in SHARED if not self._stores(part, number)]
        return self.layout.targets(module, number, shared, self.tensors or {})

    def _check(self) -> None:
        """Compare every module's tensors with what it needs. Raises CheckpointError naming the first misfit."""
        c, layout = self.config, self.layout
        zero_centered = c.zero_centered_norms
        builder = Builder(
            c.hidden_size, c.rms_eps, torch.float32, "meta", no_attention, 1, zero_centered_norms=zero_centered
        )
        for number in self.numbers:
            wanted = self._targets(self._module(number, builder), number)
            weights.check(wanted, self.tensors or {}, self.path, partial(_unexpected, layout, number))


def _unexpected(layout: Layout, number: int, name: str) -> str | None:
    """Why a tensor of module ``number`` has no place; None for other modules' and the target's tensors."""
    own, of_blocks = layout.block.replace("*", str(number)), layout.block.partition("*")[0]
    common = layout.root and name.startswith(layout.root) and not name.startswith(of_blocks)
    return "an MTP module has none like it" if common or name.startswith(own) else None


def _block_config(
    directory: Path,
    layout: Layout,
    number: int,
    tensors: Mapping[str, TensorInfo],
    target: DecoderConfig,
    formats: Callable[[str], WeightFormat],
) -> DecoderConfig:
    """The shapes of a module's block, from its tensors; what they do not tell is the target's."""
    prefix = layout.root or layout.block.replace("*", str(number))

    def like(pattern: str) -> list[str]:
        return [name for name in tensors if name.startswith(prefix) and re.search(pattern, name)]

    refused = {what: like(pattern) for pattern, what in UNSUPPORTED.items()}
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
    dim, queries = target.attention.head_dim, shape("layer.mixer.o")[1]
    mixer = replace(
        target.attention,
        num_heads=queries // dim,
        num_kv_heads=shape("layer.mixer.qkv.k")[0] // dim,
        qkv_bias=has("layer.mixer.qkv.q", "bias"),
        o_bias=has("layer.mixer.o", "bias"),
        qk_norm=has("layer.mixer.q_norm"),
        output_gate=shape("layer.mixer.qkv.q")[0] == 2 * queries,
    )
    down, router = "layer.feed_forward.down", "layer.feed_forward.router"
    feed_forward: BlockSpec
    if of_experts := like(EXPERTS_NAMES):
        feed_forward = replace(_experts(directory, target, of_experts[0]), num_experts=shape(router)[0])
    else:
        feed_forward = MLPSpec(shape(down)[1], has(down, "bias"))
    return replace(target, layers=(LayerSpec(mixer, feed_forward),))


def _experts(directory: Path, target: DecoderConfig, name: str) -> ExpertsSpec:
    """The last of the target's mixtures of experts, as which a module routes; ``name``: a tensor of the module's."""
    for layer in reversed(target.layers):
        if isinstance(layer.feed_forward, ExpertsSpec):
            return layer.feed_forward
    raise CheckpointError(
        f"{directory}: the MTP module has a mixture of experts ({name}), and a {target.architecture} with this "
        "config.json has none, so nothing says how the module routes."
    )
