"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on CPU tensors.

The interpreter is asked for in tests/conftest.py. In it ``tl.dot`` on bf16 is silently wrong: bf16 is for the GPU.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import quicken

if not torch.cuda.is_available():
    quicken()

DTYPES = (torch.float32, torch.float16) + ((torch.bfloat16,) if torch.cuda.is_available() else ())
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Bounds on ‖out - ref‖ / ‖ref‖ against float64: a few roundings of each dtype."""


@pytest.fixture
def device() -> torch.device:
    """Where launchers are tested: the GPU, or the interpreter on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's ``tl.dot`` adds products one after the other, as the device's tensor cores do at any tile size.

    Its own is the CPU's BLAS, whose order changes with the tile's height on some processors and not on others.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def values(operand: Any, dtype: np.dtype) -> np.ndarray:
        data = _e4m3_values(operand.data) if operand.dtype.scalar.is_fp8e4nv() else operand.data
        return data.astype(dtype)

    def create_dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> TensorHandle:
        total = np.zeros_like(d.data)
        left, right = values(a, total.dtype), values(b, total.dtype)
        for k in range(left.shape[-1]):
            total += left[..., k, None] * right[k]
        return TensorHandle(total + d.data, d.dtype.scalar)

    if not torch.cuda.is_available():
        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _e4m3_values(data: np.ndarray) -> np.ndarray:
    """What e4m3 values, which the interpreter keeps as bytes, stand for."""
    return torch.from_numpy(np.ascontiguousarray(data)).view(torch.float8_e4m3fn).float().numpy()


@pytest.fixture(autouse=True)
def e4m3_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter converts to e4m3 as the device does; its own conversion loses the carry of a rounding."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: np.ndarray, source: Any, to: Any, rounding: object) -> np.ndarray:
        if not to.is_fp8e4nv():
            return convert(data, source, to, rounding)
        kind = {16: np.float16, 32: np.float32}[source.primitive_bitwidth]
        value = torch.from_numpy(np.ascontiguousarray(data).view(kind).astype(np.float32))
        return value.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    if not torch.cuda.is_available():
        monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.fixture(autouse=True)
def language_is_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch patches Triton's language once for each module of device functions.

    The interpreter does so again at every call of a device function, to the same effect. It took a third of the time.
    """
    from triton.runtime import interpreter

    if torch.cuda.is_available() or not hasattr(interpreter, "_patch_lang"):
        return
    patch_lang, patched = interpreter._patch_lang, set()

    def patch_once(fn: Callable[..., Any]) -> Any:
        if id(fn.__globals__) in patched:
            return None
        launch = not patched
        patched.add(id(fn.__globals__))
        scope = patch_lang(fn)
        if launch:  # of a kernel, which ends by restoring what there was
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN, so an element that a kernel forgets is seen."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poisoned(out: torch.Tensor) -> torch.Tensor:
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **k: poisoned(new_empty(self, *a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """Compare with a float64 reference by relative norm, within the dtype's tolerance or ``e4m3``'s.

    e4m3: products of e4m3 values, whose sums a GPU's tensor cores keep in fewer bits than fp32's.
    """

    def check(out: torch.Tensor, reference: torch.Tensor, e4m3: bool = False) -> None:
        assert out.shape == reference.shape
        error = (out.double().cpu() - reference.double().cpu()).norm() / reference.double().norm().cpu()
        tolerance = max(TOLERANCE[out.dtype], 1e-3 if e4m3 and out.is_cuda else 0)
        assert error < tolerance, f"relative error {error:.2e} in {out.dtype}"

    return check


@pytest.fixture
def assert_rows_exact() -> Callable[..., None]:
    """Check that ``op(*row_tensors) -> [M, ...]`` gives a row the same bits in any company.

    Every tensor has M rows. Compares the whole batch with: each row alone, every prefix, an offset window and
    a permutation.
    """

    def check(op: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
        whole, rows = op(*tensors), tensors[0].shape[0]
        shuffled = torch.randperm(rows, device=tensors[0].device)
        batches = [slice(i, i + 1) for i in range(rows)] + [slice(0, i) for i in range(2, rows)]
        for batch in [*batches, slice(3, rows), shuffled]:
            part = op(*(t[batch].clone() for t in tensors))
            same = batch if isinstance(batch, slice) else batch.to(whole.device)
            assert torch.equal(part, whole[same]), f"bits change in batch {batch} of {rows} rows"

    return check
