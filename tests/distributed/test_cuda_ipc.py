"""Tensors of another process: descriptions that are checked, allocations that are opened once and closed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from unisono.distributed import cuda_driver, cuda_ipc
from unisono.distributed.cuda_ipc import OpenedTensors
from unisono.types import ConfigError
from unisono.types.shared_tensor import SharedTensor

HANDLE = bytes(range(64)).hex()
SHARED = SharedTensor("uuid-1", HANDLE, 16, (2, 3), "float32")


class FakeDriver:
    """One exported allocation of host memory. calls: names of the functions called."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_float * 16)(*range(16))
        self.address, self.calls = ctypes.addressof(self.memory), list[str]()

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            assert len(arguments) == len(cuda_driver.SIGNATURES[name]), name
            self.calls.append(name)
            return int(getattr(self, f"_{name}")(*arguments) or 0)

        return function

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        assert flags == cuda_ipc.LAZY_PEER_ACCESS
        if bytes(handle.bytes).hex() != HANDLE:
            return 201
        address._obj.value = self.address
        return 0

    def _cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        base._obj.value, size._obj.value = self.address, ctypes.sizeof(self.memory)

    def _cuIpcCloseMemHandle(self, address: int) -> None:
        assert address == self.address

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: fake.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))

    def at(address: int, count: int, index: int) -> torch.Tensor:
        assert index == 1
        return torch.frombuffer((ctypes.c_ubyte * count).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(cuda_ipc, "memory_at", at)
    return fake


def test_an_allocation_is_opened_once_and_closed(driver: FakeDriver) -> None:
    opened = OpenedTensors()
    first = opened.open(SHARED)
    assert first.tolist() == [[4, 5, 6], [7, 8, 9]]
    again = opened.open(SharedTensor("GPU-uuid-1", HANDLE, 0, (4,), "float32"))
    assert again.tolist() == [0, 1, 2, 3]
    driver.memory[0] = 42
    assert again[0] == 42, "nothing is copied"
    opened.close()
    opened.close()
    assert driver.calls.count("cuIpcOpenMemHandle_v2") == driver.calls.count("cuIpcCloseMemHandle") == 1
    assert driver.calls.index("synchronize") < driver.calls.index("cuIpcCloseMemHandle")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": "uuid-7"}, "not visible"),
        ({"handle": "00"}, "no CUDA IPC handle"),
        ({"handle": "zz" * 64}, "no CUDA IPC handle"),
        ({"handle": "00" * 64}, "CUDA_ERROR_INVALID_CONTEXT.*its process must run"),
        ({"offset": 44}, "do not fit an allocation of 64 bytes"),
        ({"offset": -4}, "do not fit"),
        ({"offset": 2}, "do not fit"),
        ({"shape": (-1, -6)}, "do not fit"),
        ({"dtype": "nn"}, "dtype 'nn' is unknown"),
    ],
)
def test_refusals(driver: FakeDriver, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OpenedTensors().open(msgspec.structs.replace(SHARED, **change))


def test_only_contiguous_tensors_on_gpus_are_shared() -> None:
    with pytest.raises(ConfigError, match=r"tensor \[2, 3\] on cpu"):
        cuda_ipc.share(torch.zeros(2, 3))


TRAINER = """
import sys, torch, msgspec
from unisono.distributed.cuda_ipc import share
held = torch.arange(4096, device="cuda", dtype=torch.bfloat16)
print(msgspec.json.encode(share(held[1024:].view(3, 1024))).decode(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_of_another_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        shared = msgspec.json.decode(trainer.stdout.readline(), type=SharedTensor)
        opened = OpenedTensors()
        found = opened.open(shared).clone()
        opened.close()
        trainer.communicate("\n")
    expected = torch.arange(4096, device="cuda", dtype=torch.bfloat16)[1024:].view(3, 1024)
    assert torch.equal(found, expected)
