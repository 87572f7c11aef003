"""Draft heads on disk: the formats of EAGLE-1/2, EAGLE-3 and vLLM's speculators, read and checked against a target.

Reads a head's config.json, maps its tensor names, and checks that it fits the target: a head wired wrongly yields
correct text and useless drafts, so a misfit is an error and an inferred setting is logged. Formats:
https://github.com/SafeAILab/EAGLE (EAGLE, EAGLE-3 original), SGLang's ``LlamaForCausalLMEagle3``,
https://github.com/vllm-project/speculators. Called by drafters.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from unisono.config import catalog
from unisono.config.catalog import find_directory
from unisono.config.checkpoint_files import CONFIG, PICKLE
from unisono.config.preflight.families import DRAFT_LAYERS
from unisono.config.preflight.formula import check_formula
from unisono.config.transformers_names import from_transformers
from unisono.distributed.gather import ALONE, Ranks
from unisono.drafters.eagle.model import DraftConfig, Eagle3Head, EagleHead
from unisono.drafters.quantization import DraftWeights
from unisono.layers.formats.base import PLAIN, WeightFormat, WeightTarget
from unisono.layers.norm import RMSNorm
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import AttentionSpec
from unisono.models.config import DecoderConfig
from unisono.models.families.qwen3 import QWEN3
from unisono.models.load import tensor_files, weights
from unisono.models.load.build import AttentionFactory, Builder, no_attention, plain
from unisono.models.load.checkpoint import read_config, read_tensors
from unisono.models.load.loader import draw_held
from unisono.models.load.stored_config import stored_config
from unisono.models.load.tensor_files import TensorInfo
from unisono.models.load.update import WeightUpdate, check_shared, require_all
from unisono.types import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
CONVENTIONS = ("auto", "input", "output")
"""Meanings of ``eagle_aux_hidden_state_layer_ids``: inputs of layers, or outputs."""

_NAMES = {
    **{
        ours.replace("layers.*.", "layer."): str(theirs).removeprefix("model.").replace("layers.*", "layers.0")
        for ours, theirs in QWEN3.names.items()
    },
    **{name: name for name in ("fc", "input_norm")},
    "hidden_norm": "layers.0.hidden_norm",
}
"""Module of a head -> module of a checkpoint, by speculators' names; the original's ``midlayer`` is ``layers.0``."""

Head = EagleHead | Eagle3Head


@dataclass(frozen=True)
class DraftCheckpoint:
    """The opened directory of a head that fits its target. Made by :func:`open_eagle` and :func:`open_eagle3`.

    tensors: headers by speculators' names; None builds random weights.
    ids [V'] int32: the target's token of each draft token; None if they are the same.
    why: how the target layers it reads are known, if several.
    """

    path: Path
    kind: type[Head]
    config: DraftConfig
    tied: bool
    tensors: Mapping[str, TensorInfo] | None = field(repr=False)
    ids: torch.Tensor | None = field(repr=False)
    why: str = ""

    @property
    def own_embed(self) -> bool:
        if self.tensors is not None:
            return EMBED in self.tensors
        return self.config.layer.hidden_size != self.config.target_hidden

    @property
    def own_head(self) -> bool:
        if self.tensors is not None:
            return LM_HEAD in self.tensors
        return self.own_embed or self.config.draft_vocab != self.config.layer.vocab_size

    @property
    def head_bytes(self) -> int | None:
        """Bytes of its own LM head in 16 bits; None if it shares the target's."""
        return 2 * self.config.draft_vocab * self.config.layer.hidden_size if self.own_head else None

    def choose_weights(self, choice: str, target: Decoder, ranks: Ranks) -> DraftWeights:
        """Choose the weight format: see :meth:`DraftWeights.choose`. ``auto`` keeps plain weights if a rank's part of a
        layer would begin inside a block of outputs that share a scale.
        """
        chosen = DraftWeights.choose(choice, target, own_head=self.head_bytes)
        if choice == "auto" and not self._can_divide(chosen, ranks):
            return DraftWeights(
                target, PLAIN, f"a part of {ranks.count} ranks begins inside a block that shares a scale"
            )
        return chosen

    def _can_divide(self, chosen: DraftWeights, ranks: Ranks) -> bool:
        """True if every rank can build its part, so that all ranks choose the same."""
        hidden, eps = self.config.layer.hidden_size, self.config.layer.rms_eps
        builder = Builder(hidden, eps, torch.float32, "meta", no_attention, 1, chosen.of)
        try:
            for rank in range(ranks.count):
                self._blank(replace(builder, ranks=replace(ranks, index=rank)))
        except ConfigError:
            return False
        return True

    def build(
        self,
        target: Decoder,
        attention: AttentionFactory,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: Callable[[float], None] = lambda share: None,
        format: Callable[[str], WeightFormat] = plain,
        ranks: Ranks = ALONE,
    ) -> Head:
        """Build the head on ``device`` in ``dtype``. It shares the target's embedding and LM head if it has none.

        progress: called with the fraction of its elements that is loaded, 0 … 1.
        format: weight format of linear layers, by their paths in the head.
        ranks: ranks among which its layers are divided. Raises ConfigError if they cannot be.
        """
        hidden, eps = self.config.layer.hidden_size, self.config.layer.rms_eps
        builder = Builder(hidden, eps, dtype, device, attention, max_positions, format)
        head = self._blank(replace(builder, ranks=ranks, kv_dtype=target.builder.kv_dtype))
        if self.tensors is None:
            self._fill_randomly(head)
        else:
            weights.fill(self.targets(head), self.tensors, device, progress)
        if not self.own_embed or weights.same_as(head.embed, target.embed):
            head.embed = target.embed.unscaled
        if not self.own_head and self.own_embed and self.tied:
            head.lm_head.weight = head.embed.weight
        elif not self.own_head or weights.same_as(head.lm_head, target.lm_head):
            head.lm_head = target.lm_head
        head.ids = None if self.ids is None else self.ids.to(device)
        return head.eval()

    def update(self, head: Head, target: Decoder, shares_head: bool) -> WeightUpdate:
        """This checkpoint's weights for a head that another one made. shares_head: its LM head is the target's.

        Raises CheckpointError if the other one has another config, or other tokens in its draft vocabulary.
        """
        ids = None if self.ids is None or head.ids is None else torch.equal(self.ids, head.ids.cpu())
        if self.config.layer != head.config or ids is False or (ids is None and self.ids is not head.ids):
            raise CheckpointError(
                f"{self.path}: its config or draft vocabulary is not that of the head that is served."
            )
        shared = {EMBED: target.embed.unscaled.weight} if head.embed is target.embed.unscaled else {}
        shared |= {LM_HEAD: target.lm_head.weight} if shares_head else {}
        tensors, targets = self.tensors or {}, self.targets(head)
        targets = {name: place for name, place in targets.items() if name not in shared}
        require_all(targets, tensors, self.path)
        return WeightUpdate(head, targets, tensors, lambda: check_shared(shared, tensors))

    def choices(self, head: Head, target: Decoder) -> list[tuple[str, str, str]]:
        """(name, value, reason) of the inferred settings of a head made by :meth:`build`."""
        found = []
        if self.config.aux_layers:
            found.append(
                ("target layers read by the draft head", f"inputs of {list(self.config.aux_layers)}", self.why)
            )
        mapped = "one of its own tokens for each of the target's"
        if head.ids is not None:
            mapped = "tensor d2t names the target's token of each" if self.tensors is not None else "made up (dummy)"
        vocabulary = f"{self.config.draft_vocab} of the target's {self.config.layer.vocab_size}"
        found.append(("draft vocabulary", vocabulary, mapped))
        for name, part, theirs, own in (
            ("embedding", head.embed, target.embed.unscaled, self.own_embed),
            ("LM head", head.lm_head, target.lm_head, self.own_head),
        ):
            shared = part.weight is theirs.weight
            value = "the target's" if shared else "its own" if own else "its own embedding"
            reason = "the checkpoint stores none" + ("" if own or shared else ", tie_word_embeddings is set")
            if own:
                reason = "the checkpoint stores " + ("a copy of it" if shared else "another")
            found.append((f"draft {name}", value, reason))
        return found

    def check(self) -> None:
        """Compare the tensors with the config. Raises CheckpointError naming the first that differs."""
        layer, file = self.config.layer, self.path
        if layer.hidden_size != self.config.target_hidden and not (self.own_embed and self.own_head):
            raise CheckpointError(
                f"{file}: the head's hidden size is {layer.hidden_size}, the target's {self.config.target_hidden}: it "
                f"needs {EMBED} and {LM_HEAD} of its own, for the target's do not fit."
            )
        if not self.own_head and self.config.draft_vocab != layer.vocab_size:
            raise CheckpointError(
                f"{file}: tensor {LM_HEAD} is missing: draft_vocab_size is {self.config.draft_vocab}, so the target's "
                f"LM head of {layer.vocab_size} tokens cannot stand in for it."
            )
        if self.tensors is not None:
            blank = self._blank(Builder(layer.hidden_size, layer.rms_eps, torch.float32, "meta", no_attention, 1))
            weights.check(self.targets(blank), self.tensors, file, self.unexpected)

    def unexpected(self, name: str) -> str | None:
        """Reason why a tensor without a target is an error; None ignores it."""
        return None if name in ("d2t", "t2d") else "a head with this config.json has no place for it"

    def stored_name(self, module: str) -> str:
        """Checkpoint name of a module of the head, in speculators' spelling."""
        return _NAMES.get(module, module)

    def _blank(self, builder: Builder) -> Head:
        """The head, uninitialised; shared embedding and LM head take no memory."""
        embed = builder.embedding(self.config.layer.vocab_size, empty=not self.own_embed)
        sizes = builder.hidden_size, self.config.draft_vocab
        lm_head = builder.joined("lm_head", *sizes, split_inputs=False, empty=not self.own_head)
        return self.kind(self.config, embed, lm_head, builder)

    def targets(self, head: Head) -> dict[str, WeightTarget]:
        """Checkpoint tensor names, in speculators' spelling -> the parameters they fill."""
        shared = {EMBED: not self.own_embed, LM_HEAD: not self.own_head}
        targets = {f"{self.stored_name(module)}.{kind}": place for module, kind, place in weights.weight_targets(head)}
        return {name: place for name, place in targets.items() if not shared.get(name, False)}

    def _fill_randomly(self, head: Head) -> None:
        generator = torch.Generator(head.fc.weight.device).manual_seed(0)
        for module in head.modules():
            if not isinstance(module, RMSNorm):  # norms are initialised to ones
                for parameter in module.parameters(recurse=False):
                    if not parameter.is_meta:
                        draw_held(parameter, generator)


# ---- opening ----------------------------------------------------------------------------------------


def open_eagle(path: str | Path, target: DecoderConfig, *, dummy: bool = False) -> DraftCheckpoint:
    """Open an EAGLE or EAGLE-2 head for ``target``. ``dummy`` needs config.json only and draws random weights.

    Raises CheckpointError naming what is missing, broken or does not fit.
    """
    directory = find_directory(path)
    raw = read_config(directory)
    if "speculators_model_type" in raw:
        raise CheckpointError(
            f"{directory}: a speculators head of type {raw['speculators_model_type']!r} is not read by the method "
            "eagle. An EAGLE-3 head goes with the method eagle3."
        )
    layer = layer_config(raw, raw, target, directory)
    tensors = None if dummy else head_tensors(directory)
    if tensors is not None and "layers.0.hidden_norm.weight" in tensors:
        raise CheckpointError(f"{directory} is an EAGLE-3 head (it has a hidden_norm): give the method eagle3.")
    config = DraftConfig(
        layer=layer,
        target_hidden=target_hidden_size(raw, layer, target, directory),
        draft_vocab=target.vocab_size,
        fc_bias=tensors is not None and "fc.bias" in tensors,
        input_norm=tensors is not None and "layers.0.input_layernorm.weight" in tensors,
    )
    if layer.hidden_size != config.target_hidden:
        raise CheckpointError(
            f"{directory}: the head's hidden size is {layer.hidden_size}, the target's {config.target_hidden}; an "
            "EAGLE-1 head reads and predicts the target's hidden states, so they must be equal."
        )
    opened = DraftCheckpoint(directory, EagleHead, config, tied_embeddings(raw), tensors, None)
    opened.check()
    return opened


def open_eagle3(
    path: str | Path, target: DecoderConfig, *, dummy: bool = False, convention: str = "auto"
) -> DraftCheckpoint:
    """Open an EAGLE-3 head for ``target``, in the original's, SGLang's or speculators' layout. Logs the layers it reads
    and why.

    dummy: needs config.json only and draws random weights.
    convention: meaning of the layer ids, one of CONVENTIONS. A speculators head without ``norm_before_residual`` has
        it, as in vLLM. Raises CheckpointError naming what is missing, broken or does not fit.
    """
    directory = find_directory(path)
    raw = read_config(directory)
    fields, settings = _eagle3_settings(raw, directory)
    speculators = fields is not raw
    layer = layer_config(fields, raw, target, directory)
    tensors = None if dummy else head_tensors(directory)
    if tensors is not None and "layers.0.hidden_norm.weight" not in tensors:
        raise CheckpointError(
            f"{directory} is no EAGLE-3 head: tensor layers.0.hidden_norm.weight (midlayer.hidden_norm.weight) is "
            "missing. An EAGLE-1 head goes with the method eagle."
        )
    draft_vocab = settings.get("draft_vocab_size") or target.vocab_size
    if not isinstance(draft_vocab, int) or not 1 <= draft_vocab <= target.vocab_size:
        raise CheckpointError(
            f"{directory}: draft_vocab_size={draft_vocab!r}: it must be from 1 to the target's {target.vocab_size}."
        )
    layers, why = _aux_layers(settings, speculators, target.num_layers, convention, directory)
    config = DraftConfig(
        layer=layer,
        target_hidden=target_hidden_size(settings, layer, target, directory),
        draft_vocab=draft_vocab,
        fc_bias=tensors is not None and "fc.bias" in tensors,
        aux_layers=layers,
        norm_before_residual=bool(settings.get("norm_before_residual", speculators)),
        **{name: bool(settings.get(name, False)) for name in ("norm_before_fc", "fc_norm", "norm_output")},
    )
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(f"{directory}: norm_before_fc and fc_norm exclude each other; config.json has both.")
    ids = target_ids(tensors, draft_vocab, target.vocab_size, directory)
    opened = DraftCheckpoint(directory, Eagle3Head, config, tied_embeddings(fields), tensors, ids, why)
    opened.check()
    return opened


def _eagle3_settings(raw: dict[str, Any], directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of the transformer layer, the head's own settings) of either layout."""
    kind = raw.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise CheckpointError(f"{directory}: speculators_model_type={kind!r} is not supported; 'eagle3' is.")
    if "mask_token_id" in raw:
        raise CheckpointError(f"{directory} is a P-EAGLE head (it has a mask_token_id), which is not supported.")
    nested = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state", True) is False:
        raise CheckpointError(
            f"{directory}: eagle_config.use_aux_hidden_state is false; only heads that read several layers are read."
        )
    fields = raw.get("transformer_layer_config") if "speculators_model_type" in raw else raw
    if not isinstance(fields, dict):
        raise CheckpointError(f"{directory / 'config.json'} has no transformer_layer_config.")
    return fields, {**nested, **raw}


def layer_config(
    fields: Mapping[str, Any], raw: Mapping[str, Any], target: DecoderConfig, directory: Path, single: bool = True
) -> DecoderConfig:
    """The head's decoder layers, read by the family of its ``model_type``. single: more than one layer is an error."""
    model_type = fields.get("model_type", "llama")
    if model_type not in DRAFT_LAYERS:
        raise CheckpointError(
            f"{directory}: a head with layers of model_type {model_type!r} is not supported. Supported: "
            f"{', '.join(sorted(DRAFT_LAYERS))}."
        )
    check_formula(DRAFT_LAYERS[model_type], fields, directory / CONFIG)
    values = {k: v for k, v in fields.items() if k != "model_type"}

    def by_transformers() -> Any:
        return from_transformers("AutoConfig").for_model(model_type, **values)

    try:
        hf_config = stored_config(json.dumps([model_type, values], sort_keys=True).encode(), "", by_transformers)
        hf_config.architectures = raw.get("architectures") or ["draft head"]
        config: DecoderConfig = catalog.models.load(DRAFT_LAYERS[model_type]).read(hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    except Exception as error:  # transformers validates with many exception types
        raise CheckpointError(f"{directory / 'config.json'} is not a valid config: {error}") from error
    if single and config.num_layers != 1:
        raise CheckpointError(f"{directory}: a head of {config.num_layers} layers is not supported; one layer is.")
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{directory}: the head's vocab_size is {config.vocab_size}, the target's {target.vocab_size}: it was made "
            "for another target."
        )
    attention = cast(AttentionSpec, config.attention)  # those of DRAFT_LAYERS attend over heads
    attention = dataclasses.replace(attention, qkv_bias=attention.qkv_bias or bool(fields.get("qkv_bias")))
    layers = tuple(dataclasses.replace(layer, mixer=attention) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, tie_embeddings=False)


def tied_embeddings(fields: Mapping[str, Any]) -> bool:
    """True if the head's LM head is its embedding."""
    return bool(fields.get("tie_word_embeddings", False))


def target_hidden_size(
    settings: Mapping[str, Any], layer: DecoderConfig, target: DecoderConfig, directory: Path
) -> int:
    """Size of the target's hidden states. Raises CheckpointError if the head was made for another size."""
    size = settings.get("target_hidden_size") or layer.hidden_size
    if size != target.hidden_size:
        raise CheckpointError(
            f"{directory}: the head reads hidden states of size {size}, the target's have {target.hidden_size}: it was "
            "made for another target."
        )
    return size


# ---- layers -----------------------------------------------------------------------------------------


def _aux_layers(
    settings: Mapping[str, Any], speculators: bool, num_layers: int, convention: str, directory: Path
) -> tuple[tuple[int, ...], str]:
    """(the layers whose inputs the head reads, how that is known); logs the choice."""
    layer_ids = settings.get("eagle_aux_hidden_state_layer_ids")
    layers: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    why, sure = "the default, config.json names none", True
    if not layer_ids:
        if min(layers) < 0:
            raise CheckpointError(
                f"{directory}: config.json has no eagle_aux_hidden_state_layer_ids, and the default {list(layers)} "
                f"does not fit a target of {num_layers} layers. Name the layers."
            )
    else:
        if not isinstance(layer_ids, list) or not all(isinstance(i, int) and i >= 0 for i in layer_ids):
            raise CheckpointError(
                f"{directory}: eagle_aux_hidden_state_layer_ids={layer_ids!r} must list layer numbers."
            )
        layers, why, sure = infer_aux_layers(layer_ids, num_layers, convention, speculators)
    if max(layers) > num_layers:
        raise CheckpointError(
            f"{directory}: eagle_aux_hidden_state_layer_ids={layer_ids} name the inputs of layers {list(layers)} "
            f"({why}); the target has {num_layers} layers."
        )
    message = "%s reads the inputs of the target's layers %s: %s."
    if sure:
        logger.info(message, directory, list(layers), why)
    else:
        message += ' If acceptance is low, set "aux_layers" to "input" or "output" in the speculative config.'
        logger.warning(message, directory, list(layers), why)
    return layers, why


def infer_aux_layers(
    layer_ids: Sequence[int], num_layers: int, convention: str = "auto", speculators: bool = False
) -> tuple[tuple[int, ...], str, bool]:
    """Resolve layer ids that may name layers whose *inputs* are read, or layers whose *outputs* are.

    The output of layer X is the input of layer X + 1. Trainers start at the same place, which one calls 1 and the other
    2; a list that contains the number of layers can only name inputs. Returns (the layers whose inputs are read, how
    that was inferred, True if it is certain).
    """
    inputs, outputs = tuple(layer_ids), tuple(i + 1 for i in layer_ids)
    if convention != "auto":
        return (inputs if convention == "input" else outputs), f"set in the speculative config ({convention})", True
    if max(layer_ids) >= num_layers:
        return inputs, f"{list(layer_ids)} can only name inputs, for the last output is that of {num_layers - 1}", True
    if layer_ids[0] == 1:
        why = f"{list(layer_ids)} starts at 1, so it names outputs"
        return outputs, f"{why}, though speculators' own convention is inputs" if speculators else why, not speculators
    if layer_ids[0] == 2 or speculators:
        return inputs, f"{list(layer_ids)} names inputs" + (" (it starts at 2)" if layer_ids[0] == 2 else ""), True
    return inputs, f"{list(layer_ids)} starts at neither 1 nor 2; taken to name inputs, it may name outputs", False


# ---- tensors ----------------------------------------------------------------------------------------


def head_tensors(directory: Path) -> dict[str, TensorInfo]:
    """Header of every tensor by its speculators name, from safetensors or the original's pickle."""
    pickled = directory / PICKLE
    if pickled.exists() and not any(directory.glob("*.safetensors*")):
        stored = tensor_files.read_pickle(pickled)
    else:
        stored = read_tensors(directory)
    return {re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model.")): info for name, info in stored.items()}


def target_ids(
    tensors: Mapping[str, TensorInfo] | None, draft_vocab: int, vocab: int, directory: Path
) -> torch.Tensor | None:
    """The target's token of each draft token, ``i + d2t[i]``: [V'] int32, strictly ascending. None: the same."""
    each = torch.arange(draft_vocab)
    if tensors is None:
        return None if draft_vocab == vocab else (each * vocab // draft_vocab).int()
    if "d2t" not in tensors:
        if draft_vocab == vocab:
            return None
        raise CheckpointError(
            f"{directory}: tensor d2t is missing: it must say which of the target's {vocab} tokens each of the "
            f"{draft_vocab} draft tokens is."
        )
    offsets = tensor_files.tensor("d2t", tensors)
    if offsets.shape != each.shape or offsets.is_floating_point():
        raise CheckpointError(
            f"{directory}: tensor d2t is {list(offsets.shape)} of {offsets.dtype}; it must be [{draft_vocab}] integers."
        )
    ids = each + offsets.long()
    if not bool((ids.diff() > 0).all()) or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab:
        raise CheckpointError(
            f"{directory}: d2t does not map: i + d2t[i] must ascend from 0 or more to less than the target's {vocab} "
            f"tokens, and goes from {int(ids[0])} to {int(ids[-1])}. d2t holds offsets, not token ids."
        )
    known = tensor_files.tensor("t2d", tensors) if "t2d" in tensors else None
    if known is not None and (known.shape != (vocab,) or not torch.equal(known.nonzero()[:, 0], ids)):
        raise CheckpointError(f"{directory}: t2d and d2t name different draft tokens; the head is damaged.")
    return None if draft_vocab == vocab else ids.int()
