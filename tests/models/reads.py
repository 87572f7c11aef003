"""Counts what is read of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.models import weights


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of one number: the bytes of all tensors, or parts of them, that are read from now on."""
    real, found = weights._mapped, [0]

    def counting(*args: Any) -> Any:
        for name, tensor in real(*args):
            found[0] += tensor.nbytes
            yield name, tensor

    monkeypatch.setattr(weights, "_mapped", counting)
    return found
