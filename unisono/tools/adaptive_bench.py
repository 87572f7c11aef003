"""``unisono bench adaptive``: what choosing k brings, against no speculation and against every fixed k.

Two engines live side by side: one without speculation, one that has captured rounds with every number of drafts. At
each concurrency they take turns, forwards and backwards, so that no drift of the machine decides: the plain one, the
other with k pinned to each number it has, and left to itself. What is compared is tokens a second.

With ``--synthetic-acceptance-rates`` requests are random tokens behind cached prompts and only rounds are timed.
Without, they are the bundled problems, answered to their ends, prompts included.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.heap import frozen_heap

NONE, ADAPTIVE = "none", "adaptive"
WARM = 6
"""Rounds before the clock starts."""


@dataclass
class Point:
    """One concurrency: tokens a second of each way, the median of its turns, and the adaptive engine's mean k.

    Ways are "none" (the engine without speculation), "k=0" … (pinned) and "adaptive". spread: of each, its fastest turn
    over its slowest. A machine that others use stops for a fraction of a second now and then, which is a turn's tenth.
    """

    concurrency: int
    tokens_per_second: dict[str, float]
    mean_k: float
    spread: dict[str, float] = field(default_factory=dict)

    @property
    def best_fixed(self) -> str:
        """The fixed k with most tokens a second."""
        fixed = {way: speed for way, speed in self.tokens_per_second.items() if way not in (NONE, ADAPTIVE)}
        return max(fixed, key=lambda way: fixed[way])

    @property
    def against_none(self) -> float:
        return self.tokens_per_second[ADAPTIVE] / self.tokens_per_second[NONE]

    @property
    def against_best(self) -> float:
        return self.tokens_per_second[ADAPTIVE] / self.tokens_per_second[self.best_fixed]


@dataclass
class Curve:
    """What one run measured, and of what."""

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
        """What was accepted, in words for every output."""
        if not self.rates:
            return "acceptance is the drafter's own, on the bundled problems"
        return f"SYNTHETIC ACCEPTANCE: draft 1, 2 … accepted in {self.rates} of all rounds"

    def rows(self) -> list[str]:
        """A line of the table for each concurrency."""
        lines, ways = [], list(self.points[0].tokens_per_second)
        for p in self.points:
            speeds = " | ".join(f"{p.tokens_per_second[way]:.0f}" for way in ways)
            best = f"{p.against_best:.3f} ({p.best_fixed})"
            spread = max(p.spread.values(), default=1.0)
            lines += [f"| {p.concurrency} | {speeds} | {p.mean_k:.2f} | {p.against_none:.3f} | {best} | {spread:.2f} |"]
        return lines

    def markdown(self) -> str:
        """For people."""
        ways = list(self.points[0].tokens_per_second)
        lines = [f"Model {self.model}; " + ", ".join(f"{k} {v}" for k, v in self.versions.items())]
        lines += [f"Speculation {self.speculative}; {self.acceptance}", ""]
        lines += [f"| tokens/s at | {' | '.join(ways)} | mean k | / none | / best fixed | spread |"]
        lines += ["|---" * (len(ways) + 5) + "|"]
        lines += self.rows()
        graphs = ", ".join(f"{name} {value:g}" for name, value in self.graph_memory.items())
        lines += [""]
        for engine, passes in self.passes.items():
            counts = (" ".join((p["program"], p["kind"], p["reason"], str(p["count"]))) for p in passes)
            lines += [f"Passes, {engine}: {'; '.join(counts)}"]
        return "\n".join([*lines, "", f"Start of the adaptive engine {self.start_seconds:.1f} s; graphs: {graphs}"])

    def write(self, path: Path) -> None:
        """As JSON to ``path``, and as Markdown beside it."""
        data = asdict(self)
        for row, point in zip(data["points"], self.points, strict=True):
            row |= {"against_none": point.against_none, "against_best": point.against_best}
        path.write_text(json.dumps(data, indent=1) + "\n")
        path.with_suffix(".md").write_text(self.markdown() + "\n")

    @staticmethod
    def read(path: Path) -> Curve:
        """What :meth:`write` wrote."""
        data = json.loads(path.read_text())
        names = ("concurrency", "tokens_per_second", "mean_k", "spread")
        return Curve(**data | {"points": [Point(**{n: p[n] for n in names if n in p}) for p in data["points"]]})


def adaptive(
    speculative_config: Annotated[str, typer.Option(help="As of `unisono serve`, JSON.")],
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    concurrency: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,4,16,64,128,256",
    synthetic_acceptance_rates: Annotated[
        str, typer.Option(help="Accept draft 1, 2 … in these shares of rounds. Without: the drafter's own.")
    ] = "",
    context: Annotated[int, typer.Option(help="Prompt tokens of each request, with synthetic acceptance.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds timed at a stretch, at least.")] = 48,
    cycles: Annotated[int, typer.Option(help="Turns that every way gets.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write JSON here, and Markdown beside it.")] = None,
) -> None:
    """Tokens a second without speculation, with each fixed k, and with k adapting, by concurrency."""
    from unisono.llm import LLM
    from unisono.types import SpeculativeConfig

    sizes = [int(n) for n in concurrency.split(",")]
    rates = tuple(float(rate) for rate in synthetic_acceptance_rates.split(",") if rate)
    spec = SpeculativeConfig.parse(json.loads(speculative_config))
    longest = max(_stretch(rounds, size) for size in sizes)
    width = 1 + spec.num_speculative_tokens
    length = context + (longest + 2 * WARM) * width
    flags: dict[str, Any] = {"dtype": dtype, "load_format": load_format, "max_num_seqs": max(sizes)}
    if rates:
        # Both engines have to fit.
        pages = 2 + max(n * ((context + (_stretch(rounds, n) + 2 * WARM) * width) // 16 + 2) for n in sizes)
        flags |= {"max_model_len": length, "num_pages": pages, "gpu_memory_utilization": 0.97}
    else:
        flags |= {"max_model_len": 512, "gpu_memory_utilization": 0.4}
    plain = LLM(model, **flags)
    if not rates:
        flags["gpu_memory_utilization"] = 0.8
    llm = LLM(model, speculative=spec, synthetic_acceptance_rates=rates, **flags)
    curve = Curve(model, speculative_config, list(rates), versions(llm), context, llm.engine.start_seconds)
    stretch = Rounds(context, rounds, length) if rates else Problems(max(sizes))
    with frozen_heap():
        for size in sizes:
            curve.points.append(measure(plain, llm, size, stretch, cycles))
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


Stretch = Callable[[Any, int], tuple[int, float]]
"""(llm, requests at once) -> tokens and seconds."""


def measure(plain: Any, llm: Any, size: int, stretch: Stretch, cycles: int) -> Point:
    """Every way by turns, forwards and backwards."""
    ways: list[tuple[str, Any, int | None]] = [(NONE, plain, None), (ADAPTIVE, llm, None)]
    ways += [(f"k={k}", llm, k) for k in llm.engine.runner.choices]
    speeds = defaultdict[str, list[float]](list)
    drafts = rounds = 0
    for _, engine, k in ways:  # compiles kernels, fills caches, and lets what is estimated settle
        _pinned(engine, k, stretch, size)
    for cycle in range(cycles):
        for way, engine, k in ways[:: -1 if cycle % 2 else 1]:
            count, took, chosen = _pinned(engine, k, stretch, size)
            speeds[way].append(count / took)
            if way == ADAPTIVE:
                drafts += sum(k * n for k, n in chosen.items())
                rounds += sum(chosen.values())
    medians = {way: statistics.median(each) for way, each in speeds.items()}
    return Point(size, medians, drafts / max(1, rounds), {w: max(each) / min(each) for w, each in speeds.items()})


def _pinned(llm: Any, k: int | None, stretch: Stretch, size: int) -> tuple[int, float, dict[int, int]]:
    """A stretch with k drafts a round, None for as many as pay: tokens, seconds, and rounds by their drafts."""
    engine = llm.engine
    engine.pin_drafts(k)
    before = engine.draft_controller.rounds.copy()
    tokens, seconds = stretch(llm, size)
    engine.pin_drafts(None)
    return tokens, seconds, engine.draft_controller.rounds - before


def _stretch(rounds: int, size: int) -> int:
    """Rounds timed at a stretch: more where few requests would let chance decide."""
    return max(rounds, min(5 * rounds, 384 // size))


@dataclass
class Rounds:
    """So many rounds of requests whose prompts are cached, none alike, that do not end meanwhile."""

    context: int
    rounds: int
    length: int

    def __call__(self, llm: Any, size: int) -> tuple[int, float]:
        from unisono.types import EngineRequest, SamplingParams

        engine, vocab = llm.engine, llm.engine.checkpoint.config.vocab_size
        names = [f"bench-{i}" for i in range(size)]
        for i, name in enumerate(names):
            rng = random.Random(i)  # the same ones every time, so that all but the last few tokens are cached
            params = SamplingParams(temperature=0, max_tokens=self.length - self.context, ignore_eos=True, seed=i)
            engine.add(EngineRequest(name, [rng.randrange(vocab) for _ in range(self.context)], params))
        scheduler = engine.scheduler
        while scheduler.waiting or scheduler.extending or len(scheduler.running) < size:
            engine.step()
        for _ in range(WARM):
            engine.step()
        started = time.perf_counter()
        rounds = _stretch(self.rounds, size)
        tokens = sum(len(delta.token_ids) for _ in range(rounds) for delta in engine.step())
        seconds = time.perf_counter() - started
        for name in names:
            engine.abort(name)
        while engine.has_work():
            engine.step()
        return tokens, seconds


class Problems:
    """Held-out problems of the bundled model, each answered once, so many at once."""

    def __init__(self, most: int) -> None:
        from unisono.tools.tiny.data import test_split

        self.questions = [problem.question for _, problem in test_split(max(8, 2 * most))]

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


def plot(
    results: Annotated[Path, typer.Argument(help="JSON that `unisono bench adaptive --out` wrote.")],
    picture: Annotated[Path, typer.Argument(help="PNG (or SVG, PDF) to draw.")],
) -> None:
    """Draw tokens a second over concurrency, relative to no speculation. Features matplotlib: the extra "plot"."""
    from unisono.types import ConfigError

    try:
        import matplotlib
    except ImportError:
        raise ConfigError('drawing needs matplotlib: pip install "unisono[plot]".') from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    curve = Curve.read(results)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), dpi=150)
    sizes = [point.concurrency for point in curve.points]
    for way in curve.points[0].tokens_per_second:
        relative = [p.tokens_per_second[way] / p.tokens_per_second[NONE] for p in curve.points]
        bold = way == ADAPTIVE
        axes.plot(sizes, relative, marker="o", linewidth=3 if bold else 1, zorder=3 if bold else 2, label=way)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s relative to no speculation")
    axes.set_title(f"{Path(curve.model).name} on {curve.versions.get('on', '')}\n{curve.acceptance}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture)
    print(f"{picture} drawn from {results}")


def versions(llm: Any) -> dict[str, str]:
    """The device and the versions of what affects speed."""
    import torch
    import triton

    import unisono

    device = llm.engine.config.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return {"on": name, "unisono": unisono.__version__, "torch": torch.__version__, "triton": triton.__version__}
