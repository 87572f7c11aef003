"""Multi-token prediction modules as checkpoints keep them: beside the target's weights or in a directory alone.

Owns the key layouts, what a block's shapes tell, and every way in which modules do not fit their target. Drafters
call it. The blocks read are those of the supported families; MLA and mixture-of-experts blocks are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from unisono import catalog
from unisono.attention.base import AttentionBackend
from unisono.layers.embedding import Embedding
from unisono.layers.linear import Linear
from unisono.models.checkpoint import TensorInfo, read_tensors
from unisono.models.config import DecoderConfig
from unisono.models.decoder import Decoder
from unisono.models.loader import IGNORED, check_tensor, shards, stream
from unisono.models.mtp import MTPModule
from unisono.models.qwen3 import QWEN3
from unisono.types import CheckpointError

BLOCK = {
    ours.removeprefix("layers.*."): theirs.removeprefix("model.layers.*.")
    for ours, theirs in QWEN3.names.items()
    if ours.startswith("layers.*.")
}
"""Names inside a decoder block, relative to it: Llama's and Qwen3's head norms."""


@dataclass(frozen=True)
class Layout:
    """Where a family of checkpoints keeps its modules; ``*`` is a module's number in ``block`` and ``names``.

    block: what a decoder block's names begin with. names: the rest of the module, and what the block renames.
    """

    block: str
    names: Mapping[str, str]
    hidden_first: bool = False

    def name(self, module: str, number: int) -> str:
        """The checkpoint's name of one of our modules in MTP module ``number``."""
        if module in self.names:
            return self.names[module].replace("*", str(number))
        return self.block.replace("*", str(number)) + BLOCK[module.removeprefix("layer.")]

    def targets(self, module: MTPModule, number: int) -> dict[str, torch.Tensor]:
        """The checkpoint's names of a module's own tensors -> the parameters, or rows of one, that they fill."""
        return {
            f"{self.name(path, number)}.{kind}": parameter
            for path, kind, parameter in shards(module)
            if path not in SHARED
        }

    def numbers(self, tensors: Mapping[str, TensorInfo]) -> list[int]:
        """The numbers of the modules that the checkpoint holds, in order."""
        pattern = re.compile(re.escape(self.block).replace(r"\*", r"(\d+)"))
        found = {int(match[1]) for match in map(pattern.match, tensors) if match}
        return sorted(n for n in found if self.name("project", n) + ".weight" in tensors)


def _nextn(block: str, **names: str) -> Layout:
    """A layout whose projection and norms lie in the module, named as DeepSeek's unless ``names`` say otherwise."""
    inside = {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "final_layernorm"}
    return Layout(block, {ours: block + theirs for ours, theirs in {**inside, **names}.items()})


LAYOUTS = {
    "DeepSeek-V3, GLM": _nextn(
        "model.layers.*.", norm="shared_head.norm", embed="embed_tokens", lm_head="shared_head.head"
    ),
    "Qwen3-Next, Qwen3.5": Layout(
        "mtp.layers.*.",
        {
            "embed_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "project": "mtp.fc",
            "norm": "mtp.norm",
        },
    ),
    "MiMo": replace(
        _nextn(
            "model.mtp_layers.*.", embed_norm="token_layernorm", hidden_norm="hidden_layernorm", project="input_proj"
        ),
        hidden_first=True,
    ),
    "MiMo-V2": _nextn("model.mtp.layers.*.", **{"layer.mlp_norm": "pre_mlp_layernorm"}),
}
"""By the models that use it. Sources: the models' files in vLLM and SGLang, and transformers' ``MtpModel``."""

SHARED = ("embed", "lm_head")
"""What a module shares with the target, though its checkpoint may store it."""
UNSUPPORTED = {
    r"\.self_attn\.(q_a_proj|kv_a_proj|kv_b_proj)": "multi-head latent attention (MLA)",
    r"\.(mlp\.experts|mlp\.gate\.|mlp\.shared_expert|moe\.)": "a mixture of experts",
    r"\.(linear_attn|mamba)\.": "linear attention",
    r"(weight_scale_inv|weight_scale|qweight)$": "quantised weights",
}


@dataclass(frozen=True)
class MTPCheckpoint:
    """Opened modules, checked against the target's shapes. Make one with :meth:`open`.

    config: a decoder of one layer with the shapes of a module's block; vocabulary, head size, rotary angles and window
    are those of the target('s last layer). numbers: each module's in the checkpoint's names, first step first.
    """

    path: Path
    layout: Layout = field(repr=False)
    config: DecoderConfig
    numbers: tuple[int, ...]
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def depth(self) -> int:
        """How many modules there are."""
        return len(self.numbers)

    @classmethod
    def open(cls, path: str | Path, target: DecoderConfig) -> MTPCheckpoint:
        """Find the modules in a directory, which may be the target's own, from its safetensors' headers.

        Raises CheckpointError: no directory, no modules, blocks of a kind that is not supported, a hidden size that
        is not the target's, tensors that are missing or have no place.
        """
        directory = catalog.resolve_name(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is no directory: give the one that holds the MTP modules.")
        tensors = read_tensors(directory)
        for layout in LAYOUTS.values():
            numbers = layout.numbers(tensors)
            if numbers:
                config = _block_config(directory, layout, numbers[0], tensors, target)
                opened = cls(directory, layout, config, tuple(numbers), tensors)
                opened._check()
                return opened
        keys = "; ".join(f"{models}: {layout.name('project', 0)}" for models, layout in LAYOUTS.items())
        raise CheckpointError(f"{directory} has no MTP modules. Looked for, with any number: {keys}.")

    def load(
        self,
        target: Decoder,
        step: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        progress: Callable[[float], None] = lambda share: None,
    ) -> MTPModule:
        """The module of a step, from 0, with its weights in ``dtype`` on the target's device.

        Its embedding and LM head are the target's, unless the checkpoint stores others. ``progress`` is called with the
        share of its tensors that is in place, 0 … 1.
        """
        number, device = self.numbers[step], target.embed.weight.device
        embed, lm_head = target.embed, target.lm_head
        own_embed, own_head = (self._own(part, number, getattr(target, part).weight) for part in SHARED)
        if own_embed is not None:
            embed = Embedding(0, 0, dtype, "meta")
            embed.weight = own_embed
        if own_head is not None:
            lm_head = Linear(0, 0, False, dtype, "meta")
            lm_head.weight = own_head
        module = MTPModule(
            self.config, self.layout.hidden_first, embed, lm_head, target.cos_sin, backend, dtype, device
        )
        targets = self.layout.targets(module, number)
        with torch.no_grad():
            for done, (name, tensor) in enumerate(stream(targets, self.tensors, device), 1):
                targets[name].copy_(tensor)
                progress(done / len(targets))
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

    def _own(self, part: str, number: int, shared: torch.Tensor) -> nn.Parameter | None:
        """The checkpoint's weight of an embedding or LM head; None where it has none, or a copy of the target's."""
        name = f"{self.layout.name(part, number)}.weight" if part in self.layout.names else ""
        if name not in self.tensors:
            return None
        check_tensor(name, self.tensors[name], shared)
        ((_, stored),) = stream([name], self.tensors, shared.device)
        stored = stored.to(shared.dtype)
        return None if torch.equal(stored, shared) else nn.Parameter(stored, requires_grad=False)

    def _check(self) -> None:
        """Compare every module's tensors with what it needs. Raises CheckpointError naming the first misfit."""
        dtype, nothing = torch.float32, torch.empty(0)
        embed, lm_head = Embedding(0, 0, dtype, "meta"), Linear(0, 0, False, dtype, "meta")
        backend = cast(AttentionBackend, None)  # measured, never run
        blank = MTPModule(self.config, False, embed, lm_head, nothing, backend, dtype, "meta")
        for number in self.numbers:
            targets = self.layout.targets(blank, number)
            for name, parameter in targets.items():
                if name not in self.tensors:
                    raise CheckpointError(f"{self.path}: tensor {name} {list(parameter.shape)} is missing.")
                check_tensor(name, self.tensors[name], parameter)
            shared = {f"{self.layout.name(part, number)}.weight" for part in SHARED if part in self.layout.names}
            prefix = self.layout.block.replace("*", str(number))
            for name in self.tensors.keys() - targets.keys() - shared:
                if name.startswith(prefix) and not IGNORED.search(name):
                    raise CheckpointError(f"{self.path}: tensor {name} is unexpected: an MTP module has none like it.")


def _block_config(
    directory: Path, layout: Layout, number: int, tensors: Mapping[str, TensorInfo], target: DecoderConfig
) -> DecoderConfig:
    """The shapes of a module's block, from its tensors; what they do not tell is the target's."""
    prefix = layout.block.replace("*", str(number))
    for pattern, what in UNSUPPORTED.items():
        name = next((n for n in tensors if n.startswith(prefix) and re.search(pattern, n)), None)
        if name is not None:
            raise CheckpointError(f"{directory}: the MTP module has {what} ({name}), which is not supported yet.")

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
    return replace(
        target,
        intermediate_size=shape("layer.mlp.down")[1],
        num_layers=1,
        num_heads=shape("layer.attention.o")[1] // target.head_dim,
        num_kv_heads=shape("layer.attention.qkv.k")[0] // target.head_dim,
        windows=target.windows[-1:],
        qkv_bias=has("layer.attention.qkv.q", "bias"),
        o_bias=has("layer.attention.o", "bias"),
        mlp_bias=has("layer.mlp.down", "bias"),
        qk_norm=has("layer.attention.q_norm"),
    )
