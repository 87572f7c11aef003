"""New weights for modules that are served: written in place, so that captured graphs, which hold addresses, stay valid.

The headers of all files are compared with the modules before anything is written. :class:`Changes` keeps the old values
in host memory until the update has ended, so that a failure leaves the old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unisono.kernels.gemm.cpu import forget_copies
from unisono.models.load.tensor_files import TensorInfo, read
from unisono.models.load.weights import WeightTargets, fill
from unisono.types import CheckpointError


@dataclass(frozen=True)
class WeightUpdate:
    """New values of one module.

    module: with the parameters. targets, tensors: as for :func:`unisono.models.load.weights.fill`; the tensors have
    been compared with the targets. check: called with the new weights in place; raises CheckpointError if they cannot
    be served.
    """

    module: nn.Module
    targets: WeightTargets
    tensors: Mapping[str, TensorInfo]
    check: Callable[[], None] = lambda: None


class Changes:
    """Writes updates, and takes them back."""

    def __init__(self, updates: Sequence[WeightUpdate]) -> None:
        self._updates = updates
        self._parameters = {id(p): p for update in updates for p in update.module.parameters() if not p.is_meta}
        self._old: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, which :meth:`write` keeps in host memory."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    @torch.no_grad()
    def write(self) -> None:
        """Write all updates; after any error the old weights are in place."""
        self._old = [(each, each.detach().to("cpu", copy=True)) for each in self._parameters.values()]
        try:
            for update in self._updates:
                device = next(update.module.parameters()).device
                fill(update.targets, update.tensors, device)
            for update in self._updates:
                update.check()
            self._outdate()
        except BaseException:
            self.revert()
            raise

    @torch.no_grad()
    def revert(self) -> None:
        """Put the old weights back."""
        for parameter, old in self._old:
            parameter.copy_(old)
        self._old.clear()
        self._outdate()

    def keep(self) -> None:
        """Free the old weights."""
        self._old.clear()

    def _outdate(self) -> None:
        for parameter in self._parameters.values():
            forget_copies(parameter)


def check_shared(shared: Mapping[str, torch.Tensor], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError if a stored tensor differs from the target's weight that a drafter has in its place.

    shared: the target's weights by the names of the drafter's checkpoint; those that are not stored are skipped.
    """
    for name, weight in shared.items():
        if name in tensors:
            ((_, stored),) = read({name: None}, tensors, weight.device)
            if stored.shape != weight.shape or not torch.equal(stored.to(weight.dtype), weight):
                raise CheckpointError(
                    f"{tensors[name].file}: tensor {name} differs from the target's, which the drafter shares since "
                    "the start. Restart the engine to serve it."
                )


def require_all(targets: WeightTargets, tensors: Mapping[str, TensorInfo], where: object) -> None:
    """Raise CheckpointError, naming ``where``, if a tensor is missing."""
    if missing := [name for name in targets if name not in tensors]:
        raise CheckpointError(f"{where}: tensor {missing[0]} is missing, which the drafter has had since the start.")
