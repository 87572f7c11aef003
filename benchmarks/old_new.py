"""Measures one checkout so that two can be compared on one machine: tokens, ms a step, TTFT, stalls, start.

    PYTHONPATH=OLD python -P benchmarks/old_new.py --out old.json
    PYTHONPATH=NEW python -P benchmarks/old_new.py --out new.json
    python -P benchmarks/old_new.py --compare old.json new.json

Only ``LLM``, ``Engine.add`` and ``Engine.step`` are used, so old code can run it. Random weights
(``--load-format dummy``) depend on their names and a seed, so both checkouts have the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from typing import Any

from unisono import LLM, SamplingParams
from unisono.types import EngineRequest, SpeculativeConfig

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.02},
]


def prompt(rng: random.Random, vocab: int, length: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=1)


def drain(engine: Any) -> None:
    while engine.has_work():
        engine.step()


def answers(llm: LLM, count: int, longest: int) -> list[str]:
    """Digests of the token ids of ``count`` requests, half of them greedy or with a repeated phrase."""
    rng, vocab = random.Random(0), llm.engine.checkpoint.config.vocab_size
    prompts = [prompt(rng, vocab, rng.randrange(2, longest)) for _ in range(count)]
    for one in prompts[1::2]:
        phrase = one[: rng.randrange(2, 40)]
        one[:] = (phrase * (len(one) // len(phrase) + 1))[: len(one)]
    params = [SamplingParams(**KINDS[i % 4], max_tokens=32, ignore_eos=True, seed=i) for i in range(count)]
    outputs = llm.generate(prompts, params)
    return [hashlib.blake2b(repr(o.outputs[0].token_ids).encode(), digest_size=8).hexdigest() for o in outputs]


def step_ms(llm: LLM, batch: int, context: int, tokens: int) -> float:
    """Median milliseconds between two rounds of ``batch`` requests."""
    rng, engine = random.Random(batch), llm.engine
    vocab = engine.checkpoint.config.vocab_size
    for i in range(batch):
        engine.add(EngineRequest(f"step-{i}", prompt(rng, vocab, context), greedy(tokens)))
    times: list[float] = []
    last = None
    while engine.has_work():
        deltas = engine.step()
        now = time.perf_counter()
        if len(deltas) == batch:
            if last is not None:
                times.append(1e3 * (now - last))
            last = now
        else:
            last = None
    return statistics.median(times[8:-2] or times or [float("nan")])


def ttft_ms(llm: LLM, length: int, repeats: int) -> float:
    """Median milliseconds from adding a prompt to its first token, nothing else running."""
    rng, engine, times = random.Random(length), llm.engine, []
    vocab = engine.checkpoint.config.vocab_size
    for i in range(repeats + 1):
        request = EngineRequest(f"ttft-{i}", prompt(rng, vocab, length), greedy(1))
        started = time.perf_counter()
        engine.add(request)
        while not engine.step():
            pass
        times.append(1e3 * (time.perf_counter() - started))
        drain(engine)
    return statistics.median(times[1:])


def stall(llm: LLM, streams: int, prompts: int, length: int) -> dict[str, float]:
    """``streams`` requests decode; ``prompts`` of ``length`` tokens arrive together. The largest gap of a stream, in
    ms."""
    rng, engine = random.Random(streams), llm.engine
    vocab = engine.checkpoint.config.vocab_size
    for i in range(streams):
        engine.add(EngineRequest(f"stream-{i}", prompt(rng, vocab, 64), greedy(4000)))
    heard: dict[str, float] = {}
    gaps: list[float] = []
    left, after = prompts, 0
    added = finished = 0.0
    for step in range(100_000):
        if step == 60:
            for i in range(prompts):
                engine.add(EngineRequest(f"prompt-{i}", prompt(rng, vocab, length), greedy(1)))
            added = time.perf_counter()
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id.startswith("prompt"):
                left, finished = left - 1, now
            else:
                if step > 60 and delta.request_id in heard:
                    gaps.append(1e3 * (now - heard[delta.request_id]))
                heard[delta.request_id] = now
        after += not left
        if after > 8:  # every stream was heard again
            break
    for i in range(streams):
        engine.abort(f"stream-{i}")
    drain(engine)
    return {"largest_gap_ms": max(gaps), "prompt_tokens_per_s": prompts * length / (finished - added)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    flags: dict[str, Any] = {"max_model_len": args.max_model_len, "load_format": "dummy", "max_num_seqs": 64}
    if args.eagle3:
        spec = {"method": "eagle3", "model": args.eagle3, "num_speculative_tokens": 3, "load_format": "dummy"}
        flags["speculative"] = SpeculativeConfig.parse({**spec, "adaptive": False})
        flags["synthetic_acceptance_length"] = 2.5
    started = time.perf_counter()
    llm = LLM(args.model, **flags)
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 2)}
    found["start_seconds"] = llm.engine.info().get("start_seconds")  # of each stage
    if args.ttft:
        found["ttft_ms"] = {n: round(ttft_ms(llm, n, args.repeats), 3) for n in args.ttft}
        llm.shutdown()
        return found
    if not args.eagle3:
        found["answers"] = answers(llm, args.requests, min(900, args.max_model_len // 2))
        again = answers(llm, args.requests, min(900, args.max_model_len // 2))
        found["repeated"] = found["answers"] == again
    context = min(1024, args.max_model_len // 2)
    found["step_ms"] = {b: round(step_ms(llm, b, context, args.tokens), 3) for b in (1, 4, 16, 64)}
    lengths = [n for n in (128, 512, 2048, 8192) if n < args.max_model_len]
    found["ttft_ms"] = {n: round(ttft_ms(llm, n, args.repeats), 2) for n in lengths}
    if not args.eagle3:
        longest = min(8000, args.max_model_len - 8)
        found["stall"] = {n: stall(llm, 32, n, longest) for n in (1, 8)}
    llm.shutdown()
    return found


def compare(paths: list[str]) -> None:
    """Print old and new side by side; several files of each are paired in turn."""
    runs = []
    for path in paths:
        with open(path) as file:
            runs.append(json.load(file))
    for old, new in zip(runs[::2], runs[1::2], strict=True):
        if "answers" in old:
            differ = sum(a != b for a, b in zip(old["answers"], new["answers"], strict=True))
            print(f"{differ} of {len(old['answers'])} answers differ; repeated {old['repeated']}, {new['repeated']}")
        for name in ("step_ms", "ttft_ms"):
            if name not in old:
                continue
            cells = [f"{k}: {old[name][k]} / {new[name][k]} ({old[name][k] / new[name][k]:.3f})" for k in old[name]]
            print(f"{name:8} old / new (old over new)  " + "  ".join(cells))
        for n in old.get("stall", {}):
            a, b = old["stall"][n], new["stall"][n]
            gap = f"{a['largest_gap_ms']:.0f} / {b['largest_gap_ms']:.0f} ms"
            rate = f"{a['prompt_tokens_per_s']:.0f} / {b['prompt_tokens_per_s']:.0f} prompt tokens/s"
            print(f"stall of {n} prompts: {gap}, {rate}")
        print(f"start {old['start_s']} / {new['start_s']} s; {old.get('start_seconds')} / {new.get('start_seconds')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/shapes/qwen3-8b")
    parser.add_argument("--eagle3", help="a draft head's directory: rounds of k = 3 with synthetic acceptance")
    parser.add_argument("--max-model-len", type=int, default=9000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ttft", type=int, nargs="+", help="nothing but first tokens of prompts of these lengths")
    parser.add_argument("--out", help="write the figures here, JSON")
    parser.add_argument("--compare", nargs="+", help="old.json new.json, or several of each in turn")
    args = parser.parse_args()
    if args.compare:
        compare(args.compare)
        return
    found = measure(args)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(found, file)
    print({k: v for k, v in found.items() if k != "answers"}, flush=True)


if __name__ == "__main__":
    main()
