"""Adapters for the tests of several ranks: three that are right, and some that cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.models.make_adapters import LINEARS, make_adapter, rewritten
from unisono.models.lora.adapters import WEIGHTS


def made(root: Path, base: Path, targets: tuple[str, ...] = LINEARS) -> dict[str, Path]:
    """Three adapters, of several ranks and of some modules only."""
    kinds: dict[str, dict[str, Any]] = {"one": {}, "two": {"rank": 16, "targets": targets[:4]}}
    kinds["three"] = {"rank": 3, "targets": targets[3:]}
    return {
        name: make_adapter(root / name, base, number, size=1.0, **{"targets": targets, **kind})
        for number, (name, kind) in enumerate(kinds.items(), 1)
    }


def spoiled(root: Path, base: Path) -> dict[str, Path]:
    """Directories that cannot be loaded; of the last, only what rank 1 reads is wrong."""
    wrong = {name: make_adapter(root / name, base, 5, rank=r) for name, r in (("shape", 4), ("wide", 17), ("last", 4))}
    tensors = load_file(wrong["shape"] / WEIGHTS)
    name = next(name for name in tensors if "v_proj.lora_B" in name)
    rewritten(wrong["shape"], {**tensors, name: tensors[name][:-1]})
    tensors = load_file(wrong["last"] / WEIGHTS)
    tensors[name][-1] = float("nan")
    rewritten(wrong["last"], tensors)
    return {**wrong, "none": root / "none"}
