"""Adapters: what a round and a prompt take with and without, and whether company and drafts change a byte.

    python -m benchmarks.adapters --limit 85                               # the 8B shape, dummy weights, on a GPU
    python -m benchmarks.adapters tiny --rank 4 --prompt 64 --steps 10     # a try on a CPU

Random adapters of one rank are written to a temporary directory. One engine measures: the same rounds with no row
that has an adapter, with one adapter, and with ``--adapters`` of them mixed; prompts; and what a round launches. Then
the mixed requests run alone, and in an engine that drafts (EAGLE-3 with k = 3, where there is a shape of a draft head).
Each line is printed when it is known, and the table comes last. Bars are issue 18's. What --limit leaves no time for is
said; an engine starts only while a third of it is left.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from unisono import LLM, LoRARequest, SamplingParams
from unisono.models.lora.adapters import CONFIG, WEIGHTS, AdapterLayers
from unisono.passes.features.adapters import AdapterFeature
from unisono.types import EngineRequest, SpeculativeConfig

SHAPES = Path(__file__).parent / "shapes"
BAR = 1.10


def layers_of(llm: LLM) -> AdapterLayers:
    """The engine's layers with room for adapters."""
    return next(f for f in llm.engine.runner.request_features if isinstance(f, AdapterFeature)).layers


def write_adapter(directory: Path, layers: AdapterLayers, rank: int, seed: int) -> Path:
    """A random adapter of every projection, whose products are about a tenth of the base's."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(1 << 22, generator=generator)  # to cut from: as many random numbers as weights take long
    tensors = {}
    for name, targets in layers.targets.items():
        sizes = (rank, targets[0].inputs), (sum(target.outputs for target in targets), rank)
        for kind, (rows, columns), scale in zip("AB", sizes, (targets[0].inputs ** -0.5, 0.05), strict=True):
            begin = int(torch.randint(len(pool) - rows * columns, (), generator=generator))
            values = pool[begin : begin + rows * columns].view(rows, columns) * scale
            tensors[f"base_model.model.model.{name}.lora_{kind}.weight"] = values.to(torch.bfloat16)
    save_file(tensors, directory / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (directory / CONFIG).write_text(json.dumps(config))
    return directory


class Bench:
    """One engine and its measurements. end: when to stop measuring."""

    def __init__(self, args: argparse.Namespace, end: float, speculative: SpeculativeConfig | None = None) -> None:
        self.args, self.end = args, end
        flags: dict[str, Any] = {"max_num_seqs": args.batch, "max_model_len": args.prompt + 512, "enable_lora": True}
        flags |= {"max_loras": args.adapters, "max_lora_rank": args.rank, "seed": 0}
        flags["speculative"] = speculative or SpeculativeConfig("none")
        path = args.model if "/" in args.model or not (SHAPES / args.model).is_dir() else str(SHAPES / args.model)
        if (Path(path) / "config.json").is_file() and not list(Path(path).glob("*.safetensors")):
            flags["load_format"] = "dummy"
        self.llm = LLM(path, max_num_batched_tokens=max(args.prompt, 128), **flags)
        self.vocab = self.llm.engine.checkpoint.config.vocab_size

    def load(self, adapters: dict[str, LoRARequest]) -> None:
        for one in adapters.values():
            self.llm.engine.command("load_adapter", {"name": one.lora_name, "directory": one.lora_path})
        self.llm._adapters = dict(adapters)

    def tokens(self, count: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(self.vocab) for _ in range(count)]

    def begin(self, names: list[str | None], rounds: int, context: int) -> None:
        """Requests of these adapters, past their prompts and the first rounds."""
        engine = self.llm.engine
        params = SamplingParams(temperature=0, max_tokens=rounds + 24, ignore_eos=True, seed=0)
        for row, name in enumerate(names):
            request = EngineRequest(f"step-{time.time()}-{row}", self.tokens(context, row), params)
            engine.add(replace(request, adapter=name))
        while engine.scheduler.waiting or engine.scheduler.extending:
            engine.step()
        for _ in range(8):
            engine.step()

    def finish(self) -> None:
        while self.llm.engine.has_work():
            self.llm.engine.step()

    def step_ms(self, names: list[str | None], context: int) -> float | None:
        """The median time of a round in which these rows have these adapters. context: tokens of each before it."""
        engine, times = self.llm.engine, list[float]()
        self.begin(names, self.args.steps, context)
        while (
            len(times) < self.args.steps
            and time.perf_counter() < self.end
            and len(engine.scheduler.running) == len(names)
        ):
            begun = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - begun))
        self.finish()
        return statistics.median(times) if times else None

    def launches(self, names: list[str | None]) -> Counter[str]:
        """Kernels of a round by name; without a GPU the project's ops. Copies and fills by the driver are left out."""
        rounds, gpu = 5, torch.cuda.is_available()
        self.begin(names, rounds, self.args.context[0])
        with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as trace:
            for _ in range(rounds):
                self.llm.engine.step()
        self.finish()
        events = trace.key_averages()
        own = (e.self_device_time_total > 0 and "Mem" not in e.key if gpu else "unisono::" in e.key for e in events)
        return Counter({e.key: round(e.count / rounds) for e, kept in zip(events, own, strict=True) if kept})

    def prompt_ms(self, name: str | None, repeats: int) -> float | None:
        """The median time from a prompt to its first token."""
        engine, times = self.llm.engine, list[float]()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0)
        for repeat in range(repeats + 2):
            if time.perf_counter() > self.end:
                break
            request = EngineRequest(f"prompt-{time.time()}", self.tokens(self.args.prompt, 1000 + repeat), params)
            engine.add(replace(request, adapter=name))
            begun = time.perf_counter()
            while engine.has_work():
                engine.step()
            times.append(1e3 * (time.perf_counter() - begun))
        return statistics.median(times[2:]) if len(times) > 2 else None

    def texts(self, names: list[str | None], adapters: dict[str, LoRARequest], together: bool) -> list[list[int]]:
        """Token ids of a request of each name, together or one after the other."""
        prompts = [self.tokens(40 + 7 * row, 500 + row) for row in range(len(names))]
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=48, ignore_eos=True)
        given = [adapters.get(name or "") for name in names]
        if together:
            outputs = self.llm.generate(prompts, params, lora_request=given, use_tqdm=False)
        else:
            each = zip(prompts, given, strict=True)
            outputs = [self.llm.generate([p], params, lora_request=a, use_tqdm=False)[0] for p, a in each]
        return [output.outputs[0].token_ids for output in outputs]


def draft_of(args: argparse.Namespace) -> SpeculativeConfig:
    """EAGLE-3 where there is a head for the model, else the last tokens' earlier continuations."""
    head = {"tiny": "tiny-eagle3"}.get(args.model, str(SHAPES / f"{args.model}-eagle3"))
    if args.model == "tiny" or Path(head).is_dir():
        options = {} if args.model == "tiny" else {"load_format": "dummy"}
        return SpeculativeConfig("eagle3", head, num_speculative_tokens=3, adaptive=False, options=options)
    return SpeculativeConfig("ngram", num_speculative_tokens=3, adaptive=False)


class Table:
    """Lines that are printed at once and again at the end."""

    def __init__(self) -> None:
        self.lines = ["| | without | with | ratio |", "|---|---|---|---|"]

    def say(self, *cells: object) -> None:
        self.lines.append(f"| {' | '.join(map(str, cells))} |")
        print(self.lines[-1], flush=True)

    def compare(self, name: str, base: float | None, value: float | None) -> None:
        if base is None or value is None:
            self.say(name, "not measured: the time was up", "", "")
        else:
            verdict = "ok" if value <= BAR * base else f"ABOVE {BAR}"
            self.say(name, f"{base:.3f}", f"{value:.3f}", f"{value / base:.3f} {verdict}")

    def differing(self, name: str, got: list[list[int]], wanted: list[list[int]]) -> None:
        differ = sum(a != b for a, b in zip(got, wanted, strict=True))
        self.say(name, f"{differ} of {len(wanted)} requests differ", "", "WRONG" if differ else "ok")


def speeds(bench: Bench, names: list[str], table: Table) -> None:
    """Rounds, prompts and launches."""
    args = bench.args
    mixed: list[str | None] = [names[i % len(names)] for i in range(args.batch)]
    none: list[str | None] = [None] * args.batch
    for context in args.context:
        told, base = f"ms a round of {args.batch} with {context} tokens", bench.step_ms(none, context)
        table.compare(f"{told}, one adapter", base, bench.step_ms([names[0]] * args.batch, context))
        table.compare(f"{told}, {args.adapters} adapters mixed", base, bench.step_ms(mixed, context))
    plain = bench.prompt_ms(None, args.repeats)
    table.compare(f"ms to the first token of {args.prompt}", plain, bench.prompt_ms(names[0], args.repeats))
    if time.perf_counter() < bench.end:
        without, found = bench.launches(none), bench.launches(mixed)
        what = "kernels" if torch.cuda.is_available() else "ops"
        own = {name: count for name, count in found.items() if "adapt" in name}
        table.say(f"{what} a round", without.total(), found.total(), found.total() - without.total())
        table.say(f"of these of adapters: {own}", "", sum(own.values()), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b", help="a name in benchmarks/shapes, or a PATH")
    for name, value in (("rank", 16), ("adapters", 8), ("batch", 16), ("prompt", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--context", type=int, nargs="+", default=[128, 1024], help="tokens of each request before rounds"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--limit", type=float, default=85.0, help="seconds")
    args = parser.parse_args()
    began, table = time.perf_counter(), Table()
    end = began + args.limit
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        bench = Bench(args, end)
        layers, names = layers_of(bench.llm), [f"a{number}" for number in range(args.adapters)]
        print(f"an engine after {time.perf_counter() - began:.0f} s", flush=True)
        adapters = {
            name: LoRARequest(name, 1 + i, str(write_adapter(Path(directory) / name, layers, args.rank, i)))
            for i, name in enumerate(names)
        }
        bench.load(adapters)
        told = f"{len(adapters)} adapters after {time.perf_counter() - began:.0f} s"
        print(f"{told}, {layers.nbytes >> 20} MiB on the device", flush=True)
        speeds(bench, names, table)
        some: list[str | None] = [*names[: min(6, args.batch - 1)], None]
        together = bench.texts(some, adapters, together=True)
        table.differing("bytes alone and mixed", bench.texts(some, adapters, together=False), together)
        passes = [p for p in bench.llm.engine.info()["passes"] if p["program"] == "round"]  # type: ignore[attr-defined]
        print("rounds:", ", ".join(f"{p['kind']} {p['reason']} {p['count']}" for p in passes), flush=True)
        bench.llm.shutdown()
        if time.perf_counter() < end - args.limit / 3:
            spec = draft_of(args)
            drafting = Bench(args, end, spec)
            drafting.load(adapters)
            table.differing(f"bytes with {spec.method}, k = 3", drafting.texts(some, adapters, together=True), together)
            infos = drafting.llm.engine.info()["adapters"]
            lengths = {one["name"]: one["avg_spec_accept_length"] for one in infos}  # type: ignore[attr-defined]
            table.say(f"accept length by adapter: {lengths}", "", "", "")
            drafting.llm.shutdown()
        else:
            table.say("bytes with drafts", "not measured: the time was up", "", "")
    print("\n".join(table.lines), f"{time.perf_counter() - began:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
