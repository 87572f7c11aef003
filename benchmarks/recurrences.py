"""Mamba2 and Kimi Delta Attention on the GPU: are their bits the same however a text is cut, and how fast are they?

    python -m benchmarks.recurrences           bits, µs a layer with several blockings, as markdown
    python -m benchmarks.recurrences --tiny    small layers on any device, to try this file

The layers are Nemotron-3-Nano's (8 groups, 64 heads of 64, state 128) and Kimi-Linear's (32 heads of 128), bf16. Times
are medians of CUDA graph replays, with a state for each of several layers.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gated_delta import DEVICE, LAYERS, ON_GPU, PAGE, microseconds
from tests.kernels import test_kimi_delta, test_mamba2
from tests.kernels.delta_cases import Layer, Passes, Sizes, cuts, differing, relative, rounds
from unisono.kernels.recurrent.gated_delta import ROUND_TILE, StateTile, launch_gated_delta
from unisono.kernels.recurrent.kimi_delta import ROUND_TILE as KIMI_TILE
from unisono.kernels.recurrent.kimi_delta import launch_kimi_delta

NANO, KIMI = Sizes(8, 64, 128, 64, width=4), Sizes(32, 32, 128, 128, width=4, by_channel=True)
PROMPTS = [(1, 2048), (1, 8192), (8, 2048)]
ROUNDS = [(1, 1), (1, 4), (16, 4), (64, 1)]
MAMBA_WAYS = {
    "prompt": {"Gluon's walk": {}, "Triton's walk": {"fast_walk": False}},
    "round": {f"{t.size} x {t.warps}": {"round_tile": t} for t in (ROUND_TILE, StateTile(32, 2), StateTile(16, 1))},
}
KIMI_TILES = KIMI_TILE, StateTile(64, 4), StateTile(32, 2), StateTile(32, 4), StateTile(128, 8, 128)
KIMI_WAYS = {
    "prompt": {"Gluon's walk": {}, "Triton's walk": {"fast_walk": False}},
    "round": {f"{t.size} x {t.warps}, {t.registers} registers": {"round_tile": t} for t in KIMI_TILES},
}


def bits(name: str, layer: Layer, made: Callable[[Layer], Passes], oracle: Callable[..., Any], other_rule: Any) -> None:
    """Print the rows that differ from one whole pass, and the error of that pass. other_rule: one to compare."""
    whole, found = made(layer), []
    whole.prompt(layer.lengths)
    if other_rule is not None:
        for way in ("cuts", "rounds"):
            other = made(layer)
            other.rule = other_rule
            if way == "cuts":
                cuts(other, random.Random(7), layer.lengths[0] // 3)
            else:
                rounds(other, random.Random(4), itertools.repeat(layer.sizes.width))
            found.append((f"other walk, {way}", differing(whole, other)))
    for seed in range(2):
        other = made(layer)
        cuts(other, random.Random(seed), layer.lengths[0] // 3)
        found.append((f"cuts {seed}", differing(whole, other)))
    for width in (1, layer.sizes.width):
        other = made(layer)
        rounds(other, random.Random(width), itertools.repeat(width))
        found.append((f"width {width}", differing(whole, other)))
    out, state = oracle(layer, 0)
    row = int(whole.order[0])
    errors = f"outputs {relative(whole.out[0], out):.1e}"
    if layer.lengths[0] % PAGE == 0:
        errors += f", state {relative(whole.state[row], state):.1e}"
    print(f"{name}, {sum(layer.lengths)} rows; error: {errors}; rows that differ:")
    print("  " + ", ".join(f"{way} {count}" for way, count in found), flush=True)


def timed(sizes: Sizes, rule: Callable[..., Any], rows: int, tokens: int, is_round: bool, **options: Any) -> float:
    """µs of the rule in one layer. tokens: of each row."""
    s, rnd, total, dtype = sizes, random.Random(rows), rows * tokens, torch.bfloat16
    count = (LAYERS[rows] if is_round else max(1, min(8, 8192 // total))) if ON_GPU else 1
    first = [rnd.randrange(PAGE) if is_round else 0 for _ in range(rows)]
    until = [(at if is_round else at + tokens) // PAGE * PAGE for at in first]
    lists = range(rows), [0] * rows, first, until, [at + tokens for at in first]
    ints = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in lists]
    starts = None if is_round else torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    ring = PAGE - 1 + 2 * s.width
    qkv, gates = torch.randn(total, s.channels, device=DEVICE).to(dtype), torch.rand(total, *s.gates, device=DEVICE)
    split = s.decays if s.by_channel else s.value_heads
    gates.view(total, -1)[:, :split] *= -1
    states = [
        (
            torch.randn(rows, s.value_heads, s.value_dim, s.key_dim, device=DEVICE),
            torch.randn(rows, ring, s.channels - s.keys, device=DEVICE).to(dtype),
            gates[:1].expand(rows * ring, *s.gates).reshape(rows, ring, *s.gates).contiguous(),
        )
        for _ in range(count)
    ]
    return microseconds(lambda n: rule(qkv, gates, *states[n], *ints, starts, **options), count)


def speed(name: str, sizes: Sizes, rule: Callable[..., Any], ways: dict[str, Any], tiny: bool) -> None:
    """Print µs of a layer for each way."""
    for kind, cases in (("prompt", [(1, 40)] if tiny else PROMPTS), ("round", [(1, 2)] if tiny else ROUNDS)):
        print(f"\n| {name}, {kind}, µs a layer | {' | '.join(f'{rows} x {tokens}' for rows, tokens in cases)} |")
        print("|---" * (len(cases) + 1) + "|")
        for way, options in ways[kind].items():
            times = [timed(sizes, rule, *case, kind == "round", **options) for case in cases]
            print(f"| {way} | {' | '.join(f'{us:.1f}' for us in times)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=("mamba2", "kda"), help="measure one of them")
    args = parser.parse_args()
    nano, kimi, dtype = NANO, KIMI, torch.bfloat16
    if args.tiny:
        nano, kimi = (replace(s, key_heads=2, value_heads=2, key_dim=32, value_dim=16) for s in (NANO, KIMI))
        dtype = dtype if ON_GPU else torch.float32
    lengths = [64, 70] if args.tiny else [304, 311, 318]
    if args.only != "kda":
        layer = Layer(nano, dtype, lengths)
        plain = test_mamba2.passes(layer, test_mamba2.launch_mamba_conv, test_mamba2.plain_walk, DEVICE).rule
        made = test_mamba2.kernels if ON_GPU else test_mamba2.twins
        bits("Mamba2", layer, made, test_mamba2.oracle, plain if ON_GPU else None)
        skip = torch.randn(nano.value_heads, device=DEVICE)
        if ON_GPU:
            speed("Mamba2", nano, partial(launch_gated_delta, skip=skip), MAMBA_WAYS, args.tiny)
    if args.only != "mamba2":
        other = partial(launch_kimi_delta, fast_walk=False) if ON_GPU else None
        made = test_kimi_delta.kernels if ON_GPU else test_kimi_delta.twins
        bits("KDA", Layer(kimi, dtype, lengths), made, test_kimi_delta.oracle, other)
        if ON_GPU:
            speed("KDA", kimi, launch_kimi_delta, KIMI_WAYS, args.tiny)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
