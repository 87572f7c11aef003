"""Kernels that other processes compile: this one finds them in the cache, and compiles itself what they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys, threading, time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key
from triton._C.libtriton import get_cache_invalidating_env_vars
from unisono.engine import compile_processes as ours
from unisono.kernels import activation, layer_tail, norm

mode = sys.argv[1]
target, compiled = GPUTarget("cuda", 90, 32), []
backend, env_vars = make_backend(target), get_cache_invalidating_env_vars()

def queued(case, kind, target=target):
    # as triton.runtime.jit does
    signature = {**case.signature, **dict.fromkeys(case.constexprs, "constexpr")}
    src = kind(case.kernel, signature, dict(case.constexprs), {})
    asked = {name: getattr(case, name) for name in ("num_warps", "num_stages", "maxnreg")}
    options = backend.parse_options(asked)
    key = get_cache_key(src, backend, options, env_vars)

    def async_compile():
        here = not ours.is_cached(key, src.name)
        kernel = triton.compile(src, target=target, options=options.__dict__, _env_vars=env_vars)
        if here:
            compiled.append(src.name)
        return kernel

    return key, async_compile

cases = [(norm.AOT[0], ASTSource), (activation.AOT[0], ASTSource), (layer_tail.AOT[0], GluonASTSource)]
jobs = [queued(*case) for case in cases]
if mode == "dead":
    ours.sys.executable = "/bin/false"
if mode == "local":
    jobs = [(key, (lambda run: lambda: run())(run)) for key, run in jobs]
ours.AT_HOME = 1 if mode in ("dead", "local") else 0
with ours.CompileProcesses(2) as processes:
    if ours.AT_HOME == 0:
        processes._at_home = threading.Semaphore(0)
    kernels = [processes.ahead(key, run)() for key, run in jobs]
    pids = [process.pid for process, _ in processes._started]
print(json.dumps({"by processes": processes.compiled, "here": len(compiled), "started": len(pids),
                  "cubins": [len(kernel.asm["cubin"]) > 1000 for kernel in kernels]}))
"""


def compiled(mode: str, cache: Path) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("mode", "by_processes", "here", "started"),
    [("processes", 3, 0, 2), ("dead", 0, 3, 2), ("local", 0, 3, 0)],
    ids=["by processes", "which die", "what cannot travel"],
)
def test_who_compiles(mode: str, by_processes: int, here: int, started: int, tmp_path: Path) -> None:
    found = compiled(mode, tmp_path)
    assert found == {"by processes": by_processes, "here": here, "started": started, "cubins": [True] * 3}
    if mode == "processes":
        assert compiled(mode, tmp_path) == {**found, "by processes": 0, "started": 0}, "all are in the cache"
