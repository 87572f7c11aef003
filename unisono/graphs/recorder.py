"""Recorder of the ops that a pass dispatches, on any device.

It refuses ops that cannot be captured: host reads, host constants, shapes that depend on data. The tape replays the
recording; ``compiled`` rewrites it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from unisono.graphs import Buffers, CaptureError, capturing
from unisono.graphs.segments import Break, refusal, storages, tensors

_HOST = torch.ops.aten
_FORBIDDEN = {
    _HOST._local_scalar_dense.default: "it reads a tensor's value on the host (.item(), int(), bool())",
    _HOST.lift_fresh.default: "it makes a tensor of host values (torch.tensor(...)); put them in Buffers",
    _HOST.lift_fresh_copy.default: "it makes a tensor of host values (torch.tensor(...)); put them in Buffers",
    _HOST.equal.default: "it compares on the host (torch.equal)",
}
_UNSEEN = {  # these never reach a dispatch mode
    torch.Tensor.tolist: "it reads a tensor's values on the host",
    torch.Tensor.numpy: "it reads a tensor's values on the host",
    torch.Tensor.__array__: "it reads a tensor's values on the host",
    torch.from_numpy: "it makes a tensor of host values; put them in Buffers",
    torch.as_tensor: "it makes a tensor of host values; put them in Buffers",
}
_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass(frozen=True)
class RecordedOp:
    """One recorded op: its arguments, and the tensors that hold its results.

    view: the results lie in an argument's storage, so a replay does nothing.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor, ...]
    view: bool = False

    def replay(self) -> None:
        if self.view:
            return
        twin = self._twin if torch.is_inference_mode_enabled() else None
        out = (twin or self.op)(*self.args, **self.kwargs)
        if isinstance(out, torch.Tensor):
            self._keep(self.results[0], out)
            return
        for recorded, fresh in zip(self.results, _tensors(out), strict=True):
            self._keep(recorded, fresh)

    @functools.cached_property
    def _twin(self) -> Callable[..., Any] | None:
        """The op's CPU twin if it would be dispatched there: torch's dispatcher takes longer than small ops do."""
        twin: Callable[..., Any] | None = getattr(self.op, "cpu_twin", None)
        return twin if all(t.device.type == "cpu" for t in tensors((self.args, self.kwargs))) else None

    def _keep(self, recorded: torch.Tensor, fresh: torch.Tensor) -> None:
        """Copy a result to its recorded tensor."""
        if fresh is recorded:
            return
        if fresh.shape != recorded.shape or fresh.dtype != recorded.dtype:
            raise CaptureError(
                f"{self.op} makes {fresh.dtype} {list(fresh.shape)}, where its shape function says "
                f"{recorded.dtype} {list(recorded.shape)}"
            )
        recorded.copy_(fresh)


def _tensors(out: object) -> tuple[torch.Tensor, ...]:
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, (tuple, list)):
        return tuple(t for item in out for t in _tensors(item))
    return ()


def _is_view(op: Any, args: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> bool:
    """Return True if the results lie in an argument's storage, so that a replay has nothing to do.

    The schema alone is not enough: ``contiguous``, ``reshape``, ``to`` and similar ops copy if they must, and in
    inference mode they arrive here undecomposed.
    """
    returns = op._schema.returns
    if not returns or any(r.alias_info is None or r.alias_info.is_write for r in returns):
        return False
    inputs = storages(args)
    return all(t.untyped_storage().data_ptr() in inputs for t in results)


class _HostReads(TorchFunctionMode):
    """Refuses host reads and host-made tensors that the dispatcher does not see."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _UNSEEN:
            raise refusal(getattr(func, "__name__", func), _UNSEEN[func])
        return func(*args, **(kwargs or {}))


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Leave the modes of a recording within the block."""
    with _pop_mode_temporarily(), _disable_current_modes():
        yield


class _Uncompiled(TorchDispatchMode):
    """A mode under which torch compiles nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch would enter and leave its compiler at each op."""
        return False


class Outlined(_Uncompiled):
    """Mode in which kernels with floating-point outputs compute nothing: they return zeros and leave other arguments
    unchanged.

    All other ops run, including those that compute indices and plans. The pass therefore allocates what it allocates
    once and takes its usual control path, in little time. A :class:`Recorder` inside records the ops unchanged, and
    breaks run without both.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _outlined(func, args, kwargs or {})


def _outlined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an op under :class:`Outlined`."""
    if func.namespace != "unisono" or not all(r.alias_info is None for r in func._schema.returns):
        return func(*args, **kwargs)
    key = func, _described(args), _described(tuple(kwargs.items()))
    if key not in _shapes:
        meta = tree_map_only(torch.Tensor, _shape_of, (args, kwargs))
        _shapes[key] = func(*meta[0], **meta[1])
    made = _tensors(_shapes[key])
    if not made or not all(tensor.is_floating_point() for tensor in made):
        return func(*args, **kwargs)
    device = next(tensors((args, kwargs))).device
    return tree_map_only(torch.Tensor, lambda tensor: _zeros(tensor, device), _shapes[key])


def _zeros(shape: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros on ``device`` in the layout of a meta tensor. ``torch.zeros_like`` of a meta tensor imports sympy and is
    slower."""
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device).zero_()


_shapes: dict[tuple[Any, ...], Any] = {}
"""Outputs on the meta device, by op and arguments, since layers repeat the same calls."""


def _described(value: Any) -> Any:
    """Shape, strides and dtype of a tensor, recursively in sequences; any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_described, value)) if isinstance(value, (tuple, list)) else value


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class Recorder(_Uncompiled):
    """Records the ops dispatched by a pass while it runs; it is a capture (:class:`unisono.graphs.ActiveCapture`)
    itself.

    ``steps`` are the calls and breaks in order.
    """

    def __init__(self, splits: bool) -> None:
        super().__init__()
        self.splits = splits
        self.steps: list[RecordedOp | Break] = []

    def record(self, run: Callable[[Buffers], None], buffers: Buffers) -> list[RecordedOp | Break]:
        """Run the pass once and return its steps. Raises CaptureError for ops that cannot be captured."""
        with self, _HostReads(), capturing(self):
            run(buffers)
        return self.steps

    def interrupt(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _unrecorded():
            step = Break(function, args, kwargs)
        self.steps.append(step)
        return step.result_in(step.homes)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Call a function and record it as one op. It must return new tensors and change none."""
        with _unrecorded():
            results = tuple(function(*args))
        self.steps.append(RecordedOp(function, args, {}, results))
        return results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        why = _FORBIDDEN.get(func)
        if why is None and _DYNAMIC & set(func.tags):
            why = "its output's shape depends on the data"
        if why is not None:
            raise refusal(func, why)
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = _tensors(out)
        self.steps.append(RecordedOp(func, args, kwargs, results, _is_view(func, args, results)))
        return out
