"""Graph semantics without a GPU: a tape of dispatched ops, replayed into the same storages.

Capture runs the program once under a dispatch mode and records every op with the very tensors it
touched. Replay runs them again and writes each result where the first run put it. So a frozen scalar,
a rebound input or a missing copy goes wrong here as it would in a CUDA graph, and a host
synchronisation is refused at capture.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.program import Buffers, CaptureError, Key, Program

_HOST = torch.ops.aten
_FORBIDDEN = {
    _HOST._local_scalar_dense.default: "it reads a tensor's value on the host (.item(), int(), bool())",
    _HOST.lift_fresh.default: "it makes a tensor of host values (torch.tensor(...)); put them in Buffers",
    _HOST.lift_fresh_copy.default: "it makes a tensor of host values (torch.tensor(...)); put them in Buffers",
    _HOST.equal.default: "it compares on the host (torch.equal)",
}
_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass(frozen=True)
class _Call:
    """One recorded op: its arguments as they were, and the tensors that its results live in."""

    op: Any
    args: tuple
    kwargs: dict
    results: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        out = self.op(*self.args, **self.kwargs)
        for recorded, fresh in zip(self.results, _tensors(out), strict=True):
            if fresh is not recorded:
                recorded.copy_(fresh)


def _tensors(out: object) -> tuple[torch.Tensor, ...]:
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, (tuple, list)):
        return tuple(t for item in out for t in _tensors(item))
    return ()


def _is_view(op: Any, args: tuple, results: tuple[torch.Tensor, ...]) -> bool:
    """Results in an argument's storage: nothing to do at replay.

    The schema alone can't tell: ``contiguous``, ``reshape``, ``to`` and their like copy where they must, and in
    inference mode they arrive here whole.
    """
    returns = op._schema.returns
    if not returns or any(r.alias_info is None or r.alias_info.is_write for r in returns):
        return False
    given = {t.untyped_storage().data_ptr() for t in _tensors(args)}
    return all(t.untyped_storage().data_ptr() in given for t in results)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        why = _FORBIDDEN.get(func)
        if why is None and _DYNAMIC & set(func.tags):
            why = "its output's shape depends on the data"
        if why is not None:
            raise CaptureError(f"{func} cannot be captured: {why}")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = _tensors(out)
        if not _is_view(func, args, results):
            self.calls.append(_Call(func, args, kwargs, results))
        return out


class Tape:
    """A captured pass on the CPU; see :class:`unisono.program.Graph`."""

    kind = "tape"

    def __init__(self, program: Program, key: Key, buffers: Buffers) -> None:
        started = time.perf_counter()
        self.key, self.buffers, self._program = key, buffers, program
        program.run(buffers)  # warm up outside the tape, as a CUDA graph's capture does
        with _Recorder() as recorder:
            program.run(buffers)
        self._calls = recorder.calls
        # A set of storages: many results are views of one buffer.
        owned = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for c in self._calls for t in c.results}
        self.cost_bytes = sum(owned.values())
        self.cost_seconds = time.perf_counter() - started

    @property
    def ops(self) -> list[str]:
        """The recorded ops by name, in order."""
        return [str(c.op) for c in self._calls]

    def replay(self) -> None:
        if self._program.prepare is not None:
            self._program.prepare(self.buffers)
        for call in self._calls:
            call.replay()

    def close(self) -> None:
        self._calls = []
