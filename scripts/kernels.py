"""Makes the archives of compiled kernels that a wheel carries, on a machine with the GPU they are for.

    python scripts/kernels.py start MODEL [--speculative-config JSON]    start once, print the seconds as JSON
    python scripts/kernels.py pack CACHE [--out DIR]                     pack a cache of Triton that starts filled
    python scripts/kernels.py build [MODEL …] [--out DIR] [--seconds S]  start each model, then pack
    python scripts/kernels.py check [--out DIR]                          fail if an archive is of other kernels

A model may have a draft: ``MODEL=JSON``, where JSON is what --speculative-config takes. Without models, ``build``
starts those of ``SHAPES``, in this order. After S seconds it ends the start that runs, starts no other, and packs what
was compiled. Weights are random: a kernel depends on shapes and formats. ``start`` reads the archives of
``UNISONO_KERNELS`` and the cache of ``TRITON_CACHE_DIR``, as every start does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

OUT = ROOT / "unisono" / "bundled" / "kernels"
SHAPES = (
    "benchmarks/shapes/qwen3-8b",
    'benchmarks/shapes/qwen3-8b={"method":"eagle3","model":"benchmarks/shapes/qwen3-8b-eagle3",'
    '"num_speculative_tokens":3,"load_format":"dummy"}',
    "benchmarks/shapes/qwen3.5-9b",
    "benchmarks/shapes/qwen3.5-35b-a3b",
    "benchmarks/shapes/qwen3.5-35b-a3b-fp8",
)


def start(model: str, draft: str | None, quantization: str | None, capture: str) -> None:
    """Start an engine with random weights and print its seconds, by stage and in all, and where its kernels came from.

    ``process`` counts from the beginning of this script: it includes imports, and not the interpreter's own start.
    ``first_token_since_exec`` counts from the start of the process to the first token of a request of 64 tokens.
    capture: ``--graph-capture``.
    """
    began = time.perf_counter()
    from unisono import LLM, SamplingParams

    imported = time.perf_counter()
    flags = {"quantization": quantization} if quantization else {}
    flags |= {"load_format": "dummy", "speculative_config": json.loads(draft) if draft else None}
    with LLM(model, use_tqdm_on_load=False, graph_capture=capture, **flags) as llm:
        ready, info = time.perf_counter(), llm.engine.info()
        llm.generate([[*range(64)]], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        token = since_exec()
    told = [d for d in info["decisions"] if d["name"] in ("compiled kernels", "start notes")]
    seconds = {"process": round(ready - began, 2), "import": round(imported - began, 2), **info["start_seconds"]}
    seconds["first_token_since_exec"] = round(token, 2)
    report = {"model": model, "draft": draft, "capture": capture, "seconds": seconds, "kernels": told}
    print(json.dumps(report), flush=True)


def since_exec() -> float:
    """Seconds since this process started, in steps of 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return float(Path("/proc/uptime").read_text().split()[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def pack(cache: Path, out: Path) -> None:
    """Pack a cache and print what the archives have."""
    from unisono.cli.kernels import pack_kernels

    pack_kernels(out, cache)


def build(models: Sequence[str], out: Path, seconds: float | None) -> None:
    """Start every model with an empty cache of its own, then pack what the starts compiled."""
    end = None if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:  # a killed start may still write
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "UNISONO_KERNELS": "0"}
        for number, model in enumerate(models):
            path, _, draft = model.partition("=")
            command = [sys.executable, __file__, "start", path, *(["--speculative-config", draft] if draft else [])]
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=left)
            except subprocess.TimeoutExpired:
                print(f"{seconds:.0f} s are over: {' and '.join(models[number:])} not started to the end", flush=True)
                break
        pack(Path(cache), out)


def check(out: Path) -> None:
    """Fail if an archive has a kernel whose source differs from this code's.

    A kernel's digest depends on Triton's version, so only archives of the installed Triton are checked.
    """
    import triton

    from unisono.engine.startup.kernel_archives import KernelArchive, current_source

    for path in sorted(out.glob("*.zip")):
        manifest = KernelArchive(path).manifest
        if manifest.triton != triton.__version__:
            print(f"{path.name}: for Triton {manifest.triton}, and {triton.__version__} is installed: not checked")
            continue
        changed = [kernel for kernel, source in manifest.sources.items() if current_source(kernel) != source]
        if changed:
            raise SystemExit(f"{path.name} has kernels of other code: {', '.join(changed)}. Run make kernels")
        print(f"{path.name}: {len(manifest.sources)} kernels are those of this code")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("start", "pack", "build", "check"))
    parser.add_argument("what", nargs="*", help="start: a model; pack: Triton's cache; build: models")
    parser.add_argument("--speculative-config", help="JSON, for start")
    parser.add_argument("--quantization", help="for start")
    parser.add_argument("--graph-capture", default="start", choices=("start", "lazy"), help="for start")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of archives; default: in the package")
    parser.add_argument("--seconds", type=float, help="for build: limit of the starts together; default: none")
    args = parser.parse_args()
    if args.do == "start":
        (model,) = args.what
        start(model, args.speculative_config, args.quantization, args.graph_capture)
    elif args.do == "pack":
        (cache,) = args.what
        pack(Path(cache), args.out)
    elif args.do == "build":
        build(args.what or SHAPES, args.out, args.seconds)
    else:
        check(args.out)


if __name__ == "__main__":
    main()
