"""Exact kernels: faster kernels that serve only where their bits equal the reference kernel's on the present device.

A comparison counts only if it holds on every rank, since all ranks must run the same kernels. The engine's start says
how ranks agree (:func:`agreeing`), and all ranks compare the same kernels in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec

import torch

P = ParamSpec("P")

_agree: Callable[[bool], bool] | None = None
_remembered: Mapping[str, bool] = {}

EXACT_KERNELS: dict[str, ExactKernel[Any]] = {}
"""Every exact kernel, by name."""


class ExactKernel(Generic[P]):
    """A kernel that serves where a comparison found the reference kernel's bits.

    keys: maps the arguments of a comparison to the keys that it proves: everything that bits may depend on, such as
    shapes and dtypes.
        An empty tuple: there is nothing to compare, as on a CPU.
    same_bits: runs both kernels on inputs of its own, with the same arguments, and compares the results.
    trusted: the kernel serves keys that were not compared.
    """

    def __init__(
        self, name: str, keys: Callable[P, tuple[Hashable, ...]], same_bits: Callable[P, bool], trusted: bool = False
    ) -> None:
        self.name, self.keys, self.same_bits, self.trusted = name, keys, same_bits, trusted
        self.compared: dict[tuple[Hashable, ...], bool] = {}
        self.serving: dict[Hashable, bool] = {}
        EXACT_KERNELS[name] = self

    @torch.no_grad()
    def prove(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Compare both kernels, once in a process for the same keys, unless :func:`remembering` knows the result.
        Synchronises; for the engine's start.

        Returns True where the bits are equal on all ranks, or there is nothing to compare. Elsewhere the reference
        kernel serves.
        """
        keys = self.keys(*args, **kwargs)
        if not keys:
            return True
        if not self._known(keys):
            self.compared[keys] = self.same_bits(*args, **kwargs)
        same = self.compared[keys] = agreed(self.compared[keys])
        for key in keys:
            self.serving[key] = same or self.serving.get(key, False)
        return same

    @torch.no_grad()
    def rehearse(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Launch the kernels of :meth:`prove` and ignore the result: this compiles them ahead of time."""
        if (keys := self.keys(*args, **kwargs)) and not self._known(keys):
            self.same_bits(*args, **kwargs)

    def _known(self, keys: tuple[Hashable, ...]) -> bool:
        """Return True if the result for these keys is in ``compared``, after a look at what is remembered."""
        if keys not in self.compared and (name := _noted(self.name, keys)) in _remembered:
            self.compared[keys] = _remembered[name]
        return keys in self.compared

    def serves(self, key: Hashable) -> bool:
        """Return True if the kernel may serve this key."""
        return self.serving.get(key, self.trusted)

    def same_when_serving(self, key: Hashable, run: Callable[[], torch.Tensor]) -> bool:
        """Compare a pass while the kernel does not serve the key with the same pass while it does."""
        seen = []
        for serves in (False, True):
            self.serving[key] = serves
            seen.append(run())
        del self.serving[key]
        return torch.equal(*seen)


def agreed(holds: bool) -> bool:
    """Combine the ranks' results: True if ``holds`` is true on every rank."""
    return holds if _agree is None else _agree(holds)


def _noted(name: str, keys: tuple[Hashable, ...]) -> str:
    """Name of a result in notes."""
    return f"{name}: {keys!r}"


@contextmanager
def remembering(results: Mapping[str, bool]) -> Iterator[None]:
    """Within this context, comparisons with a result of :func:`results` are not made again.

    The caller vouches that GPU, driver, versions and sources are the same.
    """
    global _remembered
    before, _remembered = _remembered, results
    try:
        yield
    finally:
        _remembered = before


def results() -> dict[str, bool]:
    """Results of all comparisons of this process, by kernel and keys."""
    return {
        _noted(kernel.name, keys): same for kernel in EXACT_KERNELS.values() for keys, same in kernel.compared.items()
    }


@contextmanager
def agreeing(agree: Callable[[bool], bool] | None) -> Iterator[None]:
    """Set the function that combines the ranks' results within this context. None: this rank is alone."""
    global _agree
    before, _agree = _agree, agree
    try:
        yield
    finally:
        _agree = before
