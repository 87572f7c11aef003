"""Calls of CUDA's driver for regions of memory: each mapped chunk is released and unmapped, at the same addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from unisono.distributed import cuda_driver
from unisono.engine.worker.regions import CHUNK, DeviceRegion

MIB = 1 << 20
GRANULARITY, FIRST = 2 * MIB, 1 << 40


class FakeDriver:
    """Keeps what is mapped. Like ctypes, it takes each function's number of arguments only.

    most: bytes of physical memory. created: handle -> bytes. mapped: address -> bytes.
    """

    def __init__(self, most: int) -> None:
        self.most, self.created, self.mapped, self.reserved = most, dict[int, int](), dict[int, int](), 0

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            assert len(arguments) == len(cuda_driver.SIGNATURES[name]), name
            plain = [each.value if isinstance(each, ctypes._SimpleCData) else each for each in arguments]
            return int(getattr(self, f"_{name}")(*plain) or 0)

        return function

    def _cuMemGetAllocationGranularity(self, found: Any, properties: Any, kind: int) -> None:
        found._obj.value = GRANULARITY

    def _cuMemAddressReserve(self, found: Any, nbytes: int, alignment: int, address: int, flags: int) -> None:
        found._obj.value, self.reserved = FIRST, nbytes

    def _cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert (address, nbytes, self.mapped) == (FIRST, self.reserved, {})
        self.reserved = 0

    def _cuMemCreate(self, found: Any, nbytes: int, properties: Any, flags: int) -> int:
        if sum(self.mapped.values()) + nbytes > self.most:
            return cuda_driver.OUT_OF_MEMORY
        found._obj.value = 1 + len(self.created)
        self.created[found._obj.value] = nbytes
        return 0

    def _cuMemRelease(self, handle: int) -> None:
        del self.created[handle]

    def _cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        assert self.created[handle] == nbytes
        assert (offset, flags, nbytes % GRANULARITY) == (0, 0, 0)
        assert FIRST <= address <= FIRST + self.reserved - nbytes
        self.mapped[address] = nbytes

    def _cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> None:
        assert (self.mapped[address], count) == (nbytes, 1)

    def _cuMemUnmap(self, address: int, nbytes: int) -> None:
        assert self.mapped.pop(address) == nbytes


def region_with(driver: FakeDriver, nbytes: int, patch: pytest.MonkeyPatch) -> DeviceRegion:
    patch.setattr(cuda_driver, "driver", lambda: driver)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return DeviceRegion(nbytes, torch.device("cuda", 0))


def test_memory_is_mapped_freed_and_mapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(8 * CHUNK)
    region = region_with(driver, 2 * CHUNK + 3 * MIB, monkeypatch)
    assert region.nbytes == 2 * CHUNK + 4 * MIB
    for _ in range(2):
        region.commit(CHUNK + 1)
        assert driver.mapped == {FIRST: CHUNK, FIRST + CHUNK: CHUNK}
        region.commit(region.nbytes)
        assert sum(driver.mapped.values()) == region.nbytes
        assert not driver.created, "the mapping alone keeps the memory"
        region.free()
        assert not driver.mapped
    region.close()
    assert not driver.reserved


def test_a_full_device_keeps_the_chunks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(2 * CHUNK)
    region = region_with(driver, 4 * CHUNK, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
        region.commit(region.nbytes)
    assert sum(driver.mapped.values()) == 2 * CHUNK
    region.close()
