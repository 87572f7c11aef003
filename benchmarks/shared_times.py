"""``python -m benchmarks.shared_times``: tokens a second where requests share drafts, beside every fixed k.

Requests of several kinds run at once; each kind has its own synthetic acceptance, and the target's weights may be
random: only rounds are timed. Two engines are started, one whose requests share drafts and one whose do not. They run
by turns, the order alternating, so that a drift of the machine's speed affects all variants alike. Look-ups cannot be
timed so: they find nothing in random text, and a round that shares drafts verifies what was found.

    python -m benchmarks.shared_times --model benchmarks/shapes/qwen3-8b --load-format dummy --speculative-config \
        '{"method": "dflash", "model": "benchmarks/shapes/qwen3-8b-dflash", "num_speculative_tokens": 7,
        "load_format": "dummy"}'
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from benchmarks.adaptive import WARM, Rounds, run_with, timed_rounds
from benchmarks.command import run
from unisono.cluster.heap import frozen_heap
from unisono.config.preflight.model import check_model
from unisono.console.values import shares, speculative, whole_numbers
from unisono.types import ConfigError

KINDS = "0.9,0.81,0.73,0.66,0.59,0.53,0.48;0.4,0.16,0.06,0.03"
"""Requests that copy or calculate, and requests that write freely."""

LOOKUPS = "ngram", "suffix"
ADAPTIVE, SHARED = "adaptive", "shared"


@dataclass
class Variant:
    """Runs of one way to choose drafts. llm: the engine. pinned: its number of drafts; None: adaptive.

    speeds: tokens a second of each run. chosen: rounds by number of drafts.
    """

    llm: Any
    pinned: int | None
    speeds: list[float] = field(default_factory=list)
    chosen: Counter[int] = field(default_factory=Counter)

    def run(self, workload: Rounds, size: int) -> None:
        tokens, seconds, chosen = run_with(self.llm, self.pinned, workload, size)
        self.speeds.append(tokens / seconds)
        self.chosen += chosen

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    @property
    def mean_drafts(self) -> float:
        return sum(k * rounds for k, rounds in self.chosen.items()) / max(1, self.chosen.total())


def shared_times(
    speculative_config: Annotated[str, typer.Option(help="As for `unisono serve`, JSON, without share_drafts.")],
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    concurrency: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "16,64,256",
    kinds: Annotated[
        str,
        typer.Option(help="Shares of rounds that accept draft 1, 2 …, for each kind of requests; kinds by semicolons."),
    ] = KINDS,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a run, at least.")] = 32,
    cycles: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 2,
) -> None:
    """Measure tokens per second with each fixed k, with adaptive k, and with drafts that requests share."""
    sizes = whole_numbers("--concurrency", concurrency, some=True)
    rates = tuple(shares("--kinds", kind) for kind in kinds.split(";"))
    spec = speculative(speculative_config)
    if not spec.adaptive or not all(rates):
        raise ConfigError("benchmarks.shared_times needs an adaptive number of drafts, and rates for each kind.")
    if spec.method in LOOKUPS:
        raise ConfigError(f"benchmarks.shared_times: {spec.method} finds no drafts in random text.")
    check_model(model, load_format=load_format)
    from unisono.entrypoints.llm import LLM

    longest, width = max(timed_rounds(rounds, size) for size in sizes), 1 + spec.num_speculative_tokens
    length = context + (longest + 2 * WARM) * width
    flags: dict[str, Any] = {
        "load_format": load_format, "max_num_seqs": max(sizes), "max_model_len": length, "gpu_memory_utilization": 0.97,
        "num_pages": 2 + max(sizes) * (length // 16 + 2), "synthetic_acceptance_rates": rates,
    }  # fmt: skip
    each, sharing = (LLM(model, speculative=replace(spec, share_drafts=shared), **flags) for shared in (False, True))
    if not sharing.engine.runner.shared:
        raise ConfigError("This drafter's requests share no drafts: see `unisono explain`.")
    workload = Rounds(context, rounds, length)
    names = [*(f"k={k}" for k in each.engine.runner.choices), ADAPTIVE, SHARED]
    print(f"| requests | {' | '.join(names)} | mean k | … shared | shared / best fixed | / adaptive | spread |")
    print("|---" * (len(names) + 6) + "|")
    with frozen_heap():
        for size in sizes:
            print(_row(measure(each, sharing, workload, size, cycles), size), flush=True)
    _print_costs(each, sharing)
    sharing.shutdown()
    each.shutdown()


def measure(each: Any, sharing: Any, workload: Rounds, size: int, cycles: int) -> dict[str, Variant]:
    """Run all variants ``cycles`` times with ``size`` requests. each, sharing: the engines without and with sharing."""
    variants = {f"k={k}": Variant(each, k) for k in each.engine.runner.choices}
    variants |= {ADAPTIVE: Variant(each, None), SHARED: Variant(sharing, None)}
    for name in (ADAPTIVE, SHARED):  # caches the prompts, and lets the estimates of acceptance and cost converge
        variants[name].run(workload, size)
        variants[name] = replace(variants[name], speeds=[], chosen=Counter())
    for cycle in range(cycles):
        for variant in list(variants.values())[:: -1 if cycle % 2 else 1]:
            variant.run(workload, size)
    return variants


def _row(variants: dict[str, Variant], size: int) -> str:
    """A line of the table."""
    best = max((v for v in variants.values() if v.pinned is not None), key=lambda v: v.speed)
    adaptive, shared = variants[ADAPTIVE], variants[SHARED]
    spread = max(max(v.speeds) / min(v.speeds) for v in variants.values())
    cells = [str(size), *(f"{v.speed:.0f}" for v in variants.values())]
    cells += [f"{adaptive.mean_drafts:.2f}", f"{shared.mean_drafts:.2f}"]
    cells += [f"{shared.speed / best.speed:.3f} (k={best.pinned})", f"{shared.speed / adaptive.speed:.3f}"]
    return "| " + " | ".join([*cells, f"{spread:.2f}"]) + " |"


def _print_costs(each: Any, sharing: Any) -> None:
    """Milliseconds of both engines' rounds on padding, by requests and drafts."""
    found = defaultdict[tuple[int, int], list[str]](list)
    for llm in (each, sharing):
        controller, runner = llm.engine.draft_controller, llm.engine.runner
        most = runner.config.max_num_seqs
        for rows in sorted({*(size for size in (1, 16, 64) if size < most), most}):
            for k in runner.choices:
                ms = controller.padding_ms(rows, k)
                found[rows, k].append("–" if ms is None else f"{ms:.3f}")
    print("\n| requests | k | round on padding, ms | … shared |\n|---|---|---|---|")
    for (rows, k), cells in found.items():
        print(f"| {rows} | {k} | {' | '.join(cells)} |")


if __name__ == "__main__":
    run(shared_times)
