"""The one way from a checkpoint's tensors to parameters: name, then slice, then weight format.

Owns reading (safetensors, or the pickle of the first EAGLE repositories) and the comparison of what a checkpoint holds
with what modules need, before a byte of weights is read. Targets and all draft heads are loaded through it: they say
what their modules are called in a checkpoint, :func:`check` compares, :func:`fill` reads.
"""

from __future__ import annotations

import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from unisono.layers.formats import Place, Slice, Slices, part_of
from unisono.models.staging import staged
from unisono.types import CheckpointError

IGNORED = re.compile(r"rotary_emb\.inv_freq$")
"""Buffers that old exports kept; the rotary table is computed from the config."""

PICKLED_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
"""safetensors' names of what pickles hold; others are called as torch calls them."""

READERS, GPU_READERS = 4, 8
"""Threads that read a checkpoint, onto a CPU and a GPU. What they wait for is pages of the file, and copies of them."""

SHOWN = 1e-3
"""The share of a checkpoint after which progress is told again: there may be tens of thousands of tensors."""

HEADERS = 512
"""Files whose headers are kept."""

PIECE = 2**27
"""Elements that a thread reads of a file before it takes the next run."""

Places = Mapping[str, Place]
"""By a checkpoint's tensor names."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint. name: in its file. order: of its bytes in the file. data: of a pickle, mapped."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    order: int = 0
    data: torch.Tensor | None = None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises CheckpointError naming the file.

    A start asks several times, for the target and for its drafter; an unchanged file is read once.
    """
    state = file.stat()
    return dict(_header(file, state.st_mtime_ns, state.st_size))


@lru_cache(HEADERS)
def _header(file: Path, changed: int, size: int) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            return {
                name: TensorInfo(file, name, part.get_dtype(), tuple(part.get_shape()), order)
                for order, (name, part) in enumerate(slices.items())
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or no safetensors file, it has {size} bytes: {error}. Download it again."
        ) from None


def read_pickle(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a pickled state dict. Raises CheckpointError naming the file."""
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Download it again.") from None
    return {
        name: TensorInfo(file, name, PICKLED_DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape), order, t)
        for order, (name, t) in enumerate(stored.items())
    }


@runtime_checkable
class Placed(Protocol):
    """A module that names its places itself, and those of all that is in it."""

    def places(self) -> Iterator[tuple[str, Place]]:
        """(name inside the module, where it goes) of each tensor that a checkpoint may hold."""
        ...


def places(
    root: nn.Module, held: Callable[[str, str], bool] = lambda module, kind: False
) -> Iterator[tuple[str, str, Place]]:
    """``(module, kind, place)`` of all that a checkpoint stores of ``root``; :func:`tensor_name` makes names of them.

    What a module's own ``places()`` yields counts as modules in it: the projections of a merged linear layer, single
    experts. held: whether the checkpoint has the tensor of a module and kind; of a module that can be stored in
    several forms, the places are those of the first form of which it has one, else of the first.
    """
    for path, module in _owners(root, "", set()):
        if not isinstance(module, Placed):
            for kind, parameter in module.named_parameters(recurse=False):
                yield path, kind, place_of(parameter)
            continue
        found = []
        for inside, place in module.places():
            part, _, kind = inside.rpartition(".")
            found.append((".".join(filter(None, (path, part))), kind, place))
        forms = list(dict.fromkeys(place.form for *_, place in found if place.form))
        there = (form for form in forms if any(p.form == form and held(name, kind) for name, kind, p in found))
        form = next(there, forms[0] if forms else "")
        yield from (each for each in found if each[2].form in ("", form))


def place_of(parameter: torch.Tensor) -> Place:
    """Where a tensor goes that is stored as it is used, or of which a rank reads a part."""
    whole = part_of(parameter)
    if whole is None:
        return Place(parameter, tuple(parameter.shape))
    return Place(parameter, whole.shape, part=whole.slices)


def _owners(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules by path, each once, without what is inside one that names its places itself."""
    if module in seen:
        return
    seen.add(module)
    yield path, module
    if not isinstance(module, Placed):
        for name, child in module.named_children():
            yield from _owners(child, f"{path}.{name}" if path else name, seen)


def tensor_name(module: str, kind: str) -> str:
    """A checkpoint's name of a tensor: a fused one has its module's name, or a name that begins so."""
    return module + kind if kind == "" or kind.startswith("_") else f"{module}.{kind}"


def check(
    wanted: Places, tensors: Mapping[str, TensorInfo], where: Path | str, unexpected: Callable[[str], str | None]
) -> None:
    """Raise CheckpointError naming the first tensor that is missing, misshapen, of another dtype or has no place.

    where: the checkpoint, for messages. unexpected: why a tensor that nothing wants has no place; None ignores it.
    """
    missing = [name for name in wanted if name not in tensors]
    if missing:
        files = {info.file for info in tensors.values()}
        where = files.pop() if len(files) == 1 else f"{where} ({len(files)} files)"
        raise CheckpointError(
            f"{where}: tensor {missing[0]} {list(wanted[missing[0]].shape)} is missing, and {len(missing) - 1} more of "
            f"the {len(wanted)} that are needed."
        )
    for name, info in tensors.items():
        if name in wanted:
            check_tensor(name, info, wanted[name])
        elif not IGNORED.search(name) and (reason := unexpected(name)) is not None:
            raise CheckpointError(f"{info.file}: tensor {name} {list(info.shape)} is unexpected: {reason}.")


def check_tensor(name: str, info: TensorInfo, place: Place) -> None:
    """Raise CheckpointError unless a tensor has the shape and a dtype that its place accepts."""
    if info.shape not in (place.shape, *place.also):
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}; config.json asks for {list(place.shape)}."
        )
    if info.dtype not in place.accepts:
        raise CheckpointError(
            f"{info.file}: tensor {name} has dtype {info.dtype}; supported are {', '.join(place.accepts)}."
        )


def fill(
    wanted: Places,
    tensors: Mapping[str, TensorInfo],
    device: torch.device | str,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Read what ``wanted`` names, only the parts that it asks for, into its parameters.

    Several threads read at once where there is much: a checkpoint may have tens of thousands of experts' tensors.
    device: where tensors are read to. progress: called with the share of the elements that is in place, 0 … 1, after
    each tensor, or after several small ones.
    """
    sizes = {name: place.parameter.numel() for name, place in wanted.items()}
    total, done, shown, lock = sum(sizes.values()), 0, 0.0, threading.Lock()
    inference = torch.is_inference_mode_enabled()  # which other threads do not inherit

    def fill_piece(names: Sequence[str]) -> None:
        nonlocal done, shown
        with torch.inference_mode(inference), torch.no_grad():
            parts = {name: wanted[name].part_of(tensors[name].shape) for name in names}
            for name, tensor in read(parts, tensors, device):
                wanted[name].fill(tensor)
                with lock:
                    done += sizes[name]
                    if done == total or done / total >= shown + SHOWN:
                        shown = done / total
                        progress(shown)

    pieces = list(_pieces(sizes, tensors))
    if len(pieces) < 2:
        for names in pieces:
            fill_piece(names)
        return
    readers = GPU_READERS if torch.device(device).type == "cuda" else READERS
    with ThreadPoolExecutor(min(readers, len(pieces))) as pool:
        try:
            for filled in [pool.submit(fill_piece, names) for names in pieces]:
                filled.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _pieces(sizes: Mapping[str, int], tensors: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """The names in the order of their bytes, in runs within one file of about PIECE elements."""
    names: list[str] = []
    held = 0
    for name in sorted(sizes, key=lambda name: (tensors[name].file, tensors[name].order)):
        if names and (held > PIECE or tensors[name].file != tensors[names[0]].file):
            yield names
            names, held = [], 0
        names.append(name)
        held += sizes[name]
    if names:
        yield names


def read(
    parts: Mapping[str, Slice | Slices | None], tensors: Mapping[str, TensorInfo], device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each named tensor, or the part of it that is asked for, on ``device`` in its stored dtype.

    File by file, in the order of the bytes; nothing but these parts is read. On its way to a GPU it passes through
    pinned memory, many small tensors at once.
    """
    device = torch.device(device)
    found = _mapped(parts, tensors, device if device.type != "cuda" else "cpu")
    yield from staged(found, device) if device.type == "cuda" else found


def _mapped(
    parts: Mapping[str, Slice | Slices | None], tensors: Mapping[str, TensorInfo], device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """:func:`read`; on a CPU the tensors are pages of the files, which are read when they are touched."""
    by_file = defaultdict(list)
    for name in sorted(parts, key=lambda name: (tensors[name].file, tensors[name].order)):
        by_file[tensors[name].file].append(name)
    for file, names in by_file.items():
        name = names[0]
        try:
            with ExitStack() as stack:
                if tensors[name].data is None:
                    opened = stack.enter_context(safe_open(file, framework="pt", device=str(device)))
                for name in names:
                    info, part = tensors[name], parts[name]
                    if info.data is not None:
                        yield name, info.data if part is None else part.of(info.data)
                    elif part is None:
                        yield name, opened.get_tensor(info.name)
                    else:
                        yield name, part.of(opened.get_slice(info.name))
        except SafetensorError as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}. Download it again.") from None


def tensor(name: str, tensors: Mapping[str, TensorInfo]) -> torch.Tensor:
    """One whole tensor, on the CPU."""
    ((_, found),) = read({name: None}, tensors, "cpu")
    return found


def same_as(module: nn.Module, shared: nn.Module) -> bool:
    """Whether two modules' weights are equal, so that one of them can serve as both."""
    return torch.equal(module.weight, shared.weight)  # type: ignore[arg-type]
