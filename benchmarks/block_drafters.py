"""``python -m benchmarks.block_drafters``: rounds with block drafters beside rounds with draft heads that step.

Random weights and synthetic acceptance: a round's time does not depend on what is drafted. For each drafter and number
of requests: milliseconds of a round; on a GPU, milliseconds of drafting and of catching up inside the round's graph
(CUDA events are recorded in the graph); tokens a second at several accept lengths, which trained heads reach
(requests × accept length / time of a round).

    python -m benchmarks.block_drafters
    python -m benchmarks.block_drafters --model tiny --setups eagle3:tiny-eagle3:3 --batch 1,4 --context 32
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import run
from benchmarks.passes import Clock
from unisono.config import catalog
from unisono.console.values import whole_numbers
from unisono.engine.worker.runner import Runner
from unisono.entrypoints.llm import LLM
from unisono.types import ConfigError, SamplingParams, SpeculativeConfig

SHAPES = Path(__file__).parent / "shapes"
SETUPS = ",".join(
    f"{method}:{SHAPES / f'qwen3-8b-{shape}'}:{k}"
    for method, shape, k in (
        ("eagle3", "eagle3", 3), ("eagle3", "eagle3", 5), ("dflash", "dflash", 7), ("dflash", "dflash", 15),
        ("dspark", "dspark", 7), ("dflash", "dflash2", 7),
    )
)  # fmt: skip


class Stages:
    """Times of a drafter's calls inside the graphs: (call, rows) -> pairs of events, one for each captured graph."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, int], Any] = {}

    def timed(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def method(drafter: Any, first: Any, *rest: Any) -> None:
            slots = first if isinstance(first, torch.Tensor) else first.slots
            wide = name == "propose" or first.sampled.shape[1] > 1
            if not (wide and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                return call(drafter, first, *rest)
            begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
            begin.record()
            call(drafter, first, *rest)
            end.record()
            self.events[name, len(slots)] = begin, end
            return None

        return method

    def ms(self, name: str, rows: int) -> str:
        """Time of the last replay, for text."""
        fits = sorted(size for call, size in self.events if call == name and size >= rows)
        if not fits:
            return "–"
        begin, end = self.events[name, fits[0]]
        try:
            return f"{begin.elapsed_time(end):.3f}"
        except RuntimeError:  # this graph has not run
            return "–"


def block_drafters(
    model: Annotated[str, typer.Option(help="Target: a directory or a bundled name.")] = str(SHAPES / "qwen3-8b"),
    setups: Annotated[str, typer.Option(help="method:directory:k of each drafter, separated by commas.")] = SETUPS,
    batch: Annotated[str, typer.Option(help="Numbers of requests, separated by commas.")] = "1,4,16,64",
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    output_len: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 160,
    accepted: Annotated[float, typer.Option(help="Synthetic accept length while measuring.")] = 3.0,
    lengths: Annotated[str, typer.Option(help="Accept lengths of the columns tokens/s.")] = "3.3,5,6",
    quantization: Annotated[str, typer.Option(help="Of the target: none or fp8.")] = "none",
    draft_quantization: Annotated[str, typer.Option(help="Option of the drafters: auto, fp8 or none.")] = "auto",
) -> None:
    """Time rounds, drafting and catching up of block drafters and of other heads, with random weights."""
    sizes, columns = whole_numbers("--batch", batch, some=True), [float(each) for each in lengths.split(",")]
    print(
        "| drafter | k | requests | round ms | drafting ms | catch-up ms | "
        + " | ".join(f"tok/s at {n}" for n in columns)
        + " |"
    )
    print("|---" * (6 + len(columns)) + "|")
    for setup in setups.split(","):
        method, directory, k = _parts(setup)
        options = {"draft_quantization": draft_quantization}
        if not any(catalog.find_directory(directory).glob("*.safetensors")):
            options["load_format"] = "dummy"
        spec = SpeculativeConfig(method, directory, k, options, adaptive=False)
        flags: dict[str, Any] = {
            "load_format": "auto" if model in catalog.bundled else "dummy", "max_num_seqs": max(sizes),
            "max_model_len": context + output_len + 16, "synthetic_acceptance_length": min(accepted, 1.0 + k),
            **({} if quantization == "none" else {"quantization": quantization}),
        }  # fmt: skip
        for rows, ms, stages in _measure(model, spec, sizes, context, output_len, flags):
            rates = " | ".join(f"{rows * min(n, 1 + k) / ms * 1e3:.0f}" for n in columns)
            name = f"{method} ({Path(directory).name})"
            drafting, catching_up = stages.ms("propose", rows), stages.ms("observe", rows)
            print(f"| {name} | {k} | {rows} | {ms:.3f} | {drafting} | {catching_up} | {rates} |", flush=True)


def _parts(setup: str) -> tuple[str, str, int]:
    """method, directory and k of a setup."""
    try:
        method, directory, k = setup.strip().split(":")
        return method, directory, int(k)
    except ValueError:
        raise ConfigError(f"--setups {setup!r}: give method:directory:k.") from None


def _measure(
    model: str, spec: SpeculativeConfig, sizes: list[int], context: int, output_len: int, flags: dict[str, Any]
) -> list[tuple[int, float, Stages]]:
    """(requests, median milliseconds of a round, the drafter's stages) for each number of requests."""
    kind, stages, clock, found = catalog.drafters.load(spec.method), Stages(), Clock(), []
    real = {name: getattr(kind, name) for name in ("propose", "observe")}
    launch = Runner.launch
    for name, call in real.items():
        setattr(kind, name, stages.timed(name, call))
    Runner.launch = clock.timed(launch)  # type: ignore[method-assign]
    try:
        with LLM(model, speculative=spec, **flags) as llm:
            params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
            for rows in sizes:
                prompts = [[(7 * i + row) % 200 for i in range(context)] for row in range(rows)]
                llm.generate(prompts, params)
                clock.passes.clear()
                clock.counts = True
                llm.generate(prompts, params)
                clock.counts = False
                if clock.on_gpu:
                    torch.cuda.synchronize()
                full = [p for p in clock.passes if p[0] == "round" and p[2] == rows and p[1] > 1]
                found.append((rows, statistics.median(clock.ms(*p[3:]) for p in full), stages))
    finally:
        Runner.launch = launch  # type: ignore[method-assign]
        for name, call in real.items():
            setattr(kind, name, call)
    return found


if __name__ == "__main__":
    run(block_drafters)
