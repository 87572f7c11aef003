"""Counts what is read of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.models.load import tensor_files
from unisono.models.load.staging import FileBytes


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of one number: the bytes of all tensors, or parts of them, that are read from now on."""
    mapped, copy, found = tensor_files._mapped, FileBytes.copy, [0]

    def counting_mapped(*args: Any) -> Any:
        for name, tensor in mapped(*args):
            found[0] += tensor.nbytes
            yield name, tensor

    def counting_copy(self: FileBytes, at: int, into: Any) -> None:
        copy(self, at, into)
        found[0] += len(into)

    monkeypatch.setattr(tensor_files, "_mapped", counting_mapped)
    monkeypatch.setattr(FileBytes, "copy", counting_copy)
    return found
