"""Latent attention on the GPU: are its bits the same everywhere, how fast is it?

    python -m benchmarks.latent                prompts: bits and TFLOP/s of each tiling of the kernel for Hopper
    python -m benchmarks.latent --rounds       rounds: bits and µs of both kernels
    python -m benchmarks.latent --products     the heads' products and the queries: µs of tilings and launches

bf16 latents of 512 with 64 elements that rotate, pages of 16 in shuffled order. Candidates run in a process of their
own. One that takes longer than LIMIT seconds is ended, and the next one runs in a fresh process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable

import torch

from benchmarks.attention import Call, median_us
from unisono.attention.base import KV, AttentionInputs, AttentionOptions
from unisono.attention.triton import TritonAttention
from unisono.kernels.attention import hopper_latent, latent, latent_rows
from unisono.kernels.attention.latent_rows import head_product

PAGE, LATENT, WIDTH = 16, 512, 576
LIMIT = 50.0
"""Seconds that a candidate may take, the start of its process and compilation included."""

TILINGS: dict[str, dict[str, int] | None] = {
    "gluon": {},
    "triton": None,
}
"""Candidates for prompts: compile-time sizes of the Gluon kernel, or None for the Triton kernel."""

SHAPES = {"GLM-4.7-Flash": 20, "DeepSeek-V3, TP 4": 32, "DeepSeek-V3": 128}
"""Query heads."""


class Pages:
    """Requests of these lengths over shuffled pages, in ``layers`` caches."""

    def __init__(self, lengths: list[int], heads: int, layers: int = 1) -> None:
        self.lengths, self.heads, self.layers = lengths, heads, layers
        pages = [-(-n // PAGE) for n in lengths]
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, own in enumerate(torch.randperm(sum(pages)).int().add(1).split(pages)):
            table[row, : len(own)] = own
        self.table = table.cuda()
        shape = sum(pages) + 1, 1, PAGE, WIDTH
        self.caches = [torch.randn(shape, device="cuda").bfloat16() for _ in range(layers)]
        self.backend = TritonAttention(heads, latent.head_blocks(heads), "cuda")

    def inputs(self, spans: list[tuple[int, int, int]], width: int | None = None) -> AttentionInputs:
        """A pass over spans (row, first position, end position)."""
        rows, _, ends = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in zip(*spans, strict=True))
        starts = list(itertools.accumulate((end - first for _, first, end in spans), initial=0))
        positions = torch.cat([torch.arange(first, end) for _, first, end in spans]).int().cuda()
        begins = torch.tensor(starts, dtype=torch.int32, device="cuda") if width is None else None
        return AttentionInputs(rows, positions, positions, ends, self.table, width, begins)

    def served(self, inputs: AttentionInputs, q: torch.Tensor) -> Call:
        """Layer -> outputs, as the engine computes them."""
        self.backend.plan(inputs)
        options = AttentionOptions(WIDTH**-0.5, values=LATENT)
        return lambda layer=0: self.backend.forward(q, KV(self.caches[layer], self.caches[layer]), inputs, options)

    def queries(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.heads, WIDTH, device="cuda").bfloat16()


def serve(heads: int, tiling: dict[str, int] | None, rounds: bool = False) -> None:
    """Let the kernel for Hopper serve prompts (or rounds) with this tiling; None: let the Triton kernel serve them."""
    key = heads, latent.head_blocks(heads), WIDTH, torch.bfloat16, torch.empty(0, device="cuda").device
    exact = hopper_latent.exact_latent_rounds if rounds else hopper_latent.exact_latent_attention
    exact.serving[key] = tiling is not None
    sizes = hopper_latent.REGISTERS
    sizes.clear()
    sizes.update(DEFAULTS | (tiling or {}))


DEFAULTS = dict(hopper_latent.REGISTERS)


def other_bits(heads: int, tiling: dict[str, int] | None) -> str:
    """Count token outputs of prompts that differ from those of rounds and of small chunks: differing / compared."""
    torch.manual_seed(0)
    few = heads > 20
    lengths = [1100, 257, 64, 901]
    pages = Pages(lengths, heads)
    q, starts = pages.queries(sum(lengths)), list(itertools.accumulate(lengths, initial=0))
    rounds = []
    for width in (1,) if few else (1, 4):
        for back in (0, 3, 50):
            spans = [(row, n - back - width, n - back) for row, n in enumerate(lengths)]
            index = torch.cat([torch.arange(starts[r] + a, starts[r] + b) for r, a, b in spans]).cuda()
            rounds.append((f"round of {width}", index, pages.served(pages.inputs(spans, width), q[index])()))
    for row, first, end in () if few else ((0, 1036, 1100), (3, 300, 364)):
        index = torch.arange(starts[row] + first, starts[row] + end).cuda()
        rounds.append(("chunk of 64", index, pages.served(pages.inputs([(row, first, end)]), q[index])()))
    serve(heads, tiling)
    whole = pages.served(pages.inputs([(row, 0, n) for row, n in enumerate(lengths)]), q)()
    for row, first, end in ((0, 200, 1100), *([] if few else [(3, 433, 901)])):
        index = torch.arange(starts[row] + first, starts[row] + end).cuda()
        rounds.append(("chunk", index, pages.served(pages.inputs([(row, first, end)]), q[index])()))
    found = {name: 0 for name, _, _ in rounds}
    for name, index, out in rounds:
        found[name] += int((out != whole[index]).any(-1).sum())
    compared = sum(len(index) for _, index, _ in rounds)
    wrong = {name: count for name, count in found.items() if count}
    nan = f", {int(whole.isnan().any(-1).sum())} NaN" if whole.isnan().any() else ""
    return f"{sum(found.values())} of {compared}{nan}" + (f" {wrong}" if wrong else "")


def teraflops(tokens: int, heads: int) -> float:
    return 2 * heads * (WIDTH + LATENT) * tokens * (tokens + 1) / 2 / 1e12


def prompt(name: str) -> list[str]:
    """Bits and TFLOP/s of one tiling: cells of a row of the table."""
    tiling, cells = TILINGS[name], []
    for heads in SHAPES.values():
        if heads < 128:
            cells.append(other_bits(heads, tiling))
        for tokens in (2048, 8192):
            if heads == 128 and tokens == 8192:
                continue
            serve(heads, tiling)
            pages = Pages([tokens], heads)
            run = pages.served(pages.inputs([(0, 0, tokens)]), pages.queries(tokens))
            us = median_us(run, 1, 7 if tokens < 8192 else 5)
            cells.append(f"{teraflops(tokens, heads) / us * 1e6:.0f}")
    return cells


ROUNDS = ((1, 1), (1, 4), (4, 1), (16, 1), (64, 1))
"""Requests, and tokens of each."""


def both_kernels(_: str) -> list[str]:
    """Microseconds of rounds with the Triton kernel and with the Gluon kernel, and outputs with other bits: cells."""
    heads, cells = SHAPES["GLM-4.7-Flash"], []
    for batch, width in ROUNDS:
        lengths = [1152 if batch == 1 else 1000 + 37 * row % 304 for row in range(batch)]
        pages = Pages(lengths, heads, max(2, 96 // batch))  # more than L2 holds
        inputs = pages.inputs([(row, n - width, n) for row, n in enumerate(lengths)], width)
        q, outs, times = pages.queries(batch * width), [], []
        for tiling in (None, {}):
            serve(heads, tiling, rounds=True)
            run = pages.served(inputs, q)
            outs += [run(), run()]  # the second finds the counters as the first left them
            times.append(median_us(run, pages.layers))
        differ = sum(int((out != outs[0]).any(-1).sum()) for out in outs)
        cells.append(f"{times[0]:.1f}, {times[1]:.1f} ({differ})")
    return cells


def work(kind: str, names: list[str]) -> None:
    """Run candidates and print a JSON line for each."""
    for name in names:
        try:
            print(json.dumps([name, (both_kernels if kind == "rounds" else prompt)(name)]), flush=True)
        except Exception as error:
            print(json.dumps([name, [f"{type(error).__name__}: {str(error)[:200]}"]]), flush=True)


def _forward(source: Iterable[str], lines: queue.Queue[str]) -> None:
    for line in source:
        lines.put(line)
    lines.put("")


def watch(kind: str, names: list[str]) -> None:
    """Run candidates in a process, and start another one for the rest where one takes longer than LIMIT."""
    while names:
        command = [sys.executable, "-m", "benchmarks.latent", "--work", json.dumps([kind, names])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        while names:
            try:
                line = lines.get(timeout=LIMIT)
            except queue.Empty:
                line = ""
            if not line.startswith("["):
                print(f"| {names.pop(0)} | ended after {LIMIT} s or by an error |", flush=True)
                break
            name, cells = json.loads(line)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
            names.remove(name)
        process.kill()
        process.wait()


def prompts() -> None:
    columns: list[str] = []
    for name, heads in SHAPES.items():
        columns += [f"{name}: 2,048"] if heads == 128 else [f"{name}: other bits", "2,048", "8,192"]
    print(f"| TFLOP/s | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|", flush=True)
    watch("prompts", list(TILINGS))


def rounds() -> None:
    """Time rounds of GLM-4.7-Flash with both kernels."""
    columns = " | ".join(f"{batch} × {width}" for batch, width in ROUNDS)
    print(f"| µs (other bits) of requests × tokens | {columns} |\n{'|---' * (len(ROUNDS) + 1)}|", flush=True)
    watch("rounds", ["triton, gluon"])


def products() -> None:
    """Time the heads' products of GLM-4.7-Flash: into the latent space, and out of it."""
    print("\n| rows, columns, K, warps, stages | rows | into, µs | out of, µs | other bits |\n|---|---|---|---|---|")
    layers, tile = 24, latent_rows._tile
    weights = [torch.randn(layers, 20, *size, device="cuda").bfloat16() for size in ((512, 192), (256, 512))]

    def product(x: torch.Tensor, which: int) -> Call:
        out = x.new_empty(len(x), 20, weights[which].shape[2])

        def run(layer: int = 0) -> torch.Tensor:
            head_product(x, weights[which][layer], out)
            return out

        return run

    for rows in (1, 4, 64):
        inputs = [torch.randn(rows, 20, size, device="cuda").bfloat16() for size in (256, 512)]
        want: list[torch.Tensor] = []
        for blocks in PRODUCTS:
            if (blocks[0] >= 64) != (rows == 64):
                continue
            latent_rows._tile = lambda *_, blocks=blocks: blocks
            runs = [product(x, which) for which, x in enumerate(inputs)]
            got = [run().clone() for run in runs]
            want = want or got
            differ = sum(int((a != b).sum()) for a, b in zip(got, want, strict=True))
            times = " | ".join(f"{median_us(run, layers):.2f}" for run in runs)
            print(f"| {blocks} | {rows} | {times} | {differ} |", flush=True)
    latent_rows._tile = tile


def queries() -> None:
    """Time rotation and product of GLM-4.7-Flash's queries, in two launches and in one."""
    print("\n| queries of rows | two launches, µs | one, µs | other bits |\n|---|---|---|---|")
    layers, heads = 24, SHAPES["GLM-4.7-Flash"]
    keys = torch.randn(layers, heads, LATENT, 192, device="cuda").bfloat16()
    cache, table = torch.zeros(8, 1, PAGE, WIDTH, device="cuda").bfloat16(), torch.randn(128, 64, device="cuda")
    norm = torch.randn(LATENT, device="cuda").bfloat16()
    for rows in (1, 4, 16, 64):
        latents, q = (torch.randn(rows, size, device="cuda").bfloat16() for size in (WIDTH, heads * 256))
        at = torch.arange(rows, dtype=torch.int32, device="cuda")
        given = latents, q, norm, 1e-6, table, at, at, cache, heads, True

        def apart(layer: int = 0, given: tuple = given, q: torch.Tensor = q) -> torch.Tensor:
            out = latent_rows.rotate_latent(*given)
            head_product(q.view(len(q), heads, -1), keys[layer], out)
            return out

        def together(layer: int = 0, given: tuple = given) -> torch.Tensor:
            return latent_rows.latent_queries(*given, keys[layer])

        differ = int((apart() != together()).sum())
        times = " | ".join(f"{median_us(run, layers):.2f}" for run in (apart, together))
        print(f"| {rows} | {times} | {differ} |", flush=True)


PRODUCTS = [(16, 64, 64, 4, 4), (16, 32, 64, 4, 4), (16, 32, 64, 4, 6), (64, 64, 64, 4, 4)]
"""Tilings of the heads' products: see ``latent_rows._tile``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", action="store_true", help="time rounds and stop")
    parser.add_argument("--products", action="store_true", help="time the heads' products and stop")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.work:
        work(*json.loads(args.work))
    elif args.rounds:
        rounds()
    elif args.products:
        queries()
        products()
    else:
        prompts()


if __name__ == "__main__":
    main()
