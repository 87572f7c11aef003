"""A model through the engine with a part of it and without, each in a process of its own; benchmarks share this.

A benchmark's flag ``--measure MODEL`` prints :func:`figures` as a line of JSON. :func:`rounds` runs the benchmark once
for each way, with that way's flags, and puts both side by side.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.old_new import answers, step_ms, ttft_ms
from unisono import LLM


def figures(llm: LLM, tiny: bool, longest: int, batches: Sequence[int], lengths: Sequence[int]) -> dict[str, object]:
    """Answers to prompts of up to ``longest`` tokens, ms of rounds by batch, ms of first tokens by length, decisions.

    Shuts the engine down.
    """
    found: dict[str, object] = {
        "answers": answers(llm, 4 if tiny else 32, longest),
        "step_ms": {n: round(step_ms(llm, n, 20 if tiny else 1024, 24 if tiny else 96), 3) for n in batches},
        "ttft_ms": {n: round(ttft_ms(llm, n, 2 if tiny else 7), 2) for n in lengths},
        "decisions": {d["name"]: d["value"] for d in llm.engine.info()["decisions"]},
    }
    llm.shutdown()
    return found


def rounds(
    module: str, models: list[str], ways: Sequence[list[str]], told: str, timeout: float | None = None
) -> Iterator[list[object]]:
    """[model, ms of rounds by batch: the first way's / the second's, of first tokens by length, answers that differ].

    module: the benchmark's name. ways: flags of its command for both. told: decisions of the second way whose names
    begin so follow in rows of their own. timeout: seconds of a process.
    """
    for model in models:
        found = []
        for flags in ways:
            command = [sys.executable, "-m", f"benchmarks.{module}", "--measure", model, *flags]
            try:
                made = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
            except subprocess.TimeoutExpired:
                yield [model, "hangs", "", ""]
                break
            lines = [line for line in made.stdout.splitlines() if line.startswith("{")]
            if not lines:
                yield [model, made.stderr.strip()[-600:], "", ""]
                break
            found.append(json.loads(lines[-1]))
        else:
            old, new = found
            cells = [", ".join(f"{n}: {old[k][n]} / {new[k][n]}" for n in old[k]) for k in ("step_ms", "ttft_ms")]
            differ = sum(a != b for a, b in zip(old["answers"], new["answers"], strict=True))
            yield [model, *cells, f"{differ} of {len(old['answers'])}"]
            for name, value in new["decisions"].items():
                if name.startswith(told):
                    yield ["", f"{name}: {value}", "", ""]
