"""``python -m benchmarks.speed``: the speed table: what this machine measures, beside bars and vLLM's figures.

    python -m benchmarks.speed --out OUT                       every row that the visible GPUs can run
    python -m benchmarks.speed --out OUT --only decode,ttft    some rows
    python -m benchmarks.speed --out OUT --table               the table of OUT again, without a run

Each command runs in its own process with a time limit, as soon as GPUs are free for it; some rows read the JSON of
another row's command. JSON and output stay in OUT, and a row is printed when its command has ended. Weights are random,
shapes are real. Bars are this project's; vLLM's figures are those of vLLM 0.26.0 on H200s of the same kind, measured on
26 November 2026. Ratios to them hold on an H200 only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
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
STALL = "--scenario stall --streams 32 --prompts 1,8 --prompt-len 8000"
Figures = list[float | None]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    title: what is measured, with units. figures: reads the command's JSON. bars, vllm: in the order of the figures;
    None where there is none. arguments: of ``python -m``; none if ``of`` names the row whose command measures this one,
    too. after: the row that this one waits for and whose compiled kernels it reads; a command without one begins with
    empty caches. gpus: GPUs of the command. limit: its seconds, start included. rates: places of the figures of which
    more is better; of times, less is.
    """

    title: str
    figures: Callable[[Any], Figures]
    bars: Sequence[float | None]
    vllm: Sequence[float | None] = ()
    arguments: Sequence[str] = ()
    of: str = ""
    after: str = ""
    gpus: int = 1
    limit: int = 120
    rates: Sequence[int] = ()


def latency(model: str, *flags: str, batch: str = "1,4,16,64", prompts: str = "") -> list[str]:
    """Arguments of ``unisono bench latency``."""
    sizes = ["--max-num-seqs", "64", "--output-len", "96", "--max-model-len", "9000", "--load-format", "dummy"]
    shape = ["--model", str(SHAPES / model), "--batch", batch, "--prompts", prompts]
    return ["unisono", "bench", "latency", *shape, *sizes, *flags]


def drafted(config: dict[str, Any], length: float) -> list[str]:
    """Flags of speculation with a synthetic accept length."""
    return ["--speculative-config", json.dumps(config), "--synthetic-acceptance-length", str(length)]


def throughput(*flags: str) -> list[str]:
    """Arguments of ``unisono bench throughput`` for the 8B."""
    shape = ["--model", str(SHAPES / "qwen3-8b"), "--load-format", "dummy", "--no-baseline"]
    return ["unisono", "bench", "throughput", *shape, *flags]


def divided(case: str, ranks: int, batch: str = "1,4,16,64") -> list[str]:
    """Arguments of ``benchmarks.tensor_parallel``."""
    sizes = ["--ranks", str(ranks), "--batch", batch, "--exact", "100", "--limit", "120"]
    return ["benchmarks.tensor_parallel", "--cases", case, *sizes]


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
        "Qwen3-8B bf16, ms a round at 1/4/16/64", steps, (4.05, 4.15, 4.75, 6.9), (5.22, 5.39, 5.92, 8.15),
        latency("qwen3-8b", prompts="128,512,2048,8192"), limit=150,
    ),
    "eagle3": Row(
        "… with EAGLE-3, k = 3", steps, (4.7, 4.9, 5.9, 10.3), (6.06, 6.29, 6.98, 11.98),
        latency("qwen3-8b", *drafted(HEAD, 2.5)), after="mixed-eagle3", limit=100,
    ),
    "ttft": Row(
        "… ms to the first token, 128/512/2,048/8,192", first_tokens, (5.3, 11.5, 46, 205), (15.99, 17.5, 53.0, 219.5),
        of="decode",
    ),
    "mixed": Row(
        "… mixed load, tokens/s", rate, (6700,), (5953,), throughput(*LOAD.split()), limit=170, rates=(0,),
    ),
    "mixed-eagle3": Row(
        "… mixed load with EAGLE-3", rate, (7600,), (6560,), throughput(*LOAD.split(), *drafted(HEAD, 2.53)), limit=165,
        rates=(0,),
    ),
    "stall": Row(
        "… 32 streams, 8 prompts of 8,000: largest gap in ms, share of the prompt rate", stalls, (50, 0.96), (227, 1.0),
        throughput(*STALL.split()), after="mixed", limit=110, rates=(1,),
    ),
    "hybrid": Row(
        "Qwen3.5-9B bf16, ms a round at 1/16/64", steps, (None, None, 7.1), (5.38, 6.11, 7.92),
        latency("qwen3.5-9b", batch="1,16,64", prompts="8192"), after="decode", limit=130,
    ),
    "hybrid-ttft": Row("… ms to the first token, 8,192", first_tokens, (190,), (216,), of="hybrid"),
    "moe": Row(
        "Qwen3.5-35B-A3B fp8, ms a round at 1/16/64", steps, (2.2, 5.6, 10.6), (3.91, 8.11, 13.49),
        latency("qwen3.5-35b-a3b-fp8", batch="1,16,64", prompts="2048,8192"), limit=180,
    ),
    "moe-mtp": Row(
        "… with MTP, k = 3", steps, (3.4, 9.2, 15), (7.09, 15.1, 22.9),
        latency("qwen3.5-35b-a3b-fp8", *drafted(MTP, 2.6), batch="1,16,64"), after="moe", limit=140,
    ),
    "moe-ttft": Row("… ms to the first token, 2,048/8,192", first_tokens, (22, 80), (None, 195), of="moe"),
    "two-gpus": Row(
        "two GPUs: 8B bf16, ms a round at 1/64", ranks, (2.75, 4.4), (), divided("8b", 2, "1,64"), gpus=2, limit=130,
    ),
    "four-gpus": Row(
        "four GPUs: 8B bf16, ms a round at 1/4/16/64", ranks, (2.2, 2.25, 2.4, 3.4), (2.83, 2.93, 3.26, 4.17),
        divided("8b", 4), after="two-gpus", gpus=4, limit=130,
    ),
    "four-gpus-eagle3": Row(
        "… with EAGLE-3, k = 3", ranks, (2.6, 2.65, 3.3, 5.9), (), divided("8b k=3", 4), after="four-gpus", gpus=4,
        limit=130,
    ),
    "start": Row("start of the 8B with empty caches, seconds", start, (10,), (103,), of="decode"),
    "moe-start": Row("start of 35B-A3B with empty caches, seconds", start, (20,), (284,), of="moe"),
}  # fmt: skip


@dataclass(frozen=True)
class Running:
    """A row's command at work. began, ends: seconds of the monotonic clock; at ``ends`` it is killed."""

    process: subprocess.Popen[bytes]
    gpus: list[int]
    began: float
    ends: float

    def kill(self) -> None:
        """Kill the command and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Runner:
    """Runs commands of rows on some GPUs.

    names: rows; one that reads another row's JSON runs that row's command. gpus: number of GPUs. seconds: for
    everything; what has not begun or ended then has no result.
    """

    LEAST = 20
    """Seconds that must be left to begin a command."""

    def __init__(self, names: Sequence[str], gpus: int, out: Path, seconds: float) -> None:
        self.names, self.out, self.ends = names, out, time.monotonic() + seconds
        commands = dict.fromkeys(ROWS[name].of or name for name in names)
        able = [name for name in commands if ROWS[name].gpus <= gpus]
        self.waiting = sorted(able, key=lambda name: (ROWS[name].gpus, -ROWS[name].limit))
        self.commands, self.free = tuple(able), set(range(gpus))
        self.running: dict[str, Running] = {}

    def run(self) -> None:
        """Run every command; kill those that run when this one is interrupted."""
        try:
            while self.waiting or self.running:
                self._begin()
                time.sleep(0.1)
                self._end()
        finally:
            for one in self.running.values():
                one.kill()

    def _begin(self) -> None:
        left = self.ends - time.monotonic()
        for name in list(self.waiting):
            row = ROWS[name]
            if left < self.LEAST:
                print(f"{name}: not begun, {left:.0f} s are left", flush=True)
            elif row.gpus > len(self.free) or row.after in (*self.waiting, *self.running):
                continue
            else:
                gpus = sorted(self.free)[: row.gpus]
                self.free -= set(gpus)
                self.running[name] = self._start(name, gpus, min(left, row.limit))
            self.waiting.remove(name)

    def _start(self, name: str, gpus: list[int], seconds: float) -> Running:
        row, result, caches = ROWS[name], self.out / f"{name}.json", self.out / "caches" / self._first(name)
        result.unlink(missing_ok=True)
        if self._first(name) == name:
            shutil.rmtree(caches, ignore_errors=True)
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "PYTHONUNBUFFERED": "1"}
        env |= {"TRITON_CACHE_DIR": str(caches / "triton"), "UNISONO_CACHE": str(caches / "unisono")}
        command = [sys.executable, "-m", *row.arguments, "--out", str(result)]
        with (self.out / f"{name}.txt").open("wb") as output:
            process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        now = time.monotonic()
        return Running(process, gpus, now, now + seconds)

    def _first(self, name: str) -> str:
        """The row whose caches ``name`` uses."""
        while ROWS[name].after in self.commands:
            name = ROWS[name].after
        return name

    def _end(self) -> None:
        for name, one in list(self.running.items()):
            code, now = one.process.poll(), time.monotonic()
            if code is None and now < one.ends:
                continue
            one.kill()
            del self.running[name]
            self.free |= set(one.gpus)
            how = "killed" if code is None else f"exit code {code}"
            print(f"{name}: {how} after {now - one.began:.0f} s on GPU {one.gpus}", flush=True)
            if code == 0:
                print(
                    "\n".join(line(each, self.out) for each in self.names if name in (each, ROWS[each].of)), flush=True
                )
            else:
                print((self.out / f"{name}.txt").read_text(errors="replace")[-2000:], flush=True)


def table(names: Sequence[str], out: Path) -> str:
    """A Markdown table of the rows."""
    head = ["| | measured | bar | vLLM 0.26 | ahead of vLLM |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(line(name, out) for name in names)])


def line(name: str, out: Path) -> str:
    """A row of the table; without figures where the command left no result, or one that it did not finish."""
    row, result = ROWS[name], out / f"{ROWS[name].of or name}.json"
    try:
        figures = row.figures(json.loads(result.read_text()))
    except (OSError, ValueError, LookupError):
        figures = []
    ratios = [
        _ratio(mine, other, place in row.rates)
        for place, (mine, other) in enumerate(zip(figures, row.vllm, strict=False))
    ]
    return f"| {row.title} | " + " | ".join(map(_cell, (figures, row.bars, row.vllm, ratios))) + " |"


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
    limit: Annotated[float, typer.Option(min=1, help="Seconds for everything.")] = 3600,
    table_only: Annotated[bool, typer.Option("--table", help="Print the table of the results in --out.")] = False,
) -> None:
    """Measure the rows of the speed table and print it."""
    names = only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise ConfigError(f"--only {', '.join(unknown)}: the rows are {', '.join(ROWS)}.")
    try:
        if not table_only:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            Runner(names, gpus or _visible(), _folder(out), limit).run()
    finally:
        print(table(names, out))


def _visible() -> int:
    """The number of visible GPUs. Raises ConfigError if there is none."""
    import torch

    if not (count := torch.cuda.device_count()):
        raise ConfigError("No GPU is visible; the table's figures are a GPU's.")
    return count


def _folder(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()


if __name__ == "__main__":
    run(speed)
