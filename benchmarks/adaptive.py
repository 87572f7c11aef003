"""``python -m benchmarks.adaptive``: throughput with adaptive k, compared with no speculation and with every fixed k.

The benchmark starts two engines: one without speculation, and one that has captured rounds for every k. At each
concurrency it measures several variants in turn: the first engine, the second with each fixed k, and the second with
adaptive k. The order alternates between forwards and backwards, so that a drift of the machine's speed affects all
variants alike. The metric is tokens per second.

With ``--synthetic-acceptance-rates`` the prompts are random tokens, already cached, and only rounds are timed. Without
it, the requests are the held-out problems (``problems.py``), and prompt passes are timed too.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from unisono.cluster.heap import frozen_heap
from unisono.config.preflight.model import check_model
from unisono.console.values import shares, speculative, whole_numbers, writable
from unisono.tools.bench.versions import versions
from unisono.types import SpeculativeConfig

NONE, ADAPTIVE = "none", "adaptive"
WARM = 6
"""Warm-up rounds before timing starts."""


@dataclass
class Point:
    """The measurements at one concurrency.

    tokens_per_second: by variant, the median of its runs. The variants are "none" (no speculation), "k=0", "k=1" …
    (fixed k) and "adaptive". mean_k: mean k that "adaptive" chose. spread: by variant, its fastest run divided by its
    slowest. On a shared machine single runs can be slowed down by about a tenth, hence the median.
    """

    concurrency: int
    tokens_per_second: dict[str, float]
    mean_k: float
    spread: dict[str, float] = field(default_factory=dict)

    @property
    def best_fixed(self) -> str:
        """The fixed k with the most tokens per second."""
        fixed = {name: speed for name, speed in self.tokens_per_second.items() if name not in (NONE, ADAPTIVE)}
        return max(fixed, key=lambda name: fixed[name])

    @property
    def against_none(self) -> float:
        """Throughput of "adaptive" relative to no speculation."""
        return self.tokens_per_second[ADAPTIVE] / self.tokens_per_second[NONE]

    @property
    def against_best(self) -> float:
        """Throughput of "adaptive" relative to the best fixed k."""
        return self.tokens_per_second[ADAPTIVE] / self.tokens_per_second[self.best_fixed]


@dataclass
class Curve:
    """The results of one benchmark run, with its settings."""

    model: str
    speculative: str
    rates: list[float]
    versions: dict[str, str]
    context: int
    start_seconds: float
    points: list[Point] = field(default_factory=list)
    round_ms: list[dict[str, Any]] = field(default_factory=list)
    graph_memory: dict[str, float] = field(default_factory=dict)
    passes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def acceptance(self) -> str:
        """The source of draft acceptance, as text."""
        if not self.rates:
            return "acceptance of the drafter itself, on the held-out problems"
        return f"SYNTHETIC ACCEPTANCE: draft 1, 2 … accepted in {self.rates} of the rounds"

    def rows(self) -> list[str]:
        """One table row per concurrency."""
        lines, variants = [], list(self.points[0].tokens_per_second)
        for p in self.points:
            speeds = " | ".join(f"{p.tokens_per_second[name]:.0f}" for name in variants)
            best = f"{p.against_best:.3f} ({p.best_fixed})"
            spread = max(p.spread.values(), default=1.0)
            lines += [f"| {p.concurrency} | {speeds} | {p.mean_k:.2f} | {p.against_none:.3f} | {best} | {spread:.2f} |"]
        return lines

    def markdown(self) -> str:
        """The results as a Markdown table."""
        variants = list(self.points[0].tokens_per_second)
        lines = [f"Model {self.model}; " + ", ".join(f"{k} {v}" for k, v in self.versions.items())]
        lines += [f"Speculation {self.speculative}; {self.acceptance}", ""]
        lines += [f"| tokens/s at | {' | '.join(variants)} | mean k | / none | / best fixed | spread |"]
        lines += ["|---" * (len(variants) + 5) + "|"]
        lines += self.rows()
        graphs = ", ".join(f"{name} {value:g}" for name, value in self.graph_memory.items())
        lines += [""]
        for engine, passes in self.passes.items():
            counts = (" ".join((p["program"], p["kind"], p["reason"], str(p["count"]))) for p in passes)
            lines += [f"Passes, {engine}: {'; '.join(counts)}"]
        return "\n".join([*lines, "", f"Start of the adaptive engine {self.start_seconds:.1f} s; graphs: {graphs}"])

    def write(self, path: Path) -> None:
        """Write JSON to ``path``, and Markdown to the same name with the suffix ``.md``."""
        data = asdict(self)
        for row, point in zip(data["points"], self.points, strict=True):
            row |= {"against_none": point.against_none, "against_best": point.against_best}
        path.write_text(json.dumps(data, indent=1) + "\n")
        path.with_suffix(".md").write_text(self.markdown() + "\n")

    @staticmethod
    def read(path: Path) -> Curve:
        """Read the JSON that :meth:`write` wrote."""
        data = json.loads(path.read_text())
        names = ("concurrency", "tokens_per_second", "mean_k", "spread")
        return Curve(**data | {"points": [Point(**{n: p[n] for n in names if n in p}) for p in data["points"]]})


def adaptive(
    speculative_config: Annotated[str, typer.Option(help="As for `unisono serve`, JSON.")],
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    concurrency: Annotated[str, typer.Option(help="Concurrencies, separated by commas.")] = "1,4,16,64,128,256",
    synthetic_acceptance_rates: Annotated[
        str, typer.Option(help="Accept draft 1, 2 … in these shares of the rounds. Default: real acceptance.")
    ] = "",
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens per request, with synthetic acceptance.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per run, at least.")] = 48,
    cycles: Annotated[int, typer.Option(min=1, help="Runs per variant.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON to this file, and Markdown to the same name with .md.")
    ] = None,
) -> None:
    """Measure tokens per second without speculation, with each fixed k and with adaptive k, by concurrency."""
    sizes = whole_numbers("--concurrency", concurrency, some=True)
    rates = shares("--synthetic-acceptance-rates", synthetic_acceptance_rates)
    spec = speculative(speculative_config)
    writable("--out", out)
    check_model(model, load_format=load_format)
    from unisono.entrypoints.llm import LLM

    longest = max(timed_rounds(rounds, size) for size in sizes)
    width = 1 + spec.num_speculative_tokens
    length = context + (longest + 2 * WARM) * width
    flags: dict[str, Any] = {"dtype": dtype, "load_format": load_format, "max_num_seqs": max(sizes)}
    if rates:
        # Both engines must fit into memory.
        pages = 2 + max(n * ((context + (timed_rounds(rounds, n) + 2 * WARM) * width) // 16 + 2) for n in sizes)
        flags |= {"max_model_len": length, "num_pages": pages, "gpu_memory_utilization": 0.97}
    else:
        flags |= {"max_model_len": 512, "gpu_memory_utilization": 0.4}
    workload: Workload = Rounds(context, rounds, length) if rates else Problems(max(sizes))
    plain = LLM(model, speculative=SpeculativeConfig("none"), **flags)
    if not rates:
        flags["gpu_memory_utilization"] = 0.8
    llm = LLM(model, speculative=spec, synthetic_acceptance_rates=rates, **flags)
    curve = Curve(model, speculative_config, list(rates), versions(llm), context, llm.engine.start_seconds)
    with frozen_heap():
        for size in sizes:
            curve.points.append(measure(plain, llm, size, workload, cycles))
            print(curve.rows()[-1], flush=True)
    info = llm.engine.info()
    curve.round_ms = info["speculation"]["round_ms"]  # type: ignore[index]
    curve.graph_memory = info["graph_memory"]  # type: ignore[assignment]
    curve.passes = {NONE: plain.engine.info()["passes"], ADAPTIVE: info["passes"]}  # type: ignore[dict-item]
    print(curve.markdown())
    if out is not None:
        curve.write(out)
    llm.shutdown()
    plain.shutdown()


Workload = Callable[[Any, int], tuple[int, float]]
"""(llm, concurrency) -> (generated tokens, seconds)."""


def measure(plain: Any, llm: Any, size: int, workload: Workload, cycles: int) -> Point:
    """Run ``workload`` ``cycles`` times with every variant at concurrency ``size``.

    plain: the LLM without speculation. llm: the LLM with speculation.
    """
    variants: list[tuple[str, Any, int | None]] = [(NONE, plain, None), (ADAPTIVE, llm, None)]
    variants += [(f"k={k}", llm, k) for k in llm.engine.runner.choices]
    speeds = defaultdict[str, list[float]](list)
    drafts = rounds = 0
    for _, engine, k in variants:  # compiles kernels, fills caches, and lets the estimates of acceptance converge
        run_with(engine, k, workload, size)
    for cycle in range(cycles):
        for name, engine, k in variants[:: -1 if cycle % 2 else 1]:
            count, seconds, chosen = run_with(engine, k, workload, size)
            speeds[name].append(count / seconds)
            if name == ADAPTIVE:
                drafts += sum(k * n for k, n in chosen.items())
                rounds += sum(chosen.values())
    medians = {name: statistics.median(runs) for name, runs in speeds.items()}
    spread = {name: max(runs) / min(runs) for name, runs in speeds.items()}
    return Point(size, medians, drafts / max(1, rounds), spread)


def run_with(llm: Any, k: int | None, workload: Workload, size: int) -> tuple[int, float, dict[int, int]]:
    """Run the workload with ``k`` drafts per round (None: adaptive) -> (tokens, seconds, number of rounds by k)."""
    engine = llm.engine
    engine.pin_drafts(k)
    before = engine.draft_controller.rounds.copy()
    tokens, seconds = workload(llm, size)
    engine.pin_drafts(None)
    return tokens, seconds, engine.draft_controller.rounds - before


def timed_rounds(rounds: int, size: int) -> int:
    """Rounds per run: more at low concurrency, where a run of ``rounds`` rounds would be too noisy."""
    return max(rounds, min(5 * rounds, 384 // size))


@dataclass
class Rounds:
    """A workload: at least ``rounds`` rounds of different requests with cached prompts, none of which finishes.

    context: prompt tokens per request. length: prompt and generated tokens per request.
    """

    context: int
    rounds: int
    length: int

    def __call__(self, llm: Any, size: int) -> tuple[int, float]:
        from unisono.types import EngineRequest, SamplingParams

        engine, vocab = llm.engine, llm.engine.checkpoint.config.vocab_size
        names = [f"bench-{i}" for i in range(size)]
        for i, name in enumerate(names):
            rng = random.Random(i)  # the same prompts in every run, so that all but the last few tokens are cached
            params = SamplingParams(temperature=0, max_tokens=self.length - self.context, ignore_eos=True, seed=i)
            engine.add(EngineRequest(name, [rng.randrange(vocab) for _ in range(self.context)], params))
        scheduler = engine.scheduler
        while scheduler.waiting or scheduler.extending or len(scheduler.running) < size:
            engine.step()
        for _ in range(WARM):
            engine.step()
        started = time.perf_counter()
        rounds = timed_rounds(self.rounds, size)
        tokens = sum(len(delta.token_ids) for _ in range(rounds) for delta in engine.step())
        seconds = time.perf_counter() - started
        for name in names:
            engine.abort(name)
        while engine.has_work():
            engine.step()
        return tokens, seconds


class Problems:
    """A workload: held-out problems, each answered once.

    most: the highest concurrency. Raises ConfigError if there are not twice as many problems.
    """

    def __init__(self, most: int) -> None:
        from unisono.tools.eval.problems import held_out_problems

        self.questions = [problem.question for problem in held_out_problems(max(8, 2 * most))]

    def __call__(self, llm: Any, size: int) -> tuple[int, float]:
        from unisono.types import EngineRequest, SamplingParams

        engine, stop = llm.engine, tuple(llm.engine.checkpoint.eos_token_ids)
        engine.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=200, seed=0)
        prompts = [llm.chat_prompt([{"role": "user", "content": q}])["prompt_token_ids"] for q in self.questions]
        waiting = [EngineRequest(f"bench-{i}", p, params, stop) for i, p in enumerate(prompts[: max(8, 2 * size)])]
        tokens, running, started = 0, 0, time.perf_counter()
        while waiting or running:
            while waiting and running < size:
                engine.add(waiting.pop())
                running += 1
            for delta in engine.step():
                tokens += len(delta.token_ids)
                running -= delta.finish != 0
        while engine.has_work():
            engine.step()
        return tokens, time.perf_counter() - started


if __name__ == "__main__":
    run(adaptive)
