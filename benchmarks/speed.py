"""``python -m benchmarks.speed``: the speed table: what this machine measures, beside bars and vLLM's figures.

    python -m benchmarks.speed --out OUT                       every row that the visible GPUs can run
    python -m benchmarks.speed --out OUT --only decode,ttft    some rows
    python -m benchmarks.speed --out OUT --table               the table of OUT again, without a run

Each row is a command in its own process with a time limit; its JSON and its output stay in OUT. Rows of one GPU run
side by side, one on each GPU; then rows of two GPUs, then rows of four. Weights are random, shapes are real. Bars are
this project's; vLLM's figures are those of vLLM 0.26.0 on H200s of the same kind, measured on 26 November 2026. Ratios
to them hold on an H200 only.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from unisono.types import ConfigError

SHAPES = Path("benchmarks/shapes")
HEAD = {
    "method": "eagle3", "model": str(SHAPES / "qwen3-8b-eagle3"), "num_speculative_tokens": 3, "load_format": "dummy",
    "adaptive": False,
}  # fmt: skip
MTP = {"method": "mtp", "num_speculative_tokens": 3, "load_format": "dummy", "adaptive": False}
LOAD = "--num-prompts 384 --max-num-seqs 256 --input-len 64:1536 --output-len 32:384 --ignore-eos --max-model-len 2048"
STALL = "--scenario stall --streams 32 --prompts 8 --prompt-len 8000"
Figures = list[float | None]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    title: what is measured, with units. arguments: of ``python -m``. figures: reads the command's JSON. bars, vllm: in
    the order of the figures; None where there is none. gpus: GPUs of the command. limit: its seconds, start included.
    rates: places of the figures of which more is better; of times, less is.
    """

    title: str
    arguments: Sequence[str]
    figures: Callable[[Any], Figures]
    bars: Sequence[float | None]
    vllm: Sequence[float | None] = ()
    gpus: int = 1
    limit: int = 120
    rates: Sequence[int] = ()


def latency(model: str, *flags: str, batch: str = "1,4,16,64", prompts: str = "") -> list[str]:
    """Arguments of ``unisono bench latency``."""
    sizes = ["--max-num-seqs", "64", "--output-len", "96", "--max-model-len", "9000", "--load-format", "dummy"]
    return [
        "unisono",
        "bench",
        "latency",
        "--model",
        str(SHAPES / model),
        "--batch",
        batch,
        "--prompts",
        prompts,
        *sizes,
        *flags,
    ]


def drafted(config: dict[str, Any], length: float) -> list[str]:
    """Flags of speculation with a synthetic accept length."""
    return ["--speculative-config", json.dumps(config), "--synthetic-acceptance-length", str(length)]


def throughput(*flags: str) -> list[str]:
    """Arguments of ``unisono bench throughput`` for the 8B."""
    shape = ["--model", str(SHAPES / "qwen3-8b"), "--load-format", "dummy", "--no-baseline"]
    return ["unisono", "bench", "throughput", *shape, *flags]


def divided(case: str, ranks: int, batch: str = "1,4,16,64") -> list[str]:
    """Arguments of ``benchmarks.tensor_parallel``."""
    return ["benchmarks.tensor_parallel", "--cases", case, "--ranks", str(ranks), "--batch", batch, "--limit", "110"]


def steps(found: Any) -> Figures:
    """Milliseconds a round, by batch size."""
    return list(found["step_ms"].values())


def first_tokens(found: Any) -> Figures:
    """Milliseconds to the first token, by length of the prompt."""
    return list(found["ttft_ms"].values())


def rate(found: Any) -> Figures:
    """Output tokens a second: the median of the runs after the first."""
    passes = found["runs"][-1]["passes"]
    return [statistics.median(one["output_tokens"] / one["seconds"] for one in passes[1:] or passes)]


def stalls(found: Any) -> Figures:
    """The largest gap in milliseconds, and the share of the prompt rate that is kept."""
    one = found["runs"][-1]["stalls"][-1]
    return [one["largest_gap_ms"], one["prompt_tokens_per_s"] / one["prompt_tokens_per_s_alone"]]


def ranks(found: Any) -> Figures:
    """Milliseconds a round of a divided model, by batch size."""
    return list(next(iter(next(iter(found.values())).values())).get("step_ms", {}).values())


def start(found: Any) -> Figures:
    """Seconds of a start, imports included."""
    return [found["start_seconds"]["import"] + found["start_seconds"]["total"]]


ROWS: dict[str, Row] = {
    "decode": Row(
        "Qwen3-8B bf16, ms a round at 1/4/16/64", latency("qwen3-8b"), steps,
        (4.05, 4.15, 4.75, 6.9), (5.22, 5.39, 5.92, 8.15),
    ),
    "eagle3": Row(
        "… with EAGLE-3, k = 3", latency("qwen3-8b", *drafted(HEAD, 2.5)), steps,
        (4.7, 4.9, 5.9, 10.3), (6.06, 6.29, 6.98, 11.98),
    ),
    "ttft": Row(
        "… ms to the first token, 128/512/2,048/8,192", latency("qwen3-8b", batch="1", prompts="128,512,2048,8192"),
        first_tokens, (5.3, 11.5, 46, 205), (15.99, 17.5, 53.0, 219.5),
    ),
    "mixed": Row(
        "… mixed load, tokens/s", throughput(*LOAD.split()), rate, (6700,), (5953,), limit=150, rates=(0,),
    ),
    "mixed-eagle3": Row(
        "… mixed load with EAGLE-3", throughput(*LOAD.split(), *drafted(HEAD, 2.53)), rate, (7600,), (6560,), limit=150,
        rates=(0,),
    ),
    "stall": Row(
        "… 32 streams, 8 prompts of 8,000: largest gap in ms, share of the prompt rate",
        throughput(*STALL.split()), stalls, (50, 0.96), (227, 1.0), rates=(1,),
    ),
    "hybrid": Row(
        "Qwen3.5-9B bf16, ms a round at 1/16/64", latency("qwen3.5-9b", batch="1,16,64"), steps,
        (None, None, 7.1), (5.38, 6.11, 7.92),
    ),
    "hybrid-ttft": Row(
        "… ms to the first token, 8,192", latency("qwen3.5-9b", batch="1", prompts="8192"), first_tokens,
        (190,), (216,),
    ),
    "moe": Row(
        "Qwen3.5-35B-A3B fp8, ms a round at 1/16/64", latency("qwen3.5-35b-a3b-fp8", batch="1,16,64"), steps,
        (2.2, 5.6, 10.6), (3.91, 8.11, 13.49),
    ),
    "moe-mtp": Row(
        "… with MTP, k = 3", latency("qwen3.5-35b-a3b-fp8", *drafted(MTP, 2.6), batch="1,16,64"), steps,
        (3.4, 9.2, 15), (7.09, 15.1, 22.9), limit=150,
    ),
    "moe-ttft": Row(
        "… ms to the first token, 2,048/8,192", latency("qwen3.5-35b-a3b-fp8", batch="1", prompts="2048,8192"),
        first_tokens, (22, 80), (None, 195),
    ),
    "two-gpus": Row(
        "two GPUs: 8B bf16, ms a round at 1/64", divided("8b", 2, "1,64"), ranks, (2.75, 4.4), gpus=2,
    ),
    "four-gpus": Row(
        "four GPUs: 8B bf16, ms a round at 1/4/16/64", divided("8b", 4), ranks, (2.2, 2.25, 2.4, 3.4),
        (2.83, 2.93, 3.26, 4.17), gpus=4,
    ),
    "four-gpus-eagle3": Row(
        "… with EAGLE-3, k = 3", divided("8b k=3", 4), ranks, (2.6, 2.65, 3.3, 5.9), gpus=4,
    ),
    "start": Row(
        "empty start of the 8B in seconds", latency("qwen3-8b", batch="1", prompts=""), start, (10,), (103,),
    ),
    "moe-start": Row(
        "empty start of 35B-A3B in seconds", latency("qwen3.5-35b-a3b-fp8", batch="1"), start, (20,), (284,),
    ),
}  # fmt: skip


def measure(name: str, gpus: Sequence[int], out: Path) -> None:
    """Run a row's command on some GPUs; its JSON and its output go to ``out``."""
    row, result = ROWS[name], out / f"{name}.json"
    result.unlink(missing_ok=True)
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    if name.endswith("start"):
        env |= {"TRITON_CACHE_DIR": str(out / f"{name}-triton"), "UNISONO_CACHE": str(out / f"{name}-cache")}
    command = [sys.executable, "-m", *row.arguments, "--out", str(result)]
    with (out / f"{name}.txt").open("w") as output:
        try:
            code = subprocess.run(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, timeout=row.limit
            ).returncode
            print(f"{name}: exit code {code}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name}: longer than {row.limit} s", flush=True)


def measure_all(names: Sequence[str], gpus: int, out: Path) -> None:
    """Run rows of one GPU side by side, then rows of two GPUs, then rows of four."""
    for size in sorted({ROWS[name].gpus for name in names}):
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            if ROWS[name].gpus == size:
                waiting.put(name)

        def lane(mine: Sequence[int], waiting: queue.SimpleQueue[str] = waiting) -> None:
            while True:
                try:
                    measure(waiting.get_nowait(), mine, out)
                except queue.Empty:
                    return

        lanes = [
            threading.Thread(target=lane, args=(range(first, first + size),))
            for first in range(0, gpus - size + 1, size)
        ]
        for one in lanes:
            one.start()
        for one in lanes:
            one.join()


def table(names: Sequence[str], out: Path) -> str:
    """A Markdown table of the rows that have results."""
    lines = ["| | measured | bar | vLLM 0.26 | ahead of vLLM |", "|---|---|---|---|---|"]
    for name in names:
        row, result = ROWS[name], out / f"{name}.json"
        figures = row.figures(json.loads(result.read_text())) if result.exists() else []
        ratios = [
            _ratio(mine, other, place in row.rates)
            for place, (mine, other) in enumerate(zip(figures, row.vllm, strict=False))
        ]
        lines.append(f"| {row.title} | " + " | ".join(map(_cell, (figures, row.bars, row.vllm, ratios))) + " |")
    return "\n".join(lines)


def _ratio(mine: float | None, other: float | None, is_rate: bool) -> float | None:
    if not mine or not other:
        return None
    return mine / other if is_rate else other / mine


def _cell(values: Sequence[float | None]) -> str:
    return "/".join("–" if v is None else f"{v:,.0f}" if v >= 1000 else f"{v:.4g}" for v in values) or "–"


def speed(
    out: Annotated[Path, typer.Option(help="A directory for JSON results and outputs.")],
    only: Annotated[str, typer.Option(help="Rows, separated by commas: " + ", ".join(ROWS))] = ",".join(ROWS),
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to use; default: all that are visible.")] = None,
    table_only: Annotated[bool, typer.Option("--table", help="Print the table of the results in --out.")] = False,
) -> None:
    """Measure the rows of the speed table and print it."""
    names = only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise ConfigError(f"--only {', '.join(unknown)}: the rows are {', '.join(ROWS)}.")
    if not table_only:
        import torch

        count = gpus or torch.cuda.device_count()
        if not count:
            raise ConfigError("No GPU is visible; the table's figures are a GPU's.")
        out.mkdir(parents=True, exist_ok=True)
        measure_all([name for name in names if ROWS[name].gpus <= count], count, out)
    print(table(names, out))


if __name__ == "__main__":
    run(speed)
