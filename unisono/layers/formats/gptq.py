"""Readers of GPTQ's and AutoRound's ``quantization_config``: weights of 4 bits (``formats/int4.py``) or 8
(``formats/int8.py``), with inputs in the order of their places or of their activations
(``formats/activation_order.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unisono.config.preflight.quantization import check_auto_round, check_gptq
from unisono.layers.formats.activation_order import ActivationOrder
from unisono.layers.formats.base import PLAIN, WeightFormat
from unisono.layers.formats.int4 import AWQ, GPTQ
from unisono.layers.formats.int8 import GPTQ8
from unisono.layers.formats.module_patterns import named


def read(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module, from a ``quantization_config`` with quant_method "gptq". Raises CheckpointError.

    ``modules_in_block_to_quantize`` lists the quantised modules of a layer; ``dynamic`` lists exceptions, as
    expressions that begin with "-:".
    """
    check_gptq(config)
    kept = ["lm_head", *(config.get("modules_to_not_convert") or ())]
    kept += [rule.removeprefix("-:") for rule in config.get("dynamic") or ()]
    listed = config.get("modules_in_block_to_quantize")
    quantised = None if not listed else [n for names in listed for n in ([names] if isinstance(names, str) else names)]
    offset = 1 if config.get("checkpoint_format", "gptq") == "gptq" else 0
    kind, group = GPTQ8 if config.get("bits", 4) == 8 else GPTQ, config.get("group_size", 128)
    format: WeightFormat = kind(group, zero_offset=offset)
    if config.get("desc_act", False) and group > 0:
        format = ActivationOrder(kind(group, zero_offset=offset))

    def choose(module: str) -> WeightFormat:
        is_plain = named(module, kept) or (quantised is not None and not named(module, quantised))
        return PLAIN if is_plain else format

    return choose


def read_auto_round(config: Mapping[str, Any]) -> Callable[[str], WeightFormat]:
    """Format of each module, from AutoRound's ``quantization_config``: its packings are AWQ's, or GPTQ's without g_idx.

    Raises CheckpointError.
    """
    check_auto_round(config)
    group = config.get("group_size", 128)
    kind = GPTQ8 if config.get("bits", 4) == 8 else GPTQ
    format: WeightFormat = AWQ(group) if config["packing_format"].endswith("awq") else kind(group, listed=False)
    kept = ("lm_head", *(config.get("extra_config") or ()))
    blocks = config.get("block_name_to_quantize")
    blocks = [each.strip() for each in blocks.split(",")] if isinstance(blocks, str) else blocks

    def choose(module: str) -> WeightFormat:
        return PLAIN if named(module, kept) or (blocks and not named(module, blocks)) else format

    return choose
