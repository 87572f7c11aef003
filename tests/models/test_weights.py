"""The one loader reads only what is asked: a rank its part of each tensor, in whatever format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unisono.layers.formats.base import PLAIN, Plain, Share, StoredTensor, WeightFormat
from unisono.layers.linear import Linear
from unisono.models.load import tensor_files
from unisono.models.load.tensor_files import read_header
from unisono.models.load.weights import check, fill, weight_targets
from unisono.types import CheckpointError, ConfigError

SIZES = {"q": 48, "k": 16, "v": 16}
INPUTS = 24


class Blocks(Plain):
    """A made-up format: a scale for each 8 outputs and 12 inputs."""

    def tensors(self, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        return {**super().tensors(dtype), "scale": StoredTensor(torch.float32, ("F32",), outputs=8, inputs=12)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    stored = {}
    for name, rows in SIZES.items():
        stored[f"{name}.weight"] = torch.randn(rows, INPUTS, generator=generator)
        stored[f"{name}.bias"] = torch.randn(rows, generator=generator)
        stored[f"{name}.scale"] = torch.randn(rows // 8, INPUTS // 12, generator=generator)
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


class Counting:
    """safetensors' reader, counting the bytes that are read."""

    bytes = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self.file = safe_open(*args, **options)

    def __enter__(self) -> Counting:
        self.file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def counted(self, tensor: torch.Tensor) -> torch.Tensor:
        Counting.bytes += tensor.nbytes
        return tensor

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.counted(self.file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        part = self.file.get_slice(name)
        return type("Part", (), {"__getitem__": lambda _, at: self.counted(part[at])})()


def loaded(file: Path, share: Share, format: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> tuple[Linear, int]:
    """The layer of a rank, and the bytes that were read for it."""
    layer = Linear(INPUTS, SIZES, True, torch.float32, "cpu", format, share)
    tensors = read_header(file)
    wanted = {f"{path}.{kind}".strip("."): target for path, kind, target in weight_targets(layer)}
    check(wanted, tensors, file, lambda name: None)
    monkeypatch.setattr(tensor_files, "safe_open", Counting)
    Counting.bytes = 0
    fill(wanted, tensors, "cpu")
    monkeypatch.undo()
    return layer, Counting.bytes


@pytest.mark.parametrize("format", [PLAIN, Blocks()], ids=["plain", "scales of blocks"])
def test_ranks_read_their_part_only(file: Path, format: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, all_bytes = loaded(file, Share(), format, monkeypatch)
    ranks = [loaded(file, Share(index, 2), format, monkeypatch) for index in range(2)]
    for kind in (*format.tensors(torch.float32), "bias"):
        rows = {name: size // (8 if kind == "scale" else 1) for name, size in SIZES.items()}
        parts = [getattr(layer, kind).split([n // 2 for n in rows.values()]) for layer, _ in ranks]
        joined = torch.cat([part for projection in zip(*parts, strict=True) for part in projection])
        assert torch.equal(joined, getattr(whole, kind)), kind
    assert [count for _, count in ranks] == [all_bytes / 2] * 2
    assert all_bytes == sum(getattr(whole, kind).nbytes for kind in (*format.tensors(torch.float32), "bias"))
    x = torch.randn(5, INPUTS)
    q = [layer(x)[:, :24] for layer, _ in ranks]
    torch.testing.assert_close(torch.cat(q, 1), whole(x)[:, :48], atol=1e-6, rtol=0)


def test_indivisible_outputs_raise() -> None:
    with pytest.raises(ConfigError, match=r"16 outputs .* among 3 ranks"):
        Linear(INPUTS, SIZES, False, torch.float32, "cpu", share=Share(0, 3))


def test_a_tensor_of_another_dtype_than_the_format_reads(file: Path) -> None:
    layer = Linear(INPUTS, {"q": 48}, False, torch.float32, "cpu", Blocks())
    wanted = {f"{path}.{kind}".strip("."): place for path, kind, place in weight_targets(layer)}
    tensors = read_header(file)
    check(wanted, tensors, file, lambda name: None)
    save_file({"q.weight": torch.zeros(48, INPUTS), "q.scale": torch.zeros(6, 2, dtype=torch.float16)}, file)
    with pytest.raises(CheckpointError, match=r"q.scale has dtype F16; supported are F32"):
        check(wanted, read_header(file), file, lambda name: None)
