"""``unisono bench exact``: checks on a real model that a request's tokens do not depend on how it is run.

One engine runs the same requests one at a time, batched, in small prompt chunks, after a prefix hit, preempted, and
without graphs. For each mode it counts the requests whose token ids differ from the run one at a time, and evidence
that the mode was exercised: without a preemption, for example, the line reports that nothing was tested. The last line
is a control with other seeds: there, sampled requests must differ.

With ``--speculative-config`` the reference run uses an engine without speculation, and all modes use a second engine
with speculation. Each line then shows the mean tokens per round: a value near 1 would mean that few drafts were tested.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from unisono.config.preflight.model import check_model
from unisono.console.values import speculative
from unisono.types import SpeculativeConfig


def exact(
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As for `unisono serve`.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="As for `unisono serve`.")] = None,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 200,
    output_len: Annotated[int, typer.Option(help="Tokens per request.", min=1)] = 32,
    max_prompt: Annotated[int, typer.Option(help="Longest prompt in tokens.", min=3)] = 900,
    long: Annotated[int, typer.Option(help="Number of requests with --long-output-len tokens.", min=0)] = 0,
    long_output_len: Annotated[int, typer.Option(help="Tokens of each long request.", min=1)] = 2100,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per pass in the chunked run.", min=16)] = 256,
    speculative_config: Annotated[str | None, typer.Option(help="As for `unisono serve`, JSON.")] = None,
    drafts: Annotated[
        int | None,
        typer.Option(help="Fix the drafts of each round, of the numbers that adapt, shared or not; default: adapt."),
    ] = None,
) -> None:
    """Run the same requests in every mode and compare their tokens.

    Exit code 1 if one differs, or if a mode was not tested: for example if no request was preempted.
    """
    spec = speculative(speculative_config) if speculative_config else None
    check_model(model, quantization=quantization, load_format=load_format)
    from unisono.entrypoints.llm import LLM

    longest = max(output_len, long_output_len) if long else output_len
    flags: dict[str, Any] = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
        "load_format": load_format,
        "max_model_len": max_prompt + longest,
    }
    llm = LLM(model, speculative=SpeculativeConfig("none"), **flags)
    prompts, params = _requests(llm, requests, output_len, max_prompt)
    params[:long] = [replace(p, max_tokens=long_output_len) for p in params[:long]]
    reference = _one_by_one(llm, prompts, params)
    if spec is not None:
        llm.shutdown()
        llm = LLM(model, speculative=spec, **flags)
    with llm:
        llm.engine.pin_drafts(drafts)
        failed = _compare(llm, prompts, params, reference, chunk, spec is not None and spec.method != "none")
    if failed:
        print(f"FAILED: {failed}")
        raise typer.Exit(1)


def _compare(
    llm: Any, prompts: list[list[int]], params: list[Any], reference: list[list[int]], chunk: int, drafts: bool
) -> str:
    """Run every mode and print a line for each; returns why the check failed, or an empty string."""
    differing, untested, count = 0, [], len(prompts)
    for name, mode in _modes(llm, chunk, prompts).items():
        one_by_one = name == "alone"
        if one_by_one and not drafts:
            continue  # the reference run itself
        before, seen = replace(llm.engine.counters), _Evidence.of(llm)
        with mode.setting():
            got = (_one_by_one if one_by_one else _tokens)(llm, prompts, params)
        differ = sum(a != b for a, b in zip(got, reference, strict=True))
        differing += differ
        figure = mode.evidence(_Evidence.of(llm).since(seen), prompts)
        rounds = _tokens_per_round(before, llm.engine.counters)
        if figure and (rounds or not drafts):
            print(f"{name:<24} {differ} of {count} differ, {figure} {mode.unit}{rounds}", flush=True)
        else:
            untested.append(name)
            reason = f"0 {mode.unit}" if not figure else "nothing was drafted"
            print(f"{name:<24} NOT TESTED: {reason} ({differ} of {count} differ)", flush=True)
    got = _tokens(llm, prompts, [replace(p, seed=(p.seed or 0) + 1) for p in params])
    sampled = sum(p.temperature > 0 for p in params)
    differ = sum(a != b for a, b in zip(got, reference, strict=True))
    print(f"{'control: other seeds':<24} {differ} of {count} differ, {sampled} are sampled")
    problems = [f"{differing} outputs differ"] if differing else []
    problems += [f"not tested: {', '.join(untested)} (more or longer requests may)"] if untested else []
    problems += ["other seeds change too little for the comparison to mean anything"] if differ < sampled // 2 else []
    return "; ".join(problems)


@dataclass(frozen=True)
class _Evidence:
    """Counters of an engine that show that a mode was exercised."""

    preemptions: int
    prefix_hits: int
    eager: int

    @classmethod
    def of(cls, llm: Any) -> _Evidence:
        scheduler, passes = llm.engine.scheduler, llm.engine.runner.planner.passes
        eager = sum(count for (_, kind, _), count in passes.items() if kind == "eager")
        return cls(scheduler.preemptions, scheduler.prefix_hits, eager)

    def since(self, before: _Evidence) -> _Evidence:
        return _Evidence(
            self.preemptions - before.preemptions, self.prefix_hits - before.prefix_hits, self.eager - before.eager
        )


@dataclass(frozen=True)
class _Mode:
    """A way to run the requests. evidence: number of ``unit`` events, from the counters and the prompts."""

    setting: Callable[[], Any]
    unit: str
    evidence: Callable[[_Evidence, list[list[int]]], int]


def _tokens_per_round(before: Any, now: Any) -> str:
    """Mean tokens per request and drafting round since ``before``, as text; empty without drafts."""
    rounds, accepted = now.draft_rounds - before.draft_rounds, now.accepted_tokens - before.accepted_tokens
    return f", {1 + accepted / rounds:.2f} tokens per round" if rounds else ""


def _requests(llm: Any, count: int, output_len: int, max_prompt: int) -> tuple[list[list[int]], list[Any]]:
    """Random prompts, every other one repetitive, with alternately greedy and sampled parameters."""
    from unisono.types import SamplingParams

    rng, vocab = random.Random(0), llm.engine.checkpoint.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(2, max_prompt))] for _ in range(count)]
    for prompt in prompts[1::2]:  # a repeated phrase, which drafters predict well
        phrase = prompt[: rng.randrange(2, 40)]
        prompt[:] = (phrase * (len(prompt) // len(phrase) + 1))[: len(prompt)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50, "min_p": 0.02},
    ]
    common: dict[str, Any] = {"max_tokens": output_len, "ignore_eos": True}
    return prompts, [SamplingParams(**kinds[i % 4], **common, seed=i) for i in range(count)]


def _one_by_one(llm: Any, prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
    return [_tokens(llm, [prompt], [q])[0] for prompt, q in zip(prompts, params, strict=True)]


def _tokens(llm: Any, prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def _modes(llm: Any, chunk: int, prompts: list[list[int]]) -> dict[str, _Mode]:
    """The modes by name."""
    from unisono.kv.specs import PAGE_SIZE

    engine = llm.engine
    scheduler, planner = engine.scheduler, engine.runner.planner

    @contextlib.contextmanager
    def cold() -> Iterator[None]:
        engine.reset_prefix_cache()
        yield

    @contextlib.contextmanager
    def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
        engine.reset_prefix_cache()
        before = getattr(owner, name)
        setattr(owner, name, value)
        yield
        setattr(owner, name, before)

    @contextlib.contextmanager
    def scarce() -> Iterator[None]:
        """Let a request that needs another page find none, so that one of several running requests is preempted.

        This ends after as many preemptions as there are prompts. Page sizes and lengths do not matter.
        """
        engine.reset_prefix_cache()
        grow, last = scheduler._grow, scheduler.preemptions + len(prompts)

        def grow_without_pages(sequence: Any, tokens: int) -> None:
            held = [pool.open([0]) for pool in engine.pool.pools]
            if scheduler.preemptions < last and len(scheduler.active) > 1:
                for each in held:
                    each.reserve(PAGE_SIZE * each.pool.available)
            try:
                grow(sequence, tokens)
            finally:
                for each in held:
                    each.release()

        scheduler._grow = grow_without_pages
        try:
            yield
        finally:
            del scheduler._grow

    in_chunks = lambda: changed(scheduler.budget, "most", chunk)  # noqa: E731
    without_graphs = lambda: changed(planner, "enabled", False)  # noqa: E731
    return {
        "alone": _Mode(cold, "requests", lambda seen, prompts: len(prompts)),
        "batched": _Mode(cold, "requests together", lambda seen, prompts: len(prompts) if len(prompts) > 1 else 0),
        f"in chunks of {chunk}": _Mode(
            in_chunks, "prompts in several chunks", lambda seen, prompts: sum(len(p) > chunk for p in prompts)
        ),
        "after a prefix hit": _Mode(
            contextlib.nullcontext, "prompt tokens from the cache", lambda seen, prompts: seen.prefix_hits
        ),
        "preempted": _Mode(scarce, "preemptions", lambda seen, prompts: seen.preemptions),
        "without graphs": _Mode(without_graphs, "eager passes", lambda seen, prompts: seen.eager),
    }
