"""Which passes take the device's time: by program and by number of rows, of any command whose engine is in its process.

    python -m benchmarks.passes bench throughput --model tiny --num-prompts 64 --repeats 1
    python -m benchmarks.passes bench throughput --num-prompts 384 … --speculative-config …

Everything after the module's name is a command line of ``unisono``. Two CUDA events surround each pass on the engine's
stream; on a CPU, where a launch is the pass, the host's clock does. Rows: those of requests in rounds, of tokens in
prompt passes, before padding. *between*: the time in which no pass ran, from the first pass to the last. Passes of the
engine's start are not counted.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from unisono.cli.main import app
from unisono.engine.engine import Engine
from unisono.engine.worker.runner import Runner

BOUNDS = (16, 64, 128, 256, 512, 1024, 2048)
"""Rows at which a line of the table ends."""


class Clock:
    """The passes' times: (program, width, rows, begin, end)."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, int, int, Any, Any]] = []
        self.on_gpu = torch.cuda.is_available()
        self.counts = False

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def method(runner: Runner, key: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.counts:
                return launch(runner, key, *args, **kwargs)
            begin = self.mark()
            outputs = launch(runner, key, *args, **kwargs)
            self.passes.append((key.program, key.shape.width, key.shape.rows, begin, self.mark()))
            return outputs

        return method

    def ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if self.on_gpu else 1e3 * (end - begin)

    def table(self) -> str:
        """Milliseconds by program and rows."""
        if self.on_gpu:
            torch.cuda.synchronize()
        found = defaultdict(list)
        for program, width, rows, begin, end in self.passes:
            bound = next((n for n in BOUNDS if rows <= n), 0)
            found[program, width, bound].append((rows, self.ms(begin, end)))
        whole = self.ms(self.passes[0][3], self.passes[-1][4])
        lines = ["| pass | width | rows, at most | passes | mean rows | mean ms | seconds | share |", "|" + "---|" * 8]
        for (program, width, bound), each in sorted(found.items()):
            took, count = sum(ms for _, ms in each), len(each)
            lines.append(
                f"| {program} | {width} | {bound or 'more'} | {count} | {sum(n for n, _ in each) / count:.0f} | "
                f"{took / count:.2f} | {took / 1e3:.2f} | {took / whole:.3f} |"
            )
        between = whole - sum(ms for each in found.values() for _, ms in each)
        lines.append(f"| between | | | | | | {between / 1e3:.2f} | {between / whole:.3f} |")
        return "\n".join(lines)


def main() -> None:
    clock = Clock()
    Runner.launch = clock.timed(Runner.launch)  # type: ignore[method-assign]
    step = Engine.step

    def counted(engine: Engine) -> Any:
        clock.counts = True
        try:
            return step(engine)
        finally:
            clock.counts = False

    Engine.step = counted  # type: ignore[method-assign]
    try:
        app()
    finally:
        if clock.passes:
            print(clock.table(), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    main()
