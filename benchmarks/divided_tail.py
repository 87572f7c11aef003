"""``python -m benchmarks.divided_tail``: a divided layer's tail in one launch, beside separate products and gathers.

Random weights of the 8B shape, each rank on a GPU of this host; graphs of several layers. Rank 0 prints elements that
differ from the separate launches, and the median microseconds of a layer by number of rows and blocking.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Annotated

import torch
import torch.multiprocessing as mp
import typer

from benchmarks.command import run
from unisono.distributed.gather import Ranks, close_transport, open_transport, regions_of
from unisono.distributed.layer_tail import apart
from unisono.distributed.nccl import Nccl
from unisono.kernels.gemm.divided_tail import DividedTailWeights, launch_divided_tail
from unisono.kernels.gemm.layer_tail import Blocks, LayerTailWeights

H, Q, I, F = 4096, 4096, 12288, 6144  # noqa: E741
LAYERS, REPLAYS = 12, 20
ROWS, EACH = (1, 4, 16, 32), (2, 4)


def weights(ranks: int, seed: int, device: torch.device) -> DividedTailWeights:
    """One rank's random weights of a layer."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, device=device, generator=generator) * k**-0.5).bfloat16()

    norm = torch.ones(H, device=device, dtype=torch.bfloat16)
    parts = random(H // ranks, Q), random(2 * I // ranks, H), random(H // ranks, I)
    return DividedTailWeights(LayerTailWeights(*parts, norm, 1e-6, norm, 1e-6, random(F // ranks, H)), ranks)


def microseconds(layer: Callable[[DividedTailWeights], object], layers: list[DividedTailWeights]) -> float:
    """The median of a layer in a graph of all ``layers``, whose weights do not fit into the L2 cache."""
    for each in layers:
        layer(each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in layers:
            layer(each)
    times = []
    for _ in range(REPLAYS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # so that the ranks have met when the measured replay begins
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(1e3 * begun.elapsed_time(ended) / len(layers))
    return statistics.median(times)


def rank_main(index: int, ranks: int, store: str) -> None:
    """One rank: all cases in the order that the others have, too."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    number = open_transport(Nccl(Ranks(index, ranks), device, store, peer_memory=True))
    regions = regions_of(number)
    assert regions is not None, "these GPUs do not map each other's memory"
    layers = [weights(ranks, seed, device) for seed in range(LAYERS)]
    for rows in ROWS:
        generator = torch.Generator(device).manual_seed(rows)
        x, residual = (torch.randn(rows, n, device=device, generator=generator).bfloat16() for n in (Q, H))
        part = x[:, index * Q // ranks : (index + 1) * Q // ranks].contiguous()
        whole = apart(part, residual, layers[0], number)
        cells = [f"{microseconds(lambda t, x=part, r=residual: apart(x, r, t, number), layers):.1f}"]
        for each in EACH:
            blocks = Blocks.of(rows, each)
            got = launch_divided_tail(part, residual, layers[0], regions, blocks)
            differ = sum(int((a != b).sum()) for a, b in zip(got, whole, strict=True))
            took = microseconds(
                lambda t, x=part, r=residual, b=blocks: launch_divided_tail(x, r, t, regions, b), layers
            )
            cells.append(f"{took:.1f} ({differ} differ)")
        if index == 0:
            print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)
    close_transport(number)


def divided_tail(ranks: Annotated[int, typer.Option(min=2, help="GPUs of this host.")] = 4) -> None:
    """Time the tail of a divided 8B layer in one launch and in separate ones."""
    print("| rows | separate launches, µs a layer | " + " | ".join(f"one launch, {each} steps" for each in EACH) + " |")
    print("|---" * (len(EACH) + 2) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, f"{folder}/store"), nprocs=ranks)


if __name__ == "__main__":
    run(divided_tail)
