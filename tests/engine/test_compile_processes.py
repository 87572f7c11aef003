"""Kernels that other processes compile: this one finds them in the cache, and compiles itself what they cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = Path(sys.prefix) / "oldest-triton"

SCRIPT = """
import json, os, sys, threading
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key
from triton._C.libtriton import get_cache_invalidating_env_vars
from unisono.sandbox import forks
from unisono.engine.startup import compile_processes as ours
from unisono.kernels.norm import activation
from unisono.kernels.attention import hopper_rounds as attention_hopper_rounds

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

every = [(activation.AOT[0], ASTSource), (attention_hopper_rounds.AOT[0], GluonASTSource)]

def who(mode):
    cases = every if mode in ("processes", "in the cache") else every[:1]
    compiled.clear()
    jobs = [queued(*case) for case in cases]
    if mode == "cannot travel":
        jobs = [(key, (lambda run: lambda: run())(run)) for key, run in jobs]
    with ours.CompileProcesses(0 if mode == "none" else 2) as processes:
        early = processes._template is not None and mode != "do not start"  # it is not known how soon that is seen
        if mode in ("processes", "die at work"):
            processes._at_home = threading.Semaphore(0 if mode == "processes" else 1)
        if mode == "die at work":
            processes._begin()
            while processes._living < 2:
                pass
            for channel in (processes._idle.get(), processes._idle.get()):
                channel.socket.shutdown(2)
                processes._idle.put(channel)
        kernels = [processes.ahead(key, run)() for key, run in jobs]
    assert all(len(kernel.asm["cubin"]) > 1000 for kernel in kernels)
    return processes.compiled, len(compiled), early

found = {}
for mode in sys.argv[2:]:
    if mode != "in the cache":
        os.environ["TRITON_CACHE_DIR"] = os.path.join(sys.argv[1], mode)
    if mode == "do not start":
        forks.sys.executable = "/bin/false"
    found[mode] = who(mode)
print(json.dumps(found))
"""


def run(folder: Path, *modes: str, **variables: str) -> str:
    """What the script prints."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-c", SCRIPT, str(folder), *modes]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_compile_in_processes_or_fall_back(tmp_path: Path) -> None:
    """(By processes, here, whether they start before the first kernel.)"""
    done = run(tmp_path, "processes", "in the cache", "cannot travel", "none", "die at work", "do not start")
    assert json.loads(done.splitlines()[-1]) == {
        "processes": [2, 0, True], "in the cache": [0, 0, False], "cannot travel": [0, 1, True], "none": [0, 1, False],
        "die at work": [0, 1, True], "do not start": [0, 1, False],
    }  # fmt: skip


@pytest.mark.skipif(not OLDEST.is_dir() or shutil.which("gcc") is None, reason="a C compiler and the oldest Triton")
def test_triton_launchers_are_compiled_with_their_kernels(tmp_path: Path) -> None:
    """Triton 3.6 does that when it loads a kernel. A library with nothing in it stands in for the GPU's."""
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-x", "c", os.devnull, "-o", library], check=True)
    paths = os.pathsep.join([str(OLDEST), *filter(None, sys.path)])
    run(tmp_path, "processes", PYTHONPATH=paths, TRITON_LIBCUDA_PATH=str(tmp_path), LD_LIBRARY_PATH=str(tmp_path))
    assert len(list(tmp_path.glob("processes/*/__triton_launcher*.so"))) == 2
