"""Kernels of the weights that small cards carry compile for each generation of GPUs and fit its shared memory.

Run as a script with capabilities such as ``8.9`` (``every`` before them: each configuration, not the largest of each
kernel) it compiles and prints one JSON line for each; the test runs it in a process of its own, because this one may
have asked for Triton's interpreter.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.layers.formats.documented import GATED

SHARED = {"8.0": 163, "8.6": 99, "8.9": 99, "10.0": 227, "12.0": 99}
"""KiB of shared memory that a block can have, by compute capability."""

EVERY = [pytest.param(name, True, marks=pytest.mark.full) for name in SHARED]


@pytest.mark.parametrize(("capability", "every"), [("8.9", False), *EVERY])
def test_kernels_fit_a_card(capability: str, every: bool) -> None:
    command = [sys.executable, __file__, *(["every"] if every else []), capability]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert {line["module"] for line in lines} == {*GATED}
    assert not [line for line in lines if line["shared"] > SHARED[capability] * 1024], "a launch would fail"
    assert not [line for line in lines if line["hopper"]], "instructions of Hopper alone"


def largest(cases: list) -> list:
    """Of each kernel the case with the largest tile."""
    found: dict = {}
    for case in cases:
        size = case.constexprs.get("BLOCK_M", 0), case.num_warps
        name = case.kernel.fn.__name__
        if name not in found or size > found[name][0]:
            found[name] = size, case
    return [case for _, case in found.values()]


def compile_for(case, capability: str) -> dict:
    """Compile as a launch on that card would: without the overlap of launches before Hopper."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    number = int(capability.replace(".", ""))
    constants = {**case.constexprs, "OVERLAP": number >= 90}
    kinds = {name: "constexpr" if name in constants else case.signature[name] for name in case.kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind[0] == "*" or kind == "i32"
    }
    made = ASTSource(case.kernel, kinds, constants, attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg}
    compiled = compile(made, target=GPUTarget("cuda", number, 32), options=options)
    return {"shared": compiled.metadata.shared, "hopper": "wgmma" in compiled.asm["ptx"]}


def main() -> None:
    every, names = sys.argv[1] == "every", [each for each in sys.argv[1:] if each != "every"]
    for module in GATED:
        cases = importlib.import_module(f"unisono.kernels.{module}").AOT
        for case in cases if every else largest(cases):
            for capability in names:
                found = {"module": module, "kernel": case.kernel.fn.__name__, "capability": capability}
                print(json.dumps(found | compile_for(case, capability)), flush=True)


if __name__ == "__main__":
    main()
