"""How an op is declared: a schema, a CUDA implementation, a CPU twin and a shape function.

Owns the ``unisono`` torch.library namespace, except ``outputs_ready`` of ``graphs/buffers.py``. Kernel files call
:func:`define` and :func:`register`; the tape (``graphs/tape.py``) then sees each kernel as one op, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.knobs
import triton.language as tl
from triton.runtime.jit import DependenciesFinder

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether kernels are machine code; else Triton's interpreter runs them, and rounds a fused multiply-add twice."""

_update_hash = DependenciesFinder._update_hash


def _hash_callee_first(self: DependenciesFinder, func: Any) -> None:
    """Triton's own, after the callee has been hashed.

    A kernel's key, by which compiled code is kept, covers the constants that its callees read, but only of callees that
    were hashed before (Triton 3.6 and 3.7). So it depended on which kernels a process had met, and a start with other
    settings, or another process, compiled anew what was there.
    """
    func.cache_key  # noqa: B018 — a property that hashes
    _update_hash(self, func)


DependenciesFinder._update_hash = _hash_callee_first

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By Triton's names."""

_library = torch.library.Library("unisono", "DEF")


def define(schema: str) -> None:
    """Declare an op, e.g. ``"silu_mul(Tensor x) -> Tensor"``; mutated arguments are ``Tensor(a!)``."""
    _library.define(schema)


def register(name: str, *, cuda: Callable, cpu: Callable, meta: Callable) -> None:
    """Give op ``name`` its implementations. ``meta`` maps fake inputs to empty outputs.

    The op has its CPU twin as its attribute ``cpu_twin`` too: the tape calls that without torch's dispatcher.
    """
    _library.impl(name, cuda, "CUDA")
    _library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"unisono::{name}", meta, lib=_library)
    getattr(torch.ops.unisono, name).default.cpu_twin = cpu


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like(x)``, for shape functions.

    torch's own imports sympy, 0.8 s, when it first sees a tensor of the meta device.
    """
    return x.new_empty(x.shape) if x.is_meta and x.is_contiguous() else torch.empty_like(x)


def differentiable(name: str, formula: Callable) -> None:
    """Give op ``name`` a gradient: ``formula``, the op in plain torch, runs in its place where one is wanted.

    A gradient is wanted where an input requires one and gradients are enabled. Everywhere else, also in serving, the
    op itself runs. A formula must give the op's values up to rounding, not its bits.
    """
    op = getattr(torch.ops.unisono, name).default

    def dispatch(*args: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if wanted:
            return formula(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    _library.impl(name, dispatch, "Autograd")


@dataclass(frozen=True)
class AotCase:
    """One configuration of a Triton kernel for the ahead-of-time sm_90a gate.

    ``signature`` maps argument names to Triton types (``"*bf16"``, ``"i32"``, ``"fp32"``);
    ``constexprs`` maps the compile-time arguments to values. ``maxnreg``: registers of a thread at most.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None


def ints(pointers: str, scalars: str) -> dict[str, str]:
    """The signature of an AotCase's int32 arguments, from their names: tensors, then numbers."""
    return dict.fromkeys(pointers.split(), "*i32") | dict.fromkeys(scalars.split(), "i32")


def one_stride(*fields: torch.Tensor) -> int:
    """The stride that all slot fields share, which kernels take once. Raises ValueError where strides differ."""
    stride = fields[0].stride(0)
    if any(field.stride(0) != stride for field in fields):
        raise ValueError(f"slot fields have strides {[f.stride(0) for f in fields]}: make them views of one arena")
    return stride
