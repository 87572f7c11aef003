"""Compares what users and GPUs see of two commits: ``make same BASE=COMMIT``.

A refactoring must change none of it. Five parts:

* tokens: token ids, and digests of log-probabilities and hidden states, of ``benchmarks.record_tokens``.
* ptx: the PTX of every configuration in the kernels' ``AOT`` lists, compiled for sm_90a without line information.
* http: ``/openapi.json``, and the names, kinds and labels of the series of ``/metrics``.
* flags: the commands, their flags and defaults.
* wheel: the files of the wheel that are not Python code, and their bytes.

The base is checked out in a temporary folder and recorded once; records are kept in ``build/same``. Products on a CPU
differ between processors, so only records of one machine are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "same"

PTX = """
import hashlib, importlib, json, pkgutil, sys
import unisono.kernels as kernels
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

part, parts = int(sys.argv[1]), int(sys.argv[2])
cases = [
    case
    for module in sorted(m.name for m in pkgutil.walk_packages(kernels.__path__, "unisono.kernels."))
    for case in getattr(importlib.import_module(module), "AOT", ())
]
found = {}
for case in cases:
    kernel, names = case.kernel, case.kernel.arg_names
    name = json.dumps(
        [kernel.fn.__name__, dict(case.signature), {k: str(v) for k, v in case.constexprs.items()},
         case.num_warps, case.num_stages, case.maxnreg],
        sort_keys=True,
    )
    if int(hashlib.sha256(name.encode()).hexdigest(), 16) % parts != part:
        continue
    kinds = {n: "constexpr" if n in case.constexprs else case.signature[n] for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(kinds.values()) if k[0] == "*" or k == "i32"}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg}
    made = source(kernel, kinds, dict(case.constexprs), attrs)
    made = compile(made, target=GPUTarget("cuda", 90, 32), options=options)
    found[name] = hashlib.sha256(made.asm["ptx"].encode()).hexdigest()[:16]
json.dump(found, sys.stdout)
"""
"""A program that prints the PTX digests of one part of the configurations."""

FLAGS = """
import json, sys
import typer
from unisono.cli.main import app

def described(command):
    if hasattr(command, "commands"):
        return {name: described(each) for name, each in command.commands.items()}
    return {p.name: [sorted([*p.opts, *p.secondary_opts]), repr(p.default), p.required] for p in command.params}

json.dump(described(typer.main.get_command(app)), sys.stdout)
"""
"""A program that prints each command's parameters."""


WHEEL = """
import sys
from pathlib import Path

sys.path.insert(0, "scripts")
from check_wheel import build

build(Path(sys.argv[1]))
"""
"""A program that builds the wheel in a folder."""


def environment(tree: Path) -> dict[str, str]:
    """The environment of a program that imports the package of ``tree``."""
    fixed = {"OMP_NUM_THREADS": "1", "TRITON_DISABLE_LINE_INFO": "1", "COLUMNS": "200", "PYTHONPATH": str(tree)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNISONO_", "TRITON_"))}
    return {**kept, **fixed}


def run(tree: Path, *arguments: str) -> str:
    """Output of a Python program that runs in ``tree``. Raises CalledProcessError."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment(tree), check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def tokens(tree: Path) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tokens.json"
        run(tree, "-m", "benchmarks.record_tokens", "--out", str(out))
        return json.loads(out.read_text())


def ptx(tree: Path) -> Any:
    parts = os.cpu_count() or 1
    command = [sys.executable, "-c", PTX]
    running = [
        subprocess.Popen([*command, str(i), str(parts)], cwd=tree, env=environment(tree), stdout=subprocess.PIPE)
        for i in range(parts)
    ]
    found: dict[str, str] = {}
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"same: compiling the kernels of {tree} failed with status {process.returncode}.")
        found |= json.loads(output)
    return found


def http(tree: Path) -> Any:
    question = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    with serving(tree) as url:
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=120).read()
        document = json.load(urllib.request.urlopen(f"{url}/openapi.json", timeout=60))
        series = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    kinds = re.findall(r"^# TYPE (\S+ \S+)$", series, re.MULTILINE)
    labels = set()
    for name, rest in re.findall(r"^([a-zA-Z_:][\w:]*)(.*)$", series, re.MULTILINE):
        labels.add(" ".join([name, *sorted(re.findall(r'(\w+)="', rest))]))
    return {"openapi": document, "metrics": sorted({*kinds, *labels})}


@contextlib.contextmanager
def serving(tree: Path) -> Iterator[str]:
    """Serve ``tiny`` on a free port; yields the address."""
    command = [
        sys.executable,
        "-m",
        "unisono",
        "serve",
        "tiny",
        "--port",
        "0",
        "--device",
        "cpu",
        "--max-num-seqs",
        "2",
    ]
    process = subprocess.Popen(
        command, cwd=tree, env=environment(tree), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://[\d.]+:\d+", line):
                yield found[0]
                return
        raise SystemExit(f"same: the server of {tree} did not start.")
    finally:
        process.terminate()
        process.wait()


def flags(tree: Path) -> Any:
    return json.loads(run(tree, "-c", FLAGS))


def wheel(tree: Path) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        run(tree, "-c", WHEEL, folder)
        (made,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(made) as archive:
            kept = [n for n in archive.namelist() if not n.endswith((".py", "/RECORD"))]
            return {name: hashlib.sha256(archive.read(name)).hexdigest()[:16] for name in kept}


PARTS: dict[str, Callable[[Path], Any]] = {"flags": flags, "wheel": wheel, "http": http, "ptx": ptx, "tokens": tokens}


def record(tree: Path, parts: list[str], name: str | None) -> dict[str, Any]:
    """The parts of ``tree``; those of a commit ``name`` are kept."""
    found: dict[str, Any] = {}
    for part in parts:
        kept = KEPT / f"{name}-{part}.json"
        if name is not None and kept.exists():
            found[part] = json.loads(kept.read_text())
            continue
        print(f"same: recording {part} of {name or 'the working tree'}", flush=True)
        found[part] = PARTS[part](tree)
        if name is not None:
            KEPT.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found[part]))
    return json.loads(json.dumps(found))


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Each place where two JSON values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            if key not in before or key not in after:
                yield f"{path}/{key}: only {'before' if key in before else 'now'}"
            else:
                yield from differences(before[key], after[key], f"{path}/{key}")
    elif before != after:
        yield f"{path}: {str(before)[:60]} before, {str(after)[:60]} now"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := sorted({*parts} - {*PARTS}):
        parser.error(f"--parts names {unknown}; there are {', '.join(PARTS)}")
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=12", f"{args.base}^{{commit}}"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            before = record(tree, parts, commit)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    after = record(ROOT, parts, None)
    found = 0
    for part in parts:
        lines = list(differences(before[part], after[part]))
        print(f"same: {part}: {len(lines)} differences from {commit}")
        print("".join(f"  {line}\n" for line in lines[:20]), end="")
        found += len(lines)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
