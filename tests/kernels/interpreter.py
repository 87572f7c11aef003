"""Makes Triton's interpreter quicker without a change of its results: a kernel's test spends its time there.

The interpreter runs the compiler's front end for every operation of every program. Most of that is types: a block type
checks and prints its shape, a tensor wraps each of its sizes, and equal shapes are broadcast to each other. Types are
few, so what depends on a shape alone is kept.

One result does change, for Triton 3.9: see :func:`_splat_boolean`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class Shape(NamedTuple):
    """What a block type or a tensor of a shape has."""

    sizes: Any
    """``tl.tuple`` of int."""
    numel: int
    text: str
    constants: Any
    """``tl.tuple`` of ``tl.constexpr``."""
    constant_numel: Any


_POINTER = np.dtype(np.uint64)
_SCALAR = Shape(tl.tuple([]), 1, "", tl.tuple([]), tl.constexpr(1))
_shapes: dict[tuple[int, ...], Shape] = {}
_numpy: dict[str, np.dtype] = {}
_types_equal, _block_type = tl.dtype.__eq__, tl.block_type.__init__
_create_splat = interpreter.InterpreterBuilder.create_splat
_broadcast, _numpy_of = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    known = _shapes.get(sizes)
    if known is None:
        _block_type(self, element_ty, shape)  # raises for sizes that no block has
        constants = tl.tuple([tl.constexpr(size) for size in sizes])
        known = Shape(self.shape, self.numel, str(self.shape), constants, tl.constexpr(self.numel))
        _shapes[sizes] = known
    self.element_ty, self.shape, self.numel = element_ty, known.sizes, known.numel
    self.name = f"<{known.text}, {element_ty}>"
    self.known = known


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    known = type.known if isinstance(type, tl.block_type) else _SCALAR
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known.constants, known.constant_numel


def _equal_types(self: Any, other: Any) -> bool:
    return self is other or _types_equal(self, other)


def _broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
    known = getattr(lhs.type, "known", None)
    if known is not None and known is getattr(rhs.type, "known", None):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _numpy_dtype(type: Any) -> np.dtype:
    scalar = type.element_ty if isinstance(type, tl.block_type) else type
    if isinstance(scalar, tl.pointer_type):
        return _POINTER
    found = _numpy.get(scalar.name)
    if found is None:
        found = _numpy[scalar.name] = _numpy_of(scalar)
    return found


def _splat_boolean(self: Any, type: Any, value: Any) -> Any:
    """Splat a scalar; keep a comparison's result boolean.

    The interpreter's handle of a comparison has the dtype of its operands, and its data are boolean. A splat converts
    the data to the handle's dtype: a mask of a scalar and a block is int32. Until 3.8 loads and stores convert masks
    to boolean; 3.9's raise "mask has unsupported dtype". Compiled kernels are not affected.
    """
    if value.data.dtype == np.bool_:
        value = interpreter.TensorHandle(value.data, tl.int1)
    return _create_splat(self, type, value)


def quicken() -> None:
    """Patch the interpreter of this process, once."""
    tl.block_type.__init__, tl.tensor.__init__ = _init_block_type, _init_tensor
    tl.dtype.__eq__ = _equal_types
    TritonSemantic.broadcast_impl_value = _broadcast_values
    interpreter._get_np_dtype = _numpy_dtype
    interpreter.InterpreterBuilder.create_splat = _splat_boolean
    if not interpreter.interpreter_builder.options.debug:
        # It computes each sum of integers again in 64 bits, for an assertion that is made with debug=True only.
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
