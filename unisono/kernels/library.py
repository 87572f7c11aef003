"""Declaration of ops: :func:`op` makes one from an annotated function in plain torch and a CUDA implementation.

Owns the ``unisono`` torch.library namespace, except ``outputs_ready`` of ``graphs/buffers.py``. The tape
(``graphs/tape.py``) sees each kernel as one op, on any device.
"""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import torch
import triton
import triton.knobs
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import DependenciesFinder

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""True if kernels are compiled; False in Triton's interpreter, which rounds a fused multiply-add twice."""

_update_hash = DependenciesFinder._update_hash


def _hash_callee_first(self: DependenciesFinder, func: Any) -> None:
    """Hash a callee before Triton merges its constants into the caller's.

    A kernel's key in the cache of compiled code covers the constants that its callees read, but only of callees hashed
    before it (Triton 3.6 and 3.7): the key would depend on the kernels that a process has hashed so far, and other
    processes, or starts with other settings, would compile again. Triton has no hook that sees callees. Hashing all 467
    functions before the first launch takes 0.8 s of a start and needs every kernel module imported.
    ``tests/kernels/test_keys.py`` fails once a version of Triton needs no patch.
    """
    func.cache_key  # noqa: B018 — a property that hashes
    _update_hash(self, func)


DependenciesFinder._update_hash = _hash_callee_first

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes by Triton's names."""

_library = torch.library.Library("unisono", "DEF")

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


Mutated = Annotated[T, "mutated"]
"""Annotation of an argument that an op writes in place: ``Mutated[Tensor]``, ``Mutated[Tensor | None]``."""

SymbolicInt = Annotated[int, "SymInt"]
"""Annotation of an integer that shapes of outputs depend on."""

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    int: "int",
    float: "float",
    bool: "bool",
    torch.dtype: "ScalarType",
    SymbolicInt: "SymInt",
    Sequence[int]: "int[]",
    list[float]: "float[]",
    list[Tensor]: "Tensor[]",
}


class Op(Generic[P, R]):
    """An op of the ``unisono`` namespace. Calling it dispatches by the device of its tensors.

    cpu: the implementation in plain torch, called without torch's dispatcher. overload: torch's handle of the op.
    """

    def __init__(self, cpu: Callable[P, R], overload: Any) -> None:
        functools.update_wrapper(self, cpu)
        self.cpu, self.overload = cpu, overload
        result = get_type_hints(cpu).get("return")
        self._named = result if hasattr(result, "_fields") else None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result = self.overload(*args, **kwargs)
        return result if self._named is None else self._named(*result)


def op(
    *, cuda: Callable[..., Any] | None = None, shape: Callable[..., Sequence[int]] | None = None,
    meta: Callable[..., Any] | None = None, gradient: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:  # fmt: skip
    """Turn an annotated function in plain torch, an op's implementation on CPUs, into the op.

    The op's schema is :func:`schema_of` the function, and its name the function's, less ``_op`` or ``_cpu``. The tape
    calls the function without torch's dispatcher (``cpu_twin`` of the overload).

    cuda: the implementation on GPUs; it takes the same arguments. None: the function serves GPUs, too.
    shape: maps arguments to the shape of the one output, of the first argument's dtype. Its parameters are those
        arguments of the op, by name, that the shape depends on.
    meta: maps fake arguments to empty outputs, in place of ``shape``. Its parameters are arguments of the op, too; one
        with a default may be missing there. Without both, the output is like the first argument, or there is none.
    gradient: the op in plain torch, run where an input requires a gradient and gradients are enabled; everywhere else,
        also in serving, the op itself runs. It must give the op's values up to rounding, not its bits.
    """

    def declare(function: Callable[P, R]) -> Op[P, R]:
        schema = schema_of(function)
        for other in filter(None, (cuda, gradient)):
            _check_defaults(function, other)
        fake = (lambda *_: None) if meta is None and schema.endswith("()") else _fake(function, shape, meta)
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, cuda or function, "CUDA")
        _library.impl(name, function, "CPU")
        torch.library.register_fake(f"unisono::{name}", fake, lib=_library)
        overload = getattr(torch.ops.unisono, name).default
        overload.cpu_twin = function
        if gradient is not None:
            _library.impl(name, _with_gradient(overload, gradient), "Autograd")
        return Op(function, overload)

    return declare


def _check_defaults(function: Callable[..., object], other: Callable[..., object]) -> None:
    """Raise TypeError if ``other`` requires an argument with a default in ``function``: torch omits defaults."""
    own, others = inspect.signature(function).parameters, inspect.signature(other).parameters
    for name, parameter in own.items():
        if parameter.default is not parameter.empty and name in others and others[name].default is parameter.empty:
            raise TypeError(f"{other.__name__}: {name} needs the default {parameter.default!r} of {function.__name__}")


def schema_of(function: Callable[..., object]) -> str:
    """Derive the schema of an annotated function, e.g. ``"scale(Tensor(a!) x, float by=1.0) -> ()"``.

    Raises TypeError for an argument or a result without an annotation, or with one that schemas have no type for.
    """
    hints, letters = get_type_hints(function, include_extras=True), iter(string.ascii_lowercase)
    arguments = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = _schema_type(function, name, hints.get(name), letters)
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        arguments.append(f"{kind} {name}{default}")
    result = hints.get("return", inspect.Parameter.empty)
    if result is type(None):
        returns = "()"
    elif get_origin(result) is tuple or hasattr(result, "_fields"):
        parts = get_args(result) or get_type_hints(result).values()
        returns = f"({', '.join(_schema_type(function, 'return', each, letters) for each in parts)})"
    else:
        returns = _schema_type(function, "return", result, letters)
    name = function.__name__.removesuffix("_op").removesuffix("_cpu")
    return f"{name}({', '.join(arguments)}) -> {returns}"


def _schema_type(function: Callable[..., object], name: str, kind: Any, letters: Iterator[str]) -> str:
    """Convert one annotation to the schema's type. letters: names of the aliases of mutated arguments."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated and parts[1] == "mutated":
        return _schema_type(function, name, parts[0], letters).replace("Tensor", f"Tensor({next(letters)}!)")
    if type(None) in parts:
        [kind] = [part for part in parts if part is not type(None)]
        return f"{_schema_type(function, name, kind, letters)}?"
    if kind not in _SCHEMA_TYPES:
        raise TypeError(f"{function.__name__}: {name} is annotated with {kind}; an op takes {[*_SCHEMA_TYPES]}")
    return _SCHEMA_TYPES[kind]


def _fake(
    function: Callable[..., object], shape: Callable[..., Sequence[int]] | None, meta: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Make the fake implementation of an op with outputs; see :func:`op`. Raises TypeError if ``shape`` or ``meta``
    requires a parameter that ``function`` lacks.
    """
    signature, chosen = inspect.signature(function), meta or shape
    parameters = {} if chosen is None else inspect.signature(chosen).parameters
    used = [name for name in parameters if name in signature.parameters]
    if unknown := [n for n, p in parameters.items() if n not in used and p.default is p.empty]:
        raise TypeError(f"{function.__name__}: its output is computed from {unknown}, which are not its arguments")

    def fake(*args: Any, **kwargs: Any) -> Any:
        if chosen is None:
            return empty_like(args[0])
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        result = chosen(**{name: bound.arguments[name] for name in used})
        return result if chosen is meta else args[0].new_empty(result)

    return fake


def _with_gradient(overload: Any, gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Make the op's implementation for autograd; see :func:`op`."""

    def dispatch(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return gradient(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return dispatch


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Return ``torch.empty_like(x)``, for shape functions.

    torch's own imports sympy, 0.8 s, when it first sees a tensor of the meta device.
    """
    return x.new_empty(x.shape) if x.is_meta and x.is_contiguous() else torch.empty_like(x)


@dataclass(frozen=True)
class AotCase:
    """One configuration of a Triton kernel for the ahead-of-time sm_90a gate.

    ``signature`` maps argument names to Triton types (``"*bf16"``, ``"i32"``, ``"fp32"``);
    ``constexprs`` maps the compile-time arguments to values. ``maxnreg``: maximum registers per thread.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None


def ints(pointers: str, scalars: str) -> dict[str, str]:
    """Signature of an AotCase's int32 arguments, from their names: tensors, then numbers."""
    return dict.fromkeys(pointers.split(), "*i32") | dict.fromkeys(scalars.split(), "i32")


def one_stride(*fields: torch.Tensor) -> int:
    """Return the stride that all slot fields share, which kernels take once. Raises ValueError if strides differ."""
    stride = fields[0].stride(0)
    if any(field.stride(0) != stride for field in fields):
        raise ValueError(f"slot fields have strides {[f.stride(0) for f in fields]}: make them views of one arena")
    return stride
