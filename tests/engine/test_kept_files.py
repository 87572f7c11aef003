"""Triton's cache: an extension is never replaced by another process's."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import triton.knobs
from triton.runtime.cache import FileCacheManager

from unisono.engine.startup import kept_files
from unisono.engine.startup.kept_files import KeptFiles

LAUNCHER = "__triton_launcher" + EXTENSION_SUFFIXES[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptFiles:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return KeptFiles("key")


def test_the_first_extension_stays(cache: KeptFiles) -> None:
    path = cache.put(b"first", LAUNCHER)
    inode = os.stat(path).st_ino
    assert cache.put(b"second", LAUNCHER) == path == cache.get_file(LAUNCHER)
    assert Path(path).read_bytes() == b"first"
    assert os.stat(path).st_ino == inode
    assert os.listdir(cache.cache_dir) == [LAUNCHER], "no temporary file is left"


def test_many_writers_leave_one_whole_extension(cache: KeptFiles) -> None:
    contents = [bytes([number]) * 100_000 for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        paths = set(pool.map(lambda content: cache.put(content, LAUNCHER), contents))
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() in contents


def test_other_files_are_replaced(cache: KeptFiles) -> None:
    cache.put(b"first", "kernel.cubin")
    assert Path(cache.put(b"second", "kernel.cubin")).read_bytes() == b"second"
    assert Path(cache.put("text", "kernel.json", binary=False)).read_text() == "text"


def test_a_file_system_without_links(cache: KeptFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: str) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    assert Path(cache.put(b"first", LAUNCHER)).read_bytes() == b"first"


def test_another_cache_manager_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "manager_class", FileCacheManager)
    kept_files.keep_extensions()
    assert triton.knobs.cache.manager_class is FileCacheManager
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    kept_files.keep_extensions()
    assert triton.knobs.cache.manager_class is KeptFiles
