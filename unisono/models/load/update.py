"""New weights for modules that are served: written in place, so that captured graphs, which hold addresses, stay valid.

The headers of all files are compared with the modules before anything is written. :class:`Changes` keeps the old values
in other memory until the update has ended, so that a failure leaves the old weights.
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

ALIGN = 256
"""Alignment of an old value in scratch memory, bytes."""


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
    """Write updates, and take them back.

    scratch: unused memory of the weights' device, uint8 [bytes] each, for the old values; it is zeroed at the end. Old
        values without room there are kept in host memory. void: module whose old values are void and not kept; an error
        leaves it void.
    """

    def __init__(
        self, updates: Sequence[WeightUpdate], scratch: Sequence[torch.Tensor] = (), void: nn.Module | None = None
    ) -> None:
        self.updates, self._void = updates, void
        self._scratch, self._used = list(scratch), [0] * len(scratch)
        self._parameters = {id(p): p for update in updates for p in update.module.parameters() if not p.is_meta}
        self._old: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def write(self) -> None:
        """Write all updates; after any error the old weights are in place."""
        void = set() if self._void is None else set(map(id, self._void.parameters()))
        self._old = [(each, self._copy(each)) for key, each in self._parameters.items() if key not in void]
        try:
            for update in self.updates:
                device = next(update.module.parameters()).device
                fill(update.targets, update.tensors, device)
            for update in self.updates:
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
        self.keep()
        self._outdate()

    def keep(self) -> None:
        """Free the old weights."""
        self._old.clear()
        for memory, used in zip(self._scratch, self._used, strict=True):
            memory[:used].zero_()
        self._scratch, self._used = [], []

    def _copy(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy in scratch memory, else in host memory."""
        for number, (memory, used) in enumerate(zip(self._scratch, self._used, strict=True)):
            if memory.device == parameter.device and used + parameter.nbytes <= memory.nbytes:
                self._used[number] = min(memory.nbytes, -(-(used + parameter.nbytes) // ALIGN) * ALIGN)
                held = memory[used : used + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
                return held.copy_(parameter)
        return parameter.detach().to("cpu", copy=True)

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
