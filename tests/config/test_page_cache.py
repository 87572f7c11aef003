"""Weight files that the kernel reads while an engine imports its packages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unisono.config import page_cache
from unisono.config.page_cache import available_memory, files_of, read_ahead


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Requests to the kernel: file name, start and bytes."""
    found: list[tuple[str, int, int]] = []

    def advise(opened: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((Path(os.readlink(f"/proc/self/fd/{opened}")).name, start, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


def checkpoint(directory: Path, *sizes: int) -> Path:
    """A directory with weight files of these sizes and an index, in the reverse order of their names."""
    directory.mkdir()
    names = [f"model-{number}.safetensors" for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        (directory / name).write_bytes(bytes(size))
    weight_map = {f"tensor {number}": name for number, name in enumerate(reversed(names))}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_all_bytes_are_requested_in_the_order_of_loading(
    tmp_path: Path, requests: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "CHUNK", 1000)
    target, draft = checkpoint(tmp_path / "target", 2500, 10), checkpoint(tmp_path / "draft", 1000)
    thread = read_ahead([target, draft, tmp_path / "absent"])
    assert thread is not None
    thread.join()
    assert requests == [
        ("model-0.safetensors", 0, 1000),
        ("model-0.safetensors", 1000, 1000),
        ("model-0.safetensors", 2000, 1000),
        ("model-1.safetensors", 0, 1000),
        ("model-0.safetensors", 0, 1000),
    ]


def test_files_larger_than_the_memory_are_not_read(
    tmp_path: Path, requests: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path / "target", 2500)
    monkeypatch.setattr(page_cache, "available_memory", lambda: 4000)
    assert read_ahead([directory]) is None
    monkeypatch.setattr(page_cache, "available_memory", lambda: 5000)
    assert read_ahead([directory]) is not None


def test_errors_are_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = checkpoint(tmp_path / "broken", 10)
    (broken / "model.safetensors.index.json").write_text("{")
    assert files_of(broken) == []
    assert read_ahead([broken, tmp_path / "absent"]) is None
    directory = checkpoint(tmp_path / "target", 10)

    def refuse(*arguments: int) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    thread = read_ahead([directory])
    assert thread is not None
    thread.join()
    monkeypatch.delattr(os, "posix_fadvise")
    assert read_ahead([directory]) is None


def test_memory_is_that_of_the_machine_or_less() -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
