"""Block drafters on disk: DFlash and DFlash2 as published (z-lab), DSpark as published, and speculators' layout.

Reads a head's config.json, infers which target layers its context reads, which row predicts the first draft and how
its layers mask a block, and checks that it fits the target. Inferred settings are logged: with a wrong one a head
drafts garbage and no text shows it. Called by the block drafters. Formats: https://github.com/z-lab/dflash,
https://github.com/vllm-project/speculators.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from unisono.config.catalog import find_directory
from unisono.drafters.block.model import BlockConfig, BlockHead, ConfidenceInputs
from unisono.drafters.block.variants import MarkovHead, SelectingHead
from unisono.drafters.eagle.checkpoint import (
    DraftCheckpoint,
    head_tensors,
    layer_config,
    target_hidden_size,
    target_ids,
    tied_embeddings,
)
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import AttentionSpec
from unisono.models.config import DecoderConfig, checkpoint_name
from unisono.models.families.qwen3 import QWEN3
from unisono.models.load.checkpoint import read_config
from unisono.types import CheckpointError

logger = logging.getLogger(__name__)

SLIDING = "sliding_attention"

_CONVS = [f"layers.*.{conv}{part}" for conv in ("attention_conv", "mlp_conv") for part in ("", ".kernel_projection")]
_NAMES = {**QWEN3.names, **{name: name for name in _CONVS}}
"""Module of a layer -> module of a checkpoint."""

ARCHITECTURES = {
    "DFlash2DraftModel": "dflash",
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
    "Qwen3DSparkModel": "dspark",
}
"""Architecture in config.json -> method."""

_NESTED = {
    "attention_sink_bias", "block_size", "causal", "conv_group_size", "conv_kernel_size", "final_logit_softcapping",
    "input_embedding_scale", "mask_token_id", "output_multiplier", "projector_type", "sample_from_anchor",
    "selector_rank", "selector_top_k", "shift_label", "swa_window_size", "target_layer_ids", "use_aux_hidden_state",
    "use_swa",
}  # fmt: skip
"""HeadFields of ``dflash_config`` that are read, here or to refuse them."""

_OWN = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers", "is_causal", "causal")
"""HeadFields of the layers that are read here, not by the family of their ``model_type``."""

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "is_neox_style": (True,),
    "markov_head_type": ("vanilla",),
    "projector_type": ("dflash",),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
    "final_logit_softcap": (0, 0.0),
}
"""Field -> values that are computed; other values are refused."""


@dataclass(frozen=True)
class HeadFields:
    """The fields of a head's config.json in either layout.

    raw: config.json. layers: fields of its decoder layers. nested: ``dflash_config``. speculators: the layout.
    """

    path: Path
    raw: Mapping[str, Any]
    layers: Mapping[str, Any]
    nested: Mapping[str, Any]
    speculators: bool

    @classmethod
    def read(cls, directory: Path) -> HeadFields:
        raw = read_config(directory)
        speculators = "speculators_model_type" in raw
        layers: Any = raw.get("transformer_layer_config") if speculators else raw
        nested = raw.get("dflash_config") or {}
        for name, value in (("transformer_layer_config", layers), ("dflash_config", nested)):
            if not isinstance(value, dict):
                raise CheckpointError(f"{directory / 'config.json'} has no {name}.")
        return cls(directory, raw, layers, nested, speculators)

    def get(self, name: str, default: Any = None) -> Any:
        """A setting of the head: from ``dflash_config``, else from the top level."""
        value = self.nested.get(name)
        value = self.raw.get(name) if value is None else value
        return default if value is None else value

    def number(self, name: str, least: int, default: int | None = None) -> int:
        """A whole number from ``least`` on. Raises CheckpointError for others."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"{self.path}: {name}={value!r}: it must be a whole number from {least} on.")
        return value

    @property
    def method(self) -> str:
        """The method that reads this head. Raises CheckpointError for other kinds of heads."""
        kind = self.raw.get("speculators_model_type")
        architectures = self.raw.get("architectures") or [None]
        kinds = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}
        found = kinds.get(kind) if kind else ARCHITECTURES.get(architectures[0])
        if found is None:
            named = f"speculators_model_type={kind!r}" if kind else f"architectures={architectures!r}"
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(
                f"{self.path}: {named} is not a block drafter that is supported. Supported: {known}, and speculators' "
                "'dflash', 'dflash2' and 'dspark'."
            )
        return found


@dataclass(frozen=True)
class BlockCheckpoint(DraftCheckpoint):
    """The opened directory of a block drafter that fits its target. Made by :func:`open_block`.

    why_first: how it is known which row predicts the first draft.
    """

    why_first: str = ""

    @property
    def settings(self) -> BlockConfig:
        """:attr:`config`, as block drafters have it."""
        return cast(BlockConfig, self.config)

    @property
    def ragged(self) -> bool:
        """True if blocks of any widths fill one pass: the first mask predicts the first draft, nothing convolves over
        equal widths, and no window is counted from the first token of blocks without an order.
        """
        settings = self.settings
        windows = zip(settings.layer.windows, settings.causal, strict=True)
        counted = any(window > 0 and not causal for window, causal in windows)
        return cast(Any, self.kind) is BlockHead and not settings.from_anchor and not counted

    def stored_name(self, module: str) -> str:
        if not module.startswith("layers."):
            return {"embed": "embed_tokens"}.get(module, module)
        return checkpoint_name(_NAMES, module).removeprefix("model.")

    def unexpected(self, name: str) -> str | None:
        """As :meth:`DraftCheckpoint.unexpected`. Copies of the target's modules are not read, nor a confidence head
        that is turned off."""
        if re.match(r"verifier_|confidence_head\.|mask_embedding$", name):
            return None
        return super().unexpected(name)

    def choices(self, head: Any, target: Decoder) -> list[tuple[str, str, str]]:
        settings = self.settings
        row = "the last token's" if settings.from_anchor else "the first mask's"
        masks = ["causal" if causal else "whole block" for causal in settings.causal]
        windows = [f", window {window}" if window else "" for window in settings.layer.windows]
        layers = dict.fromkeys(mask + window for mask, window in zip(masks, windows, strict=True))
        return [
            *super().choices(head, target),
            ("row of the first draft", row, self.why_first),
            ("block", f"{settings.block_size} tokens; layers: {' and '.join(layers)}", "config.json of the head"),
        ]


def open_block(
    path: str | Path, target: DecoderConfig, method: str, *, dummy: bool = False, convention: str = "auto",
    first_draft: str = "auto",
) -> BlockCheckpoint:  # fmt: skip
    """Open a block drafter for ``target``. Logs the layers it reads and why.

    method: the drafter that opens it. dummy: needs config.json only and draws random weights. convention: meaning of
    the layer ids, one of ``eagle.checkpoint.CONVENTIONS``. first_draft: ``anchor``, ``mask``, or auto. Raises
    CheckpointError naming what is missing, broken, not supported or does not fit.
    """
    fields = HeadFields.read(find_directory(path))
    directory = fields.path
    if fields.method != method:
        raise CheckpointError(f"{directory} is a {fields.method} head: give the method {fields.method!r}.")
    _check_supported(fields)
    own = {name: value for name, value in fields.layers.items() if name not in (*_OWN, "final_logit_softcapping")}
    config = layer_config(own, fields.raw, target, directory, single=False)
    windows, causal = _masks(fields, config.num_layers)
    attention = cast(AttentionSpec, config.attention)  # layer_config makes no other
    layers = tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(attention, window=window))
        for layer, window in zip(config.layers, windows, strict=True)
    )
    config = dataclasses.replace(config, layers=layers)
    tensors = None if dummy else head_tensors(directory)
    if tensors is not None:
        tensors = {re.sub(r"(_codebook)\.weight$", r"\1", name): info for name, info in tensors.items()}
    draft_vocab = fields.get("draft_vocab_size", target.vocab_size)
    if not isinstance(draft_vocab, int) or not 1 <= draft_vocab <= target.vocab_size:
        raise CheckpointError(
            f"{directory}: draft_vocab_size={draft_vocab!r}: it must be from 1 to the target's {target.vocab_size}."
        )
    aux_layers, why = _aux_layers(fields, target.num_layers, convention)
    from_anchor, why_first = _from_anchor(fields, method, first_draft)
    settings = BlockConfig(
        layer=config,
        target_hidden=target_hidden_size(fields.raw, config, target, directory),
        draft_vocab=draft_vocab,
        aux_layers=aux_layers,
        block_size=fields.number("block_size", 1 if from_anchor else 2, 8 if fields.speculators else 16),
        mask_token=_mask_token(fields, target.vocab_size),
        causal=causal,
        from_anchor=from_anchor,
        embed_scale=float(fields.get("input_embedding_scale", 1.0)),
        logit_scale=float(fields.get("output_multiplier", 1.0)),
        logit_cap=float(fields.get("final_logit_softcapping", 0.0)),
        mask_embedding=method == "dflash" and tensors is not None and "mask_embedding" in tensors,
        fc_bias=tensors is not None and "fc.bias" in tensors,
    )
    kind, settings = _variant(fields, method, settings, tensors)
    ids = target_ids(tensors, draft_vocab, target.vocab_size, directory)
    tied = tied_embeddings(fields.layers)
    opened = BlockCheckpoint(directory, kind, settings, tied, tensors, ids, why, why_first)  # type: ignore[arg-type]
    opened.check()
    return opened


def _confidence(fields: HeadFields, tensors: Mapping[str, Any] | None, hidden_size: int) -> ConfidenceInputs | None:
    """Inputs of the confidence head of a DSpark checkpoint; None if it has none.

    tensors: those of the checkpoint. A config that does not say if the head reads the Markov row leaves it to the size
    of the weight.
    """
    stored = tensors or {}
    weight = stored.get("confidence_head.proj.weight")
    if not fields.get("enable_confidence_head", weight is not None):
        return None
    wider = weight is not None and weight.shape[-1] != hidden_size
    with_markov = bool(fields.get("confidence_head_with_markov", wider))
    return ConfidenceInputs(with_markov, "confidence_head.proj.bias" in stored)


def _variant(
    fields: HeadFields, method: str, settings: BlockConfig, tensors: Mapping[str, Any] | None
) -> tuple[type[BlockHead], BlockConfig]:
    """(the module of this kind of head, the config with its sizes)."""
    if method == "dspark":
        confidence = _confidence(fields, tensors, settings.layer.hidden_size)
        return MarkovHead, dataclasses.replace(
            settings, markov_rank=fields.number("markov_rank", 1), confidence=confidence
        )
    if fields.get("conv_kernel_size") is None:
        return BlockHead, settings
    taps, group = fields.number("conv_kernel_size", 1), fields.number("conv_group_size", 1)
    if settings.layer.hidden_size % group:
        raise CheckpointError(
            f"{fields.path}: conv_group_size={group} must divide the hidden size {settings.layer.hidden_size}."
        )
    if settings.draft_vocab != settings.layer.vocab_size:
        raise CheckpointError(
            f"{fields.path}: a DFlash2 head with draft_vocab_size={settings.draft_vocab} is not supported; the "
            f"target's vocabulary of {settings.layer.vocab_size} is."
        )
    rank, most = fields.number("selector_rank", 1), fields.number("selector_top_k", 1)
    most = min(most, settings.draft_vocab)
    return SelectingHead, dataclasses.replace(
        settings, conv=(taps, group), selector_rank=rank, selector_candidates=most
    )


def _check_supported(fields: HeadFields) -> None:
    """Raise CheckpointError for a field that changes the formula to one that is not computed; warn of unknown ones."""
    for name, values in _UNSUPPORTED.items():
        if (value := fields.get(name)) is not None and value not in values:
            raise CheckpointError(f"{fields.path}: {name}={value!r} is not supported; {values[0]!r} is.")
    layers = fields.get("num_target_layers")
    if unread := sorted(fields.nested.keys() - _NESTED):
        logger.warning("%s: dflash_config has fields that are not read: %s.", fields.path, ", ".join(unread))
    if layers is not None and not isinstance(layers, int):
        raise CheckpointError(f"{fields.path}: num_target_layers={layers!r} must be a whole number.")


def _mask_token(fields: HeadFields, vocab: int) -> int:
    if fields.get("mask_token_id") is None:
        raise CheckpointError(
            f"{fields.path}: config.json has no mask_token_id: a head whose mask is added to the tokenizer when it is "
            "served is not supported."
        )
    token = fields.number("mask_token_id", 0)
    if token >= vocab:
        raise CheckpointError(
            f"{fields.path}: mask_token_id={token} is not in the target's vocabulary of {vocab}: the head was made for "
            "another target."
        )
    return token


def _masks(fields: HeadFields, num_layers: int) -> tuple[list[int], tuple[bool, ...]]:
    """(window of each layer, whether its blocks are causal); a window of 0 sees everything.

    Published heads: ``is_causal``, else ``dflash_config.causal``, else layers with a window are causal; ``use_swa``
    gives every layer a window. speculators: layers without a window never are, the others unless
    ``sliding_window_non_causal``.
    """
    types = fields.layers.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != num_layers):
        raise CheckpointError(
            f"{fields.path}: layer_types={types!r} must have one entry for each of {num_layers} layers."
        )
    if types is not None and (other := sorted({*map(str, types)} - {SLIDING, "full_attention"})):
        raise CheckpointError(f"{fields.path}: layer_types with {', '.join(other)} are not supported.")
    if types is None and fields.layers.get("use_sliding_window") and not fields.get("use_swa"):
        raise CheckpointError(
            f"{fields.path}: use_sliding_window is set, but layer_types do not say which layers have one."
        )
    slides = [kind == SLIDING for kind in types or ["full_attention"] * num_layers]
    if fields.speculators:
        causal = [each and not fields.raw.get("sliding_window_non_causal", False) for each in slides]
    else:
        stated = next((v for v in (fields.raw.get("is_causal"), fields.nested.get("causal")) if v is not None), None)
        causal = slides if stated is None else [bool(stated)] * num_layers
        if fields.get("use_swa") and not any(slides):
            slides = [True] * num_layers
    window: Any = fields.get("swa_window_size") or fields.layers.get("sliding_window")
    if any(slides) and (not isinstance(window, int) or window < 1):
        raise CheckpointError(f"{fields.path}: sliding_window={window!r}: layers with a window need a whole number.")
    # speculators counts a block's window from before its first token, the others from the token itself
    return [window + (fields.speculators and not c) if s else 0 for s, c in zip(slides, causal, strict=True)], tuple(
        causal
    )


def _aux_layers(fields: HeadFields, num_layers: int, convention: str) -> tuple[tuple[int, ...], str]:
    """(the target layers whose inputs the context reads, how that is known); logs the choice."""
    name, usual = "target_layer_ids", "output"
    layer_ids = fields.get(name)
    for other in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        if layer_ids is None:
            name, usual = other, "input"
            layer_ids = fields.get(other)
    if layer_ids is None and not fields.speculators:
        name, usual = "without target_layer_ids the head's code", "output"
        layer_ids = _spread(num_layers, fields.layers)
    if not layer_ids or not _numbers(layer_ids):
        raise CheckpointError(
            f"{fields.path}: config.json has {layer_ids!r} for target_layer_ids (speculators: "
            "aux_hidden_state_layer_ids); it must list the target layers that the head reads."
        )
    why = f"{name} names {usual}s of layers"
    if convention != "auto":
        usual, why = convention, f"set in the speculative config ({convention})"
    layers = tuple(i + (usual == "output") for i in layer_ids)
    made_for = fields.get("num_target_layers", num_layers)
    if max(layers) > num_layers or made_for != num_layers:
        raise CheckpointError(
            f"{fields.path}: the head reads the inputs of layers {list(layers)} ({why}) of a target of "
            f"{made_for} layers; the target has {num_layers} layers."
        )
    logger.info("%s reads the inputs of the target's layers %s: %s.", fields.path, list(layers), why)
    if num_layers in layers:
        logger.warning("%s reads the last layer's output, which is taken before the final norm.", fields.path)
    return layers, why


def _spread(num_layers: int, head: Mapping[str, Any]) -> list[int] | None:
    """The layers that a published head without a list reads: one for each layer of its own, evenly from the target's
    second to its third from the end. None if the target is too small.
    """
    count, last = head.get("num_hidden_layers"), num_layers - 3
    if not isinstance(count, int) or not 1 <= count <= last:
        return None
    if count == 1:
        return [num_layers // 2]
    return [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]


def _numbers(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(i, int) and i >= 0 for i in values)


def _from_anchor(fields: HeadFields, method: str, first_draft: str) -> tuple[bool, str]:
    """(True if the last token's row predicts the first draft, how that is known)."""
    if first_draft != "auto":
        return first_draft == "anchor", f"set in the speculative config ({first_draft})"
    stated = fields.get("sample_from_anchor")
    if stated is not None:
        return bool(stated), f"sample_from_anchor={bool(stated)}"
    anchor = method == "dspark" and not fields.speculators
    return anchor, f"the default of a {method} head" + (" in speculators' layout" if fields.speculators else "")
