"""Attention on the GPU: is it right, are its bits the same everywhere, how fast is it?

    python -m benchmarks.attention            accuracy, bits, µs per layer, as markdown
    python -m benchmarks.attention --sweep    launch options and plans, fastest first
    python -m benchmarks.attention --kv fp8   the same over e4m3 pages
    python -m benchmarks.attention --rounds   bits and µs of the kernel for Hopper's rounds beside all attention's

bf16, pages of 16 in shuffled order; speed at Qwen3-8B's heads (32 query, 8 KV, d 128). Times are medians of CUDA
graph replays. A graph holds one call per layer, each layer with a cache of its own, so that KV comes from memory;
"cold" sweeps L2 before each call too, as the weights of a real model do.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.attention.triton import TritonAttention
from unisono.kernels.attention import hopper_rounds as attention_hopper_rounds
from unisono.kernels.attention import paged as ops
from unisono.kernels.cache.kv_e4m3 import dequantised, quantised

PAGE = 16
KEYS = ops.KEYS
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Heads:
    name: str = "Qwen3-8B"
    query: int = 32
    kv: int = 8
    dim: int = 128
    window: int = 0
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in a layer: what a round reads at least."""
        return 2 * self.kv * (self.dim + 1 if self.fp8 else self.dim * self.dtype.itemsize)

    def queries(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.query, self.dim, device="cuda").to(self.dtype)


@dataclass
class Paged:
    """Requests of the given lengths over shuffled pages, in ``layers`` caches."""

    lengths: list[int]
    layers: int = 1
    heads: Heads = Heads()

    def __post_init__(self) -> None:
        pages = [-(-n // PAGE) for n in self.lengths]
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, own in enumerate(torch.randperm(sum(pages)).int().add(1).split(pages)):
            table[row, : len(own)] = own
        self.table = table.cuda()
        shape = (self.layers, sum(pages) + 1, self.heads.kv, PAGE, self.heads.dim)
        self.caches = [self._pages(shape[1:]) for _ in range(self.layers)]
        self.kv_len = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        self.rows = torch.arange(len(pages), dtype=torch.int32, device="cuda")
        self.backend = TritonAttention(self.heads.query, self.heads.kv, "cuda")
        self.scale = self.heads.dim**-0.5

    def _pages(self, shape: tuple[int, ...]) -> KV:
        k, v = (torch.empty(shape, dtype=self.heads.dtype, device="cuda").normal_() for _ in "kv")
        if not self.heads.fp8:
            return KV(k, v)
        (k8, k_scales), (v8, v_scales) = quantised(k), quantised(v)
        return KV(k8, v8, k_scales, v_scales)

    def plain(self, layer: int = 0) -> KV:
        """A layer's pages in the heads' dtype."""
        kv = self.caches[layer]
        k, v = (dequantised(*each).to(self.heads.dtype) for each in ((kv.k, kv.k_scales), (kv.v, kv.v_scales)))
        return KV(k, v)

    def round_inputs(self, rows: torch.Tensor, kv_len: torch.Tensor, width: int) -> AttentionInputs:
        """A round over ``rows`` whose last token stands at ``kv_len - 1``."""
        positions = (kv_len[:, None] - width + torch.arange(width, device="cuda")).flatten().int()
        return AttentionInputs(rows, positions, positions, kv_len, self.table, width)

    def extend_inputs(self, spans: list[tuple[int, int, int]]) -> AttentionInputs:
        """An extend pass over spans (row, first position, end position)."""
        rows, _, ends = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in zip(*spans, strict=True))
        starts = list(itertools.accumulate((end - first for _, first, end in spans), initial=0))
        query_start = torch.tensor(starts, dtype=torch.int32, device="cuda")
        positions = torch.cat([torch.arange(first, end) for _, first, end in spans]).int().cuda()
        return AttentionInputs(rows, positions, positions, ends, self.table, None, query_start)

    def served(self, inputs: AttentionInputs, q: torch.Tensor) -> Call:
        """layer -> outputs, as the engine computes them."""
        self.backend.plan(inputs)
        options = AttentionOptions(self.scale, self.heads.window)
        return lambda layer=0: self.backend.forward(q, self.caches[layer], inputs, options)

    def tuned(self, inputs: AttentionInputs, q: torch.Tensor, **options: int) -> Call:
        """layer -> outputs with a plan (tile_tokens, share, partials), a step (keys) and a launch of one's own."""
        options = dict(options)
        tile_tokens = options.pop("tile_tokens", inputs.width or 32)
        partials = options.pop("partials", 2048 // tile_tokens if inputs.width else 0)
        sizes = (len(q), tile_tokens, self.heads.kv, partials, options.pop("share", 264))
        plan = ops.attention_plan(inputs.slots, inputs.kv_len, inputs.query_start, *sizes)
        keys = options.pop("keys", KEYS)

        def run(layer: int = 0) -> torch.Tensor:
            ops.KEYS = keys
            k, v, *scales = self.caches[layer]
            args = (q, k, v, self.table, inputs.positions, *plan, self.scale, self.heads.window)
            out = ops.launch_attention(*args, 0, 0.0, None, *scales, **options)
            ops.KEYS = KEYS
            return out

        return run


def accuracy(heads: Heads) -> None:
    """Relative error against float64 on the same bf16 inputs, or on what e4m3 pages stand for."""
    print("| tokens | relative error against float64 |\n|---|---|")
    for length in (77, 1500):
        paged, q = Paged([length], heads=heads), heads.queries(length)
        out = paged.served(paged.extend_inputs([(0, 0, length)]), q)().view(length, heads.query, heads.dim)
        pages, group = paged.table[0].long(), heads.query // heads.kv
        k, v = (c[pages].transpose(0, 1).flatten(1, 2)[:, :length].double() for c in paged.plain()[:2])
        scores = q.double().transpose(0, 1) @ k.mT.repeat_interleave(group, 0) * paged.scale
        scores.masked_fill_(torch.ones(length, length, device="cuda").triu(1).bool(), float("-inf"))
        want = (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1)
        print(f"| {length} | {((out - want).norm() / want.norm()).item():.2e} |")


class Comparison:
    """Counts token outputs whose bits are not those of one extend pass over all requests."""

    def __init__(self, heads: Heads, lengths: list[int]) -> None:
        self.paged, self.heads, self.lengths = Paged(lengths, heads=heads), heads, lengths
        self.starts = list(itertools.accumulate(lengths, initial=0))
        self.q = heads.queries(self.starts[-1])
        self.spans = [(row, 0, n) for row, n in enumerate(lengths)]
        self.want = self.paged.tuned(self.paged.extend_inputs(self.spans), self.q)()
        self.passes = self.outputs = self.wrong = 0

    def check(self, name: str, got: torch.Tensor, index: torch.Tensor | slice) -> None:
        differing = int((got != self.want[index]).any(-1).sum())
        self.passes, self.outputs, self.wrong = self.passes + 1, self.outputs + len(got), self.wrong + differing
        if differing:
            print(f"{self.heads.name}, {name}: {differing} of {len(got)} differ")

    def extends(self) -> None:
        everything = self.paged.extend_inputs(self.spans)
        for tile, warps in itertools.product((1, 4, 8, 16, 32), (4, 8)):
            run = self.paged.tuned(everything, self.q, tile_tokens=tile, num_warps=warps)
            self.check(f"extend, tiles of {tile} tokens, {warps} warps", run(), slice(None))
        for row, n in enumerate(self.lengths):
            for cut in (0, n // 3, n // 2 + 1):
                for a, b in ((0, cut), (cut, n)):
                    if b > a:
                        self.extend(row, a, b)
            self.extend(row, n - 15, n, tile_tokens=4, partials=512, share=10**6)  # cut along KV

    def extend(self, row: int, first: int, end: int, **options: int) -> None:
        own = slice(self.starts[row] + first, self.starts[row] + end)
        inputs = self.paged.extend_inputs([(row, first, end)])
        run = (self.paged.tuned if options else self.paged.served)(inputs, self.q[own], **options)
        self.check(f"row {row}, tokens {first} to {end}, {options}", run(), own)

    def rounds(self, widths: tuple[int, ...]) -> None:
        ends, everyone = torch.tensor(self.starts[1:], device="cuda"), self.paged.rows
        companies = (everyone, everyone.flip(0)[:4].contiguous(), everyone[-2:-1])
        plans = [
            {"share": 10**6},
            {"share": 264},
            {"share": 40},
            {"share": 1},
            {"partials": 9},
            {"num_warps": 4},
            {"num_warps": 8},
        ]
        for width, rows, back, plan in itertools.product(widths, companies, (0, 3), plans):
            kv_len = self.paged.kv_len[rows.long()] - back  # rounds that ended three tokens earlier, too
            index = ((ends[rows.long()] - back)[:, None] - width + torch.arange(width, device="cuda")).flatten()
            run = self.paged.tuned(self.paged.round_inputs(rows, kv_len, width), self.q[index], **plan)
            for _ in range(2):  # the second finds the counters as the first left them
                self.check(f"round of {len(rows)}, width {width}, {plan}", run(), index)


CASES = (
    Heads(),
    Heads("Qwen3-8B, window 300", window=300),
    Heads("Qwen3-8B, fp16", dtype=torch.float16),
    Heads("Qwen2.5-0.5B", 14, 2, 64),
    Heads("6 on 2, d 80", 6, 2, 80),
    Heads("8 on 4, d 256", 8, 4, 256),
    Heads("8 on 4, d 64, fp32", 8, 4, 64, dtype=torch.float32),
)


def bits(cases: tuple[Heads, ...], fp8: bool) -> None:
    print("\n| heads | passes | token outputs | with other bits |\n|---|---|---|---|")
    lengths = [20, 64, 255, 256, 257, 300, 511, 512, 513, 700, 769, 1000, 1024, 1152, 2500, 1500]
    for heads in cases:
        case = Comparison(replace(heads, fp8=fp8), lengths)
        case.extends()
        case.rounds((1, 2, 3, 4, 6, 8, 16, 17) if heads == Heads() else (1, 4, 6))
        print(f"| {heads.name} | {case.passes} | {case.outputs} | {case.wrong} |", flush=True)


def median_us(run: Call, layers: int, replays: int = 15, cold: bool = False) -> float:
    """Microseconds per call in a graph of ``layers`` calls; sweeping L2 is timed alone and subtracted."""
    rubbish = torch.empty(32 * 2**20, dtype=torch.int32, device="cuda") if cold else None

    def graph_ms(call: Call | None) -> float:
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


def layers_for(tokens: int) -> int:
    return max(3, min(36, 2**18 // tokens))


def round_times(heads: Heads, batches=(1, 4, 8, 16, 64), widths=(1, 4, 6), contexts=(1152, 8192, 32768)) -> None:
    print(f"\nA token's keys and values are {heads.token_bytes} bytes.")
    print("\n| batch | context | width | µs | µs, L2 cold | MB of KV | GB/s, cold |\n|---|---|---|---|---|---|---|")
    for context, batch in itertools.product(contexts, batches):
        if context > 1152 and batch not in (1, 4, 16):
            continue
        paged = Paged([context] * batch, layers_for(context * batch), heads)
        for width in widths:
            run = paged.served(paged.round_inputs(paged.rows, paged.kv_len, width), paged.heads.queries(batch * width))
            warm, cold = (median_us(run, paged.layers, cold=cold) for cold in (False, True))
            read = batch * context * heads.token_bytes
            figures = f"{warm:.1f} | {cold:.1f} | {read / 1e6:.1f} | {read / cold / 1e3:.0f}"
            print(f"| {batch} | {context} | {width} | {figures} |", flush=True)
    ragged = [300, 8192, 700, 1000, 2500, 150, 1152, 4000] * 2
    paged = Paged(ragged, 8, heads)
    for width in widths:
        run = paged.served(paged.round_inputs(paged.rows, paged.kv_len, width), paged.heads.queries(16 * width))
        warm, cold = (median_us(run, paged.layers, cold=cold) for cold in (False, True))
        read = sum(ragged) * heads.token_bytes
        figures = f"{warm:.1f} | {cold:.1f} | {read / 1e6:.1f} | {read / cold / 1e3:.0f}"
        print(f"| 16 | 150 … 8192 | {width} | {figures} |", flush=True)


def plan_times() -> None:
    print("\n| plan, once per pass | µs |\n|---|---|")
    for batch in (1, 64, 256):
        paged = Paged([1152] * batch)
        inputs = paged.round_inputs(paged.rows, paged.kv_len, 1)

        def plan(_: int = 0, paged: Paged = paged, inputs: AttentionInputs = inputs) -> None:
            paged.backend.plan(inputs)

        print(f"| round of {batch} | {median_us(plan, 20):.1f} |")


def extend_times(heads: Heads) -> None:
    print("\n| extend tokens | after | µs | TFLOP/s |\n|---|---|---|---|")
    for tokens, before in ((20, 0), (128, 0), (512, 0), (2048, 0), (8192, 0), (20, 8192), (512, 8192)):
        paged = Paged([tokens + before], 3, heads)
        inputs = paged.extend_inputs([(0, before, before + tokens)])
        spent = median_us(paged.served(inputs, paged.heads.queries(tokens)), 3)
        print(f"| {tokens} | {before} | {spent:.0f} | {flops(tokens, before) / spent / 1e6:.0f} |", flush=True)


def flops(tokens: int, before: int = 0, heads: Heads = Heads()) -> float:
    return 4 * heads.dim * heads.query * tokens * (before + (tokens + 1) / 2)


def by_hopper(heads: Heads, yes: bool) -> None:
    """Let the kernel for Hopper serve rounds of such heads, or not."""
    device = torch.empty(0, device="cuda").device
    key = heads.query, heads.kv, heads.dim, heads.dtype, device
    attention_hopper_rounds.exact_round_attention.serving[key] = yes


def hopper_rounds() -> None:
    """The kernel for Hopper's rounds beside the one for all passes: bits, also quantised ones, then times."""
    print("| heads | outputs | with other bits | bytes of quantised ones | other bytes |\n|---|---|---|---|---|")
    for heads in (Heads(), Heads("8 on 8, fp16", 8, 8, dtype=torch.float16), Heads("64 on 8", 64)):
        paged = Paged([20, 64, 255, 256, 257, 300, 511, 513, 700, 1024, 1152, 2500], 1, heads)
        counts = [0, 0, 0, 0]
        for width in (w for w in (1, 2, 4, 6) if w * heads.query <= attention_hopper_rounds.MOST_ROWS * heads.kv):
            inputs = paged.round_inputs(paged.rows, paged.kv_len, width)
            q = heads.queries(len(paged.lengths) * width)
            paged.backend.plan(inputs)
            given = q, *paged.caches[0][:2], paged.table, inputs.positions, *inputs.plan, paged.scale, 0
            seen = []
            for yes in (False, True, True):
                by_hopper(heads, yes)
                seen.append(
                    (
                        ops.launch_attention(*given),
                        torch.cat([x.flatten().view(torch.uint8) for x in ops.launch_attention_fp8(*given)]),
                    )
                )
            (out, quantised), *others = seen
            for got, got_quantised in others:
                counts[0], counts[1] = counts[0] + len(out), counts[1] + int((got != out).any(-1).sum())
                counts[2] += quantised.numel()
                counts[3] += int((got_quantised != quantised).sum())
        print(f"| {heads.name} | {' | '.join(map(str, counts))} |", flush=True)
    print("\n| batch | context | width | all attention, µs, L2 cold | for Hopper's rounds |\n|---|---|---|---|---|")
    heads = Heads()
    for batch, context in ((1, 1152), (4, 1152), (16, 1152), (64, 1152), (4, 32768)):
        paged = Paged([context] * batch, layers_for(context * batch), heads)
        for width in (1, 4, 6):
            inputs = paged.round_inputs(paged.rows, paged.kv_len, width)
            run = paged.served(inputs, heads.queries(batch * width))
            times = []
            for yes in (False, True):
                by_hopper(heads, yes)
                times.append(f"{median_us(run, paged.layers, cold=True):.1f}")
            print(f"| {batch} | {context} | {width} | {' | '.join(times)} |", flush=True)


def round_options() -> Iterator[dict]:
    for warps, stages in itertools.product((4, 8), (3, 5, 7)):
        yield {"keys": 64, "num_warps": warps, "num_stages": stages}
    for warps, stages in ((4, 3), (8, 3), (8, 5)):
        yield {"keys": 128, "num_warps": warps, "num_stages": stages}


def extend_options() -> Iterator[dict]:
    for tile, keys, warps, stages in itertools.product((16, 32), (64, 128), (4, 8), (3, 4, 5)):
        if tile == warps * 4 and not (keys == 128 and stages == 5):
            yield {"tile_tokens": tile, "keys": keys, "num_warps": warps, "num_stages": stages}


def sweep(heads: Heads, shard: str | None, only: str = "") -> None:
    """Time launch options of the kinds that begin with ``only``.

    ``shard`` "i/n" only compiles every n-th, to fill Triton's cache in parallel.
    """
    each, of = (int(x) for x in shard.split("/")) if shard else (0, 1)
    sizes = (1,) if shard else (1, 4, 16, 64)
    batches = {b: Paged([1152] * b, 1 if shard else layers_for(b * 1152), heads) for b in sizes}
    prompts = {t: Paged([t], 3, heads) for t in ((2048,) if shard else (2048, 8192))}
    table: list[tuple[str, list[float], dict]] = []

    def rounds(options: dict, width: int) -> list[float]:
        found = []
        for batch, paged in batches.items():
            inputs = paged.round_inputs(paged.rows, paged.kv_len, width)
            run = paged.tuned(inputs, paged.heads.queries(batch * width), **options)
            found.append(run().sum().item() if shard else median_us(run, paged.layers))
        return found

    def extends(options: dict) -> list[float]:
        found = []
        for tokens, paged in prompts.items():
            run = paged.tuned(paged.extend_inputs([(0, 0, tokens)]), paged.heads.queries(tokens), **options)
            found.append(run().sum().item() if shard else -flops(tokens) / median_us(run, 3, 7) / 1e6)
        return found

    cases = [(f"round, width {w}", o, lambda o, w=w: rounds(o, w)) for w in (1, 4, 6) for o in round_options()]
    cases += [("extend", o, extends) for o in extend_options()]
    if not shard:
        for width, share, per in itertools.product((1, 6), (10**6, 132, 264, 396, 1), (2, 3, 8)):
            options = {"share": share, "programs": per * 132}
            cases.append((f"plan, width {width}", options, lambda o, w=width: rounds(o, w)))
    for i, (kind, options, measure) in enumerate(case for case in cases if case[0].startswith(only)):
        if i % of == each:
            try:
                table.append((kind, measure(options), options))
            except Exception as error:  # a configuration that does not fit
                print(f"{kind} {options}: {str(error).splitlines()[0][:120]}", flush=True)
    for kind in dict.fromkeys(row[0] for row in table):
        print(f"\n{kind}: " + (f"TFLOP/s at {list(prompts)} tokens" if kind == "extend" else f"µs at {list(batches)}"))
        for _, figures, options in sorted((row for row in table if row[0] == kind), key=lambda row: row[1][-1]):
            print("  ", " ".join(f"{abs(f):7.1f}" for f in figures), options)


def main() -> None:
    global KEYS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, help="compare bits of one head configuration and stop")
    parser.add_argument("--speed", action="store_true", help="time and stop")
    parser.add_argument("--keys", type=int, default=KEYS, help="keys per step, for another reduction order")
    parser.add_argument(
        "--sweep",
        nargs="?",
        const="",
        choices=("", "round", "extend", "plan"),
        help="time launch options and plans and stop",
    )
    parser.add_argument("--rounds", action="store_true", help="compare the kernel for Hopper's rounds and stop")
    parser.add_argument("--extend", action="store_true", help="time extend passes and stop")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto", help="what pages hold")
    parser.add_argument("--shard", help="i/n: compile every n-th configuration of the sweep and stop")
    args = parser.parse_args()
    ops.KEYS = KEYS = args.keys
    torch.manual_seed(0)
    fp8 = args.kv == "fp8"
    heads = Heads(fp8=fp8)
    if args.bits is not None:
        bits(CASES[args.bits : args.bits + 1], fp8)
    elif args.sweep is not None or args.shard:
        sweep(heads, args.shard, args.sweep or "")
    elif args.extend:
        extend_times(heads)
    elif args.rounds:
        hopper_rounds()
    else:
        accuracy(heads)
        if not args.speed:
            bits(CASES, fp8)
        round_times(heads)
        plan_times()
        extend_times(heads)


if __name__ == "__main__":
    main()
