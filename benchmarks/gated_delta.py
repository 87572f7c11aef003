"""Gated DeltaNet on the GPU: are its bits the same however a text is cut, and how fast is it?

    python -m benchmarks.gated_delta            bits, error, µs a layer, as markdown
    python -m benchmarks.gated_delta --tiles    launch options of rounds and both walks over a prompt, too
    python -m benchmarks.gated_delta --tiny     a small layer on any device, to try this file

The layer is Qwen3.5-9B's: 16 key heads, 32 value heads of 128, bf16. Times are medians of CUDA graph replays. A graph
holds one call per layer, each with a state of its own, so that states come from memory. ``floor`` is the time that the
bytes take at 4.68 TB/s, the memory bandwidth measured on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.kernels.delta_cases import Layer, Passes, Sizes, cuts, differing, oracle, rounds
from unisono.kernels.norm.gated_norm import gated_norm
from unisono.kernels.recurrent.causal_conv import causal_conv
from unisono.kernels.recurrent.gated_delta import ROUND_TILE, StateTile, gated_delta, launch_gated_delta

BYTES_PER_US, PAGE, TAPS, EPS = 4.68e6, 16, 4, 1e-6
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
PROMPTS = [(1, 128), (1, 512), (1, 2048), (1, 8192), (8, 2048)]
ROUNDS = [(rows, width) for rows in (1, 16, 64) for width in (1, 4)]
LAYERS = {1: 48, 16: 8, 64: 3}
TILES = [
    ROUND_TILE,
    StateTile(64, 4),
    StateTile(32, 2),
    StateTile(32, 4),
    StateTile(16, 1),
    StateTile(128, 8, registers=128),
]


# ---- bits ---------------------------------------------------------------------------------------------


def bits(sizes: Sizes, length: int, dtype: torch.dtype, widths: Sequence[int] = (1, 2, 4, 6, 8)) -> None:
    """Rows that differ from one whole pass, and the error of that pass."""
    layer = Layer(sizes, dtype, [length, length + 7, length + 14])

    def passes() -> Passes:
        return Passes(layer, causal_conv, gated_delta, DEVICE)

    whole, found = passes(), []
    whole.prompt(layer.lengths)
    if ON_GPU:
        other = Passes(layer, causal_conv, partial(launch_gated_delta, fast_walk=False), DEVICE)
        cuts(other, random.Random(7), length // 3)
        found.append(("Triton's walk", differing(whole, other)))
    other = passes()
    for r in range(3):
        other.prompt([n if i == r else 0 for i, n in enumerate(layer.lengths)])
    found.append(("alone", differing(whole, other)))
    for seed in range(3):
        other = passes()
        cuts(other, random.Random(seed), length // 3)
        found.append((f"cuts {seed}", differing(whole, other)))
    for width in widths:
        other = passes()
        rounds(other, random.Random(width), itertools.repeat(width))
        found.append((f"width {width}", differing(whole, other)))
    rnd, other = random.Random(0), passes()
    rounds(other, rnd, iter(lambda: rnd.randrange(1, sizes.width + 1), 0))
    found.append(("widths mixed", differing(whole, other)))
    out, _ = oracle(layer, 0)
    error = float((whole.out[0].double() - out.flatten(1)).norm() / out.norm())
    heads = f"{sizes.key_heads} / {sizes.value_heads} heads"
    print(f"{heads}, {sum(layer.lengths)} rows, error {error:.1e}; rows that differ:")
    print("  " + ", ".join(f"{name} {count}" for name, count in found), flush=True)


# ---- speed --------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """The inputs of a pass, and a state for each of its layers."""

    sizes: Sizes
    dtype: torch.dtype
    rows: int
    tokens: int  # of each row
    is_round: bool
    layers: int

    def __post_init__(self) -> None:
        s, rnd, count = self.sizes, random.Random(self.rows * 10 + self.tokens), self.rows
        since = [0] * count
        first = [rnd.randrange(PAGE) + rnd.randrange(1, self.tokens + 1) if self.is_round else 0 for _ in since]
        end = [at + self.tokens for at in first]
        until = [(at if self.is_round else at + self.tokens) // PAGE * PAGE for at in first]
        ints = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (range(count), since, first, until, end)]
        starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * self.tokens
        self.where = (*ints, None if self.is_round else starts)
        self.old, self.folds = sum(first), sum(n > 0 for n in until)
        ring, total, channels = PAGE - 1 + 2 * s.width, count * self.tokens, s.channels

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=DEVICE).to(self.dtype)

        self.both = noise(total, channels + s.value_heads * s.value_dim)
        self.ba, self.weight = noise(total, 2 * s.value_heads), noise(TAPS, 1, channels).permute(2, 1, 0)
        self.a_log = torch.rand(s.value_heads, device=DEVICE)
        self.dt_bias, self.norm = self.a_log - 4, torch.ones(s.value_dim, device=DEVICE)
        self.states = [
            (
                noise(count, TAPS - 1, channels),
                noise(count, TAPS + s.width - 2, channels),
                torch.randn(count, s.value_heads, s.value_dim, s.key_dim, device=DEVICE),
                noise(count, ring, channels - s.keys),
                torch.rand(count, ring, 2, s.value_heads, device=DEVICE) / 2,
            )
            for _ in range(self.layers)
        ]
        for state in self.states:
            state[4][:, :, 0] *= -1
        self.qkv, self.gates = self.conv(0)
        self.out = self.rule(0)

    def conv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        u, state = self.both[:, : self.sizes.channels], self.states[layer]
        return causal_conv(u, self.weight, self.ba, self.a_log, self.dt_bias, *state[:2], *self.where)

    def rule(self, layer: int, **options: StateTile | bool) -> torch.Tensor:
        op = launch_gated_delta if options else gated_delta
        return op(self.qkv, self.gates, *self.states[layer][2:], *self.where, **options)

    def gated(self, layer: int) -> torch.Tensor:
        return gated_norm(self.out, self.both[:, self.sizes.channels :], self.norm, EPS)

    def whole(self, layer: int) -> None:
        self.conv(layer)
        self.rule(layer)
        self.gated(layer)

    def floors(self) -> tuple[float, float]:
        """µs for the bytes of the rule, and of all three ops."""
        s, size, tokens = self.sizes, self.dtype.itemsize, self.rows * self.tokens
        values, state = s.value_heads * s.value_dim, 4 * s.value_heads * s.value_dim * s.key_dim
        rule = state * (self.rows + self.folds) + size * (
            self.old * (s.channels - s.keys) + tokens * (s.channels + values)
        )
        rest = size * tokens * (2 * s.channels + 3 * values)
        return rule / BYTES_PER_US, (rule + rest) / BYTES_PER_US


def microseconds(call: Callable[[int], object], layers: int, repeats: int = 7) -> float:
    """Median of a layer's time, of one replay over all layers."""
    if not ON_GPU:
        begin = time.perf_counter()
        call(0)
        return (time.perf_counter() - begin) * 1e6
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / layers)
    return statistics.median(times[1:])


def made(sizes: Sizes, dtype: torch.dtype, rows: int, tokens: int, is_round: bool) -> Pass:
    layers = (LAYERS[rows] if is_round else max(1, min(8, 8192 // (rows * tokens)))) if ON_GPU else 1
    return Pass(sizes, dtype, rows, tokens, is_round, layers)


def speed(sizes: Sizes, dtype: torch.dtype, cases: list[tuple[int, int]], is_round: bool) -> None:
    print(f"\n| {'rounds' if is_round else 'prompts'}, µs a layer | conv | rule | floor | norm | all three | floor |")
    print("|---|---|---|---|---|---|---|")
    for rows, tokens in cases:
        p = made(sizes, dtype, rows, tokens, is_round)
        conv, rule, norm, whole = (microseconds(op, p.layers) for op in (p.conv, p.rule, p.gated, p.whole))
        low, least = p.floors()
        print(
            f"| {rows} x {tokens} | {conv:.1f} | {rule:.1f} | {low:.1f} | {norm:.1f} | {whole:.1f} | {least:.1f} |",
            flush=True,
        )
        del p


def tiles(sizes: Sizes, dtype: torch.dtype) -> None:
    for kind, cases, options in (
        ("walk of prompts", [(1, 512), (1, 8192), (8, 2048)], [{"fast_walk": fast} for fast in (True, False)]),
        ("rounds", [(1, 1), (16, 4), (64, 1), (64, 4)], [{"round_tile": tile} for tile in TILES]),
    ):
        passes = [made(sizes, dtype, rows, tokens, kind == "rounds") for rows, tokens in cases]
        print(f"\n{kind}, µs of the rule at {', '.join(f'{r} x {t}' for r, t in cases)}")
        for option in options:
            found = [microseconds(partial(p.rule, **option), p.layers) for p in passes]
            print(f"  {option}: {', '.join(f'{us:.1f}' for us in found)}", flush=True)
        del passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.tiny:
        sizes, dtype = Sizes(2, 4, 16, 16), torch.float32 if not ON_GPU else torch.bfloat16
        bits(sizes, 60, dtype)
        speed(sizes, dtype, [(1, 40), (2, 33)], False)
        speed(sizes, dtype, [(1, 1), (16, 4)], True)
        return
    bits(Sizes(16, 32, 128, 128), 300, torch.bfloat16)
    bits(Sizes(16, 48, 128, 128), 100, torch.bfloat16, (1, 4, 8))
    bits(Sizes(4, 8, 32, 32, width=12), 100, torch.bfloat16, (1, 12))
    sizes = Sizes(16, 32, 128, 128, width=4)
    speed(sizes, torch.bfloat16, PROMPTS, False)
    speed(sizes, torch.bfloat16, ROUNDS, True)
    if given.tiles:
        tiles(sizes, torch.bfloat16)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
