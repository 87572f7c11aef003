"""Kernels that other processes compile: this one finds them in the cache, and compiles itself what they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, os, sys, threading
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key
from triton._C.libtriton import get_cache_invalidating_env_vars
from unisono.engine import compile_processes as ours
from unisono.kernels import activation, attention_hopper_rounds, norm

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

cases = [(norm.AOT[0], ASTSource), (activation.AOT[0], ASTSource), (attention_hopper_rounds.AOT[0], GluonASTSource)]

def who(mode):
    compiled.clear()
    jobs = [queued(*case) for case in cases]
    if mode == "cannot travel":
        jobs = [(key, (lambda run: lambda: run())(run)) for key, run in jobs]
    with ours.CompileProcesses(2) as processes:
        if mode == "processes":
            processes._at_home = threading.Semaphore(0)
        kernels = [processes.ahead(key, run)() for key, run in jobs]
        started = len(processes._started)
    assert all(len(kernel.asm["cubin"]) > 1000 for kernel in kernels)
    return processes.compiled, len(compiled), started

found = {}
for mode in ("processes", "in the cache", "cannot travel", "die"):
    if mode != "in the cache":
        os.environ["TRITON_CACHE_DIR"] = os.path.join(sys.argv[1], mode)
    if mode == "die":
        ours.sys.executable = "/bin/false"
    found[mode] = who(mode)
print(json.dumps(found))
"""


def test_who_compiles(tmp_path: Path) -> None:
    """(By processes, here, processes that were started.)"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "processes": [3, 0, 2], "in the cache": [0, 0, 0], "cannot travel": [0, 3, 0], "die": [0, 3, 2],
    }  # fmt: skip
