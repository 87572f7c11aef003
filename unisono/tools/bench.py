"""``unisono bench``: latency of the engine, and where the time is spent.

Absolute times are meaningful on a GPU only; on a CPU compare ratios within one run. Every report includes the
versions, the machine and the settings.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.tools.adaptive_bench import adaptive, plot, versions
from unisono.tools.drafters import drafters
from unisono.tools.exact import exact

app = typer.Typer(no_args_is_help=True, help="Benchmarks.")
app.command()(exact)
app.command()(adaptive)
app.command()(drafters)
app.command()(plot)


@dataclass
class Report:
    """The results of one run; times are medians in milliseconds.

    forced: synthetic acceptance length, if one was set. accept_length, step_ms: by batch size. ttft_ms: by prompt
    tokens. launches: per round. graphs: captured row counts by program.
    """

    model: str
    versions: dict[str, str]
    speculative: str = ""
    forced: float | None = None
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
        if self.speculative:
            forced = f"; SYNTHETIC ACCEPTANCE, {self.forced} tokens per round" if self.forced else ""
            lines += [f"Speculation {self.speculative}{forced}", ""]
            lines += ["Tokens per round: " + ", ".join(f"batch {b} {n:.2f}" for b, n in self.accept_length.items()), ""]
        for title, unit, values in (("ms/step at batch", "", self.step_ms), ("TTFT ms at tokens", "", self.ttft_ms)):
            if values:
                lines += ["| " + title + " | " + " | ".join(f"{k}{unit}" for k in values) + " |"]
                lines += ["|---" * (len(values) + 1) + "|"]
                lines += ["| median | " + " | ".join(f"{v:.2f}" for v in values.values()) + " |", ""]
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


@app.command()
def latency(
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="As of `unisono serve`.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes for ms/step, separated by commas.")] = "1,4,16,64",
    context: Annotated[int, typer.Option(help="Prompt tokens per request.")] = 1024,
    output_len: Annotated[int, typer.Option(help="Tokens generated per request.")] = 256,
    prompts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens for TTFT, separated by commas; empty for none.")
    ] = "128,512,2048,8192",
    repeats: Annotated[int, typer.Option(help="Measurements of each TTFT.")] = 7,
    max_model_len: Annotated[int | None, typer.Option(help="Context length of the engine.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Concurrent requests, at most.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Prompt tokens per pass, at most.")] = None,
    enforce_eager: Annotated[bool, typer.Option(help="Capture no graphs.")] = False,
    graphs: Annotated[str, typer.Option(help="As of `unisono serve`.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="As of `unisono serve`.")] = False,
    attention_backend: Annotated[str, typer.Option(help="As of `unisono serve`.")] = "auto",
    speculative_config: Annotated[str | None, typer.Option(help="As of `unisono serve`, JSON.")] = None,
    synthetic_acceptance_length: Annotated[
        float | None,
        typer.Option(help="Commit this many tokens per round, whatever the drafts are. The text is noise."),
    ] = None,
    profile: Annotated[bool, typer.Option(help="Profile rounds at the first batch size (GPU).")] = False,
    profile_prompt: Annotated[int | None, typer.Option(help="Profile a prompt of this many tokens (GPU).")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
) -> None:
    """Milliseconds per step and time to first token, measured on the engine loop that the server uses."""
    imported = time.perf_counter()
    from unisono.llm import LLM
    from unisono.types import SpeculativeConfig

    imported = time.perf_counter() - imported
    flags: dict[str, Any] = {"dtype": dtype, "load_format": load_format, "max_model_len": max_model_len}
    flags |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    flags |= {"quantization": quantization, "speculative": SpeculativeConfig("none")}
    if speculative_config:
        flags["speculative"] = SpeculativeConfig.parse(json.loads(speculative_config))
        flags["synthetic_acceptance_length"] = synthetic_acceptance_length
    flags |= {"graphs": graphs, "compile": compile, "attention_backend": attention_backend}
    llm = LLM(model, enforce_eager=enforce_eager, **flags)
    report = Report(model, versions(llm))
    report.speculative, report.forced = speculative_config or "", synthetic_acceptance_length
    report.start_seconds = {"import": imported, **llm.engine.info()["start_seconds"]}  # type: ignore[dict-item]
    for size in _integers(batch):
        report.step_ms[size], report.accept_length[size] = _step_ms(llm, size, context, output_len)
    for length in _integers(prompts):
        report.ttft_ms[length] = _ttft_ms(llm, length, repeats)
    if profile:
        _profile(llm, _integers(batch)[0], context, report)
    if profile_prompt:
        _profile_prompt(llm, profile_prompt, report)
    report.passes = llm.engine.info()["passes"]  # type: ignore[assignment]
    report.graph_memory = llm.engine.info()["graph_memory"]  # type: ignore[assignment]
    report.graphs = _sizes(llm.engine.info()["graphs"])
    print(report.markdown())
    if out is not None:
        out.write_text(json.dumps(report.__dict__, indent=1))
    llm.shutdown()


def _sizes(graphs: Any) -> dict[str, list[int]]:
    """Rows of the captured graphs, by program, width and needs."""
    sizes: dict[str, list[int]] = {}
    for graph in graphs:
        if isinstance(graph["rows"], int):
            name = f"{graph['program']} × {graph['width']} ({graph['features']})"
            sizes.setdefault(name, []).append(graph["rows"])
    return sizes


def _integers(text: str) -> list[int]:
    """Parse integers separated by commas."""
    return [int(n) for n in text.split(",") if n.strip()]


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
    """Step until all ``size`` requests are decoding, and then for three rounds more."""
    scheduler = llm.engine.scheduler
    while scheduler.waiting or scheduler.extending or len(scheduler.running) < size:
        llm.engine.step()
    for _ in range(3):
        llm.engine.step()


def _step_ms(llm: Any, size: int, context: int, output_len: int) -> tuple[float, float]:
    """(median milliseconds per round, mean tokens per request and round)."""
    names = _add_requests(llm, size, context, output_len)
    _run_until_warm(llm, size)
    times, tokens, rows = [], 0, 0
    for _ in range(max(8, output_len - 16)):
        started = time.perf_counter()
        deltas = llm.engine.step()
        times.append(1e3 * (time.perf_counter() - started))
        if len(deltas) < size or any(d.finish for d in deltas):
            break
        tokens, rows = tokens + sum(len(d.token_ids) for d in deltas), rows + size
    for name in names:
        llm.engine.abort(name)
    while llm.engine.has_work():
        llm.engine.step()
    return statistics.median(times), tokens / max(1, rows)


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
    """Share of the time from the first kernel to the last in which the device was idle between rounds.

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


def _profile(llm: Any, size: int, context: int, report: Report, rounds: int = 20) -> None:
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


def _profile_prompt(llm: Any, length: int, report: Report, repeats: int = 3) -> None:
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
