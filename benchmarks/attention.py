"""Attention on the GPU: is it right, are its bits the same everywhere, how fast is it?

    python benchmarks/attention.py            accuracy, bits, µs per layer (markdown)
    python benchmarks/attention.py --sweep    launch options and plans, fastest first

Qwen3-8B's heads (32 query, 8 KV, d 128), bf16, pages of 16 in shuffled order. Times are medians of CUDA graph
replays; a graph holds one call per layer, each layer with a cache of its own, so that KV comes from memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from unisono.kernels import attention as ops

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SCALE = DIM**-0.5
DTYPE = torch.bfloat16


@dataclass
class Paged:
    """R requests of the given lengths over shuffled pages, in ``layers`` caches."""

    lengths: list[int]
    layers: int = 1

    def __post_init__(self) -> None:
        self.rows = len(self.lengths)
        pages = [-(-n // PAGE) for n in self.lengths]
        shuffled = torch.randperm(sum(pages)).int().add(1).split(pages)
        table = torch.zeros(self.rows, max(pages), dtype=torch.int32)
        for row, own in enumerate(shuffled):
            table[row, : len(own)] = own
        self.table = table.cuda()
        shape = (self.layers, 2, sum(pages) + 1, KV_HEADS, PAGE, DIM)
        self.caches = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        self.slots = torch.arange(self.rows, dtype=torch.int32, device="cuda")
        self.kv_len = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")

    def round(self, q: torch.Tensor, rows: torch.Tensor, length: torch.Tensor, width: int, **how) -> Callable:
        """A round over ``rows`` whose last token stands at ``length - 1``: layer -> outputs."""
        plan = ops.attention_plan(
            self.slots[rows], length, width, KV_HEADS, how.pop("partials", 1024), how.pop("share", 264)
        )
        positions = (length[:, None] - width + torch.arange(width, device="cuda")).flatten().int()
        keys = how.pop("keys", ops.KEYS)

        def run(layer: int = 0) -> torch.Tensor:
            ops.KEYS = keys
            cache = self.caches[layer]
            return ops.launch_attention_round(q, cache[0], cache[1], self.table, positions, *plan, SCALE, 0, **how)

        return run

    def extend(self, q: torch.Tensor, spans: list[tuple[int, int, int]], tile_tokens: int = 32, **how) -> Callable:
        """An extend pass over spans (row, first position, end position): layer -> outputs."""
        starts = list(itertools.accumulate((end - first for _, first, end in spans), initial=0))
        positions = torch.cat([torch.arange(first, end) for _, first, end in spans]).int().cuda()
        slots = torch.tensor([row for row, _, _ in spans], dtype=torch.int32, device="cuda")
        query_start = torch.tensor(starts, dtype=torch.int32, device="cuda")
        plan = ops.attention_extend_plan(slots, query_start, starts[-1], tile_tokens)
        keys = how.pop("keys", ops.KEYS)

        def run(layer: int = 0) -> torch.Tensor:
            ops.KEYS = keys
            cache = self.caches[layer]
            return ops.launch_attention_extend(q, cache[0], cache[1], self.table, positions, *plan, SCALE, 0, **how)

        return run


def queries(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HEADS, DIM, device="cuda").to(DTYPE)


def accuracy() -> None:
    """Relative error against float64 on the same bf16 inputs."""
    paged = Paged([1500, 77])
    q = queries(1577)
    out = paged.extend(q, [(0, 0, 1500), (1, 0, 77)])()
    begin = 0
    for row, length in enumerate(paged.lengths):
        pages = paged.table[row, : -(-length // PAGE)].long()
        k, v = (c[pages].transpose(1, 2).flatten(0, 1)[:length].double() for c in paged.caches[0])
        group = HEADS // KV_HEADS
        wide = q[begin : begin + length].double().transpose(0, 1)
        scores = wide @ k.permute(1, 2, 0).repeat_interleave(group, 0) * SCALE
        scores.masked_fill_(torch.ones(length, length, device="cuda").triu(1).bool(), float("-inf"))
        want = scores.softmax(-1) @ v.transpose(0, 1).repeat_interleave(group, 0)
        got = out[begin : begin + length].view(length, HEADS, DIM).transpose(0, 1)
        print(f"| {length} tokens | relative error {((got - want).norm() / want.norm()).item():.2e} |")
        begin += length


def bits() -> None:
    """Rows (token outputs) whose bits differ from one extend pass over everything, tiles of 128 rows."""
    lengths = [20, 64, 255, 256, 257, 300, 511, 512, 513, 700, 769, 1000, 1024, 1152, 1500, 2500]
    paged = Paged(lengths)
    starts = list(itertools.accumulate(lengths, initial=0))
    q = queries(starts[-1])
    spans = [(row, 0, n) for row, n in enumerate(lengths)]
    want = paged.extend(q, spans, 32)()
    total = wrong = 0

    def compare(name: str, got: torch.Tensor, index: torch.Tensor | slice) -> None:
        nonlocal total, wrong
        differing = int((got != want[index]).any(-1).sum())
        total, wrong = total + got.shape[0], wrong + differing
        if differing:
            print(f"| {name} | **{differing} of {got.shape[0]} rows differ** |")

    for tokens, warps in itertools.product((4, 8, 16, 32), (4, 8)):
        compare(
            f"extend, tiles of {tokens * 4} rows, {warps} warps",
            paged.extend(q, spans, tokens, num_warps=warps)(),
            slice(None),
        )
    for row, (n, start) in enumerate(zip(lengths, starts, strict=False)):
        own = slice(start, start + n)
        compare(f"extend, row {row} alone", paged.extend(q[own], [(row, 0, n)])(), own)
        for cut in (n // 3, n // 2 + 1):
            halves = [
                paged.extend(q[start : start + cut], [(row, 0, cut)], 8)(),
                paged.extend(q[start + cut : start + n], [(row, cut, n)], 32)(),
            ]
            compare(f"extend, row {row} cut at {cut}", torch.cat(halves), own)
    ends = torch.tensor(starts[1:], device="cuda")
    everyone = torch.arange(len(lengths), device="cuda")
    for width, share, warps in itertools.product((1, 2, 3, 4, 6, 8, 16, 17), (10**9, 264, 40, 1), (4, 8)):
        if warps == 8 and share != 264:
            continue
        for rows in (everyone, everyone.flip(0)[:4], everyone[14:15]):
            for back in (0, 3):  # rounds that end earlier in the request
                index = ((ends - back)[rows, None] - width + torch.arange(width, device="cuda")).flatten()
                how = {"share": share, "num_warps": warps}
                run = paged.round(q[index].contiguous(), rows, paged.kv_len[rows] - back, width, **how)
                for _ in range(2):  # the second run finds the counters as the first left them
                    compare(f"round of {len(rows)} rows, width {width}, {how}", run(), index)
    print(f"| all passes | {wrong} of {total} rows differ |")


def median_us(run: Callable[[int], object], layers: int, replays: int = 15, cold: bool = False) -> float:
    """Microseconds per call in a graph of ``layers`` calls. ``cold`` sweeps L2 before each, and subtracts that."""
    rubbish = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda") if cold else None

    def graph_ms(call: Callable[[int], object] | None) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(layers):
                if rubbish is not None:
                    rubbish.fill_(layer)
                if call is not None:
                    call(layer)
        times = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times[2:])

    run(0)
    torch.cuda.synchronize()
    return (graph_ms(run) - (graph_ms(None) if cold else 0.0)) * 1000 / layers


LAYERS = {1: 36, 4: 36, 16: 12, 64: 6}


def round_times(batches=(1, 4, 16, 64), widths=(1, 4, 6), context: int = 1152) -> None:
    print("\n| batch | width | µs | µs, L2 cold | GB/s |\n|---|---|---|---|---|")
    for batch in batches:
        paged = Paged([context] * batch, LAYERS[batch])
        for width in widths:
            run = paged.round(queries(batch * width), paged.slots.long(), paged.kv_len, width)
            warm, cold = median_us(run, LAYERS[batch]), median_us(run, LAYERS[batch], cold=True)
            read = batch * context * KV_HEADS * DIM * 4
            print(f"| {batch} | {width} | {warm:.1f} | {cold:.1f} | {read / cold / 1e3:.0f} |", flush=True)


def extend_times(sizes=(128, 512, 2048, 8192)) -> None:
    print("\n| extend tokens | µs | TFLOP/s |\n|---|---|---|")
    for tokens in sizes:
        paged = Paged([tokens], 4)
        run = paged.extend(queries(tokens), [(0, 0, tokens)], min(32, max(4, tokens * HEADS // 132 // 4)))
        spent = median_us(run, 4)
        print(f"| {tokens} | {spent:.0f} | {flops(tokens) / spent / 1e6:.0f} |", flush=True)


def flops(tokens: int) -> float:
    return 4 * DIM * HEADS * tokens * (tokens + 1) / 2


def round_options() -> Iterator[dict]:
    for keys, warps, stages in itertools.product((32, 64, 128), (4, 8), (3, 5, 7)):
        if (keys, stages) != (128, 7):
            yield {"keys": keys, "num_warps": warps, "num_stages": stages}
    yield {"keys": 64, "num_warps": 4, "num_stages": 5, "maxnreg": 168}
    yield {"keys": 128, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
    yield {"keys": 32, "num_warps": 4, "num_stages": 5, "maxnreg": 128}


def extend_options() -> Iterator[dict]:
    for tile, keys, warps, stages in itertools.product((16, 32), (32, 64, 128), (4, 8), (3, 5)):
        if (tile, warps) != (32, 4) and not (keys == 128 and stages == 5):
            yield {"tile_tokens": tile, "keys": keys, "num_warps": warps, "num_stages": stages}


def sweep(shard: str | None) -> None:
    """Time launch options. ``shard`` "i/n" only compiles every n-th, to fill Triton's cache in parallel."""
    each, of = (int(x) for x in shard.split("/")) if shard else (0, 1)
    batches = {b: Paged([1152] * b, LAYERS[b] if not shard else 1) for b in ((1, 16, 64) if not shard else (1,))}
    prompts = {t: Paged([t], 3) for t in ((2048, 8192) if not shard else (2048,))}
    table: list[tuple] = []

    def attempt(kind: str, options: dict, measure: Callable[[dict], list[float]]) -> None:
        try:
            table.append((kind, measure(dict(options)), options))
        except Exception as error:
            print(f"{kind} {options}: {str(error).splitlines()[0][:120]}", flush=True)

    def rounds(options: dict, width: int) -> list[float]:
        found = []
        for batch, paged in batches.items():
            run = paged.round(queries(batch * width), paged.slots.long(), paged.kv_len, width, **options)
            found.append(run().sum().item() if shard else median_us(run, paged.layers))
        return found

    def extends(options: dict) -> list[float]:
        found = []
        for tokens, paged in prompts.items():
            run = paged.extend(queries(tokens), [(0, 0, tokens)], **options)
            found.append(run().sum().item() if shard else -flops(tokens) / median_us(run, 3, 7) / 1e6)
        return found

    for i, options in enumerate(round_options()):
        if i % of == each:
            attempt("round W=1", options, lambda o: rounds(o, 1))
            attempt("round W=6", options, lambda o: rounds(o, 6))
    for i, options in enumerate(extend_options()):
        if i % of == each:
            attempt("extend", options, extends)
    if not shard:
        for warps, share, per in itertools.product((4, 8), (10**9, 264, 396, 528, 800, 1), (2, 3, 4, 8, 16)):
            options = {"num_warps": warps, "share": share, "programs": per * 132}
            attempt(f"plan W=1 {warps} warps", options, lambda o: rounds(o, 1))
        for kind in dict.fromkeys(row[0] for row in table):
            print(f"\n{kind}: µs at batch {list(batches)}, or TFLOP/s at {list(prompts)} tokens")
            for _, figures, options in sorted((row for row in table if row[0] == kind), key=lambda row: row[1][-1]):
                print("  ", " ".join(f"{abs(f):7.1f}" for f in figures), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shard", help="i/n: compile every n-th configuration of the sweep and stop")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.sweep or args.shard:
        sweep(args.shard)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    accuracy()
    bits()
    round_times()
    extend_times()


if __name__ == "__main__":
    main()
