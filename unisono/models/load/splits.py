"""Report of a model's division among ranks, and the sizes of its gathers, for ``explain``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import nn

from unisono.layers.experts import Experts
from unisono.layers.formats.base import WHOLE
from unisono.layers.linear import Linear
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.latent_attention import LatentAttention

SHOWN = 3
"""Undivided layers listed by name."""


def split_decisions(model: Decoder) -> Iterator[tuple[str, str, str]]:
    """(name, value, reason) of how a model is divided among its ranks."""
    ranks = model.builder.ranks
    divided = "products are divided by outputs, and no sum is"
    if ranks.ordered:
        summed = sum(isinstance(module, Linear) and module.sums for module in model.modules())
        divided = f"--tp-reduce ordered: {summed} products are divided by inputs, the others by outputs; another "
        divided += "number of ranks gives other bytes"
    yield "ranks", str(ranks.count), f"--tensor-parallel-size: {divided}"
    held = sum(p.numel() for p in model.parameters() if hasattr(p, "part_of"))
    total = sum(p.numel() for p in model.parameters())
    whole = "whole on each: embedding, norms, routers, drafters, the vision tower"
    if undivided := list(dict.fromkeys(model.builder.undivided)):
        more = f" and {len(undivided) - SHOWN} more" if len(undivided) > SHOWN else ""
        whole += f"; and because their outputs cannot be divided: {', '.join(undivided[:SHOWN])}{more}"
    experts = "; experts whole on a rank" if ranks.whole_experts else ""
    if ranks.placement:
        experts += f", those of {len(ranks.placement)} layers in the order of --expert-placement"
    yield "split", f"{held} of {total} weights of a rank are its part alone", whole + experts
    of_layers, of_head = (
        list(chain.from_iterable(map(_gather_bytes, model.layers.modules()))),
        list(_gather_bytes(model.lm_head)),
    )
    logits = f", and {of_head[0]} for each row of logits" if of_head else ""
    value = f"{len(of_layers)} a pass, {sum(of_layers)} bytes a token"
    yield (
        "gathers",
        value + logits,
        f"what a rank says to each other one, in the largest {max(of_layers)} bytes a token",
    )


def _gather_bytes(module: nn.Module) -> Iterator[int]:
    """Bytes sent by a rank per token in each gather of a module, without those of its submodules."""
    if isinstance(module, Linear):
        size = module.dtype.itemsize
        if module.split_inputs:
            yield module.inputs // module.ranks.count * size
        if module.sums:
            yield module.outputs * size
        if module.joins:
            yield module.outputs * size
    elif isinstance(module, LatentAttention) and module.ranks.dp_attention:
        yield module.spec.num_heads * module.spec.value_dim * module.dtype.itemsize
    elif isinstance(module, Experts):
        gate_up, down = module.stacks
        size = down.dtype.itemsize
        if gate_up.rows != WHOLE:
            yield gate_up.outputs // 2 * (module.top_k + gate_up.rides) * size
            yield down.outputs * size
        elif gate_up.share != WHOLE:
            yield down.outputs * module.top_k * size
