"""Every kernel configuration in an ``AOT`` list compiles to sm_90a machine code, on any machine.

Run as a script it compiles them all and prints one JSON line each; the test runs it in a process of its own,
because this one may have asked for Triton's interpreter.
"""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import traceback

from tests.kernels.kernel_source import overlapped_kernels
from unisono.kernels.overlap import READ_EARLY

TOUCHES = re.compile(r"\b(ld|st|atom|red|cp)\.[\w.:]*global")
"""An access to the device's memory, in PTX."""
WRITES = re.compile(r"\b(st|atom|red)\.[\w.:]*global")

NORMS = ("_rms_norm_kernel", "_combine_kernel", "_gated_norm_kernel", "_norm_keep_kernel")
"""Kernels with a sum over a row, which quantise it or do not."""

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
    compiled = compile(
        source(case.kernel, kinds, dict(case.constexprs), attrs),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg},
    )
    if compiled.metadata.shared > SHARED_LIMIT:
        raise ValueError(f"needs {compiled.metadata.shared} bytes of shared memory; the limit is {SHARED_LIMIT}")
    if ".target sm_90a" not in compiled.asm["ptx"] or not compiled.asm["cubin"]:
        raise ValueError("not sm_90a machine code")
    wait = compiled.asm["ptx"].find("griddepcontrol.wait")
    touches = WRITES if case.kernel.fn.__name__ in READ_EARLY else TOUCHES
    if wait >= 0 and touches.search(compiled.asm["ptx"], 0, wait):
        raise ValueError("touches memory before it waits for the kernel before it")
    old = "mma.sync" in compiled.asm["ptx"]
    found = {"shared": compiled.metadata.shared, "cubin": len(compiled.asm["cubin"]), "waits": wait >= 0, "old": old}
    return found | {"sums": _sums(compiled.asm.get("ttgir", ""))}


def _sums(code: str) -> list[str]:
    """The layout of each sum over a dimension: it is the order of the sum."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reductions = re.findall(r'"tt\.reduce".*?\}\) : \((tensor<[^)]*>)\)', code, re.DOTALL)
    bodies = re.findall(r'"tt\.reduce".*?\^bb0.*?\n(.*?)\n', code, re.DOTALL)
    of_sums = (kind for kind, body in zip(reductions, bodies, strict=True) if "addf" in body)
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), kind) for kind in of_sums]


def main() -> None:
    import unisono.kernels

    for module in pkgutil.iter_modules(unisono.kernels.__path__):
        cases = getattr(importlib.import_module(f"unisono.kernels.{module.name}"), "AOT", [])
        for index, case in enumerate(cases):
            line = {"case": f"{module.name}.AOT[{index}] {case.kernel.__name__}", "is": str(dict(case.constexprs))}
            sizes = [case.constexprs.get(name) for name in ("BLOCK_H", "V")]
            line["norm"] = str([*sizes, case.signature.get("x", case.signature.get("y", case.signature.get("o")))])
            try:
                line |= _compile(case)
            except Exception:
                line["error"] = traceback.format_exc(limit=-3)
            print(json.dumps(line), flush=True)


def test_every_kernel_compiles_for_hopper():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    failed = [f"{line['case']} {line['is']}\n{line['error']}" for line in lines if "error" in line]
    assert not failed, "\n".join(failed)
    covered = {line["case"].split(".")[0] for line in lines}
    assert {"linear", "norm", "activation", "rotary"} <= covered
    quantised = [line for line in lines if "fp8" in line["case"] or "int4" in line["case"]]
    assert len(quantised) > 20
    assert not [line for line in quantised if line["old"]], "not wgmma: its bits differ from those of larger tiles"
    norms = [line for line in lines if line["case"].split()[1] in NORMS]
    orders = {}
    for line in norms:
        orders.setdefault((line["case"].split()[1].replace("_norm_keep", "_gated_norm"), line["norm"]), set()).add(
            tuple(line["sums"])
        )
    assert all(sums != () for each in orders.values() for sums in each)
    assert all(len(each) == 1 for each in orders.values()), "a norm that quantises adds in another order than plain"
    assert len(norms) > len(orders) + 8
    waiting = {line["case"].split()[1] for line in lines if line["waits"]}
    assert waiting == overlapped_kernels(), "who waits is who is launched before its turn"


if __name__ == "__main__":
    main()
