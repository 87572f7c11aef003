"""Every kernel configuration in an ``AOT`` list compiles to sm_90a machine code, on any machine.

Run as a script with the number of a part, or ``gluon``, it compiles that part and prints one JSON line for each
configuration; the test runs it in a process of its own, because this one may have asked for Triton's interpreter. Parts
are there to be compiled side by side: all of it takes minutes. By default a kernel is compiled with every flag and
every type, and the long matrix adds its other sizes.
"""

import importlib
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import traceback
import zlib
from pathlib import Path

import pytest

from tests.kernels.kernel_source import overlapped_kernels
from unisono.kernels.overlap import BESIDE, LEADING, READ_EARLY

TOUCHES = re.compile(r"\b(ld|st|atom|red|cp)\.[\w.:]*global")
"""An access to the device's memory, in PTX."""
WRITES = re.compile(r"\b(st|atom|red)\.[\w.:]*global")

NORMS = ("_rms_norm_kernel", "_combine_kernel", "_gated_norm_kernel")
"""Kernels with a sum over a row, which quantise it or do not. They are in one part."""

LAYER_TAILS = (
    "layer_tail_kernel", "_gather_norm_kernel", "_add_normed_kernel", "_beside_norms_kernel", "_beside_sum_kernel",
)  # fmt: skip
"""Kernels with norms between their products, after a gather, or around a sum. They are in the same part."""

APART = ("_adapter_expand_kernel", "_adapter_silu_kernel", "_adapted_linear_kernel")
"""Kernels that add a product to a base. Left to itself the compiler begins the product's sum with the base."""

PUBLISHING = ("plan_kernel",)
"""Kernels whose writes the kernel just after them reads before its turn."""

PARTS = 4

OLDEST = Path(sys.prefix) / "oldest-triton"
"""The oldest Triton that pyproject.toml allows; ``make test`` installs it there. Gluon differs most among versions."""

BY_HEADS = ("_rope_and_cache_kernel",)
"""Kernels that are compiled for a number of heads, of which a rank of several has a part."""

EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some", "every"])
"""Whether each configuration is compiled."""

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory a block can have on Hopper. The compiler does not check it; the launch would fail."""


def _compile(case) -> dict:
    """Compile as for a launch with 16-byte aligned tensors and sizes divisible by 16, the usual case."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    unknown = set(case.signature) ^ (set(names) - set(case.constexprs))
    if unknown:
        raise ValueError(f"signature and constexprs do not cover the kernel's arguments: {sorted(unknown)}")
    kinds = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind[0] == "*" or kind == "i32"
    }
    source = GluonASTSource if case.kernel.is_gluon() else ASTSource
    made, target = source(case.kernel, kinds, dict(case.constexprs), attrs), GPUTarget("cuda", 90, 32)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg}
    compiled = compile(made, target=target, options=options)
    if compiled.metadata.shared > SHARED_LIMIT:
        raise ValueError(f"needs {compiled.metadata.shared} bytes of shared memory; the limit is {SHARED_LIMIT}")
    if ".target sm_90a" not in compiled.asm["ptx"] or not compiled.asm["cubin"]:
        raise ValueError("not sm_90a machine code")
    wait = compiled.asm["ptx"].find("griddepcontrol.wait")
    touches = WRITES if case.kernel.fn.__name__ in READ_EARLY else TOUCHES
    checked = case.kernel.fn.__name__ not in BESIDE
    if checked and wait >= 0 and _touched_early(compiled.asm["ptx"], touches):
        raise ValueError("touches memory before it waits for the kernel before it")
    if case.kernel.fn.__name__ in PUBLISHING:
        *_, last = WRITES.finditer(compiled.asm["ptx"])
        if compiled.asm["ptx"].rfind("fence.acq_rel.gpu") < last.start():
            raise ValueError("writes what is read early and does not publish it at its end")
    old = "mma.sync" in compiled.asm["ptx"]
    fused = compiled.asm["ptx"].count("fma.rn.f32")
    if case.kernel.fn.__name__ in (*NORMS, *BY_HEADS, *LAYER_TAILS) and _written_fused(compiled.asm["llir"]) != fused:
        raise ValueError("leaves it to the compiler which product it fuses with a sum")
    found = {"shared": compiled.metadata.shared, "cubin": len(compiled.asm["cubin"]), "waits": wait >= 0, "old": old}
    found["leads"] = -1 < compiled.asm["ptx"].find("griddepcontrol.launch_dependents") < wait
    code = compiled.asm.get("ttgir", "")
    fed = sorted(set(re.findall(r"kWidth = (\d+)", code)))
    saturates = "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]
    return found | {"sums": _sums(code), "apart": "math.fma" in code, "fed": fed, "saturates": saturates}


def _written_fused(code: str) -> int:
    """Multiply-adds in a kernel's LLVM code. PTX is made of it next, where the compiler may fuse more of them."""
    return sum(int(width or 1) for width in re.findall(r"call [^@\n]*@llvm\.fma\.(?:v(\d+))?f32\(", code))


def _touched_early(ptx: str, touches: re.Pattern) -> bool:
    """Whether some way through the code has a match of ``touches`` before it waits for the kernel before it."""
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    marks = [number for number, line in enumerate(lines) if re.match(r"[$\w]+:", line)]
    labels = {lines[number].partition(":")[0]: number for number in marks}
    ways, seen = [0], set[int]()
    while ways:
        at = ways.pop()
        while at < len(lines) and at not in seen:
            seen.add(at)
            line = lines[at]
            if touches.search(line):
                return True
            jump = re.match(r"(@!?[%\w]+\s+)?bra(?:\.uni)?\s+([$\w]+);", line)
            if jump and jump[2].startswith("$"):  # others are loops of inline code, which wait for one thing
                ways.append(labels[jump[2]])
            targets = re.search(r"\.branchtargets\s+(.*);", line)  # of an indirect jump just below
            ways += [labels[name.strip()] for name in targets[1].split(",")] if targets else []
            if "griddepcontrol.wait" in line or re.match(r"(ret|exit);", line) or (jump and not jump[1]):
                break
            at += 1
    return False


def test_early_access_check_follows_branches() -> None:
    """A write after the wait may stand before it in the text, and one before it after it."""
    fine = [".entry f()", "bra.uni $B;", "$A:", "st.global.b32 [x], y;", "ret;", "$B:", "griddepcontrol.wait;"]
    early = [".entry f()", "@%p1 bra $B;", "griddepcontrol.wait;", "ret;", "$B:", "st.global.b32 [x], y;"]
    assert not _touched_early("\n".join(fine), WRITES)
    assert _touched_early("\n".join(early), WRITES)


def _sums(code: str) -> list[str]:
    """The layout of each sum over a dimension: it is the order of the sum."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reductions = re.findall(r'"tt\.reduce".*?\}\) : \((tensor<[^)]*>)\)', code, re.DOTALL)
    bodies = re.findall(r'"tt\.reduce".*?\^bb0.*?\n(.*?)\n', code, re.DOTALL)
    of_sums = (kind for kind, body in zip(reductions, bodies, strict=True) if "addf" in body)
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), kind) for kind in of_sums]


def part_of(kernel: str) -> int:
    """The part that a kernel belongs to. What is compared with the norms is in theirs."""
    return 0 if kernel in NORMS + LAYER_TAILS else zlib.crc32(kernel.encode()) % PARTS


def cover(cases: list) -> set[int]:
    """Indices of few cases that have each flag and each type of a kernel's cases."""
    have = [
        {item for item in case.constexprs.items() if type(item[1]) is not int} | set(case.signature.items())
        for case in cases
    ]
    left, chosen = set().union(*have), {0}
    left -= have[0]
    while left:
        best = max(range(len(cases)), key=lambda index: len(have[index] & left))
        chosen.add(best)
        left -= have[best]
    return chosen


def main(part: str, every: bool) -> None:
    import triton

    import unisono.kernels

    print(json.dumps({"triton": triton.__version__}))
    names = [module.name for module in pkgutil.walk_packages(unisono.kernels.__path__, "unisono.kernels.")]
    found = {name: getattr(importlib.import_module(name), "AOT", []) for name in names}
    of_kernels: dict[str, list] = {}
    for case in itertools.chain(*found.values()):
        of_kernels.setdefault(case.kernel.__name__, []).append(case)
    some = {id(cases[index]) for cases in of_kernels.values() for index in cover(cases)}
    for name, cases in found.items():
        for index, case in enumerate(cases):
            kernel = case.kernel.__name__
            line = {"module": name, "index": index, "kernel": kernel, "is": str(dict(case.constexprs))}
            sizes = [case.constexprs.get(name) for name in ("D", "HALF", "HAS_NORM", "V_NORM")]
            line["head"] = str([*sizes, case.signature.get("qkv"), case.signature.get("q_norm")])
            sizes = [case.constexprs.get(name) for name in ("BLOCK_H", "V")]
            line["row"] = sizes[0]
            line["norm"] = str([*sizes, case.signature.get("x", case.signature.get("y", case.signature.get("o")))])
            first = case is of_kernels[kernel][0]
            line["chosen"] = every or id(case) in some or kernel in (*NORMS, *BY_HEADS)  # compared with each other
            line["gluon"] = case.kernel.is_gluon()
            kinds = {case.signature.get(name) for name in ("x8", "out")}
            line["quantises"] = "*fp8e4nv" in kinds and "scales" in case.signature
            if part == "first":
                wanted = first and not line["gluon"]
            else:
                wanted = line["chosen"] and (line["gluon"] if part == "gluon" else part_of(kernel) == int(part))
            if wanted:
                try:
                    line |= _compile(case)
                except Exception:
                    line["error"] = traceback.format_exc(limit=-3)
            print(json.dumps(line), flush=True)


def compiled(part, every, *paths):
    """The version of Triton, imported from ``paths`` where it is there, and a line for each configuration."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *(path for path in sys.path if path)])
    command = [sys.executable, __file__, str(part), *(["every"] if every else [])]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    version, *listed = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    failed = [
        f"{line['module']}.AOT[{line['index']}] {line['kernel']} {line['is']}\n{line['error']}"
        for line in listed
        if "error" in line
    ]
    assert not failed, "\n".join(failed)
    return version["triton"], listed


@pytest.mark.skipif(not OLDEST.is_dir(), reason="make test installs the oldest Triton that is supported")
@EVERY
def test_gluon_kernels_compile_with_the_oldest_triton(every):
    version, lines = compiled("gluon", every, OLDEST)
    assert f'"triton>={version.rpartition(".")[0]},' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    made = {line["kernel"] for line in lines if "cubin" in line}
    assert made >= {"layer_tail_kernel", "prompt_attention_kernel"}


@pytest.mark.skipif(not OLDEST.is_dir(), reason="make test installs the oldest Triton that is supported")
def test_a_configuration_of_every_kernel_compiles_with_the_oldest_triton():
    _, lines = compiled("first", False, OLDEST)
    made = {line["kernel"] for line in lines if "cubin" in line}
    assert made == {line["kernel"] for line in lines if not line["gluon"]}
    assert len(made) > 60


@EVERY
@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_compiles_for_hopper(part, every):
    _, listed = compiled(part, every)
    modules = {line["module"].rpartition(".")[2] for line in listed}
    assert {"linear", "rms_norm", "activation", "rotary"} <= modules
    quantised = [line for line in listed if re.search("fp8|int4|integers|fp4", line["module"])]
    assert len(quantised) > 20
    lines = [line for line in listed if line["chosen"] and part_of(line["kernel"]) == part]
    assert {line["kernel"] for line in lines} == {k for line in listed if part_of(k := line["kernel"]) == part} != set()
    assert all("cubin" in line for line in lines)
    assert not [line for line in quantised if line.get("old")], "not wgmma: its bits differ from those of larger tiles"
    unclamped = [line["is"] for line in lines if line["quantises"] and not line["saturates"]]
    assert not unclamped, "what is beyond e4m3's range does not become its largest value"
    together = [line["is"] for line in lines if line["kernel"] in APART and not line["apart"]]
    assert not together, "a product's sum begins with what it is to be added to"
    other = [line["is"] for line in lines if line["kernel"] == "attention_kernel" and line["fed"] != ["2"]]
    assert not other, "tensor cores add products in another order in some tiles"
    waiting = {line["kernel"] for line in lines if line["waits"]}
    overlapped = {name for name in overlapped_kernels() if part_of(name) == part}
    assert waiting == overlapped, "who waits is who is launched before its turn"
    leading = {line["kernel"] for line in lines if line["leads"]}
    assert leading == {name for name in LEADING if part_of(name) == part}, "who may start the next one before its turn"
    if part == part_of(BY_HEADS[0]):
        heads_add_in_one_order([line for line in lines if line["kernel"] in BY_HEADS])
    if part == part_of(NORMS[0]):
        norms_add_in_one_order([line for line in lines if line["kernel"] in NORMS])
        tails_add_as_norms(lines)


def heads_add_in_one_order(lines):
    """A rank's heads, of which there are fewer, are added up as all."""
    of_heads = {line["head"]: tuple(line["sums"]) for line in lines}
    assert len(of_heads) < len(lines) - 4
    assert all(tuple(line["sums"]) == of_heads[line["head"]] for line in lines)


def norms_add_in_one_order(norms):
    """A norm that quantises its result adds up a row as the one that does not."""
    orders = {}
    for line in norms:
        orders.setdefault((line["kernel"], line["norm"]), set()).add(tuple(line["sums"]))
    assert all(sums != () for each in orders.values() for sums in each)
    assert all(len(each) == 1 for each in orders.values()), "a norm that quantises adds in another order than plain"
    assert len(norms) > len(orders) + 8


def tails_add_as_norms(lines):
    """The norms between a layer's products add up a row as the norm's own kernel."""
    plain: dict[int, set[str]] = {}
    for line in lines:
        if line["kernel"] == "_rms_norm_kernel":  # fp32 rows have another layout than 16-bit rows
            plain.setdefault(line["row"], set()).update(line["sums"])
    tails = [line for line in lines if line["kernel"] in LAYER_TAILS]
    assert {line["kernel"] for line in tails} == set(LAYER_TAILS)
    assert all(line["sums"] and set(line["sums"]) <= plain[line["row"]] for line in tails)


if __name__ == "__main__":
    main(sys.argv[1], "every" in sys.argv[2:])
