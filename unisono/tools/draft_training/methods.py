"""From a method's name to a draft that can be trained, and back to a directory. One class for each method.

Each first writes the config.json that it will export and has the serving code open it, so that what is trained is what
will be read.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from unisono.models.blocks import MLPSpec
from unisono.models.build import Builder
from unisono.models.checkpoint import WEIGHTS, Checkpoint, read_json
from unisono.models.decoder import Decoder
from unisono.models.draft_checkpoint import DraftCheckpoint, open_eagle, open_eagle3
from unisono.models.loader import checkpoint_names
from unisono.models.mtp import MTPModule
from unisono.models.mtp_checkpoint import LAYOUTS
from unisono.models.weights import Places
from unisono.tools.draft_training import export
from unisono.tools.draft_training.answers import Text
from unisono.tools.draft_training.draft import Draft, ModulePerStep, UnrolledHead, WholeModel
from unisono.tools.draft_training.teacher import Teacher
from unisono.types import ConfigError

STD = 0.02
"""Of fresh weights, as the models' own configs have it; products that end a residual branch begin smaller."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a draft. None: what the method takes by default.

    unroll: drafts that a head is unrolled for. modules: of MTP. layout: of MTP's keys, ``deepseek`` or ``qwen``; with
    beside_target in a copy of the target's directory. draft_vocab: EAGLE-3's tokens. aux_layers: EAGLE-3, the target's
    layers whose inputs it reads. hidden_size, layers: of a standalone model. tokenizer: a standalone model brings its
    files along.
    """

    unroll: int = 3
    modules: int = 3
    layout: str = "deepseek"
    beside_target: bool = False
    draft_vocab: int | None = None
    aux_layers: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    hidden_size: int = 128
    layers: int = 3
    tokenizer: bool = True

    def __post_init__(self) -> None:
        for name in ("unroll", "modules", "draft_vocab", "intermediate_size", "hidden_size", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give at least 1.")
        if self.unroll > 8:
            raise ConfigError(f"--unroll {self.unroll}: a head is unrolled for 8 drafts at most.")
        if self.layout not in _LAYOUTS:
            raise ConfigError(f"--layout {self.layout!r} is unknown; choose one of {', '.join(_LAYOUTS)}.")
        if self.layout == "qwen" and self.modules > 1:
            raise ConfigError(f"--layout qwen shares one projection: it has 1 module, not {self.modules}.")
        if self.hidden_size % 64:
            raise ConfigError(f"--hidden-size {self.hidden_size}: give a multiple of 64 (heads of 32, in pairs).")


class Method(Protocol):
    """A draft in the making. draft: what is trained. save: write the directory."""

    draft: Draft

    def save(self) -> None: ...


class Eagle:
    """EAGLE's head: one decoder layer; embedding and LM head are the target's."""

    def __init__(self, teacher: Teacher, shape: Shape, texts: Sequence[Text], out: Path) -> None:
        self.out, self.dtype = out, stored_dtype(teacher)
        raw, c = _target(teacher)
        sizes = _given(intermediate_size=shape.intermediate_size)
        fields = export.layer_fields(raw, c, architectures=["LlamaForCausalLMEagle"], torch_dtype=_name(self.dtype))
        export.write_json(out / "config.json", {**fields, **sizes})
        self.checkpoint = open_eagle(out, c, dummy=True)
        head = _build(self.checkpoint, teacher)
        self.draft = UnrolledHead(head, shape.unroll)

    def save(self) -> None:
        tensors = _parameters(self.checkpoint.targets(self.draft.module))  # type: ignore[arg-type]
        export.write_tensors(self.out / WEIGHTS, tensors, self.dtype)


class Eagle3:
    """EAGLE-3's head: reads three layers, knows the tokens that answers are mostly made of."""

    def __init__(self, teacher: Teacher, shape: Shape, texts: Sequence[Text], out: Path) -> None:
        self.out, self.dtype = out, stored_dtype(teacher)
        raw, c = _target(teacher)
        layers = shape.aux_layers or _default_layers(c.num_layers)
        draft_vocab = min(shape.draft_vocab or max(c.vocab_size // 4, min(c.vocab_size, 1024)), c.vocab_size)
        changes = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": c.hidden_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
            "torch_dtype": _name(self.dtype),
            **_given(intermediate_size=shape.intermediate_size),
        }
        export.write_json(out / "config.json", export.layer_fields(raw, c, **changes))
        opened = open_eagle3(out, c, dummy=True)
        self.vocab, self.draft_vocab = c.vocab_size, draft_vocab
        ids = None if draft_vocab == c.vocab_size else frequent_tokens(texts, draft_vocab, c.vocab_size)
        self.checkpoint = dataclasses.replace(opened, ids=ids)
        if opened.config.aux_layers != tuple(layers):
            raise ConfigError(
                f"--aux-layers {list(layers)} would be read as {list(opened.config.aux_layers)} by others: a list that "
                "starts at 1 names outputs there. Begin with another layer."
            )
        head = _build(self.checkpoint, teacher)
        with torch.no_grad():  # it begins as the target's own last step
            head.norm.weight.copy_(teacher.decoder.norm.weight)
            if ids is not None:
                head.lm_head.weight.copy_(teacher.decoder.lm_head.weight[ids.to(teacher.device)])
        self.draft = UnrolledHead(head, shape.unroll, tuple(layers))

    def save(self) -> None:
        tensors = export.original_names(_parameters(self.checkpoint.targets(self.draft.module)))  # type: ignore[arg-type]
        tensors |= export.vocabulary_maps(self.checkpoint.ids, self.draft_vocab, self.vocab)
        export.write_tensors(self.out / WEIGHTS, tensors, self.dtype)


class MTP:
    """Modules shaped as the target's last layer, from which they start."""

    def __init__(self, teacher: Teacher, shape: Shape, texts: Sequence[Text], out: Path) -> None:
        self.out, self.shape, self.teacher, self.dtype = out, shape, teacher, stored_dtype(teacher)
        target, last = teacher.decoder, teacher.decoder.layers[-1]
        c = target.config
        layer = c.layers[-1]
        if shape.intermediate_size:
            layer = dataclasses.replace(layer, feed_forward=MLPSpec(shape.intermediate_size))
        block = dataclasses.replace(c, layers=(layer,))
        builder = target.builder.beside(teacher.attention, torch.float32)
        modules = nn.ModuleList()
        for _ in range(shape.modules):
            module = MTPModule(block, target.embed, target.lm_head, builder)
            _fresh(module, shared=teacher)
            with torch.no_grad():
                own = module.layer.state_dict()
                same = {n: t for n, t in last.state_dict().items() if own[n].shape == t.shape}
                module.layer.load_state_dict({**own, **same})
                module.norm.weight.copy_(target.norm.weight)
                module.project.weight[:, c.hidden_size :] += torch.eye(c.hidden_size, device=teacher.device)
            modules.append(module)
        self.draft: Draft = (
            ModulePerStep(modules) if shape.modules > 1 else UnrolledHead(modules[0], shape.unroll)  # type: ignore[arg-type]
        )
        self.modules = modules
        raw, _ = _target(teacher)
        count = "num_nextn_predict_layers" if shape.layout == "deepseek" else "mtp_num_hidden_layers"
        export.write_json(out / "config.json", {**raw, count: shape.modules})

    def save(self) -> None:
        layout, first = LAYOUTS[_LAYOUTS[self.shape.layout]], 0
        if self.shape.layout == "deepseek":
            first = self.teacher.decoder.config.num_layers
        tensors: dict[str, torch.Tensor] = {}
        for number, module in enumerate(self.modules, first):
            tensors |= _parameters(layout.targets(module, number))  # type: ignore[arg-type]
        if self.shape.beside_target:
            export.write_beside_target(self.teacher.checkpoint.path, self.out, tensors, self.dtype)
        else:
            export.write_tensors(self.out / WEIGHTS, tensors, self.dtype)


class Standalone:
    """A small Qwen3 with the target's vocabulary and tokenizer."""

    def __init__(self, teacher: Teacher, shape: Shape, texts: Sequence[Text], out: Path) -> None:
        self.out, self.dtype = out, stored_dtype(teacher)
        raw, c = _target(teacher)
        heads = shape.hidden_size // 32
        fields = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": c.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size or 3 * shape.hidden_size,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": c.max_positions,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "torch_dtype": _name(self.dtype),
            **_given(**{name: raw.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}),
        }
        export.write_json(out / "config.json", fields)
        if shape.tokenizer:
            export.copy_tokenizer(teacher.checkpoint.path, out)
        self.checkpoint = Checkpoint.open(out)
        c, longest = self.checkpoint.config, teacher.longest
        builder = Builder(c.hidden_size, c.rms_eps, torch.float32, teacher.device, teacher.attention, longest)
        model = Decoder(c, builder)
        _fresh(model)
        self.draft = WholeModel(model)

    def save(self) -> None:
        tensors = _parameters(checkpoint_names(self.draft.module, self.checkpoint.family))
        export.write_tensors(self.out / WEIGHTS, tensors, self.dtype)


METHODS: dict[str, Any] = {"eagle": Eagle, "eagle3": Eagle3, "mtp": MTP, "standalone": Standalone}
_LAYOUTS = {"deepseek": "DeepSeek-V3, GLM", "qwen": "Qwen3-Next, Qwen3.5"}


def frequent_tokens(texts: Sequence[Text], count: int, vocab: int) -> torch.Tensor:
    """The ``count`` tokens that answers hold most often, ascending [V'] int32; then the lowest ids."""
    seen: Counter[int] = Counter()
    for text in texts:
        seen.update(text.token_ids[text.learnt :])
    ranked = sorted(range(vocab), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(ranked[:count]), dtype=torch.int32)


def stored_dtype(teacher: Teacher) -> torch.dtype:
    """What weights are stored in: the target's own."""
    return teacher.checkpoint.dtype or torch.float32


def trainable(draft: Draft, teacher: Teacher) -> dict[str, nn.Parameter]:
    """The weights that are the draft's own, by name."""
    shared = {id(p) for p in teacher.decoder.parameters()}
    return {name: p for name, p in draft.module.named_parameters() if id(p) not in shared}


def _build(checkpoint: DraftCheckpoint, teacher: Teacher) -> Any:
    """A fresh head in fp32, which shares the target's embedding and, if it knows all tokens, LM head."""
    head = checkpoint.build(teacher.decoder, teacher.attention, teacher.longest, torch.float32, teacher.device)
    _fresh(head, shared=teacher)
    return head


@torch.no_grad()
def _fresh(module: nn.Module, shared: Teacher | None = None) -> None:
    """Draw matrices; norms stay ones. Parameters of ``shared`` are left alone."""
    kept = {id(p) for p in shared.decoder.parameters()} if shared else set()
    generator = torch.Generator(device=next(module.parameters()).device).manual_seed(torch.initial_seed() % 2**63)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and id(parameter) not in kept:
            ends = name.endswith(("mixer.o.weight", "feed_forward.down.weight"))
            parameter.normal_(0, STD / (4 if ends else 1), generator=generator)
        elif name.endswith("bias") and id(parameter) not in kept:
            parameter.zero_()


def _default_layers(count: int) -> tuple[int, ...]:
    """As EAGLE-3's authors have them; a target too shallow for that: its ends and its middle."""
    return (2, count // 2, count - 3) if count >= 3 else (count, count // 2, 0)


def _target(teacher: Teacher) -> tuple[dict[str, Any], Any]:
    return read_json(teacher.checkpoint.path / "config.json"), teacher.decoder.config


def _parameters(places: Places) -> dict[str, torch.Tensor]:
    """The parameters, or rows of one, that a checkpoint's tensors go to."""
    return {name: place.parameter for name, place in places.items()}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
