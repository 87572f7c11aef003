"""``python -m benchmarks.soak``: a server under every kind of request; it must lose, leak and change nothing.

A quiet server answers each distinct request alone, without speculation. A second server, with the given flags, few
pages and few slots, then gets them again and again, many at once, some of them aborted or left by their clients. Each
answer is compared with the quiet one; afterwards the server must hold what it held before.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.soak_server import KEEP_ALIVE, Held, SoakServer, metrics, soak_server
from unisono.config.catalog import bundled
from unisono.config.preflight.model import check_model
from unisono.tools.load.server_process import check_flags

FLAT = 0.02
"""Share that memory may grow by over the last half."""
SAMPLES = 200
"""Times that memory is looked at."""
PAGE_TOKENS = 16
CONTEXT = 512
"""Tokens that most requests fit into; definitions of tools in a long chat template take more."""
TABLE = "{:<20} {:>8} {:>8} {:>8} {:>6} {:>6} {:>6} {:>6} {:>9} {:>9}"


def soak(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    requests: Annotated[int, typer.Option(help="Number of requests.", min=21)] = 10_000,
    distinct: Annotated[int, typer.Option(help="Distinct requests among them.", min=21)] = 420,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 32,
    max_num_seqs: Annotated[int, typer.Option(help="Of the server: requests that run at once.", min=1)] = 8,
    max_model_len: Annotated[int, typer.Option(help="Of the server: its context in tokens.", min=512)] = 1024,
    limit: Annotated[float, typer.Option(help="Seconds after which a request counts as hung.", min=1)] = 120.0,
    deaths: Annotated[int, typer.Option(help="Engine processes to end, by SIGKILL and SIGSTOP in turns.", min=0)] = 0,
    sleeps: Annotated[
        int, typer.Option(help="Sleeps of levels 1 and 2 in turns, each with an update of the weights.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the choice of requests.")] = 0,
) -> None:
    """Send a server every kind of request; all other flags are those of `unisono serve`.

    Exit code 1 if a request hung or failed, if a byte differs from a quiet run, if pages, slots, file descriptors or
    processes are left, if memory grew by more than 2 % over the last half, or if nothing was preempted or refused.
    With --deaths the engine process dies in the first third of the run. Requests that ran in it end with an error, at
    most as many as the server has slots, and are sent again; all others are answered. With --sleeps requests that run
    wait, and all answers stay the same.
    """
    check_model(model, load_format="dummy")  # its weights are the servers' to check
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the servers end with this process
    check_flags(model, context)
    plan = Plan(
        model, requests, min(distinct, requests), concurrency, max_num_seqs, max_model_len, limit, deaths, seed, sleeps
    )
    report = asyncio.run(_run(plan, context.args))
    print(report.table())
    if report.problems:
        print("FAILED: " + "; ".join(report.problems))
        raise typer.Exit(1)


@dataclass(frozen=True)
class Plan:
    """The command's flags."""

    model: str
    requests: int
    distinct: int
    concurrency: int
    max_num_seqs: int
    max_model_len: int
    limit: float
    deaths: int
    seed: int
    sleeps: int = 0

    def flags(self, busy: bool) -> list[str]:
        """The server's flags. busy: few pages and a short queue, so that requests are preempted, and some refused."""
        own = ["--max-num-seqs", str(self.max_num_seqs), "--max-model-len", str(self.max_model_len)]
        own += ["--timeout-keep-alive", str(KEEP_ALIVE)]
        few = max(self.max_model_len + CONTEXT // 8, CONTEXT * 3 // 2) // PAGE_TOKENS
        queue = max(1, self.concurrency - self.max_num_seqs)  # n > 1 goes beyond it
        if not busy:
            return [*own, "--speculative-method", "none"]
        shared = [*own, "--num-pages", str(few), "--max-queued-requests", str(queue)]
        shared += ["--enable-sleep-mode"] if self.sleeps else []
        return [*shared, "--max-engine-restarts", str(self.deaths)] if self.deaths else shared

    def sleeps_at(self, requests: int) -> dict[int, int]:
        """Levels of sleep, by the number of answered requests of ``requests`` that they follow."""
        every = max(1, requests // (self.sleeps + 1))
        return {every * (i + 1): 1 + i % 2 for i in range(self.sleeps)}

    def deaths_at(self, requests: int) -> dict[int, int]:
        """Signals to the engine process, by the number of answered requests of ``requests`` that they follow."""
        every = max(1, requests // 3 // max(1, self.deaths))
        return {every * (i + 1): (signal.SIGKILL, signal.SIGSTOP)[i % 2] for i in range(self.deaths)}


@dataclass
class Report:
    """What came of a run. memory: KiB by kind of process, over time, evenly spaced in requests."""

    outcomes: list[Any] = field(default_factory=list)
    before: Held | None = None
    after: Held | None = None
    memory: list[Counter[str]] = field(default_factory=list)
    preemptions: float = 0
    drafts: float = 0
    accepted: float = 0
    seconds: float = 0
    deaths: int = 0
    slots: int = 0
    sleeps: int = 0
    ended: list[str] = field(default_factory=list)

    def half(self, kind: str = "") -> list[float]:
        """MiB over the last half of the run: of a kind of process, or of all."""
        return [(one[kind] if kind else one.total()) / 2**10 for one in self.memory[len(self.memory) // 2 :]]

    @property
    def growth(self) -> float:
        """Of memory over the last half, as a share: its last quarter against the first quarter of that half."""
        first, last = _quarters(self.half())
        return last / first - 1

    @property
    def rises(self) -> str:
        """The kinds of processes whose memory rose most over the last half, in words."""
        ends = {kind: _quarters(self.half(kind)) for kind in {kind for one in self.memory for kind in one}}
        most = sorted(((last - first, kind) for kind, (first, last) in ends.items()), reverse=True)[:3]
        return ", ".join(f"{kind} {rise:+.0f} MiB" for rise, kind in most)

    @property
    def problems(self) -> list[str]:
        """Every violation, in words."""
        assert self.before is not None
        assert self.after is not None
        counts = Counter(one.verdict for one in self.outcomes)
        found = [f"{counts[name]} {name}" for name in ("hung", "failed", "wrong") if counts[name]]
        left = {"pages": self.after.pages, "running": self.after.running, "waiting": self.after.waiting}
        left["requests in flight"] = self.after.load
        found += [f"{name} left: {value:g}" for name, value in left.items() if value]
        found += self.after.left_beyond(self.before)
        if self.growth > FLAT:
            found.append(f"memory grew by {100 * self.growth:.1f} % over the last half: {self.rises}")
        if counts["killed"] > (most := self.deaths * self.slots):
            found.append(f"{counts['killed']} requests ended with an engine; {self.deaths} deaths end at most {most}")
        untested = {"preempted": self.preemptions, "refused for overload": counts["refused"]}
        return [*found, *self.ended, *(f"not tested: nothing was {name}" for name, n in untested.items() if not n)]

    def table(self) -> str:
        """The run in a few lines."""
        assert self.before is not None
        assert self.after is not None
        names = ("ok", "refused", "killed", "wrong", "failed", "hung")
        lines = [TABLE.format("requests", "sent", *names, "p50 s", "p99 s")]
        kinds = sorted({one.kind for one in self.outcomes})
        for kind in [*kinds, "all"]:
            these = [one for one in self.outcomes if kind in (one.kind, "all")]
            counts, times = Counter(one.verdict for one in these), sorted(one.seconds for one in these)
            quantiles = (f"{times[int(share * (len(times) - 1))]:.2f}" for share in (0.5, 0.99))
            lines.append(TABLE.format(kind, len(these), *(counts[name] for name in names), *quantiles))
        reasons = Counter(f"{one.kind}: {one.why}" for one in self.outcomes if one.why)
        lines += [f"  {count} × {reason}" for reason, count in reasons.most_common(10)]
        b, a = self.before, self.after
        half = self.half()
        rounds = f", {self.accepted:.0f} of {self.drafts:.0f} drafts accepted" if self.drafts else ""
        return "\n".join(
            [
                *lines,
                f"left: {100 * a.pages:g} % of pages, {a.running:g} running, {a.waiting:g} waiting, "
                f"{a.load:g} in flight",
                f"files: API process {b.files[0].total()} before, {a.files[0].total()} after; "
                f"engine {b.files[1].total()}, {a.files[1].total()}; "
                f"processes {b.processes.total()}, {a.processes.total()}",
                f"memory: {half[0]:.0f} MiB at half time, {half[-1]:.0f} at the end, {100 * self.growth:+.2f} % "
                f"({self.rises})",
                f"{self.preemptions:.0f} preemptions{rounds}, {self.deaths} engine deaths, {self.sleeps} sleeps with "
                f"updates, {self.seconds:.0f} s",
            ]
        )


def _quarters(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the first and of the last quarter of these values."""
    part = max(1, len(values) // 4)
    return statistics.median(values[:part]), statistics.median(values[-part:])


# ---- the run ------------------------------------------------------------------------------------


async def _run(plan: Plan, serve_flags: Sequence[str]) -> Report:
    from benchmarks.soak_requests import Client, cases, kinds

    report = Report(slots=plan.max_num_seqs)
    with soak_server(plan.model, [*answering(serve_flags), *plan.flags(False)]) as quiet:
        client = Client(quiet.url, plan.limit)
        abilities = await client.abilities()
        asked = cases(plan.distinct, plan.seed, CONTEXT, abilities)
        print(f"A quiet run of {len(asked)} distinct requests of {len(kinds(abilities))} kinds …", flush=True)
        expected = [await client.answer(case) if case.repeats else None for case in asked]
        await client.http.aclose()
        report.ended += quiet.end()
    print(f"{plan.requests} requests, {plan.concurrency} at once …", flush=True)
    with soak_server(plan.model, [*plan.flags(True), *serve_flags]) as server:
        client = Client(server.url, plan.limit)
        warm = list(range(len(asked)))
        begun = time.monotonic()
        report.outcomes += await _flood(plan, client, asked, expected, warm, server, None)
        report.before = await server.held(client)
        rng = random.Random(plan.seed + 1)
        rest = [rng.randrange(len(asked)) for _ in range(plan.requests - len(warm))]
        report.outcomes += await _flood(plan, client, asked, expected, rest, server, report)
        report.seconds = time.monotonic() - begun
        report.after = await server.held_after(client, report.before)
        numbers = await metrics(client)
        report.preemptions = numbers["num_preemptions_total"]
        report.drafts = numbers.get("spec_decode_num_draft_tokens_total", 0)
        report.accepted = numbers.get("spec_decode_num_accepted_tokens_total", 0)
        await client.http.aclose()
        report.ended += server.end()
    return report


ANSWERING = frozenset({
    "--enable-lora", "--lora-modules", "--max-lora-rank", "--max-loras", "--max-cpu-loras", "--dtype", "--quantization",
    "--kv-cache-dtype", "--hf-overrides", "--tokenizer", "--chat-template", "--reasoning-parser", "--tool-call-parser",
    "--generation-config", "--limit-mm-per-prompt", "--load-format", "--device",
})  # fmt: skip
"""Flags that decide about answers: the quiet server has them too."""


def answering(flags: Sequence[str]) -> list[str]:
    """The flags among ``flags``, with their values, that are in ANSWERING."""
    found: list[str] = []
    kept = False
    for one in flags:
        if one.startswith("--"):
            kept = one.partition("=")[0].replace("_", "-") in ANSWERING
        if kept:
            found.append(one)
    return found


async def _flood(
    plan: Plan, client: Any, asked: Any, expected: Any, order: list[int], server: SoakServer, report: Report | None
) -> list[Any]:
    """Ask the cases with these numbers, ``concurrency`` at once, until they are taken; notes memory in ``report``.

    Without a report clients stay to the end, so that everything has been compiled once.
    """
    left, outcomes, done = iter(order), [], 0
    every = max(1, len(order) // SAMPLES)
    deaths = plan.deaths_at(len(order)) if report is not None else {}
    sleeps = plan.sleeps_at(len(order)) if report is not None else {}
    one_sleep = asyncio.Lock()

    async def worker() -> None:
        nonlocal done
        for number in left:
            case = asked[number].patient() if report is None else asked[number]
            outcome = await client.ask(case, expected[number])
            outcomes.append(outcome)
            while outcome.verdict in ("refused", "killed"):  # clients do as Retry-After says
                await asyncio.sleep(1)
                outcome = await client.ask(case, expected[number])
                outcomes.append(outcome)
            if outcome.verdict != "ok":
                print(f"  {outcome.kind}: {outcome.verdict}: {outcome.why}", flush=True)
            done += 1
            if report is not None and done % every == 0:
                report.memory.append(server.memory())
            if report is not None and done in deaths:
                server.signal_engine(deaths[done])
                report.deaths += 1
            if report is not None and done in sleeps:
                level = sleeps.pop(done)
                async with one_sleep:
                    report.ended += await _sleep(client, level, plan.model)
                report.sleeps += 1
            if done % max(100, len(order) // 10) == 0:
                counts = Counter(one.verdict for one in outcomes)
                print(f"  {done} of {len(order)}: {dict(counts)}", flush=True)

    await asyncio.gather(*(worker() for _ in range(plan.concurrency)))
    return outcomes


async def _sleep(client: Any, level: int, model: str) -> list[str]:
    """Put the server to sleep, write its weights again and wake it; returns what went wrong."""
    directory = {"model_path": str(bundled.get(model, Path(model)))}
    parts = {"tags": "weights", "reload": level == 1}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("/sleep", {"params": {"level": level, "mode": "keep"}}),
        ("/wake_up", {"params": parts}),
        ("/update_weights_from_disk", {"json": directory}),
        ("/wake_up", {}),
    ]
    for path, body in steps:
        answer = await client.http.post(path, **body)
        if answer.status_code != 200:
            return [f"{path} at level {level}: {answer.status_code} {answer.text[:200]}"]
    return []


if __name__ == "__main__":
    run(soak, allow_extra_args=True, ignore_unknown_options=True)
