"""Assignment of GPUs and CPU threads to replicas, as environment variables of their processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unisono.types import ConfigError

GPUS = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


def environments(
    count: int, device: str, ranks: int = 1, variables: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Return the variables of ``count`` replicas with ``ranks`` GPUs each.

    device: as of ``--device``. GPUs are assigned in order, whole ones only. On CPUs each replica gets its share of the
    threads, unless ``OMP_NUM_THREADS`` is set. Raises ConfigError for too few GPUs, or if ``device`` names one.
    """
    kind, _, index = device.partition(":")
    if index:
        raise ConfigError(
            f"--device {device} is one GPU, and each of the {count} engines of --data-parallel-size needs one: give "
            f"--device cuda, and choose GPUs with {GPUS}."
        )
    gpus = [] if kind == "cpu" else visible_gpus(variables)
    if kind == "cpu" or (kind == "auto" and not gpus):
        threads = max(1, len(os.sched_getaffinity(0)) // count) if hasattr(os, "sched_getaffinity") else 1
        return [{} if THREADS in variables else {THREADS: str(threads)} for _ in range(count)]
    if len(gpus) < count * ranks:
        each = f" with {ranks} each" if ranks > 1 else ""
        raise ConfigError(
            f"--data-parallel-size {count}{each} needs {count * ranks} GPUs and {len(gpus)} are visible; lower it, or "
            "run engines on other machines too (--distributed-executor-backend ray)."
        )
    return [{GPUS: ",".join(gpus[i * ranks : (i + 1) * ranks])} for i in range(count)]


def visible_gpus(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the GPUs that this process may use, in the form of ``CUDA_VISIBLE_DEVICES``."""
    import torch

    if not torch.cuda.is_available():
        return []
    if listed := variables.get(GPUS):
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]
