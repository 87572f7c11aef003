"""``unisono bench exact``: checks on a real model that a request's tokens do not depend on how it is run.

One engine runs the same requests one at a time, batched, in small prompt chunks, after a prefix hit, preempted, and
without graphs. For each mode it counts the requests whose token ids differ from the run one at a time. The last line
is a control with other seeds: there, sampled requests must differ.

With ``--speculative-config`` the reference run uses an engine without speculation, and all modes use a second engine
with speculation. Each line then shows the mean tokens per round: a value near 1 would mean that few drafts were tested.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer


def exact(
    model: Annotated[str, typer.Option(help="A checkpoint directory or a bundled name.")] = "tiny",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="As of `unisono serve`.")] = None,
    requests: Annotated[int, typer.Option(help="How many requests.")] = 200,
    output_len: Annotated[int, typer.Option(help="Tokens per request.")] = 32,
    max_prompt: Annotated[int, typer.Option(help="Longest prompt in tokens.")] = 900,
    long: Annotated[int, typer.Option(help="How many of the requests have --long-output-len tokens.", min=0)] = 0,
    long_output_len: Annotated[int, typer.Option(help="Tokens of those.", min=1)] = 2100,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per pass in the chunked run.")] = 256,
    speculative_config: Annotated[str | None, typer.Option(help="As of `unisono serve`, JSON.")] = None,
) -> None:
    """Run the same requests in every mode and compare their tokens; exit code 1 if one differs."""
    from unisono.llm import LLM
    from unisono.types import SpeculativeConfig

    longest = max(output_len, long_output_len) if long else output_len
    flags: dict[str, Any] = {
        "dtype": dtype,
        "quantization": quantization,
        "load_format": load_format,
        "max_model_len": max_prompt + longest,
    }
    llm = LLM(model, speculative=SpeculativeConfig("none"), **flags)
    prompts, params = _requests(llm, requests, output_len, max_prompt)
    params[:long] = [replace(p, max_tokens=long_output_len) for p in params[:long]]
    reference = _one_by_one(llm, prompts, params)
    if speculative_config:
        llm.shutdown()
        llm = LLM(model, speculative=SpeculativeConfig.parse(json.loads(speculative_config)), **flags)
    failed = 0
    for name, mode in _modes(llm, chunk).items():
        one_by_one = name == "alone"
        if one_by_one and not speculative_config:
            continue  # the reference run itself
        before = replace(llm.engine.counters)
        with mode():
            got = (_one_by_one if one_by_one else _tokens)(llm, prompts, params)
        differ = sum(a != b for a, b in zip(got, reference, strict=True))
        failed += differ
        print(f"{name:<24} {differ} of {requests} differ{_tokens_per_round(before, llm.engine.counters)}", flush=True)
    got = _tokens(llm, prompts, [replace(p, seed=(p.seed or 0) + 1) for p in params])
    sampled = sum(p.temperature > 0 for p in params)
    differ = sum(a != b for a, b in zip(got, reference, strict=True))
    print(f"{'control: other seeds':<24} {differ} of {requests} differ, {sampled} are sampled")
    print(f"preemptions {llm.engine.scheduler.preemptions}, prefix hits {llm.engine.scheduler.prefix_hits} tokens")
    llm.shutdown()
    if failed or differ < sampled // 2:
        raise typer.Exit(1)


def _tokens_per_round(before: Any, now: Any) -> str:
    """Mean tokens per request and drafting round since ``before``, as text; empty without drafts."""
    rounds, accepted = now.draft_rounds - before.draft_rounds, now.accepted_tokens - before.accepted_tokens
    return f", {1 + accepted / rounds:.2f} tokens per round" if rounds else ""


def _requests(llm: Any, count: int, output_len: int, max_prompt: int) -> tuple[list[list[int]], list[Any]]:
    """Random prompts, every other one repetitive, and greedy and sampled parameters by turns."""
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


def _modes(llm: Any, chunk: int) -> dict[str, Callable[[], Any]]:
    """Name -> a context manager that sets the engine up to run requests in that mode."""
    from unisono.state.pages import pages_for
    from unisono.state.specs import PAGE_SIZE

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
        """Reserve all pages but those of about three requests, so that requests are preempted."""
        engine.reset_prefix_cache()
        held = engine.pool.open([0])
        held.reserve(PAGE_SIZE * (engine.pool.available - 3 * longest))
        yield
        held.release()

    longest = pages_for(engine.config.max_model_len)
    return {
        "alone": cold,
        "batched": cold,
        f"in chunks of {chunk}": lambda: changed(scheduler.budget, "most", chunk),
        "after a prefix hit": contextlib.nullcontext,
        "preempted": scarce,
        "without graphs": lambda: changed(planner, "enabled", False),
    }
