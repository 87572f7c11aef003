"""What each kernel of a round, or of a prompt's pass, adds to it: from the end of the kernels before it to its own.

    python -m benchmarks.chain --model benchmarks/shapes/qwen3.5-35b-a3b --batch 1,16
    python -m benchmarks.chain --model benchmarks/shapes/qwen3-8b --quantization fp8 --speculative-config '{…}'
    python -m benchmarks.chain --model benchmarks/shapes/qwen3.5-35b-a3b --batch 1 --prompts 2048

Kernels of a round depend on each other and are launched early (``kernels/overlap.py``), so what a profiler calls a
kernel's time has waiting in it. These times have none, and add up to the time of the device. A line is a kernel with
one grid, means over all rounds or prompts. The kernel after a pause of the device is measured from its own start.
Random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tensor_parallel import numbers, running, step_ms, stop
from unisono import LLM, SamplingParams
from unisono.types import SpeculativeConfig

ROUNDS = 10

PAUSE = 30.0
"""µs without a kernel from which on the device is taken to have waited for the host."""

Added = tuple[str, str, float]
"""(kernel, grid, µs)."""


def added(events: list[dict[str, Any]]) -> list[Added]:
    """What each kernel of a trace adds, in order."""
    found, last = list[Added](), float("-inf")
    for each in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"]):
        end = each["ts"] + each["dur"]
        last = each["ts"] if each["ts"] > last + PAUSE else last
        found.append((each["name"], "×".join(str(n) for n in each["args"]["grid"]), max(0.0, end - last)))
        last = max(last, end)
    return found


def table(kernels: list[Added]) -> str:
    """Markdown: kernels by what they add to one of ROUNDS rounds."""
    found = defaultdict[tuple[str, str], list[float]](list)
    for name, grid, us in kernels:
        found[name, grid].append(us)
    whole = sum(us for _, _, us in kernels)
    lines = ["| kernel | grid | launches | µs each | µs a round | share |", "|" + "---|" * 6]
    for (name, grid), times in sorted(found.items(), key=lambda item: -sum(item[1])):
        launches, total, mean = len(times) / ROUNDS, sum(times), statistics.mean(times)
        lines.append(
            f"| {name[:60]} | {grid} | {launches:g} | {mean:.2f} | {total / ROUNDS:.1f} | {total / whole:.3f} |"
        )
    return "\n".join([*lines, f"| all | | {len(kernels) / ROUNDS:g} | | {whole / ROUNDS:.0f} | 1 |"])


def rounds(llm: Any, batch: int, context: int) -> list[Added]:
    """Of ROUNDS rounds of ``batch`` requests."""
    names = running(llm, batch, context)
    found = traced(llm.engine.step)
    stop(llm, names)
    return found


def prompts(llm: Any, tokens: int) -> list[Added]:
    """Of the passes of ROUNDS prompts, one after the other."""
    rng, params = random.Random(tokens), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def one() -> None:
        llm.generate([[rng.randrange(llm.engine.checkpoint.config.vocab_size) for _ in range(tokens)]], params)

    for _ in range(3):
        one()
    return traced(one)


def traced(run: Callable[[], object]) -> list[Added]:
    """A trace of ``run``, ROUNDS times."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(ROUNDS):
            run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        trace.export_chrome_trace(str(file))
        return added(json.loads(file.read_text())["traceEvents"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--speculative-config", default='{"method": "none"}', type=json.loads)
    parser.add_argument("--batch", default=[1], type=numbers)
    parser.add_argument("--context", default=1024, type=int)
    parser.add_argument("--prompts", default=[], type=numbers, help="tokens of prompts whose passes are traced, too")
    parser.add_argument("--snapshot-points", default=2, type=int)
    parser.add_argument("--gpu-memory-utilization", default=0.9, type=float)
    args = parser.parse_args()
    flags = {
        "max_num_seqs": max(args.batch),
        "max_model_len": max([2 * args.context, *(n + 64 for n in args.prompts)]),
        "quantization": args.quantization,
        "snapshot_points": args.snapshot_points,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "load_format": "dummy",
    }
    with LLM(args.model, speculative=SpeculativeConfig.parse(args.speculative_config), **flags) as llm:
        for batch in args.batch:
            print(f"\n{batch} requests: {step_ms(llm, batch, args.context):.3f} ms a step, not traced\n")
            print(table(rounds(llm, batch, args.context)), flush=True)
        for tokens in args.prompts:
            print(f"\na prompt of {tokens} tokens\n")
            print(table(prompts(llm, tokens)), flush=True)


if __name__ == "__main__":
    main()
