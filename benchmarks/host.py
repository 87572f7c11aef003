"""Microseconds that the host spends on a round without waiting for the device, by number of requests and their length.

    python -m benchmarks.host                                      64 and 256 requests of 1,024 and 8,192 tokens
    python -m benchmarks.host --requests 256 --context 8192 --speculative-config '{"method":"ngram"}'
    python -m benchmarks.host --tiny                               few, short ones, to try this file

The model is a made-up one of one small layer with random weights: the host does for it what it does for any other. All
prompts but the last tokens are the same, so that they are computed once. A round's time is that of ``Engine.step``
without waiting for outputs, and on a CPU without the pass itself. *schedule*: choosing the pass and its pages;
*launch*: filling buffers and launching; *read*: committing tokens. Medians. The last two columns are fixed pieces of
Python, timed before each line: where they differ from line to line, it is the machine whose speed changed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.loading import SHAPES, cut
from unisono import LLM, SamplingParams
from unisono.engine.engine import Engine
from unisono.graphs.buffers import PendingOutputs
from unisono.graphs.segments import Segmented
from unisono.types import EngineRequest, SpeculativeConfig

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1,
    "vocab_size": 512, "max_position_embeddings": 16384,
}  # fmt: skip
PARTS = {"_next_pass": "schedule", "_launch": "launch", "_read": "read"}
SETTLED = 8
"""Rounds that are not counted at the beginning."""


class Clock:
    """Seconds within the functions of a step, without those of waiting within them."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.waited = 0.0

    def timed(self, owner: type, name: str, part: str | None) -> None:
        """Count the time in a method. part None: it is waiting."""
        plain: Callable[..., Any] = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            began, waited = time.perf_counter(), self.waited
            try:
                return plain(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                if part is None:
                    self.waited = waited + took  # what it waits within itself is counted once
                else:
                    self.spent[part] += took - (self.waited - waited)

        setattr(owner, name, method)


def rounds(llm: LLM, clock: Clock, requests: int, context: int, tokens: int) -> list[dict[str, float]]:
    """Microseconds of each part of each round in which all requests took part."""
    engine, rng = llm.engine, random.Random(requests)
    vocab = engine.checkpoint.config.vocab_size
    same = [rng.randrange(vocab) for _ in range(context - 8)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=1)
    llm.generate([same], [SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)])
    for i in range(requests):
        own = [rng.randrange(vocab) for _ in range(8)]
        engine.add(EngineRequest(f"{requests}-{context}-{i}", same + own, params))
    found = []
    while engine.has_work():
        clock.spent.clear()
        if len(engine.step()) == requests:
            found.append({part: 1e6 * seconds for part, seconds in clock.spent.items()})
    return found[SETTLED:-2]


def fixed_work() -> tuple[float, float]:
    """Microseconds of 10,000 additions, and of reading 10,000 objects scattered over 80 MB: medians of 25."""
    scattered = [float(i) for i in range(2_000_000)]
    places = random.Random(0).sample(range(len(scattered)), 10_000)

    def add() -> None:
        total = 0
        for i in range(10_000):
            total += i

    def read() -> None:
        for place in places:
            scattered[place]

    found = []
    for work in (add, read):
        times = []
        for _ in range(25):
            began = time.perf_counter()
            work()
            times.append(1e6 * (time.perf_counter() - began))
        found.append(statistics.median(times))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--speculative-config", default='{"method":"none"}')
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.tiny:
        given.requests, given.context, given.output_len = [2, 4], [64], 20
    clock = Clock()
    clock.timed(PendingOutputs, "wait", None)
    if not torch.cuda.is_available():
        clock.timed(Segmented, "replay", None)
    for name, part in PARTS.items():
        clock.timed(Engine, name, part)
    with tempfile.TemporaryDirectory() as directory:
        cut(SHAPES / "qwen3-8b", Path(directory), 1, SIZES)
        llm = LLM(
            directory, load_format="dummy", max_num_seqs=max(given.requests),
            max_model_len=max(given.context) + 2 * given.output_len, max_stall_ms=60_000,
            speculative=SpeculativeConfig.parse(json.loads(given.speculative_config)),
        )  # fmt: skip
        print("| requests | tokens each | schedule | launch | read | a round, µs | rounds | additions | reads |")
        print("|---|---|---|---|---|---|---|---|---|")
        for requests in given.requests:
            for context in given.context:
                fixed = " | ".join(f"{us:.0f}" for us in fixed_work())
                found = rounds(llm, clock, requests, context, given.output_len)
                each = [statistics.median(r.get(part, 0.0) for r in found) for part in PARTS.values()]
                whole = statistics.median(sum(r.values()) for r in found)
                columns = " | ".join(f"{us:.0f}" for us in (*each, whole))
                print(f"| {requests} | {context} | {columns} | {len(found)} | {fixed} |", flush=True)
        llm.shutdown()


if __name__ == "__main__":
    main()
