"""Figures of a load: percentiles, throughput, goodput, failures; as a table and as JSON.

Definitions and JSON names are those of ``vllm bench serve``: TTFT from sending a request (connecting included) to its
first text; TPOT = (last text − first text) / (output tokens − 1) of each request; ITL between consecutive texts; E2EL
to the end of the response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unisono.tools.load.client import ClientOutcome
from unisono.tools.load.streams import RequestResult
from unisono.types import ConfigError

METRICS = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Between texts (ITL)",
    "e2el": "End to end (E2EL)",
}
SLOS = ("ttft", "tpot", "e2el")
"""Metrics with one value per request."""
BUSY, LATE = 0.85, 0.005
"""Processor fraction, and lag in seconds, above which the client distorts the results."""


@dataclass(frozen=True)
class Spread:
    """The distribution of a metric, in milliseconds. percentiles: by percentage."""

    mean: float
    median: float
    std: float
    max: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> Spread:
        ms = 1e3 * np.asarray(seconds, dtype=np.float64)
        ranks = {p: float(np.percentile(ms, p)) for p in percentiles}
        return cls(float(ms.mean()), float(np.median(ms)), float(ms.std()), float(ms.max()), ranks)


@dataclass
class LoadFigures:
    """The results of a load. duration: seconds from the first request sent to the last response's end."""

    duration: float
    completed: int
    failures: dict[str, int]
    examples: dict[str, str]
    total_input_tokens: int
    total_output_tokens: int
    counted: dict[str, int]
    spreads: dict[str, Spread]
    goodput: dict[str, float]
    good: int
    max_concurrent: int
    lag: float
    busy: float
    answers: list[RequestResult] = field(repr=False, default_factory=list)

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def per_second(self, count: float) -> float:
        return count / self.duration if self.duration else 0.0

    @property
    def warnings(self) -> list[str]:
        """Warnings about the reliability of the figures."""
        found = []
        if self.busy > BUSY:
            found.append(
                f"the client used {100 * self.busy:.0f} % of a processor and may have been the bottleneck; "
                "--client-processes starts more."
            )
        elif self.lag > LATE:
            found.append(
                f"the client was up to {1e3 * self.lag:.1f} ms late (p99), for the machine is busy: latencies may be "
                "too long by that."
            )
        for name, way in (("tokenizer", "from the text"), ("events", "as one for each streamed event")):
            if self.counted.get(name):
                found.append(f"the server sent no usage with {self.counted[name]} answers: tokens are counted {way}.")
        return found

    def rows(self) -> list[tuple[str, str]]:
        """Figures without a distribution, as (name, value)."""
        rows = [("successful requests", str(self.completed)), ("failed requests", str(self.failed))]
        rows += [(f"  {kind}", f"{n}  ({self.examples[kind][:90]})") for kind, n in self.failures.items()]
        rows += [("duration", f"{self.duration:.2f} s"), ("at once, at most", str(self.max_concurrent))]
        rows += [("input tokens", str(self.total_input_tokens)), ("output tokens", str(self.total_output_tokens))]
        rows += [("requests/s", f"{self.per_second(self.completed):.2f}")]
        if self.goodput:
            limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in self.goodput.items())
            share = 100 * self.good / max(1, self.completed + self.failed)
            rows += [(f"goodput, requests/s ({limits})", f"{self.per_second(self.good):.2f}  ({share:.1f} %)")]
        rows += [("output tokens/s", f"{self.per_second(self.total_output_tokens):.2f}")]
        total = self.total_input_tokens + self.total_output_tokens
        return [*rows, ("total tokens/s", f"{self.per_second(total):.2f}")]

    def markdown(self) -> str:
        """The figures as two Markdown tables and warnings."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = ["| figure | value |", "|---|---|", *(f"| {name:<{width}} | {value} |" for name, value in rows), ""]
        if self.spreads:
            ranks = list(next(iter(self.spreads.values())).percentiles)
            heads = ["ms", "mean", "median", *(f"p{p:g}" for p in ranks), "max"]
            lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
            for name, s in self.spreads.items():
                values = [s.mean, s.median, *s.percentiles.values(), s.max]
                lines += [f"| {METRICS[name]} | " + " | ".join(f"{v:.2f}" for v in values) + " |"]
        return "\n".join([*lines, "", *(f"Note: {text}" for text in self.warnings)]).rstrip()

    def json(self, detailed: bool) -> dict[str, Any]:
        """The figures under vLLM's names. detailed: with a list of values per request."""
        data: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "failures": self.failures,
            "failure_examples": self.examples,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "tokens_counted_from": self.counted,
            "request_throughput": self.per_second(self.completed),
            "request_goodput": self.per_second(self.good) if self.goodput else None,
            "goodput": self.goodput,
            "output_throughput": self.per_second(self.total_output_tokens),
            "total_token_throughput": self.per_second(self.total_input_tokens + self.total_output_tokens),
            "max_concurrent_requests": self.max_concurrent,
            "client_lag_p99_ms": 1e3 * self.lag,
            "client_cpu_share": self.busy,
        }
        for name, s in self.spreads.items():
            data |= {f"mean_{name}_ms": s.mean, f"median_{name}_ms": s.median, f"std_{name}_ms": s.std}
            data |= {f"max_{name}_ms": s.max} | {f"p{p:g}_{name}_ms": value for p, value in s.percentiles.items()}
        if detailed:
            fine = [a for a in self.answers if a.failure is None]
            data |= {"start_times": [a.sent for a in fine], "ttfts": [a.ttft for a in fine]}
            data |= {"itls": [a.gaps for a in fine], "latencies": [a.e2el for a in fine]}
            data |= {"input_lens": [a.prompt_tokens for a in fine], "output_lens": [a.output_tokens for a in fine]}
            data |= {"queue_times": [a.queued for a in fine]}
            data |= {"errors": [": ".join(a.failure) for a in self.answers if a.failure is not None]}
        return data


def figures(
    outcomes: Sequence[ClientOutcome],
    goodput: Mapping[str, float],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> LoadFigures:
    """The figures of a load. goodput: limits of a good request, milliseconds by metric."""
    answers = sorted((a for one in outcomes for a in one.answers), key=lambda a: a.sent)
    fine = [a for a in answers if a.failure is None]
    failures = Counter(a.failure[0] for a in answers if a.failure is not None)
    examples = {a.failure[0]: " ".join(a.failure[1].split()) for a in answers if a.failure is not None}
    values = {
        "ttft": [a.ttft for a in fine],
        "tpot": [t for a in fine if (t := a.tpot) is not None],
        "itl": [gap for a in fine for gap in a.gaps],
        "e2el": [a.e2el for a in fine],
    }
    return LoadFigures(
        duration=max(a.ended for a in answers) - answers[0].sent if answers else 0.0,
        completed=len(fine),
        failures=dict(failures.most_common()),
        examples=examples,
        total_input_tokens=sum(a.prompt_tokens for a in fine),
        total_output_tokens=sum(a.output_tokens for a in fine),
        counted=dict(Counter(a.counted for a in fine)),
        spreads={name: Spread.of(values[name], percentiles) for name in metrics if values[name]},
        goodput=dict(goodput),
        good=sum(_good(a, goodput) for a in fine),
        max_concurrent=_most_at_once(answers),
        lag=max((one.lag for one in outcomes), default=0.0),
        busy=max((one.busy for one in outcomes), default=0.0),
        answers=answers,
    )


def _good(answer: RequestResult, limits: Mapping[str, float]) -> bool:
    """True if a request kept every limit; one of a single token has no TPOT."""
    return all(1e3 * (getattr(answer, name) or 0.0) <= limit for name, limit in limits.items())


def _most_at_once(answers: Sequence[RequestResult]) -> int:
    edges = sorted([(a.sent, 1) for a in answers] + [(a.ended, -1) for a in answers])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    return most


def limits_of(pairs: Sequence[str]) -> dict[str, float]:
    """Parse ``--goodput ttft:200 tpot:20`` into milliseconds by metric. Raises ConfigError."""
    found = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in SLOS or not found[name] > 0:
            raise ConfigError(f"--goodput {pair!r}: give METRIC:MILLISECONDS with one of {', '.join(SLOS)}.")
    return found


def chosen_metrics(text: str) -> list[str]:
    """Parse ``--percentile-metrics``. Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics {unknown[0]!r} is unknown; choose from {', '.join(METRICS)}.")
    return names


def chosen_percentiles(text: str) -> list[float]:
    """Parse ``--metric-percentiles``. Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1.0]
    if any(not 0 <= p <= 100 for p in found):
        raise ConfigError(f"--metric-percentiles {text!r}: give numbers from 0 to 100, separated by commas.")
    return found
