"""Measures a model on one GPU and divided among several: bits, ms a step, gathers, launches. Random weights.

    python -m benchmarks.tensor_parallel --limit 540 --out tp.json
    python -m benchmarks.tensor_parallel --cases 8b,8b-fp8 --exact 200 --ranks 1,2
    python -m benchmarks.tensor_parallel --table one.json two.json      of runs apart, and their kernels

Each case and number of ranks is a process of its own, which ends before the next begins. What does not fit the limit
is left out, and the table says so. On a CPU (``--model tiny --load-format auto``) only the bits mean anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "shapes"
DENSE = {"model": str(SHAPES / "qwen3-8b")}
EAGLE3 = {
    "method": "eagle3", "model": str(SHAPES / "qwen3-8b-eagle3"), "num_speculative_tokens": 3, "load_format": "dummy",
    "adaptive": False,
}  # fmt: skip
MTP = {"method": "mtp", "num_speculative_tokens": 3, "load_format": "dummy", "adaptive": False}
MOE, MOE_FP8 = ({"model": str(SHAPES / f"qwen3.5-35b-a3b{kind}")} for kind in ("", "-fp8"))
AIR, DEEPSEEK = ({"model": str(SHAPES / name)} for name in ("glm-4.5-air-fp8", "deepseek-v3-5-layers-fp8"))
CASES: dict[str, dict[str, Any]] = {
    "8b": DENSE,
    "8b ordered": {**DENSE, "tp_reduce": "ordered"},
    "8b k=3": {**DENSE, "speculative": EAGLE3, "synthetic_acceptance_length": 2.5},
    "8b-fp8": {**DENSE, "quantization": "fp8"},
    "35b": MOE,
    "35b-fp8": MOE_FP8,
    "35b-ep": {**MOE, "enable_expert_parallel": True},
    "8b-fp8 k=3": {**DENSE, "quantization": "fp8", "speculative": EAGLE3, "synthetic_acceptance_length": 2.5},
    "35b-fp8-ep": {**MOE_FP8, "enable_expert_parallel": True},
    "35b-mtp": {**MOE, "speculative": MTP},
    "35b-fp8-mtp": {**MOE_FP8, "speculative": MTP},
    "8b-fp8-eagle3": {**DENSE, "quantization": "fp8", "speculative": EAGLE3},
    "8b ordered k=3": {**DENSE, "tp_reduce": "ordered", "speculative": EAGLE3, "synthetic_acceptance_length": 2.5},
    "8b-eagle3": {**DENSE, "speculative": EAGLE3},
    "8b k=3 whole drafts": {
        **DENSE, "speculative": {**EAGLE3, "draft_tensor_parallel_size": 1}, "synthetic_acceptance_length": 2.5,
    },
    "air-fp8": AIR,
    "air-fp8-ep": {**AIR, "enable_expert_parallel": True},
    "deepseek-fp8": DEEPSEEK,
    "deepseek-fp8-ep": {**DEEPSEEK, "enable_expert_parallel": True},
    "deepseek-fp8-dp": {**DEEPSEEK, "enable_expert_parallel": True, "enable_dp_attention": True},
    "tiny-eagle3": {
        "model": "tiny", "load_format": "auto",
        "speculative": {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3},
    },
    "tiny-hybrid-mtp": {
        "model": "tiny-hybrid", "load_format": "auto", "speculative": {"method": "mtp", "num_speculative_tokens": 3},
    },
}  # fmt: skip
"""In the order in which they are measured. The bundled models' drafts are accepted, which random weights' are not."""

BATCH, CONTEXT, TOKENS = (1, 4, 16, 64), 1024, 96
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.02},
]  # fmt: skip
GATHERS = re.compile("gather\\w*_kernel|nccl", re.IGNORECASE)


# ---- one case, in a process of its own ----------------------------------------------------------


def measure(name: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Bits, times, and where they go; of rank 0."""
    from unisono import LLM
    from unisono.types import SpeculativeConfig

    flags = {"load_format": args.load_format, **CASES[name], "max_num_seqs": max(args.batch)}
    flags["max_model_len"], flags["gpu_memory_utilization"] = args.max_model_len, args.gpu_memory_utilization
    flags["model"] = args.model or flags["model"]
    spec = flags.pop("speculative", None) or {"method": "none"}
    if ranks == 1:
        for divided in ("enable_expert_parallel", "enable_dp_attention"):
            flags.pop(divided, None)
        spec = {**spec, "draft_tensor_parallel_size": 1}
    flags["speculative"] = SpeculativeConfig.parse(spec)
    started = time.perf_counter()
    with LLM(flags.pop("model"), tensor_parallel_size=ranks, **flags) as llm:
        found: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1)}
        decisions = llm.engine.config.explain()["decisions"]
        shown = ("ranks", "split", "gathers", "gathered of logits", "gathers go", "num_pages")
        found["decisions"] = {d["name"]: d["value"] for d in decisions if d["name"] in shown}  # type: ignore[union-attr]
        if not llm.engine.config.requested.synthetic:
            found["answers"] = answers(llm, args.exact)
        found["step_ms"] = {}
        for batch in args.batch:
            found["step_ms"][batch] = round(step_ms(llm, batch, args.context), 3)
        if llm.engine.config.device.type == "cuda" and not args.no_profile:
            found["profile"] = {batch: profile(llm, batch, args.context) for batch in (args.batch[0], args.batch[-1])}
        passes = llm.engine.runner.planner.passes
        found["eager rounds"] = sum(n for (what, kind, _), n in passes.items() if what == "round" and kind == "eager")
    return found


def answers(llm: Any, count: int) -> list[str]:
    """Digests of the token ids of ``count`` requests, half of them with a repeated phrase."""
    from unisono import SamplingParams

    rng, vocab = random.Random(0), llm.engine.checkpoint.config.vocab_size
    longest = min(700, llm.engine.config.max_model_len // 2)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(2, longest))] for _ in range(count)]
    for one in prompts[1::2]:
        phrase = one[: rng.randrange(2, 40)]
        one[:] = (phrase * (len(one) // len(phrase) + 1))[: len(one)]
    params = [SamplingParams(**KINDS[i % 4], max_tokens=24, ignore_eos=True, seed=i) for i in range(count)]
    outputs = llm.generate(prompts, params)
    return [hashlib.blake2b(repr(o.outputs[0].token_ids).encode(), digest_size=8).hexdigest() for o in outputs]


def running(llm: Any, batch: int, context: int) -> list[str]:
    """Add requests and step until all of them are decoding."""
    from unisono import SamplingParams
    from unisono.types import EngineRequest

    rng, engine = random.Random(batch), llm.engine
    vocab, names = engine.checkpoint.config.vocab_size, [f"{batch}-{i}" for i in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=4 * TOKENS, ignore_eos=True, seed=1)
    for name in names:
        engine.add(EngineRequest(name, [rng.randrange(vocab) for _ in range(context)], params))
    warm = 0
    while warm < 8:
        warm += len(engine.step()) == batch
    return names


def stop(llm: Any, names: list[str]) -> None:
    for name in names:
        llm.engine.abort(name)
    while llm.engine.has_work():
        llm.engine.step()
    llm.engine.reset_prefix_cache()


def step_ms(llm: Any, batch: int, context: int) -> float:
    """Median milliseconds of a round of ``batch`` requests."""
    names, times = running(llm, batch, context), []
    for _ in range(TOKENS):
        started = time.perf_counter()
        llm.engine.step()
        times.append(1e3 * (time.perf_counter() - started))
    stop(llm, names)
    return statistics.median(times)


def profile(llm: Any, batch: int, context: int, rounds: int = 10) -> dict[str, Any]:
    """Of a round on rank 0: launches by the host, kernels, microseconds busy and in gathers (waiting included), and the
    kernels that take most of it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as traced

    names = running(llm, batch, context)
    with traced(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(rounds):
            llm.engine.step()
    events = trace.key_averages()
    device = [e for e in events if e.self_device_time_total > 0 and "Mem" not in e.key]
    gathers = [e for e in device if GATHERS.search(e.key)]
    stop(llm, names)
    launched = sum(e.count for e in events if e.key == "cudaGraphLaunch")
    single = sum(e.count for e in events if e.key in ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx"))
    return {
        "graph launches": launched / rounds,
        "other launches": single / rounds,
        "kernels": sum(e.count for e in device) / rounds,
        "busy us": round(sum(e.self_device_time_total for e in device) / rounds, 1),
        "gathers": sum(e.count for e in gathers) / rounds,
        "gathers us": round(sum(e.self_device_time_total for e in gathers) / rounds, 1),
        "most": [
            (e.key[:60], e.count / rounds, round(e.self_device_time_total / rounds, 1))
            for e in sorted(device, key=lambda e: -e.self_device_time_total)[:14]
        ],
    }


# ---- all cases ----------------------------------------------------------------------------------


def run_all(args: argparse.Namespace) -> dict[str, dict[int, dict[str, Any]]]:
    """Every case with every number of ranks, as long as time is left."""
    began, found = time.monotonic(), dict[str, dict[int, dict[str, Any]]]()
    for name in args.cases:
        for ranks in args.ranks:
            left = args.limit - (time.monotonic() - began)
            if left < 40:
                found.setdefault(name, {})[ranks] = {"left out": f"{args.limit:g} s are over"}
                continue
            print(f"== {name}, {ranks} ranks, {left:.0f} s left", flush=True)
            found.setdefault(name, {})[ranks] = one = child(name, ranks, args, left)
            shown = {k: v for k, v in one.items() if k != "answers"}
            print(json.dumps(shown), flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(found))
    return found


def child(name: str, ranks: int, args: argparse.Namespace, left: float) -> dict[str, Any]:
    """One case in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "one.json")
        itself = [sys.executable, "-m", "benchmarks.tensor_parallel"]
        command = [*itself, *sys.argv[1:], "--one", f"{name}:{ranks}", "--out", str(out)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            done = subprocess.run(command, env=env, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return {"left out": "it took longer than the limit"}
        return json.loads(out.read_text()) if out.exists() else {"left out": f"it failed with {done.returncode}"}


def table(found: dict[str, dict[int, dict[str, Any]]], args: argparse.Namespace) -> str:
    """Markdown: a line for each case and number of ranks."""
    heads = [f"ms at {b}" for b in args.batch]
    lines = ["| case | ranks | differ | " + " | ".join(heads) + " | gathers µs of busy µs (launches) at "]
    lines[0] += f"{args.batch[0]}, {args.batch[-1]} | start s |"
    lines.append("|---" * (len(heads) + 5) + "|")
    for name, by_ranks in found.items():
        base = by_ranks.get(args.ranks[0]) or found.get(name.replace(" ordered", ""), {}).get(args.ranks[0], {})
        for ranks, one in by_ranks.items():
            if "left out" in one:
                lines.append(f"| {name} | {ranks} | {one['left out']} |")
                continue
            lines.append(f"| {name} | {ranks} | {line(one, base)} | {one['start_s']} |")
    return "\n".join(lines)


def merged(files: list[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """What several runs have found."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for file in files:
        for name, by_ranks in json.loads(Path(file).read_text()).items():
            found.setdefault(name, {}).update({int(ranks): one for ranks, one in by_ranks.items()})
    return found


def kernels(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """A line for each profile: kernel, launches a round, microseconds a round."""
    lines = []
    for name, by_ranks in found.items():
        for ranks, one in by_ranks.items():
            for batch, profile in one.get("profile", {}).items():
                most = "; ".join(f"{kernel} {count:g} × {us:.0f}" for kernel, count, us in profile["most"])
                lines.append(f"{name}, {ranks} ranks, batch {batch}: {most}")
    return "\n".join(lines)


def line(one: dict[str, Any], base: dict[str, Any]) -> str:
    """The cells of one measurement, with how much faster than the first number of ranks it is."""
    mine, theirs = one.get("answers"), base.get("answers")
    differ = "-"
    if mine and theirs:
        differ = f"{sum(a != b for a, b in zip(mine, theirs, strict=True))} of {len(mine)}"
    cells = []
    for batch, ms in one["step_ms"].items():
        before = base.get("step_ms", {}).get(batch)
        cells.append(f"{ms:.2f}" + (f" ({before / ms:.2f} ×)" if before and one is not base else ""))
    told = [
        f"{p['gathers us']:.0f} of {p['busy us']:.0f} ({p['graph launches']:g} + {p['other launches']:g})"
        for p in one.get("profile", {}).values()
    ]
    return " | ".join([differ, *cells, ", ".join(told) or "-"])


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), type=lambda text: text.split(","), help=", ".join(CASES))
    parser.add_argument("--ranks", default=[1, 2], type=numbers)
    parser.add_argument("--batch", default=list(BATCH), type=numbers)
    parser.add_argument("--context", default=CONTEXT, type=int)
    parser.add_argument("--exact", default=200, type=int, help="requests whose tokens are compared")
    parser.add_argument("--max-model-len", default=2048, type=int)
    parser.add_argument("--gpu-memory-utilization", default=0.9, type=float)
    parser.add_argument("--model", help="instead of the cases' own")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--no-profile", action="store_true", help="leave out launches, gathers and kernels")
    parser.add_argument("--limit", default=540.0, type=float, help="seconds for everything")
    parser.add_argument("--out", help="JSON with every figure")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="JSONs of runs on one machine, instead of a run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, _, ranks = args.one.rpartition(":")
        Path(args.out).write_text(json.dumps(measure(name, int(ranks), args)))
        return
    if args.table:
        found = merged(args.table)
        print(table(found, args), kernels(found), sep="\n\n")
        return
    print(table(run_all(args), args))


if __name__ == "__main__":
    main()
