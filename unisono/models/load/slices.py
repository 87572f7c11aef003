"""Slices of checkpoint tensors that a trainer pushes in place of whole ones.

A slice has the tensor's name with bounds of one dimension: ``model.norm.weight[0:128]``, ``lm_head.weight[:, 64:128]``.
Slices that cover a tensor are joined to it before they are written, whatever its format. Others are written over their
part of weights that are served as they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise

import torch

from unisono.layers.formats.base import PLAIN, Slice, WeightTarget
from unisono.models.load.tensor_files import TensorInfo, tensor
from unisono.models.load.weights import WeightTargets, check_tensor
from unisono.types import CheckpointError

SPELLING = re.compile(r"(?P<name>[^\[\]]+)\[(?P<before>(?::, ?)*)(?P<start>\d+):(?P<stop>\d+)(?:, ?:)*\]")
"""Names of slices. NumPy's notation with bounds in one dimension."""


@dataclass(frozen=True)
class PushedSlice:
    """A slice of the checkpoint tensor ``name``, as it was pushed under ``spelled``."""

    spelled: str
    name: str
    part: Slice
    info: TensorInfo

    @classmethod
    def of(cls, spelled: str, info: TensorInfo) -> PushedSlice:
        """Read the name of a slice. Raises CheckpointError for another notation, and for other bounds than its own."""
        found = SPELLING.fullmatch(spelled)
        if found is None:
            raise CheckpointError(
                f"{info.file}: tensor {spelled} is no slice: give NAME[start:stop] or NAME[:, start:stop]."
            )
        part = Slice(found["before"].count(":"), int(found["start"]), int(found["stop"]))
        size = info.shape[part.dim] if part.dim < len(info.shape) else -1
        if size != part.stop - part.start or not size:
            raise CheckpointError(f"{info.file}: tensor {spelled} has shape {list(info.shape)}.")
        return cls(spelled, found["name"], part, info)


def whole_name(name: str) -> str:
    """Name of the whole tensor, of a slice's name or its own."""
    return name.partition("[")[0]


def is_slice(name: str) -> bool:
    """Return True for a name with bounds."""
    return "[" in name


def with_slices(
    targets: WeightTargets, tensors: Mapping[str, TensorInfo]
) -> tuple[WeightTargets, Mapping[str, TensorInfo]]:
    """Resolve the slices among ``tensors``: joined ones get the tensor's name, others a target of their part.

    targets: those of whole tensors. Whole tensors stay as they are. Raises CheckpointError.
    """
    found = {name: info for name, info in tensors.items() if not is_slice(name)}
    added = dict(targets)
    slices = [PushedSlice.of(name, info) for name, info in tensors.items() if is_slice(name)]
    for name, group in groupby(sorted(slices, key=lambda each: (each.name, each.part.start)), lambda each: each.name):
        each, target = list(group), targets.get(name)
        if name in found:
            raise CheckpointError(f"{each[0].info.file}: tensor {name} is pushed whole and as {each[0].spelled}.")
        if target is None:
            found[name] = each[0].info  # without a place; the caller says so
        elif any(a.part.dim != b.part.dim or b.part.start < a.part.stop for a, b in pairwise(each)):
            raise CheckpointError(
                f"{each[0].info.file}: slices of {name} overlap, or differ in dimension: push disjoint ones of one."
            )
        elif (whole := joined(each, target)) is not None:
            found[name] = whole
        else:
            for one in each:
                for number, (part, of_part) in enumerate(narrowed(one, target)):
                    key = f"{one.spelled}/{number}" if number else one.spelled
                    found[key], added[key] = of_part, part
    return added, found


def joined(slices: Sequence[PushedSlice], target: WeightTarget) -> TensorInfo | None:
    """The whole tensor, read from its slices; None if they do not cover it. slices: of one tensor, by their starts."""
    first, dim = slices[0], slices[0].part.dim
    shape = (*first.info.shape[:dim], slices[-1].part.stop, *first.info.shape[dim + 1 :])
    alike = all(one.part.dim == dim and one.info.dtype == first.info.dtype for one in slices)
    shapes = {one.info.shape[:dim] + one.info.shape[dim + 1 :] for one in slices}
    meet = all(one.part.stop == other.part.start for one, other in pairwise(slices))
    if not (alike and len(shapes) == 1 and meet and first.part.start == 0 and shape in (target.shape, *target.also)):
        return None
    return TensorInfo(first.info.file, first.name, first.info.dtype, shape, decoded=partial(_concatenated, slices, dim))


def _concatenated(slices: Sequence[PushedSlice], dim: int) -> torch.Tensor:
    return torch.cat([tensor(one.spelled, {one.spelled: one.info}).cpu() for one in slices], dim)


def narrowed(one: PushedSlice, target: WeightTarget) -> Iterator[tuple[WeightTarget, TensorInfo]]:
    """(target of the slice's part of a parameter, the slice); several where a rank holds several runs of the tensor.

    Raises CheckpointError for weights that are not served as they are stored.
    """
    dim, start, stop = one.part.dim, one.part.start, one.part.stop
    where = f"{one.info.file}: tensor {one.spelled}"
    part = target.part
    if type(target) is not WeightTarget or target.format not in (None, PLAIN) or getattr(part, "transposed", False):
        raise CheckpointError(
            f"{where} is a part of a weight that is converted when it is read; push slices that cover {one.name}."
        )
    if dim >= len(target.shape) or stop > target.shape[dim]:
        raise CheckpointError(f"{where} is beyond the tensor's shape {list(target.shape)}.")
    shape = (*target.shape[:dim], stop - start, *target.shape[dim + 1 :])
    own = replace(target, shape=shape, also=())
    check_tensor(one.spelled, one.info, own)
    if part is None or part.dim != dim:
        yield replace(own, parameter=target.parameter.narrow(dim, start, stop - start)), one.info
        return
    at = 0
    for first, last in getattr(part, "runs", None) or ((part.start, part.stop),):  # type: ignore[union-attr]
        low, high = max(first, start), min(last, stop)
        if low < high:
            held = target.parameter.narrow(dim, at + low - first, high - low)
            yield replace(own, parameter=held, part=Slice(dim, low - start, high - start)), one.info
        at += last - first
