"""KV offload: hit rate and time to first token with a working set that the device's pages do not hold.

    python -m benchmarks.offload --model PATH                     documents of four times the device's pages
    python -m benchmarks.offload --model PATH --load-format dummy --num-pages 20000 --limit 300
    python -m benchmarks.offload                                  `tiny`, to try this file on a CPU

Documents are asked about in random order, a question of its own each time, so that every document is wanted again
after the others have pushed it off the device. Each engine computes every document once, then answers the same
questions; only these are timed. ``hit rate``: of the prompt tokens asked for, those that no pass computed. The texts
of all engines are compared; the last line says how many differ, and the exit status is 1 if any does. The table comes
last.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from unisono.entrypoints.llm import LLM
from unisono.kv.specs import ALL, PAGE_SIZE
from unisono.types import EngineRequest, SamplingParams, SpeculativeConfig


@dataclass
class Run:
    """What one engine did. first: seconds to the first token of each question; tokens: the answers, by question."""

    name: str
    first: list[float] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    hit_rate: float = 0.0
    moved: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    options = _options()
    runs: list[Run] = []
    for name, flags in (("device only", {}), (f"host, {options.ratio:g} ×", {"cpu_offload_ratio": options.ratio})):
        with LLM(options.model, **_flags(options), **flags) as llm:
            pages = min(llm.engine.worker.num_pages[ALL], options.most_pages or 1 << 40)
            run = Run(name)
            _ask(llm, run, options, pages)
            run.moved = dict(llm.engine.info()["kv_offload"])  # type: ignore[call-overload]
            runs.append(run)
    common = runs[0].tokens.keys() & runs[1].tokens.keys()
    differ = sum(runs[0].tokens[key] != runs[1].tokens[key] for key in common)
    print("| pages | questions | hit rate | TTFT p50, ms | p95, ms | questions/s | GB/s in | GB/s out |")
    print("|---|---|---|---|---|---|---|---|")
    for run in runs:
        print(_row(run))
    print(f"{differ} of {len(common)} answers differ")
    return 1 if differ or not common else 0


def _ask(llm: LLM, run: Run, options: argparse.Namespace, pages: int) -> None:
    """Compute every document once, then ask about them, ``at_once`` questions at a time, half of the limit long."""
    rng = random.Random(7)
    vocab = llm.engine.checkpoint.config.vocab_size
    length = options.document - options.document % PAGE_SIZE
    count = max(2, options.times * pages * PAGE_SIZE // length)
    documents = [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=1, ignore_eos=True)
    for at in range(0, count, options.at_once):
        llm.generate(documents[at : at + options.at_once], params)
    scheduler, engine, until = llm.engine.scheduler, llm.engine, time.monotonic() + options.limit / 2
    queries, hits, began = scheduler.prefix_queries, scheduler.prefix_hits, time.monotonic()
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=options.max_tokens, ignore_eos=True)
    sent: dict[str, float] = {}
    asked = 0
    while (asked < options.questions and time.monotonic() < until) or sent:
        while len(sent) < options.at_once and asked < options.questions and time.monotonic() < until:
            question = [rng.randrange(vocab) for _ in range(rng.randrange(4, 40))]
            request = EngineRequest(str(asked), rng.choice(documents) + question, params)
            sent[request.request_id] = time.monotonic()
            run.tokens[request.request_id] = []
            engine.add(request)
            asked += 1
        for delta in engine.step():
            if not run.tokens[delta.request_id]:
                run.first.append(time.monotonic() - sent[delta.request_id])
            run.tokens[delta.request_id] += delta.token_ids
            if delta.finish:
                del sent[delta.request_id]
    run.seconds = time.monotonic() - began
    run.hit_rate = (scheduler.prefix_hits - hits) / max(1, scheduler.prefix_queries - queries)
    print(f"{run.name}: {count} documents of {length} tokens, {pages} pages on the device", flush=True)


def _row(run: Run) -> str:
    first = sorted(run.first)
    speeds = ["", ""]
    if run.moved:
        speeds = [
            f"{run.moved[f'bytes_{way}'] / 1e9 / max(1e-9, run.moved['seconds'][way]):.1f}" for way in ("in", "out")
        ]
    cells = [
        run.name, len(run.first), f"{run.hit_rate:.3f}", f"{1000 * statistics.median(first):.1f}",
        f"{1000 * first[int(0.95 * (len(first) - 1))]:.1f}", f"{len(run.first) / run.seconds:.1f}", *speeds,
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    given = {"num_pages": options.num_pages, "max_model_len": options.max_model_len}
    flags: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    flags |= {"load_format": options.load_format, "max_num_seqs": options.max_num_seqs}
    if options.speculative_method is not None:
        flags["speculative"] = SpeculativeConfig(options.speculative_method)
    return flags


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--speculative-method")
    parser.add_argument("--num-pages", type=int, help="KV pages of the device; default: what fits")
    parser.add_argument("--most-pages", type=int, help="size the working set as if the device had no more pages")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--document", type=int, default=None, help="tokens of a document")
    parser.add_argument("--times", type=int, default=4, help="working set, in the device's pages")
    parser.add_argument("--ratio", type=float, default=6.0, help="host memory, in the device's pages")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of both engines' questions together")
    options = parser.parse_args()
    if options.model == "tiny":
        options.num_pages = options.num_pages or 65
        options.document = options.document or 256
        options.questions = min(options.questions, 60)
        options.at_once = min(options.at_once, 2)
    options.document = options.document or 4096
    return options


if __name__ == "__main__":
    sys.exit(main())
