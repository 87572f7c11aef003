"""Draft methods by name. Each class builds a draft model for training and saves it to a directory.

A class first writes the config.json of its checkpoint and opens it with the serving code, so that training uses the
same module that serving will build.
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

from unisono.drafters.block.checkpoint import open_block
from unisono.drafters.eagle.checkpoint import DraftCheckpoint, open_eagle, open_eagle3
from unisono.drafters.mtp.checkpoint import LAYOUTS
from unisono.drafters.mtp.frozen_kv_model import FrozenCheckpoint
from unisono.drafters.mtp.model import MTPModule
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.latent_attention import LatentSpec
from unisono.models.blocks.layers import AttentionSpec, MLPSpec
from unisono.models.config import DecoderConfig, attention_of
from unisono.models.load.build import Builder
from unisono.models.load.checkpoint import WEIGHTS, Checkpoint, read_json
from unisono.models.load.loader import checkpoint_names
from unisono.models.load.weights import WeightTargets
from unisono.tools.draft_training import export
from unisono.tools.draft_training.answers import Text
from unisono.tools.draft_training.block import BlockDraft, BlockTrainingAttention
from unisono.tools.draft_training.draft import FrozenDraft, ModulePerStep, TrainableDraft, UnrolledHead, WholeModel
from unisono.tools.draft_training.teacher import Teacher
from unisono.types import CheckpointError, ConfigError

STD = 0.02
"""Standard deviation of initial weights. The last matrix of a residual branch gets a quarter of it."""


POST_NORM = 0.25
"""Initial weights of norms of a branch's output. A matrix before them has any scale."""


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft model. None means the default of the method.

    unroll: steps that a head is unrolled in training. modules: number of MTP modules. layout: names of the MTP tensors,
    ``deepseek`` or ``qwen``. beside_target: write MTP modules into a copy of the target's directory. draft_vocab: size
    of EAGLE-3's vocabulary. aux_layers: layers of the target whose inputs EAGLE-3 and DFlash read. hidden_size: of a
    standalone model or an assistant. layers: of these or of a DFlash head. block_size: tokens of DFlash's blocks, the
    last committed one included. tokenizer: copy the target's tokenizer to a standalone model. heads, kv_heads: of
    DFlash's attention; None: the target's.
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
    block_size: int = 8
    heads: int | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        at_least_1 = (
            "unroll",
            "modules",
            "draft_vocab",
            "intermediate_size",
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
        )
        for name in at_least_1:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give at least 1.")
        if self.unroll > 8:
            raise ConfigError(f"--unroll {self.unroll}: a head can be unrolled for at most 8 steps.")
        if not 4 <= self.block_size <= 16:
            raise ConfigError(f"--block-size {self.block_size}: give 4 to 16.")
        if self.layout not in _LAYOUTS:
            raise ConfigError(f"--layout {self.layout!r} is unknown; choose one of {', '.join(_LAYOUTS)}.")
        if self.layout == "qwen" and self.modules > 1:
            raise ConfigError(f"--layout qwen shares one projection: it has 1 module, not {self.modules}.")
        if self.hidden_size % 64:
            raise ConfigError(f"--hidden-size {self.hidden_size}: give a multiple of 64 (heads of 32, in pairs).")

    def drafts(self, method: str, default: int) -> int:
        """Drafts of a round when the trained head is measured: all of a DFlash block, ``default`` of others."""
        return self.block_size - 1 if method == "dflash" else default


class Method(Protocol):
    """A draft model in training and its checkpoint directory."""

    draft: TrainableDraft

    def save(self) -> None:
        """Write the checkpoint directory."""
        ...


class Eagle:
    """EAGLE: one decoder layer that shares the target's embedding and LM head."""

    def __init__(self, teacher: Teacher, shape: DraftShape, texts: Sequence[Text], out: Path) -> None:
        _check_attends(teacher, "eagle")
        self.out, self.dtype = out, stored_dtype(teacher)
        raw, c = _target_config(teacher)
        sizes = _without_none(intermediate_size=shape.intermediate_size)
        names = {"architectures": ["LlamaForCausalLMEagle"], "torch_dtype": _dtype_name(self.dtype)}
        fields = export.layer_fields(raw, c, **names)
        export.write_json(out / "config.json", {**fields, **sizes})
        self.checkpoint = open_eagle(out, c, dummy=True)
        head = _new_head(self.checkpoint, teacher)
        self.draft = UnrolledHead(head, shape.unroll)

    def save(self) -> None:
        tensors = _parameters(self.checkpoint.targets(self.draft.module))  # type: ignore[arg-type]
        export.write_tensors(self.out / WEIGHTS, tensors, self.dtype)


class Eagle3:
    """EAGLE-3: reads the inputs of three target layers and drafts the most frequent tokens of the answers."""

    def __init__(self, teacher: Teacher, shape: DraftShape, texts: Sequence[Text], out: Path) -> None:
        _check_attends(teacher, "eagle3")
        self.out, self.dtype = out, stored_dtype(teacher)
        raw, c = _target_config(teacher)
        layers = shape.aux_layers or _default_layers(c.num_layers)
        draft_vocab = min(shape.draft_vocab or max(c.vocab_size // 4, min(c.vocab_size, 1024)), c.vocab_size)
        changes = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": c.hidden_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
            "torch_dtype": _dtype_name(self.dtype),
            **_without_none(intermediate_size=shape.intermediate_size),
        }
        export.write_json(out / "config.json", export.layer_fields(raw, c, **changes))
        opened = open_eagle3(out, c, dummy=True)
        self.vocab, self.draft_vocab = c.vocab_size, draft_vocab
        ids = None if draft_vocab == c.vocab_size else frequent_tokens(texts, draft_vocab, c.vocab_size)
        self.checkpoint = dataclasses.replace(opened, ids=ids)
        if opened.config.aux_layers != tuple(layers):
            raise ConfigError(
                f"--aux-layers {list(layers)} would be read as {list(opened.config.aux_layers)} by other engines: a "
                "list that starts at 1 names layer outputs. Begin with another layer."
            )
        head = _new_head(self.checkpoint, teacher)
        with torch.no_grad():  # start from the target's final norm and LM head
            head.norm.weight.copy_(teacher.decoder.norm.weight)
            if ids is not None:
                head.lm_head.weight.copy_(teacher.decoder.lm_head.weight[ids.to(teacher.device)])
        self.draft = UnrolledHead(head, shape.unroll, tuple(layers))

    def save(self) -> None:
        tensors = export.original_names(_parameters(self.checkpoint.targets(self.draft.module)))  # type: ignore[arg-type]
        tensors |= export.vocabulary_maps(self.checkpoint.ids, self.draft_vocab, self.vocab)
        export.write_tensors(self.out / WEIGHTS, tensors, self.dtype)


class DFlash:
    """DFlash: a few layers that fill blocks of masks, over the states of target layers; shares embedding and LM head.

    Its layers are Qwen3's, as those of published heads.
    """

    def __init__(self, teacher: Teacher, shape: DraftShape, texts: Sequence[Text], out: Path) -> None:
        self.out, self.dtype = out, stored_dtype(teacher)
        raw, c = _target_config(teacher)
        layers = shape.aux_layers or spread_layers(c.num_layers)
        if layers[0] < 1 or layers[-1] > c.num_layers or list(layers) != sorted(set(layers)):
            raise ConfigError(
                f"--aux-layers {','.join(map(str, layers))}: give numbers from 1 to {c.num_layers}, ascending. "
                "config.json of a DFlash head names outputs of layers, and the first layer's input is none."
            )
        used = {token for text in texts for token in text.token_ids}
        mask = next((token for token in reversed(range(c.vocab_size)) if token not in used), c.vocab_size - 1)
        changes = {
            **_own_heads(c),
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": shape.layers,
            "num_target_layers": c.num_layers,
            "block_size": shape.block_size,
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": [layer - 1 for layer in layers]},
            "torch_dtype": _dtype_name(self.dtype),
            **_without_none(
                intermediate_size=shape.intermediate_size, num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
            ),
        }  # fmt: skip
        fields = export.layer_fields(raw, c, **changes)
        export.write_json(out / "config.json", export.with_plain_rotation(fields))
        self.checkpoint = open_block(out, c, "dflash", dummy=True)
        head: Any = self.checkpoint.build(
            teacher.decoder, lambda heads, kv_heads: BlockTrainingAttention(), teacher.longest, torch.float32,
            teacher.device,
        )  # fmt: skip
        _initialize(head, shared=teacher)
        with torch.no_grad():
            head.norm.weight.copy_(teacher.decoder.norm.weight)
        self.draft = BlockDraft(head, layers)

    def stored(self) -> dict[str, torch.Tensor]:
        """The parameters by their names in the checkpoint."""
        return _parameters(self.checkpoint.targets(self.draft.module))  # type: ignore[arg-type]

    def save(self) -> None:
        export.write_tensors(self.out / WEIGHTS, self.stored(), self.dtype)


class MTP:
    """MTP modules, initialised from the target's last layer."""

    def __init__(self, teacher: Teacher, shape: DraftShape, texts: Sequence[Text], out: Path) -> None:
        _check_attends(teacher, "mtp")
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
            _initialize(module, shared=teacher)
            with torch.no_grad():
                own = module.layer.state_dict()
                same = {n: t for n, t in last.state_dict().items() if own[n].shape == t.shape}
                module.layer.load_state_dict({**own, **same})
                module.norm.weight.copy_(target.norm.weight)
                module.project.weight[:, c.hidden_size :] += torch.eye(c.hidden_size, device=teacher.device)
            modules.append(module)
        self.draft: TrainableDraft = (
            ModulePerStep(modules) if shape.modules > 1 else UnrolledHead(modules[0], shape.unroll)  # type: ignore[arg-type]
        )
        self.modules = modules
        raw, _ = _target_config(teacher)
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


class FrozenMTP:
    """An assistant of Gemma 4: the last of its layers reads the target's keys without a window, the others those with
    one."""

    def __init__(self, teacher: Teacher, shape: DraftShape, texts: Sequence[Text], out: Path) -> None:
        self.out, self.dtype = out, stored_dtype(teacher)
        raw, c = _target_config(teacher)
        kind = raw.get("text_config", raw).get("model_type", "")
        if not kind.startswith("gemma4"):
            raise ConfigError(f"mtp_frozen is trained for targets of Gemma 4, not for a {c.architecture}.")
        types = [export.SLIDING] * (shape.layers - 1) + ["full_attention"]
        sizes = shape.hidden_size, shape.intermediate_size or 2 * shape.hidden_size
        fields = dict(zip(("hidden_size", "intermediate_size"), sizes, strict=True))
        config = export.assistant_fields(raw, c, types, dtype=_dtype_name(self.dtype), **fields)
        export.write_json(out / "config.json", config)
        last = {bool(layer.mixer.window): c.reads[number] for number, layer in enumerate(c.layers)}
        empty = export.empty_assistant(c, [last[kind == export.SLIDING] for kind in types], *sizes)
        export.write_tensors(out / WEIGHTS, empty, self.dtype)
        self.checkpoint = FrozenCheckpoint.open(out, c)
        head = self.checkpoint.load(teacher.decoder, teacher.attention, torch.float32)
        _initialize(head, shared=teacher)
        with torch.no_grad():
            own: dict[str, torch.Tensor] = head.state_dict()
            theirs = teacher.decoder.state_dict()
            for number, read in enumerate(head.reads):
                layer = f"layers.{number}."
                own[f"{layer}mixer.q_norm.weight"].copy_(theirs[f"layers.{read}.mixer.q_norm.weight"])
                for norm in ("mixer_post_norm", "feed_forward_post_norm"):
                    own[f"{layer}{norm}.weight"].fill_(POST_NORM)
        self.draft = FrozenDraft(head, shape.unroll)

    def save(self) -> None:
        tensors = _parameters(self.checkpoint.targets(self.draft.module))
        export.write_tensors(self.out / WEIGHTS, tensors, self.dtype)


class Standalone:
    """A small Qwen3 with the target's vocabulary and tokenizer."""

    def __init__(self, teacher: Teacher, shape: DraftShape, texts: Sequence[Text], out: Path) -> None:
        self.out, self.dtype = out, stored_dtype(teacher)
        raw, c = _target_config(teacher)
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
            "torch_dtype": _dtype_name(self.dtype),
            **_without_none(**{name: raw.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}),
        }
        export.write_json(out / "config.json", fields)
        if shape.tokenizer:
            export.copy_tokenizer(teacher.checkpoint.path, out)
        self.checkpoint = Checkpoint.open(out)
        c, longest = self.checkpoint.config, teacher.longest
        builder = Builder(c.hidden_size, c.rms_eps, torch.float32, teacher.device, teacher.attention, longest)
        model = Decoder(c, builder)
        _initialize(model)
        self.draft = WholeModel(model)

    def save(self) -> None:
        tensors = _parameters(checkpoint_names(self.draft.module, self.checkpoint.family))
        export.write_tensors(self.out / WEIGHTS, tensors, self.dtype)


METHODS: dict[str, Any] = {
    "dflash": DFlash,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": MTP,
    "mtp_frozen": FrozenMTP,
    "standalone": Standalone,
}
_LAYOUTS = {"deepseek": "DeepSeek-V3, GLM", "qwen": "Qwen3-Next, Qwen3.5"}


def _own_heads(config: DecoderConfig) -> dict[str, Any]:
    """Heads for a target whose attention has no keys by head; none for other targets."""
    if isinstance(config.attention, AttentionSpec):
        return {}
    size = min(128, config.hidden_size)
    heads = max(1, config.hidden_size // size)
    kv_heads = heads // 4 if heads % 4 == 0 else heads
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}


def frequent_tokens(texts: Sequence[Text], count: int, vocab: int) -> torch.Tensor:
    """The ``count`` most frequent tokens of the answers, ascending, [count] int32. Ties go to the lowest ids."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.token_ids[text.answer_start :])
    ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:count]), dtype=torch.int32)


def stored_dtype(teacher: Teacher) -> torch.dtype:
    """The dtype of stored weights, which is the target's."""
    return teacher.checkpoint.dtype or torch.float32


def trainable_parameters(draft: TrainableDraft, teacher: Teacher) -> dict[str, nn.Parameter]:
    """The draft's parameters by name, without those shared with the target."""
    shared = {id(p) for p in teacher.decoder.parameters()}
    return {name: p for name, p in draft.module.named_parameters() if id(p) not in shared}


def _check_attends(teacher: Teacher, method: str) -> None:
    """Raise CheckpointError for a target with recurrent layers or latent attention: the heads of ``method`` take their
    layer from it.
    """
    layers = teacher.decoder.config.layers
    if any(isinstance(attention_of(layer), LatentSpec) for layer in layers):
        raise CheckpointError(
            f"{teacher.checkpoint.path}: {method} is not trained for targets with latent attention (MLA); dflash and "
            "standalone are."
        )
    recurrent = [n for n, layer in enumerate(layers) if attention_of(layer) is None]
    if recurrent:
        raise CheckpointError(
            f"{teacher.checkpoint.path}: layer {recurrent[0]} has a recurrence, and {len(recurrent) - 1} more have. "
            f"{method} is trained only for targets all of whose layers attend; dflash and standalone for others, too."
        )


def _new_head(checkpoint: DraftCheckpoint, teacher: Teacher) -> Any:
    """A randomly initialised fp32 head that shares the embedding and, with the full vocabulary, the LM head."""
    head = checkpoint.build(teacher.decoder, teacher.attention, teacher.longest, torch.float32, teacher.device)
    _initialize(head, shared=teacher)
    return head


@torch.no_grad()
def _initialize(module: nn.Module, shared: Teacher | None = None) -> None:
    """Initialise matrices randomly and biases with zeros. Norms stay ones; parameters of ``shared`` stay unchanged."""
    kept = {id(p) for p in shared.decoder.parameters()} if shared else set()
    generator = torch.Generator(device=next(module.parameters()).device).manual_seed(torch.initial_seed() % 2**63)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and id(parameter) not in kept:
            last = name.endswith(("mixer.o.weight", "feed_forward.down.weight"))
            parameter.normal_(0, STD / (4 if last else 1), generator=generator)
        elif name.endswith("bias") and id(parameter) not in kept:
            parameter.zero_()


def _default_layers(count: int) -> tuple[int, ...]:
    """EAGLE-3's default aux layers for a target of ``count`` layers; below 3 layers: last, middle and first."""
    return (2, count // 2, count - 3) if count >= 3 else (count, count // 2, 0)


def spread_layers(count: int, most: int = 5) -> tuple[int, ...]:
    """Up to ``most`` layers whose inputs DFlash reads, evenly spread from layer 2 to the last one (published heads:
    five, from layer 2 to the last but one of 36)."""
    first, last = min(2, count), max(count - 1, 1)
    chosen = min(most, max(1, last - first + 1))
    return tuple(sorted({first + round(n * (last - first) / max(1, chosen - 1)) for n in range(chosen)}))


def _target_config(teacher: Teacher) -> tuple[dict[str, Any], Any]:
    """(the target's config.json, its DecoderConfig)."""
    return read_json(teacher.checkpoint.path / "config.json"), teacher.decoder.config


def _parameters(places: WeightTargets) -> dict[str, torch.Tensor]:
    """The parameters, or rows of one, that a checkpoint's tensors go to."""
    return {name: place.parameter for name, place in places.items()}


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
