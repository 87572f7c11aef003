"""Every kernel that a GPU would run compiles for it and fits its shared memory; none needs Hopper below Hopper.

``python -m tests.kernels.test_cards [every] 8.9[,8.0,…] [jobs=16]`` compiles the largest configurations of
:data:`REPRESENTATIVE`, or each configuration of each kernel, in that many processes, and prints a JSON line for each.
The test runs it in a process of its own, because this one may have asked for Triton's interpreter. Gluon kernels are
for 9.0 alone and are in ``test_aot.py``.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.kernels.attention import latent
from unisono.kernels.attention.paged import _geometry
from unisono.kernels.cards import SHARED, card_kernels, fitting_stages
from unisono.kernels.gemm.linear import _hopper_tile, linear_tile
from unisono.kernels.moe.experts import TILES, expert_tiles
from unisono.layers.formats.documented import GATED

REPRESENTATIVE = ("gemm.linear", "gemm.int4", "gemm.int8_weights", "gemm.nvfp4", "moe.experts", "moe.integers")
"""Modules whose largest tile of each kernel is compiled for 8.9 by default."""

EVERY = [pytest.param(capability, True, marks=pytest.mark.full) for capability in SHARED]

HOPPER_ONLY = re.compile(r"wgmma|cp\.async\.bulk|griddepcontrol|mbarrier")
"""Instructions that begin with compute capability 9.0, in PTX."""

E4M3, E4M3_PAGES, NEEDS_E4M3 = "fp8e4nv", "k_scales_ptr", (8, 9)
"""Type and argument of kernels with e4m3 activations and e4m3 KV caches, which begin with 8.9."""


@pytest.mark.parametrize(("capability", "every"), [((8, 9), False), *EVERY])
def test_kernels_fit_a_card(capability: tuple[int, int], every: bool) -> None:
    command = [sys.executable, "-m", __name__, *(["every"] if every else []), "{}.{}".format(*capability)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=7200)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    modules = {line["module"] for line in lines}
    assert modules >= {*GATED} if every else modules == {*REPRESENTATIVE}
    assert not [line for line in lines if "error" in line]
    assert not [line for line in lines if line["shared"] > SHARED[capability]], "a launch would fail"
    assert not [line for line in lines if line["hopper"]], "instructions that this card does not have"


def test_tiles_on_hopper_are_those_that_were_tuned_there() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in (1, 17, 33, 65, 2000):
            for n in (512, 2048, 4096, 6144, 12288, 151936):
                assert linear_tile(rows, n, dtype) == _hopper_tile(rows, n, dtype)
    for most, tiles in TILES.items():
        pairs = int(min(most, 10_000) * 64) - 1
        assert expert_tiles(pairs, 64, torch.bfloat16) == tiles


def test_smaller_cards_take_fewer_stages_of_the_same_tile() -> None:
    assert fitting_stages(4, 40, 227) == 4
    assert fitting_stages(4, 40, 99) == 3
    assert fitting_stages(4, 200, 99) == 1
    for rows in (1, 32, 64):
        for n in (2048, 4096, 8192):
            ada, hopper = (linear_tile(rows, n, torch.bfloat16, SHARED[card]) for card in ((8, 9), (9, 0)))
            assert ada._replace(stages=hopper.stages) == hopper
            assert (ada.stages - 1) * (ada.m + ada.n) * ada.k * 2 <= SHARED[8, 9]
    assert linear_tile(64, 4096, torch.bfloat16, SHARED[8, 9]).stages < linear_tile(64, 4096, torch.bfloat16).stages


def test_wide_heads_take_fewer_rows_where_memory_is_small() -> None:
    sizes, options = _geometry(16, 2, 512, torch.bfloat16, 4, True, SHARED[8, 9])
    assert (sizes["ROWS"], options["num_stages"]) == (16, 1)
    usual = 32, 8, 128, torch.bfloat16, 4, True
    assert _geometry(*usual, SHARED[8, 9]) == _geometry(*usual)
    for key in ("KEYS", "SPLIT", "HEAD_DIM"):
        assert sizes[key] == _geometry(16, 2, 512, torch.bfloat16, 4, True)[0][key], "the order of sums"


def test_kernels_of_a_card_are_named() -> None:
    assert card_kernels((9, 0))[0] == "Gluon (wgmma, TMA) and Triton"
    assert card_kernels((8, 9)) == (
        "Triton",
        "Gluon kernels are for 9.0 alone; launches overlap from 9.0 on; a block has 99 KiB of shared memory",
    )


def module_cases(name: str, capability: tuple[int, int]) -> list:
    """The configurations of a module that a card of this capability would launch."""
    module, shared = importlib.import_module(f"unisono.kernels.{name}"), SHARED[capability]
    if name == "attention.latent" and shared < latent.SHARED:
        return []  # refused at the start
    cases = module.aot(shared) if hasattr(module, "aot") else getattr(module, "AOT", [])
    return [case for case in cases if not case.kernel.is_gluon() and (capability >= NEEDS_E4M3 or not needs_e4m3(case))]


def needs_e4m3(case: Any) -> bool:
    """True for a kernel that an engine below 8.9 refuses to serve; pages of e4m3 are passed as int16."""
    return E4M3_PAGES in case.signature or any(E4M3 in str(kind) for kind in case.signature.values())


def largest(cases: list) -> list:
    """Of each kernel the case with the largest tile."""
    found: dict = {}
    for case in cases:
        sizes = case.constexprs
        step = (sizes.get("BLOCK_M", sizes.get("TILE", 0)) + sizes.get("BLOCK_N", 0)) * sizes.get("BLOCK_K", 1)
        name = case.kernel.fn.__name__
        if name not in found or step * case.num_stages > found[name][0]:
            found[name] = step * case.num_stages, case
    return [case for _, case in found.values()]


def compile_for(case, capability: tuple[int, int]) -> dict:
    """Compile as a launch on that card would: without the overlap of launches before Hopper."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    number, constants = capability[0] * 10 + capability[1], dict(case.constexprs)
    if "OVERLAP" in constants:
        constants["OVERLAP"] = capability >= (9, 0)
    kinds = {name: "constexpr" if name in constants else case.signature[name] for name in case.kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind[0] == "*" or kind == "i32"
    }
    made = ASTSource(case.kernel, kinds, constants, attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg}
    compiled = triton.compile(made, target=GPUTarget("cuda", number, 32), options=options)
    hopper = capability < (9, 0) and HOPPER_ONLY.search(compiled.asm["ptx"]) is not None
    return {"shared": compiled.metadata.shared, "hopper": hopper, **registers(compiled.asm["cubin"])}


def registers(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, where registers are spilled; empty without ``cuobjdump``."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    return {} if found is None else {"registers": int(found[1]), "stack": int(found[2])}


def compiled_case(name: str, index: int, capability: tuple[int, int], every: bool) -> dict:
    """Compile one case of a module; a failure is the line's ``error``."""
    cases = module_cases(name, capability)
    case = (cases if every else largest(cases))[index]
    found = {"module": name, "kernel": case.kernel.fn.__name__, "capability": capability}
    try:
        return found | compile_for(case, capability)
    except Exception as error:  # Triton and ptxas raise of many types
        return found | {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def main(every: bool, capabilities: Sequence[tuple[int, int]], jobs: int = 1) -> None:
    import unisono.kernels

    walked = pkgutil.walk_packages(unisono.kernels.__path__, "unisono.kernels.")
    names = [each.name.removeprefix("unisono.kernels.") for each in walked] if every else REPRESENTATIVE
    found = ((name, capability, module_cases(name, capability)) for capability in capabilities for name in names)
    tasks = [
        (name, index, capability, every)
        for name, capability, cases in found
        for index in range(len(cases if every else largest(cases)))
    ]
    with ProcessPoolExecutor(jobs) as pool:
        for line in pool.map(compiled_case, *zip(*tasks, strict=True)) if jobs > 1 else starmap(compiled_case, tasks):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "every"]
    cards = [(int(major), int(minor)) for major, _, minor in (each.partition(".") for each in arguments[0].split(","))]
    main("every" in sys.argv[1:], cards, int(arguments[1].removeprefix("jobs=")) if arguments[1:] else 1)
