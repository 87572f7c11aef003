"""Number of KV pages that fit on the device, beside the weights, the largest pass and the graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from unisono.config import ResolvedConfig
from unisono.graphs import Buffers, PassShape, Program
from unisono.kv.pages import pages_for
from unisono.kv.specs import ALL, PAGE_SIZE
from unisono.types import ConfigError

GPU_SLACK = 1 << 29
"""Bytes of a GPU that are left to the allocator, beside the budget for graphs."""

LIBRARY_BYTES = 256 << 20
"""Bytes of a GPU that CUDA's libraries take in a first pass, where none is run to measure them."""

CPU_KV_BYTES = 1 << 30
"""Largest KV cache on a CPU, in bytes: enough for the bundled models."""


CPU_GRAPH_BYTES = 2 << 30
GPU_GRAPH_BYTES, GPU_GRAPH_SHARE = 2 << 30, 0.1
"""Limits of graph memory on a GPU: bytes, and the fraction of free memory before the KV cache is sized."""

RANK_GRAPH_BYTES = 3 << 30
"""Byte limit on a rank of several: most rounds have two graphs of a size (:func:`part_buckets`)."""

MOST_SNAPSHOTS = 4096
"""Largest number of snapshots of recurrent layers."""


@dataclass(frozen=True)
class PageDemand:
    """Inputs of the KV cache's size.

    page_bytes: bytes of one page of target and drafter, by window group. windows: useful pages at most, by window
    group. snapshot_bytes: bytes of one snapshot of the recurrent state. path_pages: pages of a tree's ``paths``, beside
    the pool's. logits_bytes: fp32 logits of the largest round, if no measured pass contains them. staging_bytes: buffer
    for pages that move to and from host memory. ranks: number of ranks among which pages are divided.
    """

    page_bytes: Mapping[int, int]
    windows: Mapping[int, int] = field(default_factory=dict)
    snapshot_bytes: int = 0
    paths: int = 1
    path_pages: int = 0
    logits_bytes: int = 0
    staging_bytes: int = 0
    ranks: int = 1

    def bytes(self, pages: int) -> int:
        """Bytes of the KV cache with this number of pages of window group ALL, including those of tree paths."""
        counts = self.counts(pages)
        return sum((counts[w] + self.path_pages) * size for w, size in self.page_bytes.items())

    def counts(self, pages: int) -> dict[int, int]:
        """Return the pages of each window group for this number of pages of ALL."""
        return {ALL: pages, **{w: min(pages, most) for w, most in self.windows.items()}}

    def fit(self, free: int, most: int) -> int:
        """Return the pages of window group ALL, up to ``most``, that fit in ``free`` bytes."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= free else (low, middle - 1)
        return low


def fit_pages(
    config: ResolvedConfig, demand: PageDemand, peak_bytes: Callable[[], int]
) -> tuple[dict[int, int], int, ResolvedConfig]:
    """Return the pages of the pool by window group, the number of snapshots, and the configuration with the decisions.

    peak_bytes: measures the bytes in use at the peak of the largest pass; called on a GPU only. Raises ConfigError if
    not even one request fits.
    """
    num_pages, path_pages = config.requested.num_pages, demand.path_pages
    # Running requests never need more. Cached prefixes share these pages.
    whole = demand.ranks * (config.max_num_seqs * pages_for(config.max_model_len) + 1)
    if config.device.type == "cpu":
        free, why = CPU_KV_BYTES, f"{CPU_KV_BYTES >> 20} MiB at most on a CPU"
        config = with_graph_bytes(config, CPU_GRAPH_BYTES, "the default on a CPU")
    else:
        used = peak_bytes()
        held = used + GPU_SLACK + demand.logits_bytes + demand.staging_bytes
        free = int(config.requested.gpu_memory_utilization * torch.cuda.mem_get_info()[1]) - held
        if free <= 0 and num_pages is None:
            raise ConfigError(
                f"weights, the state of {config.max_num_seqs} requests and the largest pass take {held >> 20} MiB, and "
                f"--gpu-memory-utilization {config.requested.gpu_memory_utilization} leaves {-free >> 20} MiB too few: "
                "raise it, or lower --max-num-batched-tokens or --max-num-seqs."
            )
        config = gpu_graph_bytes(config, free)
        free -= config.graph_bytes
        why = f"measured: weights and the largest pass take {used >> 20} MiB"
    if path_pages:
        why += f"; {path_pages} more are for {demand.paths} paths of {config.max_num_seqs} requests"
        path_bytes = path_pages * sum(demand.page_bytes.values())
        config = config.decide("path_pages", path_pages, f"{path_bytes} bytes; {why}")
    snapshots = 0
    if demand.snapshot_bytes:
        share = config.requested.snapshot_share
        snapshots = min(MOST_SNAPSHOTS, max(1, int(share * free) // demand.snapshot_bytes))
        free -= snapshots * demand.snapshot_bytes
        reason = f"--snapshot-share: {share:.0%} of the KV cache's bytes, for prefixes of a model with recurrent layers"
        config = config.decide("snapshots", snapshots, reason)
    pages = num_pages or demand.fit(free, whole) // demand.ranks * demand.ranks
    if pages < 2 * demand.ranks:
        raise ConfigError(
            f"the model leaves room for {pages} KV pages of {sum(demand.page_bytes.values())} bytes ({why}): "
            "raise --gpu-memory-utilization or lower --max-num-batched-tokens"
            f"{', or ask for fewer paths or a lower --max-num-seqs' if path_pages else ''}."
        )
    config = _within_context(config, pages // demand.ranks, why)
    if num_pages is None:
        divided = f"; divided among {demand.ranks} ranks" if demand.ranks > 1 else ""
        config = config.decide("num_pages", pages, f"{PAGE_SIZE} tokens each; {why}{divided}")
    counts = {**demand.counts(pages), **demand.windows} if num_pages else demand.counts(pages)
    return counts, snapshots, config


def _within_context(config: ResolvedConfig, pages: int, why: str) -> ResolvedConfig:
    """Lower ``max_model_len`` to the capacity of the pages. Raises ConfigError if the user set a larger one."""
    capacity = (pages - 1) * PAGE_SIZE
    if capacity >= config.max_model_len:
        return config
    if config.requested.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} needs {pages_for(config.max_model_len)} KV pages, "
            f"{pages - 1} fit ({why}): lower it to {capacity}, or raise --gpu-memory-utilization."
        )
    reason = f"the KV cache holds {capacity} tokens; the model's context is {config.max_model_len}"
    return config.decide("max_model_len", capacity, reason, max_model_len=capacity)


def peak_bytes(
    passes: Sequence[tuple[Program, PassShape]], device: torch.device, known: int | None = None
) -> tuple[int, int]:
    """Return the bytes of the GPU in use at the peak of the largest of these passes, and what torch allocated in it.

    Memory of other processes counts. The passes run on padding tokens: they compute everything but attention, which
    keeps no activations. known: the bytes that torch allocated in an earlier start; then no pass runs, and libraries
    that the first pass would load are assumed to take LIBRARY_BYTES. Only torch's own bytes may be kept for later
    starts: the rest of a GPU's memory changes with other processes.
    """
    torch.cuda.synchronize()
    gc.collect()  # reserved by an earlier engine of this process
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    allocated, beside = _growth(passes, device, free) if known is None else (known, LIBRARY_BYTES)
    return total - free + allocated + max(0, beside), allocated


def _growth(passes: Sequence[tuple[Program, PassShape]], device: torch.device, free: int) -> tuple[int, int]:
    """Run the passes; free: bytes of the GPU that were free before.

    Return the bytes of torch's allocator, freed after the passes, and those of CUDA and its libraries, which stay.
    """
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for program, shape in passes:
        program.run(Buffers(program.schema, shape, device))
    torch.cuda.synchronize()
    beside = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - before)
    allocated = max(0, torch.cuda.max_memory_reserved() - before)
    gc.collect()
    torch.cuda.empty_cache()
    return allocated, beside


def with_graph_bytes(config: ResolvedConfig, default: int, why: str) -> ResolvedConfig:
    """Resolve ``--graph-memory``: the flag, else ``default`` bytes. why: the reason of the default."""
    limit = config.requested.graph_memory
    if limit is None:
        return config.decide("graph_memory", f"{default / (1 << 30):.2f} GiB", why, graph_bytes=default)
    return config.decide("graph_memory", f"{limit} GiB", "set by --graph-memory", graph_bytes=int(limit * (1 << 30)))


def gpu_graph_bytes(config: ResolvedConfig, free: int) -> ResolvedConfig:
    """:func:`with_graph_bytes` on a GPU with ``free`` bytes for graphs and the KV cache."""
    if set(config.graphs.values()) == {"off"}:
        return config
    most = GPU_GRAPH_BYTES if config.requested.tensor_parallel_size == 1 else RANK_GRAPH_BYTES
    default = max(0, min(most, int(GPU_GRAPH_SHARE * free)))
    why = f"{GPU_GRAPH_SHARE:.0%} of {free >> 20} MiB free, {most >> 30} GiB at most"
    config = with_graph_bytes(config, default, why)
    if config.graph_bytes > free:
        raise ConfigError(
            f"--graph-memory {config.requested.graph_memory}: {max(0, free) / (1 << 30):.2f} GiB are free for graphs "
            "and the KV cache together. Lower it, or raise --gpu-memory-utilization."
        )
    return config
