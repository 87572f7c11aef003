"""Bytes of files and of the host arrive unchanged through pinned buffers, for all sizes."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.reads import counted_reads
from unisono.layers.formats.base import Slice, Slices, WeightTarget
from unisono.models.load import staging, tensor_files, weights
from unisono.models.load.staging import Passing, Staging
from unisono.models.load.tensor_files import Part, read_ahead, read_header
from unisono.types import CheckpointError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.int64, torch.bool]
SHAPES = [(), (1,), (3, 5), (0, 4), (4096,), (4097,), (64, 300), (2, 3, 700), (255,), (257,)]
SIZES = [(1 << 23, 1 << 25, 1 << 30), (4096, 10_000, 50_000), (256, 1, 1), (512, 1 << 20, 1 << 20)]


def named() -> dict[str, torch.Tensor]:
    """Tensors of random bits, of every dtype and shape."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            elements = torch.Size(shape).numel()
            high = 2 if dtype is torch.bool else 256
            noise = torch.randint(high, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            found[f"{dtype}{shape}"] = noise.view(dtype).view(shape)
    return found


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    bits = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (got, want)]
    return got.shape == want.shape and got.dtype == want.dtype and torch.equal(*bits)


def limit(monkeypatch: pytest.MonkeyPatch, half: int, piece: int, ahead: int) -> None:
    monkeypatch.setattr(staging, "HALF", half)
    monkeypatch.setattr(tensor_files, "PIECE", piece)
    monkeypatch.setattr(tensor_files, "AHEAD", ahead)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(named(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("half", [1 << 23, 4096, 256])
def test_tensors_of_the_host_arrive(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "HALF", half)
    whole = torch.randn(40, 60)
    wanted = named() | {"rows": whole[3:9], "columns": whole[:, 5:7], "turned": whole.t()}
    arrived = Staging(DEVICE).to_device([Passing.of(tensor) for tensor in wanted.values()])
    assert all(same(got, want) for got, want in zip(arrived, wanted.values(), strict=True))


@pytest.mark.parametrize(("half", "piece", "ahead"), SIZES)
def test_tensors_of_a_file_arrive(
    half: int, piece: int, ahead: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, half, piece, ahead)
    wanted, tensors = named(), read_header(file)
    arrived = dict(read_ahead(dict.fromkeys(wanted), tensors, DEVICE, readers=3))
    assert list(arrived) == sorted(arrived, key=lambda name: tensors[name].start)
    assert arrived.keys() == wanted.keys()
    assert all(same(arrived[name], tensor) for name, tensor in wanted.items())
    assert all(tensor.device.type == DEVICE for tensor in arrived.values())


def test_the_host_copies_each_byte_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file to pinned memory, rows of a tensor too; columns pass through a tensor of the host."""
    copied: list[tuple[type, int]] = []
    for kind in (staging.FileBytes, staging.HostBytes):
        copy = kind.copy

        def noted(self: Any, at: int, into: np.ndarray, kind: type = kind, copy: Any = copy) -> None:
            copied.append((kind, len(into)))
            copy(self, at, into)

        monkeypatch.setattr(kind, "copy", noted)
    tensors, wanted = read_header(file), named()
    parts: dict[str, Part] = dict.fromkeys(wanted)
    rows, columns = f"{torch.int64}(64, 300)", f"{torch.float32}(64, 300)"
    parts[rows], parts[columns] = Slice(0, 8, 16), Slice(1, 0, 10)
    arrived = dict(read_ahead(parts, tensors, DEVICE, readers=3))
    assert torch.equal(arrived[rows].cpu(), wanted[rows][8:16])
    by_kind = {kind: sum(size for each, size in copied if each is kind) for kind, _ in copied}
    assert by_kind[staging.HostBytes] == 64 * 10 * 4
    assert sum(by_kind.values()) == sum(tensor.nbytes for tensor in arrived.values())


def test_every_start_is_where_safetensors_reads(file: Path) -> None:
    raw = file.read_bytes()
    for name, tensor in named().items():
        start = read_header(file)[name].start
        assert raw[start : start + tensor.nbytes] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_that_begin_at_odd_bytes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files that were not written by safetensors: sorted by name here, and followed by what is aligned again."""
    limit(monkeypatch, 4096, 1 << 20, 1 << 20)
    wanted = dict(sorted(named().items(), key=lambda item: (len(item[0]) % 3, item[0])))
    raw = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in wanted.values()]
    header, end = {}, 0
    for (name, tensor), data in zip(wanted.items(), raw, strict=True):
        start, end = end, end + len(data)
        dtype = tensor_files.NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw))
    tensors = read_header(file)
    assert any(info.start % tensor_files.DTYPES[info.dtype].itemsize for info in tensors.values())
    arrived = dict(read_ahead(dict.fromkeys(wanted), tensors, DEVICE, readers=1))
    assert all(same(arrived[name], tensor) for name, tensor in wanted.items())


PARTS: list[Part] = [
    None,
    Slice(0, 2, 9),
    Slice(1, 3, 50),
    Slices(0, ((0, 1), (4, 8))),
    Slices(0, ((4, 8), (0, 1))),
    Slices(1, ((0, 10), (30, 35))),
    Slices(0, ((2, 6),), transposed=True),
]


def test_parts_arrive_between_whole_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows are read from the file, others through its map; progress rises to 1."""
    limit(monkeypatch, 512, 4000, 20_000)
    as_on_a_gpu = partial(read_ahead, readers=2)
    monkeypatch.setattr(weights, "read", as_on_a_gpu)
    bytes_read = counted_reads(monkeypatch)
    mapped: list[str] = []
    direct = tensor_files._mapped
    monkeypatch.setattr(tensor_files, "_mapped", lambda parts, infos: mapped.extend(parts) or direct(parts, infos))
    stored = {f"t{i}": torch.randn(10 + i, 70) for i in range(42)}
    save_file(stored, tmp_path / "model.safetensors")
    tensors = read_header(tmp_path / "model.safetensors")
    places, want = {}, {}
    for i, (name, tensor) in enumerate(stored.items()):
        part = PARTS[i % len(PARTS)]
        want[name] = tensor if part is None else part.of(tensor)
        places[name] = WeightTarget(torch.empty_like(want[name], device=DEVICE), tuple(tensor.shape), part=part)
    shares: list[float] = []
    weights.fill(places, tensors, DEVICE, shares.append)
    assert all(torch.equal(places[name].parameter.cpu(), tensor) for name, tensor in want.items())
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert bytes_read == [sum(tensor.nbytes for tensor in want.values())], "other parts were read"
    assert sorted(mapped) == sorted(f"t{i}" for i in range(42) if i % len(PARTS) in (2, 5, 6))


def test_a_caller_waits_for_what_was_read_ahead(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more bytes than AHEAD are read or wait, whatever the caller does with what came."""
    limit(monkeypatch, 4096, 10_000, 60_000)
    asked: list[int] = []
    send = tensor_files._staged
    infos = read_header(file)

    def counted(names, parts, tensors, staging):
        asked.append(sum(tensor_files.nbytes(tensors[name]) for name in names))
        return send(names, parts, tensors, staging)

    monkeypatch.setattr(tensor_files, "_staged", counted)
    taken = 0
    for name, tensor in read_ahead(dict.fromkeys(infos), infos, DEVICE, readers=4):
        taken += tensor.nbytes
        assert sum(asked) - taken <= 60_000 + max(asked), name
    assert sum(asked) == taken == sum(tensor.nbytes for tensor in named().values())


def test_a_file_that_ends_early_is_an_error(file: Path) -> None:
    tensors = read_header(file)
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=f"{file} cannot be read: it ends at byte"):
        list(read_ahead(dict.fromkeys(tensors), tensors, DEVICE, readers=2))


def test_an_unknown_dtype_is_read_through_the_map(file: Path) -> None:
    tensors = {name: replace(info, readable=False) for name, info in read_header(file).items()}
    arrived = dict(read_ahead(dict.fromkeys(tensors), tensors, DEVICE, readers=2))
    assert all(same(arrived[name], tensor) for name, tensor in named().items())
