"""``unisono bench throughput``: requests and tokens per second of an engine in this process, without a server.

With ``--speculative-config`` the same load runs without speculation first, for comparison.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.cluster.heap import frozen_heap
from unisono.config.preflight.model import MODEL_FLAGS, check_model, read_overrides
from unisono.console.values import speculative, writable
from unisono.tools.load import stall
from unisono.tools.load.flags import command_line, environment, mix_of, scene_of
from unisono.tools.load.mixes import Conversation, conversations
from unisono.tools.load.prompts import source_of
from unisono.types import ConfigError, SpeculativeConfig, UnisonoError


@dataclass(frozen=True)
class Pass:
    """One run of the load. accept_length: mean tokens per request and round, None without drafts."""

    seconds: float
    requests: int
    input_tokens: int
    output_tokens: int
    accept_length: float | None

    @property
    def output_per_second(self) -> float:
        return self.output_tokens / self.seconds

    def row(self, name: str) -> str:
        """A row of the table."""
        total = (self.input_tokens + self.output_tokens) / self.seconds
        length = "" if self.accept_length is None else f"{self.accept_length:.2f}"
        return (
            f"| {name} | {self.seconds:.2f} | {self.requests / self.seconds:.2f} | {self.output_per_second:.0f} | "
            f"{total:.0f} | {length} |"
        )


HEAD = "| run | seconds | requests/s | output tokens/s | total tokens/s | tokens per round |\n|---|---|---|---|---|---|"


@dataclass
class Runs:
    """Passes and stalls of one engine, with its settings."""

    speculative: str
    start_seconds: float
    settings: dict[str, Any]
    versions: dict[str, str]
    passes: list[Pass] = field(default_factory=list)
    stalls: list[stall.Stall] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Output tokens per second, the median of the passes."""
        return statistics.median(one.output_per_second for one in self.passes)


@dataclass(frozen=True)
class _Load:
    """The load to run. most: concurrency, None: all. stalls: the stall scenario instead of the load."""

    conversations: list[Conversation]
    stalls: stall.StallScenario | None
    seed: int
    most: int | None
    repeats: int
    ignore_eos: bool
    temperature: float


def throughput(
    engine: dict[str, Any],
    mix: dict[str, Any],
    scene: dict[str, Any],
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at once; default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of the load, the first one cold.")] = 3,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Generate output_len tokens, ignoring EOS.")
    ] = True,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    speculative_config: Annotated[str | None, typer.Option(help="As for `unisono serve`, JSON.")] = None,
    synthetic_acceptance_length: Annotated[
        float | None, typer.Option(help="Commit this many tokens per round, whatever the drafts are.")
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="With speculation: run the load without it, too.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Write the results to this file, as JSON.")] = None,
) -> None:
    """Measure requests/s and tokens/s of the engine alone, with and without speculation; with --scenario stall its
    gaps.

    Prompts are random token ids (or a dataset's texts, tokenized); conversations have their first turn only. The prefix
    cache is emptied before each run.
    """
    writable("--out", out)
    engine["hf_overrides"] = read_overrides("--hf-overrides", engine["hf_overrides"] or {})
    check_model(engine["model"], **{name: engine[name] for name in MODEL_FLAGS})
    spec = speculative(speculative_config) if speculative_config else None
    if synthetic_acceptance_length is not None and spec is None:
        raise ConfigError("--synthetic-acceptance-length needs --speculative-config.")
    settings, seed = mix_of(mix)
    stalls, requests = scene_of(scene), []
    if stalls is None:
        as_ids = settings.dataset_name in ("random", "prefix_repetition")
        source = source_of([engine["tokenizer"], engine["model"]], as_ids)
        requests = conversations(settings, source, seed)
    load = _Load(requests, stalls, seed, max_concurrency, repeats, ignore_eos, temperature)
    found = []
    if spec is None or baseline:
        found.append(_run(engine, "none", {"speculative": SpeculativeConfig("none")}, load))
    if spec is not None:
        more = {"speculative": spec, "synthetic_acceptance_length": synthetic_acceptance_length}
        found.append(_run(engine, speculative_config or "", more, load))
    if len(found) == 2 and stalls is None:
        print(f"\nWith speculation: {found[1].median / found[0].median:.3f} times the output tokens/s (medians).")
    if out is not None:
        data = {"command": command_line(), "client": environment(), "mix": vars(settings), "seed": seed}
        data |= {"runs": [asdict(one) for one in found]}
        out.write_text(json.dumps(data, indent=1, default=str) + "\n")


def _run(engine: dict[str, Any], name: str, more: dict[str, Any], load: _Load) -> Runs:
    """Start an engine, run the load, print the results."""
    from unisono.entrypoints.llm import LLM
    from unisono.tools.bench.versions import versions

    flags = dict(engine)
    if flags["max_num_seqs"] is None and load.stalls is not None:
        flags["max_num_seqs"] = load.stalls.streams + max(load.stalls.prompts)
    started = time.perf_counter()
    with LLM(flags.pop("model"), **flags, **more) as llm:
        runs = Runs(name, time.perf_counter() - started, llm.engine.info()["settings"], versions(llm))  # type: ignore[arg-type]
        print(f"\nSpeculation: {name}; started in {runs.start_seconds:.1f} s", flush=True)
        ready = time.perf_counter()
        while llm.engine.capture_missing():
            pass  # like a server without requests
        print(f"Graphs captured while idle took {time.perf_counter() - ready:.1f} s.", flush=True)
        with frozen_heap():
            if load.stalls is not None:
                runs.stalls = stall.in_engine(llm, load.stalls, load.seed)
                print(stall.table(runs.stalls))
                return runs
            print(HEAD)
            requests = _requests(llm, load)
            before = Counter(llm.engine.runner.planner.passes)
            for number in range(1, load.repeats + 1):
                runs.passes.append(_pass(llm, requests, load.most))
                print(runs.passes[-1].row(str(number)), flush=True)
            print(f"Passes: {stall.passes_of(llm.engine, before)}.")
        if load.repeats > 1:
            first, last = runs.passes[0].output_per_second, runs.passes[-1].output_per_second
            print(f"The first run has {first / last:.3f} of the last run's tokens/s.")
    return runs


def _requests(llm: Any, load: _Load) -> list[tuple[list[int], Any, tuple[int, ...]]]:
    """(prompt, parameters, stop ids) of each request. Raises ConfigError for one that is longer than the context."""
    from unisono.types import SamplingParams

    limit, found = llm.engine.config.max_model_len, []
    for place, one in enumerate(load.conversations):
        turn = one.turns[0]
        ids = turn.prompt if isinstance(turn.prompt, list) else None
        if ids is None and one.messages:
            ids = llm.chat_prompt(list(one.messages))["prompt_token_ids"]
        elif ids is None:
            ids = llm.get_tokenizer().encode(f"{one.system}\n{turn.prompt}" if one.system else turn.prompt)
        if len(ids) + 1 > limit:
            raise ConfigError(f"a prompt of {len(ids)} tokens: the engine's context is {limit} (--max-model-len).")
        output = min(turn.output_len or limit, limit - len(ids))
        params = SamplingParams(
            temperature=load.temperature, max_tokens=output, ignore_eos=load.ignore_eos, seed=load.seed + place
        )
        found.append((ids, params, () if load.ignore_eos else llm.eos_token_ids))
    return found


def _pass(llm: Any, requests: Sequence[tuple[list[int], Any, tuple[int, ...]]], most: int | None) -> Pass:
    """Run all requests, ``most`` at once, with an empty prefix cache."""
    from unisono.types import EngineRequest

    engine = llm.engine
    engine.reset_prefix_cache()
    before = replace(engine.counters)
    waiting = deque(EngineRequest(f"load-{i}", list(ids), *rest) for i, (ids, *rest) in enumerate(requests))
    running = output = 0
    started = time.perf_counter()
    while waiting or running:
        while waiting and (most is None or running < most):
            engine.add(waiting.popleft())
            running += 1
        for delta in engine.step():
            output += len(delta.token_ids)
            running -= delta.finish != 0
            if delta.error is not None:
                raise UnisonoError(f"a request failed: {delta.error}")
    seconds = time.perf_counter() - started
    while engine.has_work():
        engine.step()
    rounds = engine.counters.draft_rounds - before.draft_rounds
    length = 1 + (engine.counters.accepted_tokens - before.accepted_tokens) / rounds if rounds else None
    return Pass(seconds, len(requests), sum(len(ids) for ids, _, _ in requests), output, length)
