"""Device and software versions, for reports of benchmarks."""

from __future__ import annotations

import platform
from typing import Any


def versions(llm: Any) -> dict[str, str]:
    """The device and the versions of software that affects speed."""
    import torch
    import triton

    import unisono

    device = llm.engine.config.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return {"on": name, "unisono": unisono.__version__, "torch": torch.__version__, "triton": triton.__version__}
