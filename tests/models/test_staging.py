"""Tensors that pass through pinned buffers arrive as they were, whatever their sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unisono.layers.formats import Place, Slice
from unisono.models import staging, weights
from unisono.models.staging import staged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32]
SHAPES = [(), (1,), (3, 5), (0, 4), (4096,), (4097,), (64, 300), (2, 3, 700), (255,), (257,)]


def named() -> dict[str, torch.Tensor]:
    """Tensors of random bits, of every dtype and shape."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            elements = torch.Size(shape).numel()
            noise = torch.randint(256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            found[f"{dtype}{shape}"] = noise.view(dtype).view(shape)
    return found


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    bits = [t.cpu().reshape(-1).view(torch.uint8) for t in (got, want)]
    return got.shape == want.shape and got.dtype == want.dtype and torch.equal(*bits)


@pytest.mark.parametrize(("half", "batch"), [(1 << 23, 1 << 25), (4096, 10_000), (256, 1), (512, 1 << 20)])
def test_they_arrive_as_they_were(half: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "HALF", half)
    monkeypatch.setattr(staging, "BATCH", batch)
    wanted = named()
    arrived = dict(staged(wanted.items(), DEVICE))
    assert list(arrived) == list(wanted)
    assert all(same(arrived[name], tensor) for name, tensor in wanted.items())
    assert all(tensor.device.type == torch.device(DEVICE).type for tensor in arrived.values())


def test_a_view_of_rows_and_columns_arrives() -> None:
    whole = torch.randn(40, 60)
    parts = {"rows": whole[3:9], "columns": whole[:, 5:7], "turned": whole.t()}
    for name, arrived in staged(parts.items(), DEVICE):
        assert same(arrived, parts[name])


def test_many_threads_fill_what_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of tensors too, through small buffers, in runs of a few tensors; progress ends at 1."""
    monkeypatch.setattr(staging, "HALF", 512)
    monkeypatch.setattr(staging, "BATCH", 3000)
    monkeypatch.setattr(weights, "PIECE", 4000)
    if DEVICE == "cpu":  # a GPU's loads are staged anyhow
        direct = weights._mapped
        monkeypatch.setattr(weights, "_mapped", lambda parts, tensors, _: staged(direct(parts, tensors, "cpu"), DEVICE))
    stored = {f"t{i}": torch.randn(10 + i, 70) for i in range(40)}
    save_file(stored, tmp_path / "model.safetensors")
    tensors = weights.read_header(tmp_path / "model.safetensors")
    places, want = {}, {}
    for i, (name, tensor) in enumerate(stored.items()):
        part = Slice(0, 2, 9) if i % 3 == 0 else None
        want[name] = tensor if part is None else part.of(tensor)
        places[name] = Place(torch.empty_like(want[name], device=DEVICE), tuple(tensor.shape), part=part)
    shares: list[float] = []
    weights.fill(places, tensors, DEVICE, shares.append)
    assert all(torch.equal(places[name].parameter.cpu(), tensor) for name, tensor in want.items())
    assert shares == sorted(shares)
    assert shares[-1] == 1
