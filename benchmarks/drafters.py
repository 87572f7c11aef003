"""``python -m benchmarks.drafters``: throughput of the bundled model with each of its drafters.

An engine without speculation and one engine per drafter answer the same held-out problems greedily, at each batch size.
The command fails if a drafter changes a text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.command import run
from unisono.cluster.heap import frozen_heap
from unisono.console.values import whole_numbers
from unisono.tools.eval.problems import COUNT, final_answer, held_out_problems
from unisono.types import ConfigError, SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from unisono.entrypoints.llm import LLM

HEADS = {
    "ngram": None,
    "suffix": None,
    "standalone": "tiny-draft",
    "eagle": "tiny-eagle",
    "eagle3": "tiny-eagle3",
    "mtp": "tiny-mtp",
}
"""Method name -> the bundled draft checkpoint it uses, None if it needs no checkpoint."""


@dataclass(frozen=True)
class Speed:
    """The measurements of one drafter.

    per_second: tokens per second by batch size. accept_length: mean tokens per round over all batch sizes. right:
    problems solved. answers: token ids of every answer.
    """

    per_second: dict[int, float]
    accept_length: float
    right: int
    answers: list[list[int]]


def drafters(
    problems: Annotated[int, typer.Option(min=1, max=COUNT, help="Held-out problems.")] = 96,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,16",
    drafts: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Drafts per round, at most.")] = 3,
    methods: Annotated[str, typer.Option(help="Methods to compare, separated by commas.")] = ",".join(HEADS),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(help="As for `unisono serve`.")] = 0.3,
) -> None:
    """Measure tokens per second of the bundled model without speculation and with each of its drafters."""
    sizes, chosen = whole_numbers("--batch", batch, some=True), [name.strip() for name in methods.split(",")]
    if unknown := [name for name in chosen if name not in HEADS]:
        raise ConfigError(f"--methods {unknown[0]!r} is unknown; choose from {', '.join(HEADS)}.")
    flags = {"device": device, "gpu_memory_utilization": gpu_memory_utilization, "max_num_seqs": max(sizes)}
    print("| drafter | " + " | ".join(f"tokens/s, batch {n}" for n in sizes) + " | tokens per round | right | same |")
    print("|---" * (len(sizes) + 4) + "|")
    baseline = _measure(SpeculativeConfig("none"), problems, sizes, flags)
    _print_row("none", baseline, baseline, problems)
    for method in chosen:
        spec = SpeculativeConfig.parse({"method": method, "model": HEADS[method], "num_speculative_tokens": drafts})
        result = _measure(spec, problems, sizes, flags)
        _print_row(method, result, baseline, problems)
        if result.answers != baseline.answers:
            raise SystemExit(f"{method} changed a text.")


def _print_row(name: str, result: Speed, baseline: Speed, problems: int) -> None:
    """Print one line of the table; ``baseline`` is the engine without speculation."""
    rates = " | ".join(f"{rate:.0f} ({rate / baseline.per_second[n]:.2f}×)" for n, rate in result.per_second.items())
    same = "" if result is baseline else "yes" if result.answers == baseline.answers else "NO"
    print(f"| `{name}` | {rates} | {result.accept_length:.2f} | {result.right} of {problems} | {same} |", flush=True)


def _measure(spec: SpeculativeConfig, count: int, sizes: list[int], flags: dict[str, Any]) -> Speed:
    """Answer the first ``count`` problems at every batch size in ``sizes``."""
    from unisono.entrypoints.llm import LLM

    llm = LLM("tiny", speculative=spec, **flags)
    problems = held_out_problems(count)
    _ask(llm, [problem.question for problem in problems[-4:]])  # warm up: compile kernels, fill caches
    rates, answers = {}, []
    with frozen_heap():
        for size in sizes:
            llm.engine.reset_prefix_cache()
            started, outputs = time.perf_counter(), []
            for first in range(0, count, size):
                outputs += _ask(llm, [problem.question for problem in problems[first : first + size]])
            rates[size] = sum(len(ids) for ids, _ in outputs) / (time.perf_counter() - started)
            answers += [ids for ids, _ in outputs]
    right = sum(final_answer(text) == p.final_answer for (_, text), p in zip(outputs, problems, strict=True))
    length = llm.engine.counters.accept_length
    llm.shutdown()
    return Speed(rates, length, right, answers)


def _ask(llm: LLM, questions: list[str]) -> list[tuple[list[int], str]]:
    """Token ids and text of each answer."""
    params = SamplingParams(temperature=0, max_tokens=220, seed=0)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    return [(list(output.outputs[0].token_ids), output.outputs[0].text) for output in outputs]


if __name__ == "__main__":
    run(drafters)
