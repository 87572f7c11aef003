"""``unisono bench drafters``: what each of the bundled model's drafters brings, in tokens a second.

The same held-out problems are answered greedily by an engine without speculation and by one for each drafter, one
problem at a time and many at once. Texts must be the same, so accuracy is too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.heap import frozen_heap
from unisono.tools.tiny.data import final_answer, test_split
from unisono.types import SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from unisono.llm import LLM

HEADS = {
    "ngram": None,
    "suffix": None,
    "standalone": "tiny-draft",
    "eagle": "tiny-eagle",
    "eagle3": "tiny-eagle3",
    "mtp": "tiny-mtp",
}
"""Method -> the bundled checkpoint that it drafts with."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second by problems answered at once, tokens a round over all, right answers, and the tokens."""

    per_second: dict[int, float]
    accept_length: float
    right: int
    answers: list[list[int]]


def drafters(
    problems: Annotated[int, typer.Option(help="Held-out problems.")] = 96,
    batch: Annotated[str, typer.Option(help="Problems at once, with commas.")] = "1,16",
    drafts: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Drafts a round, at most.")] = 3,
    methods: Annotated[str, typer.Option(help="Methods to compare, with commas.")] = ",".join(HEADS),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(help="As of `unisono serve`.")] = 0.3,
) -> None:
    """Tokens a second of the bundled model with and without each of its drafters."""
    sizes = [int(n) for n in batch.split(",")]
    flags = {"device": device, "gpu_memory_utilization": gpu_memory_utilization, "max_num_seqs": max(sizes)}
    print("| drafter | " + " | ".join(f"tokens/s, {n} at once" for n in sizes) + " | tokens a round | right | same |")
    print("|---" * (len(sizes) + 4) + "|")
    plain = _measure(None, problems, sizes, flags)
    _print("none", plain, plain, problems)
    for method in methods.split(","):
        spec = SpeculativeConfig.parse({"method": method, "model": HEADS[method], "num_speculative_tokens": drafts})
        found = _measure(spec, problems, sizes, flags)
        _print(method, found, plain, problems)
        if found.answers != plain.answers:
            raise SystemExit(f"{method} changed a text")


def _print(name: str, found: Speed, plain: Speed, problems: int) -> None:
    rates = " | ".join(f"{rate:.0f} ({rate / plain.per_second[n]:.2f}×)" for n, rate in found.per_second.items())
    same = "" if found is plain else "yes" if found.answers == plain.answers else "NO"
    print(f"| `{name}` | {rates} | {found.accept_length:.2f} | {found.right} of {problems} | {same} |", flush=True)


def _measure(spec: SpeculativeConfig | None, count: int, sizes: list[int], flags: dict[str, Any]) -> Speed:
    from unisono.llm import LLM

    llm = LLM("tiny", speculative=spec, **flags)
    problems = [problem for _, problem in test_split(count)]
    _ask(llm, [problem.question for problem in problems[-4:]])  # whatever is slow only once
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
    """The tokens and the text of each answer."""
    params = SamplingParams(temperature=0, max_tokens=220, seed=0)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    return [(list(output.outputs[0].token_ids), output.outputs[0].text) for output in outputs]
