"""``python -m benchmarks.restart``: seconds from exec to the first token, by stage, of first starts and restarts.

Every start is a process of ``scripts/kernels.py start``, with random weights. The first one begins with empty caches of
kernels, notes and bytecode, which the restarts then read.
"""

from __future__ import annotations

import contextlib
import json
import os
import pstats
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run

ROOT = Path(__file__).parents[1]
KERNELS = str(ROOT / "scripts" / "kernels.py")
LIMIT = 300.0
"""Seconds of one start."""
STAGES = ("import", "load", "compile", "size the KV cache", "capture")
SHOWN, DEEPEST = 25, 45
"""Rows of the tables of imports and of functions."""
IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s*(\S+)")


def restart(
    model: Annotated[str, typer.Option(help="A directory of config.json, or a bundled name.")] = "tiny",
    speculative_config: Annotated[str, typer.Option(help="JSON, as for `unisono serve`.")] = "",
    capture: Annotated[str, typer.Option(help="--graph-capture of the starts.")] = "lazy",
    profile: Annotated[bool, typer.Option(help="Also print what a restart calls.")] = False,
) -> None:
    """Start a model again and again; print the seconds by stage, and the imports that take longest."""
    with tempfile.TemporaryDirectory(prefix="restart-") as directory:
        starts = Starts(Path(directory), model, speculative_config, capture)
        print(f"| start | first token | {' | '.join(STAGES)} | the rest |")
        print(f"|{'---|' * (3 + len(STAGES))}", flush=True)
        starts.row("first", "kernels")
        starts.row("again", "kernels")
        starts.row("again", "kernels")
        own = os.environ.get("PYTHONDONTWRITEBYTECODE")
        starts.row("again, bytecode as installed", "kernels", PYTHONPYCACHEPREFIX=None, PYTHONDONTWRITEBYTECODE=own)
        starts.pack("kernels")
        starts.row("another machine, kernels of an archive", "empty", UNISONO_KERNELS=str(starts.root / "archives"))
        served = ", ".join(f"{starts.serve('kernels'):.2f}" for _ in range(2))
        print(f"`unisono serve`, twice: {served} s from exec to the first token over HTTP", flush=True)
        print(starts.imports(), flush=True)
        if profile:
            print(starts.calls("kernels"), flush=True)


class Starts:
    """Starts of one model. root: directory of their caches."""

    def __init__(self, root: Path, model: str, draft: str, capture: str) -> None:
        self.root, self.model = root, model
        self._draft = ["--speculative-config", draft] if draft else []
        self._arguments = ["start", model, "--graph-capture", capture, *self._draft]
        self._capture = ["--graph-capture", capture]

    def environment(self, cache: str, **changes: str | None) -> dict[str, str]:
        """Variables with this cache of kernels. changes: of variables; None: unset."""
        own: dict[str, str | None] = {
            "TRITON_CACHE_DIR": str(self.root / cache),
            "UNISONO_START_NOTES": str(self.root / "notes"),
            "PYTHONPYCACHEPREFIX": str(self.root / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": None,
        }
        merged = {**os.environ, **own, **changes}
        return {name: value for name, value in merged.items() if value is not None}

    def row(self, name: str, cache: str, **changes: str | None) -> None:
        """Start once and print a row."""
        command = [sys.executable, KERNELS, *self._arguments]
        seconds = report(command, self.environment(cache, **changes))["seconds"]
        stages = [seconds.get(stage, 0.0) for stage in STAGES]
        first = seconds["first_token_since_exec"]
        cells = " | ".join(f"{each:.2f}" for each in [first, *stages, first - sum(stages)])
        print(f"| {name} | {cells} |", flush=True)

    def pack(self, cache: str) -> None:
        """Make an archive of a cache of kernels, where it has any."""
        command = [sys.executable, KERNELS, "pack", str(self.root / cache), "--out", str(self.root / "archives")]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=LIMIT, check=False)

    def serve(self, cache: str) -> float:
        """Seconds from the exec of ``unisono serve`` to the first token of a request of 64 tokens."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = ["--load-format", "dummy", "--port", str(port), *self._capture, *self._draft]
        body = {"prompt": [*range(64)], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = time.monotonic()
        command = [sys.executable, "-m", "unisono", "serve", self.model, *flags]
        log = self.root / "serve.log"
        with log.open("wb") as sink:
            server = subprocess.Popen(command, cwd=ROOT, env=self.environment(cache), stdout=sink, stderr=sink)
        try:
            while server.poll() is None and time.monotonic() < began + LIMIT:
                with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=LIMIT) as answer:
                    answer.read()
                    return time.monotonic() - began
                time.sleep(0.02)
            raise SystemExit(f"the server gave no token:\n{log.read_text()[-2000:]}")
        finally:
            server.terminate()
            server.wait()

    def imports(self) -> str:
        """Tables of the modules, and of the packages, whose imports take longest; the packages' times add up."""
        command = [sys.executable, "-X", "importtime", "-c", "from unisono import LLM"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment("kernels"),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
        found = [(int(own), int(total), name) for own, total, name in IMPORT.findall(done.stderr)]
        packages: Counter[str] = Counter()
        for own, _, name in found:
            packages[".".join(name.split(".")[: 3 if name.startswith("unisono") else 1])] += own
        slowest = sorted(found, key=lambda each: each[1], reverse=True)[:SHOWN]
        lines = ["| module | its own ms | with what it imports |", "|---|---|---|"]
        lines += [f"| {name} | {own / 1e3:.0f} | {total / 1e3:.0f} |" for own, total, name in slowest]
        lines += [f"| package of {packages.total() / 1e3:.0f} ms | ms |", "|---|---|"]
        lines += [f"| {name} | {own / 1e3:.0f} |" for name, own in packages.most_common(SHOWN)]
        return "\n".join(lines)

    def calls(self, cache: str) -> str:
        """Table of the functions that a restart spends most time in, with those that they call. Profiling slows it."""
        out = self.root / "profile"
        command = [sys.executable, "-m", "cProfile", "-o", str(out), KERNELS, *self._arguments]
        report(command, self.environment(cache))
        stats: Any = pstats.Stats(str(out))
        lines = ["| function | calls | s | with calls |", "|---|---|---|---|"]
        for kind, count in (("cumulative", DEEPEST), ("tottime", SHOWN)):
            stats.sort_stats(kind)
            for place in [each for each in stats.fcn_list if "importlib" not in each[0]][:count]:
                _, calls, own, total, _ = stats.stats[place]
                where = f"{'/'.join(place[0].split('/')[-3:])}:{place[1]} {place[2]}"
                lines.append(f"| {where} | {calls} | {own:.2f} | {total:.2f} |")
        return "\n".join(lines)


def report(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What ``scripts/kernels.py start`` prints."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode:
        raise SystemExit(f"a start failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return found


if __name__ == "__main__":
    run(restart)
