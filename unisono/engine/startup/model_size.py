"""Sizes of a model that is built on the meta device, and the defaults that fit beside it.

Recurrent layers keep a state for every request that runs, of 151 MB in Qwen3.8-27B, whatever its length. The usual
number of requests would fill a small GPU with it, and the usual prompt pass with activations, so the defaults are lower
there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.config import Hardware, ResolvedConfig, catalog
from unisono.config.engine import GPU_SIZES
from unisono.config.gguf.directory import source as gguf_source
from unisono.config.preflight.weights import check_weights
from unisono.distributed.gather import ALONE, Ranks
from unisono.drafters.from_checkpoint import drafting_bytes
from unisono.drafters.quantization import copied_head_bytes
from unisono.engine.startup.memory import GPU_SLACK
from unisono.kv.specs import PAGE_SIZE, Paged, PerSlot, Recurrent, leaves
from unisono.layers.experts import Experts
from unisono.layers.linear import Linear
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import AttentionSpec
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import Checkpoint, read_tensors
from unisono.models.load.tensor_files import nbytes

STATE_SHARE = 0.55
"""Largest share of the bytes beside the weights that states take by default; 35B-A3B in fp8 keeps 256 on 80 GB."""

PASS_SHARE, LEAST_TOKENS = 0.2, 512
"""Largest share of the same bytes that activations of a prompt pass take by default, and its least tokens."""

CONTEXT_BYTES = 1 << 30
"""Bytes of a GPU that CUDA, its libraries, loaded kernels and tables take: an estimate."""

STATES_BESIDE = 2
"""States beside those of requests: of padding and of the first snapshot."""

COPY_SHARE = 0.25
"""Largest share of what weights leave that an fp8 copy of the LM head, for drafts, takes by default."""

SMALL_GPU = 48 << 30
"""Bytes that an engine may use below which any model's default sizes are fitted; above, those of recurrent layers."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a model's state. token: per token of keys and values. request: per request, for its other state."""

    token: int
    request: int

    @classmethod
    def of(cls, specs: Any, width: int) -> StateBytes:
        """Build the store of declared specs. width: tokens per request in the widest round, 1 + drafts."""
        found = list(leaves(specs))
        pages = sum(each.page_bytes for each in found if isinstance(each, Paged))
        slots = sum(each.slot_bytes for each in found if isinstance(each, PerSlot))
        recurrent = sum(each.row_bytes(width) for each in found if isinstance(each, Recurrent))
        return cls(pages // PAGE_SIZE, slots + recurrent)


@dataclass(frozen=True)
class PassBytes:
    """Estimate of a prompt pass's memory. token: bytes of a token's activations. unpacked: of the largest weight that
    is unpacked for a product."""

    token: int
    unpacked: int

    @classmethod
    def of(cls, model: Decoder) -> PassBytes:
        """Estimate for a decoder, which may be on the meta device: the residual stream, and the widest product's result
        with what is made of it."""
        size, widest, unpacked = model.embed.weight.element_size(), 0, 0
        for module in model.layers.modules():
            if isinstance(module, Linear):
                widest = max(widest, module.outputs)
                if any(each.dtype is torch.uint8 for each in module.parameters(recurse=False)):
                    unpacked = max(unpacked, module.outputs * module.input_share.size(module.inputs) * size)
            elif isinstance(module, Experts):
                widest = max(widest, module.top_k * sum(stack.outputs for stack in module.stacks))
        return cls(size * (4 * model.config.hidden_size + widest * 3 // 2), unpacked)

    def of_tokens(self, tokens: int) -> int:
        """Bytes of a pass of this number of tokens."""
        return self.unpacked + tokens * self.token


def on_meta(checkpoint: Checkpoint, config: ResolvedConfig) -> Decoder:
    """Build one rank's part of the decoder on the meta device. Raises ConfigError if it cannot be divided."""
    c, requested = checkpoint.config, config.requested
    ranks = ALONE
    if requested.tensor_parallel_size > 1:
        ranks = Ranks(
            0,
            requested.tensor_parallel_size,
            requested.enable_expert_parallel,
            ordered=requested.tp_reduce == "ordered",
            dp_attention=requested.enable_dp_attention,
        )
    c.check_divides(ranks)
    builder = Builder(
        c.hidden_size,
        c.rms_eps,
        config.dtype,
        "meta",
        no_attention,
        1,
        checkpoint.format_of_module,
        c.zero_centered_norms,
        ranks=ranks,
        kv_dtype=config.kv_dtype,
        wide_norms=c.wide_norms,
    )
    return Decoder(c, builder)


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters; shared ones count once."""
    return sum(each.numel() * each.element_size() for each in {id(p): p for p in module.parameters()}.values())


def drafter_bytes(config: ResolvedConfig, checkpoint: Checkpoint, model: Decoder, hardware: Hardware) -> int:
    """Bytes of the drafter's own files, or of its tensors among the target's weights. model: on the meta device.

    A copy of the target's LM head counts for modules from its own checkpoint alone.
    """
    spec = config.speculative
    if spec is None or spec.method == "none":
        return 0
    if spec.model is not None:
        return file_bytes(catalog.find_directory(spec.model))
    return drafting_bytes(checkpoint.path, spec, model, _multiplies_e4m3(hardware))


def file_bytes(directory: Path) -> int:
    """Bytes of all tensors in a directory as they are stored; 0 without weights."""
    if gguf_source(directory) is not None:
        return check_weights(directory)
    if not any(directory.glob("*.safetensors")):
        return 0
    return sum(map(nbytes, read_tensors(directory).values()))


def round_width(config: ResolvedConfig) -> int:
    """Tokens of a request in the widest round, 1 + drafts."""
    spec = config.speculative
    return 1 + (spec.num_speculative_tokens if spec is not None else 0)


def left_of(config: ResolvedConfig, weights: int, total: int) -> int:
    """Bytes of a GPU of ``total`` bytes beside weights, CUDA and the allocator's."""
    return int(config.requested.gpu_memory_utilization * total) - weights - GPU_SLACK - CONTEXT_BYTES


def fitting_sizes(
    config: ResolvedConfig, weights: int, state: StateBytes, largest: PassBytes, total: int
) -> ResolvedConfig:
    """Lower the defaults of ``max_num_batched_tokens`` and ``max_num_seqs`` to what fits beside the weights.

    Activations of a prompt pass take PASS_SHARE of what weights leave, states STATE_SHARE of the rest. weights, total:
    bytes of the weights and of the GPU. Numbers that the user set stay.
    """
    requested, left = config.requested, max(0, left_of(config, weights, total))
    tokens = config.max_num_batched_tokens
    if requested.max_num_batched_tokens is None and tokens == GPU_SIZES[2]:
        while tokens > LEAST_TOKENS and largest.of_tokens(tokens) > PASS_SHARE * left:
            tokens //= 2
        reason = f"activations take about {largest.token >> 10} KiB a token, and weights leave {left >> 20} MiB"
        config = _lowered(config, "max_num_batched_tokens", tokens, reason)
    if requested.max_num_seqs is None and state.request:
        beside = max(0, left - largest.of_tokens(tokens))
        fit = max(1, int(STATE_SHARE * beside) // state.request - STATES_BESIDE)
        reason = (
            f"a request has {state.request >> 20} MiB of recurrent state, and weights and a prompt pass leave "
            f"{beside >> 20} MiB: states take {STATE_SHARE:.0%} of these"
        )
        config = _lowered(config, "max_num_seqs", fit, reason)
    return config


def fitting_drafts(
    config: ResolvedConfig, weights: int, drafter: int, model: Decoder, hardware: Hardware
) -> tuple[ResolvedConfig, int]:
    """Turn the fp8 copy of the LM head off by default where it takes more than COPY_SHARE of what weights leave.

    weights, drafter: bytes of the target and of its drafter with the copy. Returns the drafter's bytes, too.
    """
    spec = config.speculative
    if not drafter or spec is None or spec.model is not None or "draft_quantization" in spec.options:
        return config, drafter
    copied = copied_head_bytes("auto", model.lm_head, _multiplies_e4m3(hardware))
    left = left_of(config, weights + drafter - copied, hardware.total_bytes)
    if not copied or copied <= COPY_SHARE * left:
        return config, drafter
    spec = replace(spec, options={**spec.options, "draft_quantization": "none"})
    reason = f"an fp8 copy of the LM head takes {copied >> 20} MiB, and weights leave {left >> 20} MiB"
    return config.decide("draft_quantization", "none", reason, speculative=spec), drafter - copied


def _multiplies_e4m3(hardware: Hardware) -> bool:
    return hardware.capability is not None and hardware.capability >= (8, 9)


def _lowered(config: ResolvedConfig, name: str, value: int, reason: str) -> ResolvedConfig:
    """Replace a default by a lower value, and its decision."""
    if value >= getattr(config, name):
        return config
    others = tuple(each for each in config.decisions if each.name != name)
    return replace(config, decisions=others).decide(name, value, reason, **{name: value})


def with_fitting_sizes(config: ResolvedConfig, checkpoint: Checkpoint) -> ResolvedConfig:
    """Apply :func:`fitting_sizes` on a GPU; on a large one only for models with other layers than plain attention."""
    requested = config.requested
    if config.device.type != "cuda":
        return config
    fixed = None not in (requested.max_num_seqs, requested.max_num_batched_tokens)
    attends = all(isinstance(layer.mixer, AttentionSpec) for layer in checkpoint.config.layers)
    hardware = Hardware.detect(requested.device)
    if (attends or fixed) and requested.gpu_memory_utilization * hardware.total_bytes >= SMALL_GPU:
        return config
    model = on_meta(checkpoint, config)
    weights, drafter = module_bytes(model), drafter_bytes(config, checkpoint, model, hardware)
    config, drafter = fitting_drafts(config, weights, drafter, model, hardware)
    state = StateBytes.of(model.state_specs(), round_width(config))
    return fitting_sizes(config, weights + drafter, state, PassBytes.of(model), hardware.total_bytes)
