"""Sizes of a model that is built on the meta device, and the number of requests whose state fits beside it.

Recurrent layers keep a state for every request that runs, of 151 MB in Qwen3.8-27B, whatever its length. The usual
number of requests would fill a small GPU with it, so the default is lower there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from unisono.config import Hardware, ResolvedConfig, catalog
from unisono.config.gguf.directory import source as gguf_source
from unisono.config.preflight.weights import check_weights
from unisono.distributed.gather import ALONE, Ranks
from unisono.drafters.from_checkpoint import drafting_bytes
from unisono.engine.startup.memory import GPU_SLACK
from unisono.kv.specs import PAGE_SIZE, Paged, PerSlot, Recurrent, leaves
from unisono.models.blocks.decoder import Decoder
from unisono.models.blocks.layers import AttentionSpec
from unisono.models.load.build import Builder, no_attention
from unisono.models.load.checkpoint import Checkpoint, read_tensors
from unisono.models.load.tensor_files import nbytes

STATE_SHARE = 0.55
"""Largest share of the bytes beside the weights that states take by default; 35B-A3B in fp8 keeps 256 on 80 GB."""


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
            by_requests=requested.enable_dp_attention,
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
    e4m3 = hardware.capability is not None and hardware.capability >= (8, 9)
    return drafting_bytes(checkpoint.path, spec, model, e4m3)


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


def fitting_requests(config: ResolvedConfig, weights: int, state: StateBytes, total: int) -> ResolvedConfig:
    """Lower the default of ``max_num_seqs`` to the requests whose state takes STATE_SHARE of what weights leave.

    weights, total: bytes of the weights and of the GPU. A number that the user set stays.
    """
    if config.requested.max_num_seqs is not None or not state.request:
        return config
    left = max(0, int(config.requested.gpu_memory_utilization * total) - weights - GPU_SLACK)
    fit = max(1, int(STATE_SHARE * left) // state.request)
    if fit >= config.max_num_seqs:
        return config
    reason = (
        f"a request has {state.request >> 20} MiB of recurrent state, and weights leave {left >> 20} MiB: "
        f"states take {STATE_SHARE:.0%} of these"
    )
    others = tuple(each for each in config.decisions if each.name != "max_num_seqs")
    return replace(config, decisions=others).decide("max_num_seqs", fit, reason, max_num_seqs=fit)


def with_fitting_requests(config: ResolvedConfig, checkpoint: Checkpoint) -> ResolvedConfig:
    """:func:`fitting_requests` on the GPU of an engine; on a CPU, and without recurrent layers, the configuration."""
    attends = all(isinstance(layer.mixer, AttentionSpec) for layer in checkpoint.config.layers)
    if config.device.type != "cuda" or config.requested.max_num_seqs is not None or attends:
        return config
    model, hardware = on_meta(checkpoint, config), Hardware.detect(config.requested.device)
    weights = module_bytes(model) + drafter_bytes(config, checkpoint, model, hardware)
    state = StateBytes.of(model.state_specs(), round_width(config))
    return fitting_requests(config, weights, state, hardware.total_bytes)
