"""How many KV pages fit on the device, beside the weights, the largest pass and the graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.config import ResolvedConfig
from unisono.engine.buckets import CPU_GRAPH_BYTES, gpu_graph_bytes, with_graph_bytes
from unisono.program import Buffers, Program, Shape
from unisono.state.pages import pages_for
from unisono.state.specs import PAGE_SIZE
from unisono.types import ConfigError

GPU_SLACK = 1 << 29
"""Bytes of a GPU that are left to the allocator, beside the budget for graphs."""

CPU_KV_BYTES = 1 << 30
"""Bytes of the KV cache on a CPU, at most: enough for the bundled models."""


@dataclass(frozen=True)
class PageDemand:
    """What the KV cache's size depends on.

    page_bytes: of one page, of target and drafter. path_pages: pages that a tree's ``paths`` need beside the pool's.
    logits_bytes: fp32 logits of the largest round, where no measured pass contains them.
    """

    page_bytes: int
    paths: int = 1
    path_pages: int = 0
    logits_bytes: int = 0


def fit_pages(config: ResolvedConfig, demand: PageDemand, peak_bytes: Callable[[], int]) -> tuple[int, ResolvedConfig]:
    """The number of pages of the pool, and the configuration with the decisions made on the way.

    peak_bytes: measures the bytes in use at the peak of the largest pass; called on a GPU only.
    Raises ConfigError where not even one request fits.
    """
    asked, page_bytes, path_pages = config.asked.num_pages, demand.page_bytes, demand.path_pages
    whole = config.max_num_seqs * pages_for(config.max_model_len) + 1  # more can never be used
    if config.device.type == "cpu":
        fit, why = CPU_KV_BYTES // page_bytes, f"{CPU_KV_BYTES >> 20} MiB at most on a CPU"
        config = with_graph_bytes(config, CPU_GRAPH_BYTES, "the default on a CPU")
    else:
        used = peak_bytes()
        held = used + GPU_SLACK + demand.logits_bytes
        free = int(config.asked.gpu_memory_utilization * torch.cuda.mem_get_info()[1]) - held
        config = gpu_graph_bytes(config, free)
        fit = (free - config.graph_bytes) // page_bytes
        why = f"measured: weights and the largest pass take {used >> 20} MiB"
    if path_pages:
        why += f"; {path_pages} more are for {demand.paths} paths of {config.max_num_seqs} requests"
        config = config.decide("path_pages", path_pages, f"{path_pages * page_bytes} bytes; {why}")
    pages = asked or min(whole, fit - path_pages)
    if pages < 2:
        raise ConfigError(
            f"the model leaves room for {max(0, pages)} KV pages of {page_bytes} bytes ({why}): "
            "raise --gpu-memory-utilization or lower --max-num-batched-tokens"
            f"{', or ask for fewer paths or a lower --max-num-seqs' if path_pages else ''}."
        )
    config = _within_context(config, pages, why)
    if asked is None:
        config = config.decide("num_pages", pages, f"{PAGE_SIZE} tokens each; {why}")
    return pages, config


def _within_context(config: ResolvedConfig, pages: int, why: str) -> ResolvedConfig:
    """Lower ``max_model_len`` to what the pages hold. Raises ConfigError where the user asked for more."""
    capacity = (pages - 1) * PAGE_SIZE
    if capacity >= config.max_model_len:
        return config
    if config.asked.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} needs {pages_for(config.max_model_len)} KV pages, "
            f"{pages - 1} fit ({why}): lower it to {capacity}, or raise --gpu-memory-utilization."
        )
    reason = f"the KV cache holds {capacity} tokens; the model's context is {config.max_model_len}"
    return config.decide("max_model_len", capacity, reason, max_model_len=capacity)


def peak_bytes(passes: Sequence[tuple[Program, Shape]], device: torch.device) -> int:
    """Bytes of the GPU in use at the peak of the largest of these passes, those of other processes included.

    The passes run on padding tokens. These compute everything but attention, which keeps no activations.
    """
    torch.cuda.synchronize()
    gc.collect()  # what an earlier engine of this process left
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for program, shape in passes:
        program.run(Buffers(program.schema, shape, device))
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    grown = max(0, torch.cuda.max_memory_reserved() - before)
    used = total - free - (torch.cuda.memory_reserved() - before) + grown
    gc.collect()
    torch.cuda.empty_cache()
    return used
