"""Microseconds of a gather between GPUs of one host, between two norms in a graph, as in a round of a divided model.

    python -m benchmarks.gathers --ranks 2

Of each size: the kernel over peers' memory with chunks of several widths, and NCCL. The time of the norms alone is
taken off. Rank 0 prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch
import torch.multiprocessing as mp

from unisono.distributed.gather import Ranks
from unisono.distributed.nccl import PEER_MEMORY_BYTES, Nccl
from unisono.kernels.comm.gather import launch_gather
from unisono.kernels.norm.rms_norm import rms_norm

SIZES = [
    (1, 2048),
    (1, 6144),
    (4, 2048),
    (4, 6144),
    (16, 2048),
    (16, 6144),
    (64, 2048),
    (64, 6144),
    (256, 2048),
    (256, 6144),
]
"""(rows, bf16 columns of a rank): of the 8B shape on two ranks attention's or a product's, and the MLP's."""

WIDTHS = (128, 256, 512, 1024)
"""int32 words of a chunk at most."""

STEPS, REPLAYS = 40, 30
"""Gathers of a graph, and how often it is replayed."""


def microseconds(step: Callable[[], object], device: torch.device) -> float:
    """The median of a step, replayed in a graph of ``STEPS``."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            step()
    times = []
    for _ in range(REPLAYS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # so that the device is busy when the measured replay is launched, and the ranks have met
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * begun.elapsed_time(ended) / STEPS)
    del graph
    return statistics.median(times)


def rank_main(index: int, ranks: int, store: str) -> None:
    """One rank: all sizes in the order that the others have, too."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    transport = Nccl(Ranks(index, ranks), device, store, peer_memory=True)
    peer_memory = transport._peer_memory
    if index == 0:
        print(f"gathers go by {transport.name}: {transport.why}")
        print("| rows × columns | norm µs | " + " | ".join(f"{w} words" for w in WIDTHS) + " | NCCL |")
        print("|---" * (len(WIDTHS) + 3) + "|", flush=True)
    weight = torch.ones(max(columns for _, columns in SIZES), dtype=torch.bfloat16, device=device)
    for rows, columns in SIZES:
        x = torch.randn(rows, columns, device=device).bfloat16()

        def norm(x: torch.Tensor = x, columns: int = columns) -> torch.Tensor:
            return rms_norm(x, weight[:columns], 1e-6)

        alone, times = microseconds(norm, device), []
        for width in WIDTHS:
            if peer_memory is None or x.nbytes > PEER_MEMORY_BYTES:
                times.append("–")
                continue

            def by_kernel(width: int = width) -> torch.Tensor:
                given = peer_memory._addresses, peer_memory._turns, index, ranks, width
                return launch_gather(norm().view(torch.int32), *given)

            times.append(f"{microseconds(by_kernel, device) - alone:.2f}")
        transport._peer_memory = None
        times.append(f"{microseconds(lambda: transport.all_gather(norm()), device) - alone:.2f}")
        transport._peer_memory = peer_memory
        if index == 0:
            print(f"| {rows} × {columns} | {alone:.2f} | " + " | ".join(times) + " |", flush=True)
    transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (given.ranks, f"{folder}/store"), nprocs=given.ranks)


if __name__ == "__main__":
    main()
