"""Notes of earlier starts: results of comparisons and measurements on a GPU, in files that later starts read.

Proofs of exact kernels depend on the GPU, its driver, versions and sources; the times of passes and the memory of the
largest one depend on the engine's configuration, too. These are in the name of their file, so notes of anything else
are never read. A start without notes compares and measures, and writes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton

from unisono.config import ResolvedConfig, catalog, env
from unisono.config.checkpoint_files import CONFIG
from unisono.distributed import cuda_driver
from unisono.graphs.cost import PassCost
from unisono.kernels import proofs

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[2]
BLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
"""Packages with cuBLAS, whose version torch does not fix."""
PREFIXES = ("CUBLAS", "CUDA_", "LD_", "NVIDIA_", "PYTORCH_", "TORCH_", "TRITON_", "UNISONO_")
"""Environment variables that may change kernels or times, by their beginnings."""
UNRELATED = {
    env.API_KEY.name,
    env.BYTECODE.name,
    env.CACHE.name,
    env.START_NOTES.name,
    env.TRANSFER_KEY.name,
    "TRITON_CACHE_DIR",
}


@dataclass
class StartNotes:
    """Notes of one start. proofs, costs, memory: files; None: nothing is read or written.

    known: results of earlier proofs, by kernel and key. costs_known: costs of passes, by their buckets.
    allocated_known: bytes that torch allocated in the largest pass; None: not known.
    """

    proofs: Path | None = None
    costs: Path | None = None
    memory: Path | None = None
    known: Mapping[str, bool] = field(default_factory=dict)
    costs_known: dict[str, PassCost] = field(default_factory=dict)
    allocated_known: int | None = None

    @classmethod
    def of(cls, config: ResolvedConfig, files: Iterable[Path], ranks: int) -> StartNotes:
        """Read the notes for this GPU and configuration. files: those that the model's shapes come from.

        Ranks agree on proofs and memory by comparing them, so notes of these are for one rank only. Proofs also need a
        package that tells the version of cuBLAS.
        """
        directory = env.start_notes()
        if directory is None or config.device.type != "cuda":
            return cls()
        machine = _machine(config.device)
        settings = json.dumps(config.explain()["settings"], sort_keys=True, default=str)
        stored = [file.read_bytes() for file in files if file.is_file()]
        whole = _digest(machine, settings, str(ranks), *stored)
        alone = ranks == 1
        proven = alone and any(_version(name) for name in BLAS)
        found = cls(
            directory / f"proofs-{machine}.json" if proven else None,
            directory / f"costs-{whole}.json",
            directory / f"memory-{whole}.json" if alone else None,
        )
        found.known = {name: same for name, same in _read(found.proofs).items() if isinstance(same, bool)}
        found.allocated_known = _allocated(_read(found.memory))
        try:
            found.costs_known = {name: _cost(each) for name, each in _read(found.costs).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is not read: %s.", found.costs, error)
        return found

    @contextmanager
    def proving(self) -> Iterator[None]:
        """Within the block, kernels whose comparison is noted are not compared again; new results are written after
        it."""
        with proofs.remembering(self.known):
            yield
        if self.proofs is not None and (results := {**self.known, **proofs.results()}) != self.known:
            _write(self.proofs, results)

    def save_allocated(self, allocated: int) -> None:
        """Write the bytes that torch allocated in the largest pass, unless they were known."""
        if self.memory is not None and allocated != self.allocated_known:
            _write(self.memory, {"allocated": allocated})

    def save(self, costs: Mapping[str, PassCost]) -> None:
        """Write the costs that were measured, unless all were known."""
        if self.costs is not None and costs.keys() - self.costs_known.keys():
            _write(self.costs, {name: asdict(cost) for name, cost in {**self.costs_known, **costs}.items()})

    def decision(self) -> tuple[str, str, str]:
        """(name, value, reason) for ``explain``."""
        value = f"{len(self.known)} proofs and {len(self.costs_known)} costs of passes of earlier starts"
        value += "" if self.allocated_known is None else ", and the largest pass's memory"
        return "start notes", value, "for this GPU, driver, versions, sources and settings; UNISONO_START_NOTES=0: none"


def shape_files(config: ResolvedConfig, target: Path) -> list[Path]:
    """Files that the shapes of the target, in this directory, and of its draft model come from."""
    spec = config.speculative
    draft = [catalog.resolve_name(spec.model)] if spec is not None and spec.model is not None else []
    return [directory / CONFIG for directory in (target, *draft)]


@cache
def _machine(device: torch.device) -> str:
    """Digest of everything that a proof depends on beside its key."""
    properties = torch.cuda.get_device_properties(device)
    facts = [properties.name, str(properties.uuid), str(properties.total_memory), str(properties.multi_processor_count)]
    facts += [torch.__version__, triton.__version__, str(torch.version.cuda), str(cuda_driver.driver_version())]
    facts += [f"{name}={_version(name)}" for name in BLAS]
    facts += [f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith(PREFIXES) and n not in UNRELATED]
    return _digest(*facts, sources())


@cache
def sources() -> str:
    """Digest of the package's Python files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return _digest(*(part for file in files for part in (str(file.relative_to(PACKAGE)), file.read_bytes())))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def _cost(stored: Mapping[str, Any]) -> PassCost:
    return PassCost(**{**stored, "points": tuple((int(rows), float(ms)) for rows, ms in stored["points"])})


def _allocated(stored: Mapping[str, Any]) -> int | None:
    """The bytes in a file's notes; None for notes of another form."""
    found = stored.get("allocated")
    return found if type(found) is int and found >= 0 else None


def _read(file: Path | None) -> dict[str, Any]:
    """The notes in a file; none if it is missing or unreadable."""
    if file is None:
        return {}
    try:
        found = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        logger.warning("%s is not read: %s.", file, error)
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, notes: Mapping[str, Any]) -> None:
    """Write a file in one step; a directory that cannot be written is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(notes, new)
        os.replace(new.name, file)
    except OSError as error:
        logger.warning("%s is not written: %s.", file, error)
