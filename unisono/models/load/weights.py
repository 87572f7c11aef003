"""Loading of checkpoint tensors into parameters: name, then slice, then weight format.

Compares the checkpoint's tensors with the modules' parameters before any weights are read. Targets and all draft heads
are loaded through it: they supply the checkpoint names of their modules, :func:`check` compares, :func:`fill` reads
(:mod:`unisono.models.load.tensor_files`) and converts.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from unisono.layers.formats.base import WeightTarget, part_of
from unisono.models.load.tensor_files import TensorInfo, pieces, read, read_ahead
from unisono.types import CheckpointError

IGNORED = re.compile(r"rotary_emb\.inv_freq$")
"""Buffers in old exports; the rotary table is computed from the config."""

READERS, GPU_READERS = 4, 8
"""Threads that read a checkpoint to a CPU and to a GPU. They mostly wait for file pages and copies."""

SHOWN = 1e-3
"""Fraction of a checkpoint between progress reports: there may be tens of thousands of tensors."""

WeightTargets = Mapping[str, WeightTarget]
"""Targets by checkpoint tensor name."""


@runtime_checkable
class DeclaresTargets(Protocol):
    """A module that declares the targets of itself and of everything in it."""

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """(name inside the module, target) of each tensor that a checkpoint may hold."""
        ...


def weight_targets(
    root: nn.Module, held: Callable[[str, str], bool] = lambda module, kind: False
) -> Iterator[tuple[str, str, WeightTarget]]:
    """``(module, kind, target)`` of every checkpoint tensor of ``root``; :func:`tensor_name` makes names of them.

    Entries of a module's own ``weight_targets()`` count as submodules: the projections of a merged linear layer, single
    experts.

    held: returns True if the checkpoint has the tensor of a module and kind. If a module can be stored in several
        forms, the targets are those of the first form of which it has one, else of the first.
    """
    for path, module in _owners(root, "", set()):
        if not isinstance(module, DeclaresTargets):
            for kind, parameter in module.named_parameters(recurse=False):
                yield path, kind, target_of(parameter)
            continue
        found = []
        for inside, target in module.weight_targets():
            part, _, kind = inside.rpartition(".")
            found.append((".".join(filter(None, (path, part))), kind, target))
        forms = list(dict.fromkeys(target.form for *_, target in found if target.form))
        there = (form for form in forms if any(p.form == form and held(name, kind) for name, kind, p in found))
        form = next(there, forms[0] if forms else "")
        yield from (each for each in found if each[2].form in ("", form))


def target_of(parameter: torch.Tensor) -> WeightTarget:
    """Target of a tensor that is stored as it is used, or of which a rank reads a part."""
    whole = part_of(parameter)
    if whole is None:
        return WeightTarget(parameter, tuple(parameter.shape))
    return WeightTarget(parameter, whole.shape, part=whole.slices)


def _owners(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules by path, each once, without the contents of a module that declares its targets itself."""
    if module in seen:
        return
    seen.add(module)
    yield path, module
    if not isinstance(module, DeclaresTargets):
        for name, child in module.named_children():
            yield from _owners(child, f"{path}.{name}" if path else name, seen)


def tensor_name(module: str, kind: str) -> str:
    """Checkpoint name of a tensor: a fused one has its module's name, or a name that begins with it."""
    return module + kind if kind == "" or kind.startswith("_") else f"{module}.{kind}"


def check(
    targets: WeightTargets,
    tensors: Mapping[str, TensorInfo],
    where: Path | str,
    unexpected: Callable[[str], str | None],
) -> None:
    """Raise CheckpointError naming the first tensor that is missing, misshapen, of another dtype or unexpected.

    where: the checkpoint, for messages. unexpected: returns the reason why a tensor without a target is an error; None
        ignores it.
    """
    missing = [name for name in targets if name not in tensors]
    if missing:
        files = {info.file for info in tensors.values()}
        where = files.pop() if len(files) == 1 else f"{where} ({len(files)} files)"
        raise CheckpointError(
            f"{where}: tensor {missing[0]} {list(targets[missing[0]].shape)} is missing, and {len(missing) - 1} more "
            f"of the {len(targets)} that are needed."
        )
    for name, info in tensors.items():
        if name in targets:
            check_tensor(name, info, targets[name])
        elif not IGNORED.search(name) and (reason := unexpected(name)) is not None:
            raise CheckpointError(f"{info.file}: tensor {name} {list(info.shape)} is unexpected: {reason}.")


def check_tensor(name: str, info: TensorInfo, target: WeightTarget) -> None:
    """Raise CheckpointError unless a tensor has a shape and a dtype that its target accepts."""
    if info.shape not in (target.shape, *target.also):
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}; config.json asks for {list(target.shape)}."
        )
    if info.dtype not in target.accepts:
        raise CheckpointError(
            f"{info.file}: tensor {name} has dtype {info.dtype}; supported are {', '.join(target.accepts)}."
        )


def fill(
    targets: WeightTargets,
    tensors: Mapping[str, TensorInfo],
    device: torch.device | str,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Read the tensors named in ``targets``, only the parts they need, into their parameters.

    Several threads read at the same time if there is much to read: a checkpoint may have tens of thousands of experts'
    tensors. device: where tensors are read to. progress: called with the fraction of elements loaded, 0 … 1, after each
    tensor, or after several small ones.
    """
    sizes = {name: target.parameter.numel() for name, target in targets.items()}
    parts = {name: target.part_of(tensors[name].shape) for name, target in targets.items()}
    total, done, shown, lock = sum(sizes.values()), 0, 0.0, threading.Lock()
    inference = torch.is_inference_mode_enabled()  # other threads do not inherit it

    def place_all(found: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal done, shown
        with torch.inference_mode(inference), torch.no_grad():
            for name, tensor in found:
                targets[name].fill(tensor)
                with lock:
                    done += sizes[name]
                    if done == total or done / total >= shown + SHOWN:
                        shown = done / total
                        progress(shown)

    def read_and_place(names: Sequence[str]) -> None:
        place_all(read({name: parts[name] for name in names}, tensors, device))

    if torch.device(device).type == "cuda":
        place_all(read_ahead(parts, tensors, device, GPU_READERS))
        return
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for placed in [pool.submit(read_and_place, names) for names in pieces(parts, tensors)]:
                placed.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def same_as(module: nn.Module, shared: nn.Module) -> bool:
    """Return True if two modules' weights are equal and neither has a bias, so that one of them can serve as both."""
    biased = any(getattr(each, "bias", None) is not None for each in (module, shared))
    return not biased and torch.equal(module.weight, shared.weight)  # type: ignore[arg-type]
