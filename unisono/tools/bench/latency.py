"""``unisono bench latency``: time per step and to the first token, and device time by kernel.

Absolute times are meaningful on a GPU only; on a CPU compare ratios within one run. Every report includes the versions,
the machine and the settings.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.config.preflight.model import check_model
from unisono.console.help import HelpfulCommand
from unisono.console.output import CommandGroup
from unisono.console.values import speculative, whole_numbers, writable
from unisono.tools.bench.drafters import drafters
from unisono.tools.bench.exact import exact
from unisono.tools.bench.versions import versions
from unisono.tools.load import flags as load_flags
from unisono.tools.load.serve_bench import serve
from unisono.tools.load.throughput import throughput
from unisono.types import ConfigError, SpeculativeConfig

BATCH, CONTEXT, OUTPUT, PROMPTS = (1, 4, 16, 64), 1024, 256, (128, 512, 2048, 8192)
"""Defaults of ``latency``, as far as the model and the machine allow them; the report names the others."""

WARM = 3
"""Warm-up rounds before rounds are timed."""

ALL_PROMPTS_FIRST = 1e6
"""Value of ``--max-stall-ms`` with which all prompts of a batch are computed before its first round."""

LEAST_ROUNDS = 8
"""Least rounds that a batch is timed for."""

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Benchmarks.", add_completion=False, pretty_exceptions_enable=False
)
app.command(cls=HelpfulCommand)(exact)
app.command(cls=HelpfulCommand)(drafters)
app.command(cls=load_flags.SeveralValues, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    load_flags.grouped(
        serve,
        target=load_flags.target_flags,
        mix=load_flags.mix_flags,
        rate=load_flags.rate_flags,
        sampling=load_flags.sampling_flags,
        report=load_flags.report_flags,
        scene=load_flags.stall_flags,
    )
)
app.command(cls=HelpfulCommand)(
    load_flags.grouped(
        throughput, engine=load_flags.engine_flags, mix=load_flags.mix_flags, scene=load_flags.stall_flags
    )
)


@dataclass
class LatencyReport:
    """The results of one run; times are medians in milliseconds.

    forced: synthetic acceptance length, if one was set. settings: the engine's. context, output_len: tokens of each
    request of step_ms. accept_length, step_ms, rounds (timed ones): by batch size. ttft_ms: by prompt tokens, of
    ``repeats`` prompts each. left_out: sizes that were not measured, with reasons. launches: per round. graphs:
    captured row counts by program.
    """

    model: str
    versions: dict[str, str]
    speculative: str = ""
    forced: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    context: int = 0
    output_len: int = 0
    repeats: int = 0
    left_out: list[str] = field(default_factory=list)
    rounds: dict[int, int] = field(default_factory=dict)
    accept_length: dict[int, float] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)
    step_ms: dict[int, float] = field(default_factory=dict)
    ttft_ms: dict[int, float] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    prompt_kernels: list[dict[str, Any]] = field(default_factory=list)
    launches: dict[str, float] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)
    graph_memory: dict[str, float] = field(default_factory=dict)
    graphs: dict[str, list[int]] = field(default_factory=dict)

    def markdown(self) -> str:
        """The report as Markdown tables."""
        lines = [f"Model {self.model}; " + ", ".join(f"{k} {v}" for k, v in self.versions.items()), ""]
        shown = ("dtype", "quantization", "max_model_len", "max_num_seqs", "attention_backend", "graphs", "load_format")
        lines += ["Settings: " + ", ".join(f"{k} {self.settings[k]}" for k in shown if k in self.settings), ""]
        if self.speculative:
            forced = f"; SYNTHETIC ACCEPTANCE, {self.forced} tokens per round" if self.forced else ""
            lines += [f"Speculation {self.speculative}{forced}", ""]
            lines += ["Tokens per round: " + ", ".join(f"batch {b} {n:.2f}" for b, n in self.accept_length.items()), ""]
        for title, values in (("ms/step at batch", self.step_ms), ("TTFT ms at tokens", self.ttft_ms)):
            if values:
                lines += ["| " + title + " | " + " | ".join(map(str, values)) + " |"]
                lines += ["|---" * (len(values) + 1) + "|"]
                lines += ["| median | " + " | ".join(f"{v:.2f}" for v in values.values()) + " |"]
                if values is self.step_ms:
                    lines += ["| rounds timed | " + " | ".join(map(str, self.rounds.values())) + " |", ""]
                    lines += [
                        f"Each request: {self.context} random tokens in, up to {self.output_len} out, greedy.",
                        "",
                    ]
                else:
                    lines += ["", f"Of {self.repeats} prompts of random tokens, one at a time, none cached.", ""]
        if self.left_out:
            lines += ["Not measured: " + "; ".join(self.left_out) + ".", ""]
        lines += ["Start: " + ", ".join(f"{k} {v:.1f} s" for k, v in self.start_seconds.items()), ""]
        if self.launches:
            lines += ["Per round: " + ", ".join(f"{k} {v:g}" for k, v in self.launches.items()), ""]
        for per, kernels in (("round", self.kernels), ("prompt", self.prompt_kernels)):
            if kernels:
                lines += [f"| kernel | launches/{per} | µs/{per} | share |", "|---|---|---|---|"]
                for k in kernels:
                    lines += [f"| `{k['name']}` | {k['count']:g} | {k['us']:.1f} | {100 * k['share']:.1f} % |"]
                lines += [""]
        if self.graph_memory:
            costs = ", ".join(f"{name} {value:g}" for name, value in self.graph_memory.items())
            lines += [f"- graphs: {costs}"]
        lines += [f"- graphs of {name}: {', '.join(map(str, rows))} rows" for name, rows in self.graphs.items()]
        for p in self.passes:
            lines += [f"- passes: {p['program']} {p['kind']} {p['reason']} {p['count']}"]
        return "\n".join(lines)


@app.command(cls=HelpfulCommand)
def latency(
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As for `unisono serve`.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="As for `unisono serve`.")] = None,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes for ms/step, with commas; empty for none. [default: 1,4,16,64]")
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Prompt tokens per request. [default: 1024]")] = None,
    output_len: Annotated[int, typer.Option(min=16, help="Tokens generated per request.")] = OUTPUT,
    prompts: Annotated[
        str | None,
        typer.Option(help="Prompt lengths in tokens for TTFT; empty for none. [default: 128,512,2048,8192]"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each TTFT.")] = 7,
    max_model_len: Annotated[int | None, typer.Option(help="Context length of the engine.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Concurrent requests, at most.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per pass, at most.")] = None,
    enforce_eager: Annotated[bool, typer.Option(help="Capture no graphs.")] = False,
    graphs: Annotated[str, typer.Option(help="As for `unisono serve`.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="As for `unisono serve`.")] = False,
    attention_backend: Annotated[str, typer.Option(help="As for `unisono serve`.")] = "auto",
    speculative_config: Annotated[str | None, typer.Option(help="As for `unisono serve`, JSON.")] = None,
    synthetic_acceptance_length: Annotated[
        float | None,
        typer.Option(help="Commit this many tokens per round, whatever the drafts are. The text is noise."),
    ] = None,
    profile: Annotated[bool, typer.Option(help="Profile rounds at the first batch size (GPU).")] = False,
    profile_prompt: Annotated[int | None, typer.Option(help="Profile a prompt of this many tokens (GPU).")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
) -> None:
    """Measure milliseconds per step and time to first token, on the engine loop that the server uses.

    Defaults that the model or the machine cannot run are left out, and the report lists them. A flag that cannot be run
    is an error before anything is measured.
    """
    requested = RequestedSizes(_asked("--batch", batch), context, output_len, _asked("--prompts", prompts))
    writable("--out", out)
    check_model(model, quantization=quantization, load_format=load_format)
    spec = speculative(speculative_config) if speculative_config else None
    if synthetic_acceptance_length is not None and spec is None:
        raise ConfigError("--synthetic-acceptance-length needs --speculative-config.")
    flags: dict[str, Any] = {"dtype": dtype, "load_format": load_format, "max_model_len": max_model_len}
    flags |= {"max_num_seqs": max_num_seqs or max(requested.batch or (), default=None)}
    flags |= {"max_num_batched_tokens": max_num_batched_tokens, "max_stall_ms": ALL_PROMPTS_FIRST}
    flags |= {"kv_cache_dtype": kv_cache_dtype}
    flags |= {"quantization": quantization, "speculative": spec or SpeculativeConfig("none")}
    flags |= {"synthetic_acceptance_length": synthetic_acceptance_length, "enforce_eager": enforce_eager}
    flags |= {"graphs": graphs, "compile": compile, "attention_backend": attention_backend}
    report = LatencyReport(model, {}, speculative_config or "", synthetic_acceptance_length, repeats=repeats)
    try:
        _measure(report, flags, requested, profile, profile_prompt)
    finally:
        if report.step_ms or report.ttft_ms:  # results before an error are kept, too
            print(report.markdown())
            if out is not None:
                out.write_text(json.dumps(report.__dict__, indent=1))


def _asked(flag: str, text: str | None) -> list[int] | None:
    return None if text is None else whole_numbers(flag, text)


def _measure(
    report: LatencyReport, flags: dict[str, Any], requested: RequestedSizes, profile: bool, profile_prompt: int | None
) -> None:
    """Start the engine and fill the report."""
    imported = time.perf_counter()
    import torch

    from unisono.entrypoints.llm import LLM

    imported = time.perf_counter() - imported
    if (profile or profile_prompt) and not torch.cuda.is_available():
        raise ConfigError("--profile and --profile-prompt read a GPU's kernels, and no GPU is visible here.")
    with LLM(report.model, **flags) as llm:
        sizes, lengths = requested.fitted(llm, report)
        report.versions = versions(llm)
        report.start_seconds = {"import": imported, **llm.engine.info()["start_seconds"]}  # type: ignore[dict-item]
        report.settings = llm.engine.info()["settings"]  # type: ignore[assignment]
        for size in sizes:
            times, tokens = _step_ms(llm, size, report.context, report.output_len)
            report.step_ms[size], report.rounds[size] = statistics.median(times), len(times)
            report.accept_length[size] = tokens
        while lengths and llm.engine.capture_missing():
            pass  # capture the graphs that a server captures in its first idle seconds
        for length in lengths:
            report.ttft_ms[length] = _ttft_ms(llm, length, report.repeats)
        if profile and sizes:
            _profile(llm, sizes[0], report.context, report)
        if profile_prompt:
            _profile_prompt(llm, profile_prompt, report)
        info = llm.engine.info()
        report.passes = info["passes"]  # type: ignore[assignment]
        report.graph_memory = info["graph_memory"]  # type: ignore[assignment]
        report.graphs = _sizes(info["graphs"])


@dataclass(frozen=True)
class RequestedSizes:
    """The sizes to measure; None: the default, as far as possible.

    batch: batch sizes. context, output_len: prompt and generated tokens of their requests. prompts: prompt lengths.
    """

    batch: list[int] | None
    context: int | None
    output_len: int
    prompts: list[int] | None

    def fitted(self, llm: Any, report: LatencyReport) -> tuple[list[int], list[int]]:
        """(batch sizes, prompt lengths) that this engine can run.

        Raises ConfigError for an explicit one that it cannot.

        Sets the report's context and output_len.
        """
        limit = llm.engine.config.max_model_len
        report.output_len = self.output_len
        report.context = self.context or min(CONTEXT, max(1, limit - self.output_len))
        if self.context is None and report.context < CONTEXT:
            report.left_out.append(f"a context of {CONTEXT} ({report.context} and the output fill {limit} tokens)")
        if self.batch != [] and report.context + self.output_len > limit:
            raise ConfigError(
                f"--context {report.context} and --output-len {self.output_len} are more than the engine's context of "
                f"{limit} tokens (--max-model-len)."
            )
        room = {size: self._room(llm, size, report.context) for size in self.batch or BATCH}
        sizes = _fitting("batch", "--batch", self.batch, BATCH, lambda size: room[size], report)
        too_long = f"the engine's context is {limit} tokens"
        lengths = _fitting(
            "a prompt of", "--prompts", self.prompts, PROMPTS, lambda n: too_long if n + 2 > limit else "", report
        )
        return sizes, lengths

    def _room(self, llm: Any, size: int, context: int) -> str:
        """The reason why ``size`` requests cannot run at once; empty if they can."""
        from unisono.kv.pages import pages_for

        most, pages = llm.engine.config.max_num_seqs, llm.engine.pool.available
        needed = size * pages_for(context + self.output_len)
        if size > most:
            return f"--max-num-seqs is {most}"
        return f"it needs {needed} pages of the KV cache, which has {pages}" if needed > pages else ""


def _fitting(
    what: str,
    flag: str,
    explicit: list[int] | None,
    default: Sequence[int],
    problem: Callable[[int], str],
    report: LatencyReport,
) -> list[int]:
    """The values without a problem.

    Raises ConfigError for an explicit one with a problem; the report lists the others.
    """
    fitting = []
    for value in default if explicit is None else explicit:
        if not (reason := problem(value)):
            fitting.append(value)
        elif explicit is not None:
            raise ConfigError(f"{flag} {value}: {reason}.")
        else:
            report.left_out.append(f"{what} {value} ({reason})")
    return fitting


def _sizes(graphs: Any) -> dict[str, list[int]]:
    """Rows of the captured graphs, by program, width and needs."""
    sizes: dict[str, list[int]] = {}
    for graph in graphs:
        if isinstance(graph["rows"], int):
            name = f"{graph['program']} × {graph['width']} ({graph['features']})"
            sizes.setdefault(name, []).append(graph["rows"])
    return sizes


def _add_requests(llm: Any, size: int, context: int, output_len: int) -> list[str]:
    """Add ``size`` random requests that generate exactly ``output_len`` tokens each; returns their ids."""
    from unisono.types import EngineRequest, SamplingParams

    rng = random.Random(time.perf_counter_ns())
    vocab = llm.engine.checkpoint.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, seed=0)
    names = []
    for i in range(size):
        request = EngineRequest(f"bench-{rng.random()}-{i}", [rng.randrange(vocab) for _ in range(context)], params)
        llm.engine.add(request)
        names.append(request.request_id)
    return names


def _run_until_warm(llm: Any, size: int) -> None:
    """Step until all ``size`` requests are decoding, then for three more rounds. Raises ConfigError if one ends."""
    scheduler, warm = llm.engine.scheduler, 0
    while warm < WARM:
        warm += not (scheduler.waiting or scheduler.extending or len(scheduler.running) < size)
        if any(delta.finish for delta in llm.engine.step()):
            raise ConfigError(f"a request of batch {size} ended before all of them ran: raise --output-len.")


def _step_ms(llm: Any, size: int, context: int, output_len: int) -> tuple[list[float], float]:
    """(milliseconds of each round in which all requests got tokens, mean tokens per request and round)."""
    names = _add_requests(llm, size, context, output_len)
    _run_until_warm(llm, size)
    times, tokens = [], 0
    while True:
        started = time.perf_counter()
        deltas = llm.engine.step()
        elapsed = 1e3 * (time.perf_counter() - started)
        if len(deltas) < size or any(d.finish for d in deltas):
            break
        times.append(elapsed)
        tokens += sum(len(d.token_ids) for d in deltas)
    for name in names:
        llm.engine.abort(name)
    while llm.engine.has_work():
        llm.engine.step()
    if len(times) < LEAST_ROUNDS:
        raise ConfigError(f"batch {size}: {len(times)} rounds had all requests, too few to time: raise --output-len.")
    return times, tokens / (size * len(times))


def _ttft_ms(llm: Any, length: int, repeats: int) -> float:
    """Median time to first token for a prompt of ``length`` tokens, in milliseconds."""
    times = []
    for _ in range(repeats + 2):
        (name,) = _add_requests(llm, 1, length, 2)
        started = time.perf_counter()
        while not any(d.request_id == name for d in llm.engine.step()):
            pass
        times.append(1e3 * (time.perf_counter() - started))
        llm.engine.abort(name)
        while llm.engine.has_work():
            llm.engine.step()
    return statistics.median(times[2:])  # the first two compile kernels and warm the allocator


def _idle_share(trace: Any) -> float:
    """Fraction of the time from the first kernel to the last in which the device was idle between rounds.

    The kernels of a round share the correlation id of the graph launch. Gaps between kernels inside a graph are not
    counted: the host does not cause them.
    """
    spans: dict[int, list[int]] = {}
    for e in trace.profiler.kineto_results.events():
        if e.device_type().name == "CUDA" and e.duration_ns():
            start, end = e.start_ns(), e.start_ns() + e.duration_ns()
            span = spans.setdefault(e.correlation_id(), [start, end])
            span[:] = min(span[0], start), max(span[1], end)
    ordered = sorted(spans.values())
    if not ordered:
        return 0.0
    idle, busy_until = 0, ordered[0][0]
    for start, end in ordered:
        idle += max(0, start - busy_until)
        busy_until = max(busy_until, end)
    return idle / max(1, busy_until - ordered[0][0])


def _profile(llm: Any, size: int, context: int, report: LatencyReport, rounds: int = 20) -> None:
    """Profile ``rounds`` rounds: device time by kernel, and launches by the host, per round."""
    names = _add_requests(llm, size, context, rounds + 64)
    _run_until_warm(llm, size)
    trace = _traced(lambda: [llm.engine.step() for _ in range(rounds)])
    events = trace.key_averages()
    report.kernels, total = _kernels(events, rounds)
    report.launches = {"device busy µs": round(total / rounds, 1)}
    report.launches["device idle between rounds %"] = round(100 * _idle_share(trace), 2)
    for e in events:
        if e.key in ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync"):
            report.launches[e.key] = e.count / rounds
    for name in names:
        llm.engine.abort(name)
    while llm.engine.has_work():
        llm.engine.step()


def _profile_prompt(llm: Any, length: int, report: LatencyReport, repeats: int = 3) -> None:
    """Profile prompts of ``length`` tokens: device time by kernel, per prompt."""
    trace = _traced(lambda: _ttft_ms(llm, length, repeats))
    report.prompt_kernels, _ = _kernels(trace.key_averages(), repeats + 2)


def _traced(work: Callable[[], object]) -> Any:
    """Run ``work`` under the profiler of torch, for host and device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        work()
    return trace


def _kernels(events: Any, times: int) -> tuple[list[dict[str, Any]], float]:
    """(the slowest kernels with times per repetition, microseconds of all kernels over all repetitions).

    times: number of repetitions in the profile.
    """
    device = [e for e in events if e.self_device_time_total > 0 and "Memcpy" not in e.key and "Memset" not in e.key]
    total = sum(e.self_device_time_total for e in device) or 1.0
    rows = []
    for e in sorted(device, key=lambda e: -e.self_device_time_total)[:14]:
        us, share = e.self_device_time_total / times, e.self_device_time_total / total
        rows.append({"name": e.key[:60], "count": e.count / times, "us": us, "share": share})
    return rows, total
