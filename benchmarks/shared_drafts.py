"""``python -m benchmarks.shared_drafts``: tokens of rounds whose requests share drafts, beside rounds of one width.

The bundled model answers easy requests (its own maths problems, greedily) and hard ones (random prompts, at temperature
1) side by side; an ended request is replaced by one of its kind. Counts tokens and rows, no times: they are the same on
every device. A row is one token of the target's pass, padding included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.drafters import HEADS
from unisono.console.values import whole_numbers
from unisono.tools.eval.problems import COUNT, held_out_problems
from unisono.types import EngineRequest, SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from unisono.entrypoints.llm import LLM

LONGEST, SETTLING = 160, 16
"""Tokens of an answer at most, and rounds before those that count."""


@dataclass(frozen=True)
class Account:
    """Sums over the counted rounds. rows: tokens computed by the target. verified: those without padding."""

    rounds: int
    tokens: int
    rows: int
    verified: int


def shared_drafts(
    method: Annotated[str, typer.Option(help="One of: " + ", ".join(HEADS))] = "eagle3",
    requests: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "16,64",
    drafts: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Drafts per request, at most.")] = 7,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to count.")] = 48,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Count tokens per round and per row, for each number of drafts, shared by the requests or the same for each."""
    from unisono.entrypoints.llm import LLM

    print("| requests | drafts | tokens per round | … shared | tokens per row | … shared | verified rows | … shared |")
    print("|---" * 8 + "|")
    for count in whole_numbers("--requests", requests, some=True):
        accounts: dict[bool, dict[int, Account]] = {}
        for shared in (False, True):
            spec = {"method": method, "model": HEADS[method], "num_speculative_tokens": drafts, "share_drafts": shared}
            flags: dict[str, Any] = {"device": device, "max_num_seqs": count, "max_model_len": 512}
            with LLM("tiny", speculative=SpeculativeConfig.parse(spec), **flags) as llm:
                accounts[shared] = {k: account(llm, k, count, rounds) for k in llm.engine.runner.choices if k}
        for k, fixed in accounts[False].items():
            both = fixed, accounts[True][k]
            figures = [f"{each.tokens / each.rounds:.1f}" for each in both]
            figures += [f"{each.tokens / each.rows:.3f}" for each in both]
            figures += [f"{each.verified / each.rounds:.1f}" for each in both]
            print(f"| {count} | {k} | " + " | ".join(figures) + " |", flush=True)


def account(llm: LLM, k: int, count: int, rounds: int) -> Account:
    """Run rounds of ``count`` requests with k drafts per row, and count them."""
    engine, kinds = llm.engine, [_easy(llm), _hard()]
    engine.reset_prefix_cache()
    engine.pin_drafts(k)
    running: dict[str, int] = {}  # kind of each request, by its id

    def add(kind: int) -> None:
        request = next(kinds[kind])
        running[request.request_id] = kind
        engine.add(request)

    for index in range(count):
        add(index % 2)
    started: tuple[int, ...] | None = None
    while True:
        for delta in engine.step():
            if delta.finish:
                add(running.pop(delta.request_id))
        done = engine.draft_controller.rounds[k]
        if started is None and len(engine.scheduler.waiting) == 0 and done >= SETTLING:
            started = _sums(llm, k)
        elif started is not None and done >= started[0] + rounds:
            break
    found = Account(*(after - before for after, before in zip(_sums(llm, k), started, strict=True)))
    for request_id in list(running):
        engine.abort(request_id)
    while engine.has_work():
        engine.step()
    return found


def _sums(llm: LLM, k: int) -> tuple[int, int, int, int]:
    """The fields of an :class:`Account` since the start."""
    engine = llm.engine
    planner, counters = engine.runner.planner, engine.counters
    program = engine.runner.round_key(1, k).program
    rows = (planner.filled_rows[program] + planner.padded_rows[program]) * (1 + k)
    verified = counters.draft_rounds + counters.drafted_tokens
    return engine.draft_controller.rounds[k], counters.generation_tokens, rows, verified


def _easy(llm: LLM) -> Iterator[EngineRequest]:
    """Maths problems of the kind that the model and its drafters were trained on."""
    params = SamplingParams(temperature=0, max_tokens=LONGEST, seed=0)
    for number, problem in enumerate(held_out_problems(COUNT)):
        prompt = llm.chat_prompt([{"role": "user", "content": problem.question}])["prompt_token_ids"]
        yield EngineRequest(f"easy-{number}", prompt, params, tuple(llm.engine.checkpoint.eos_token_ids))


def _hard() -> Iterator[EngineRequest]:
    """Random tokens, continued at temperature 1."""
    rng = random.Random(0)
    for number in range(10_000):
        params = SamplingParams(temperature=1, max_tokens=LONGEST, seed=number)
        yield EngineRequest(f"hard-{number}", [rng.randrange(3, 500) for _ in range(24)], params)


if __name__ == "__main__":
    run(shared_drafts)
