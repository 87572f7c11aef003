"""Contexts of GPUs that a process creates while it imports torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.cluster.early_device import start_cuda_context


class Driver:
    """libcuda with two GPUs, which notes its calls. failing: code of cuInit."""

    def __init__(self, failing: int = 0) -> None:
        self.calls: list[object] = []
        self._failing = failing

    def cuInit(self, flags: int) -> int:
        self.calls.append("init")
        return self._failing

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 40 + index
        return 0 if index < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.calls.append(device.value)
        return 0


@pytest.mark.parametrize(
    ("device", "driver", "calls"),
    [
        ("auto", Driver(), ["init", 40]),
        ("cuda", Driver(), ["init", 40]),
        ("cuda:1", Driver(), ["init", 41]),
        ("cuda:7", Driver(), ["init"]),
        ("auto", Driver(failing=100), ["init"]),
        ("cpu", Driver(), []),
        ("cuda:x", Driver(), []),
        ("", Driver(), []),
    ],
)
def test_a_flag_retains_the_context_of_its_gpu(
    device: str, driver: Driver, calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if name == "libcuda.so.1" else SimpleNamespace())
    thread = start_cuda_context(device)
    if thread is not None:
        thread.join(10)
    assert driver.calls == calls


def test_machines_without_a_driver_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    thread = start_cuda_context("auto")
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
