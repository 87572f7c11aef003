"""Device of an engine: name, memory and compute capability. Called by the configuration, the engine and tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.types import ConfigError

if TYPE_CHECKING:
    import torch

E4M3_CAPABILITY = (8, 9)
"""Least compute capability of a GPU with matrix products of e4m3."""


@dataclass(frozen=True)
class Hardware:
    """The machine as the engine sees it."""

    device: torch.device
    name: str
    total_bytes: int
    devices: int | None = None
    """Number of GPUs from ``device`` on; None on a CPU."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU; None on a CPU."""

    @property
    def multiplies_e4m3(self) -> bool:
        """True for a GPU with matrix products of e4m3."""
        return self.capability is not None and self.capability >= E4M3_CAPABILITY

    @staticmethod
    def detect(device: str) -> Hardware:
        """The hardware of ``--device``; auto: the first GPU or the CPU. Raises ConfigError for an absent GPU."""
        import torch

        gpu = torch.cuda.is_available()
        if device == "auto":
            device = "cuda" if gpu else "cpu"
        if device.startswith("cuda"):
            if not gpu:
                raise ConfigError("--device cuda: no NVIDIA GPU is visible here; use --device cpu.")
            index = int(device.partition(":")[2] or 0)
            if index >= torch.cuda.device_count():
                raise ConfigError(f"--device {device}: {torch.cuda.device_count()} GPUs are visible.")
            properties = torch.cuda.get_device_properties(index)
            left = torch.cuda.device_count() - index
            capability = properties.major, properties.minor
            return Hardware(torch.device("cuda", index), properties.name, properties.total_memory, left, capability)
        return Hardware(torch.device("cpu"), "CPU", 0)
