"""How many prompt tokens the prefix caches of several replicas find, against those of one engine.

    python -m benchmarks.replicas                                  tiny on the CPU, 1 engine and 4 replicas
    python -m benchmarks.replicas --model DIR --device auto --prefix 4096 --groups 64 --concurrency 128

The load: ``--groups`` prefixes of ``--prefix`` tokens, each asked ``--asks`` times with another tail, in a random order
that is the same in each run, ``--concurrency`` at once. Three runs: one engine; replicas with the router; the same
replicas with requests given out in turn, as a router that knows no prefix would. Prints a Markdown table; *hit rate*:
prompt tokens that the caches had, of those looked up (``prefix_cache_hits`` / ``prefix_cache_queries``). The figure is
a ratio of counts, so any device gives it. Texts are compared; exits 1 if one differs.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

Load = Sequence[list[int]]


def load_of(groups: int, asks: int, prefix: int, tail: int, seed: int = 0) -> Load:
    """Prompts of token ids, ``groups`` * ``asks`` of them."""
    draw = random.Random(seed)
    heads = [[draw.randrange(3, 3000) for _ in range(prefix)] for _ in range(groups)]
    prompts = [[*head, *(draw.randrange(3, 3000) for _ in range(tail))] for head in heads for _ in range(asks)]
    draw.shuffle(prompts)
    return prompts


@contextmanager
def server(flags: Sequence[str]) -> Iterator[httpx.Client]:
    """A client of ``unisono serve`` with these flags, ready."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        command = [sys.executable, "-m", "unisono", "serve", *flags, "--port", "0"]
        process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)
        try:
            while (found := re.search(r"Serving .* on (http://\S+)/v1", Path(log.name).read_text())) is None:
                if process.poll() is not None:
                    sys.exit(f"the server ended:\n{Path(log.name).read_text()}")
                time.sleep(0.1)
            with httpx.Client(base_url=found[1], timeout=600) as client:
                yield client
        finally:
            process.terminate()
            process.wait(60)


def counted(client: httpx.Client, name: str) -> float:
    """A counter of all engines together."""
    return sum(map(float, re.findall(rf"^unisono:{name}_total{{.*}} (\S+)$", client.get("/metrics").text, re.M)))


def run(
    client: httpx.Client, load: Load, tokens: int, concurrency: int, ranks: int = 0
) -> tuple[float, float, list[str]]:
    """Send a load to empty caches: (hit rate, seconds, texts). ranks: engines that get requests in turn."""
    client.post("/reset_prefix_cache").raise_for_status()
    names = ("prefix_cache_hits", "prefix_cache_queries")
    before, begun = [counted(client, name) for name in names], time.monotonic()

    def ask(item: tuple[int, list[int]]) -> str:
        number, prompt = item
        headers = {"X-data-parallel-rank": str(number % ranks)} if ranks else {}
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": number, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body, headers=headers)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(concurrency) as pool:
        texts = list(pool.map(ask, enumerate(load)))
    seconds = time.monotonic() - begun
    hits, queries = (counted(client, name) - old for name, old in zip(names, before, strict=True))
    return hits / queries, seconds, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    numbers = {"replicas": 4, "groups": 12, "asks": 20, "prefix": 256, "tail": 24, "tokens": 8, "concurrency": 16}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    load = load_of(given.groups, given.asks, given.prefix, given.tail)
    flags = [given.model, "--device", given.device]
    if given.device == "cpu":
        flags += ["--max-model-len", str(given.prefix + given.tail + given.tokens), "--graphs", "off"]
    rows = {}
    with server(flags) as client:
        rows["1 engine"] = run(client, load, given.tokens, given.concurrency)
    with server([*flags, "--data-parallel-size", str(given.replicas)]) as client:
        rows[f"{given.replicas} replicas, the router"] = run(client, load, given.tokens, given.concurrency)
        rows[f"{given.replicas} replicas, in turn"] = run(client, load, given.tokens, given.concurrency, given.replicas)
    one, _, right = rows["1 engine"]
    print(f"{len(load)} prompts of {len(load[0])} tokens, {given.groups} prefixes of {given.prefix}:\n")
    print("| | hit rate | of one engine's | seconds | texts that differ |\n|---|---|---|---|---|")
    differing = 0
    for name, (rate, seconds, texts) in rows.items():
        wrong = sum(a != b for a, b in zip(texts, right, strict=True))
        differing += wrong
        print(f"| {name} | {rate:.3f} | {rate / one:.3f} | {seconds:.1f} | {wrong} of {len(load)} |")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
