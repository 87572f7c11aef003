"""Identity of an engine's state: two engines may exchange pages, by file or directly, only if it is equal.

The identity is a digest of the code, the device, the dtypes of model and KV cache, the number of ranks, the shape of
every part of the state, and a sample of every weight of target and drafter, of rank 0's part of them. A sample is 64
values spread over the weight, so checkpoints that were trained apart differ, regardless of their path.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from unisono.config import ResolvedConfig
from unisono.engine.worker.worker import Worker
from unisono.kv.specs import PAGE_SIZE, SNAPSHOTS

SAMPLES = 64
"""Sampled values of each weight."""


def engine_identity(config: ResolvedConfig, worker: Worker) -> bytes:
    """Return 16 bytes that two engines share only if each may use the other's pages."""
    device = config.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    store = worker.store
    kinds = [*store.window_groups, *([SNAPSHOTS] if store.recurrent else [])]
    shapes = [(kind, [(tuple(part.shape[1:]), str(part.dtype)) for part in store.parts(kind)]) for kind in kinds]
    facts = (
        _code(),
        torch.__version__,
        name,
        str(config.dtype),
        str(config.kv_dtype),
        config.requested.quantization,
        (config.requested.tensor_parallel_size, config.requested.tp_reduce),
        PAGE_SIZE,
        worker.drafter.name,
        shapes,
    )
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    modules = [*worker.modules(), *_modules_of(worker.drafter)]
    for tensor in _tensors(modules):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(_sample(tensor))
    return digest.digest()


@functools.cache
def _code() -> bytes:
    """Return a digest of this package's source, since a change of a kernel may change bits."""
    package = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def _modules_of(owner: object) -> Iterator[nn.Module]:
    """Iterate over the modules in a drafter's attributes."""
    for value in vars(owner).values():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, nn.Module):
                yield from one.modules()


def _tensors(modules: list[nn.Module]) -> Iterator[torch.Tensor]:
    """Iterate over every weight once, in the modules' order."""
    seen: set[int] = set()
    for module in modules:
        for tensor in module.parameters(recurse=False):
            if tensor.numel() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield tensor


def _sample(tensor: torch.Tensor) -> bytes:
    count = tensor.numel()
    places = torch.arange(min(SAMPLES, count), device=tensor.device) * max(1, count // SAMPLES)
    return tensor.detach().reshape(-1)[places].contiguous().view(torch.uint8).cpu().numpy().tobytes()
