"""Counts the launches that a pass would make on a GPU, without one.

Each op of the project runs its CUDA implementation on whatever tensors there are, with kernels that are counted and not
run. So results are garbage, and shapes and numbers of launches are a GPU's. PyTorch's own ops count as one launch each,
unless they return views. What was proven on a GPU (torch's fp8 product, Gluon kernels) does not serve here; the kernels
in its place are as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from unisono.kernels.proofs import ExactKernel

_ON_GPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "view", "_unsafe_view"}


class _Counting(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "unisono":
            return op.redispatch(_ON_GPU, *args, **kwargs)
        name = op.overloadpacket.__name__
        if name not in _FREE and not op.is_view:
            self.found[name] += 1
        return op(*args, **kwargs)


def launches(run: Callable[[], object]) -> Counter[str]:
    """How often ``run`` would launch each kernel, by name."""
    found: Counter[str] = Counter()

    def counted(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            found[kernel.fn.__name__] += 1

        return launch

    with ExitStack() as patches:
        for kind in (JITFunction, InterpretedFunction):
            patches.enter_context(mock.patch.object(kind, "__getitem__", counted))
        patches.enter_context(_Counting(found))
        run()
    return found


def forget(monkeypatch: pytest.MonkeyPatch, kernel: ExactKernel) -> None:
    """Let an exact kernel know of no comparison, for one test."""
    monkeypatch.setattr(kernel, "compared", {})
    monkeypatch.setattr(kernel, "serving", {})
