"""Base of all kinds of graph: a list of segments with eager breaks between them.

Records and replays breaks. Captures (``cuda``, ``tape``, ``compiled``) make the segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from unisono.graphs import Buffers, CaptureError, Program

_FROZEN = (int, float, str, type(None))


class GraphPart(Protocol):
    """A captured segment or a break."""

    def replay(self) -> None: ...


class Break:
    """One call of an eager function between two segments.

    ``homes`` are the tensors that hold its results, in order: the code after it was captured with their addresses. If
    the function returns one of its arguments, or a view of one, that is its own home.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.name = getattr(function, "__qualname__", repr(function))
        leaves, self._spec = self._flat(function(*args, **kwargs))
        self._frozen = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        self.homes = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _flat(self, result: Any) -> tuple[list[Any], TreeSpec]:
        leaves, spec = tree_flatten(result)
        wrong = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_FROZEN))), None)
        if wrong is not None:
            raise CaptureError(
                f"the eager break {self.name} returns a {type(wrong).__name__}: return tensors, numbers, strings, "
                "None, or tuples, lists and dicts of them"
            )
        return leaves, spec

    def result_in(self, homes: Sequence[torch.Tensor]) -> Any:
        """The function's result with each tensor in its home."""
        left = iter(homes)
        return tree_unflatten([next(left) if f is None else f[0] for f in self._frozen], self._spec)

    def owned(self) -> list[int]:
        """Indices of the homes outside the arguments' memory."""
        inputs = storages(self.args, self.kwargs)
        return [i for i, home in enumerate(self.homes) if home.untyped_storage().data_ptr() not in inputs]

    def replay(self) -> None:
        leaves, spec = self._flat(self.function(*self.args, **self.kwargs))
        if spec != self._spec:
            raise CaptureError(f"the eager break {self.name} returned another structure than when it was captured")
        homes = iter(self.homes)
        for frozen, leaf in zip(self._frozen, leaves, strict=True):
            if frozen is not None:
                if isinstance(leaf, torch.Tensor) or leaf != frozen[0]:
                    raise CaptureError(
                        f"the eager break {self.name} returned {leaf!r} where its capture saw {frozen[0]!r}: "
                        "only tensors' values may change"
                    )
                continue
            home = next(homes)
            if not isinstance(leaf, torch.Tensor) or leaf.shape != home.shape or leaf.dtype != home.dtype:
                raise CaptureError(
                    f"the eager break {self.name} returned {_shape(leaf)} where its capture saw {_shape(home)}: "
                    "shapes are fixed"
                )
            if leaf.data_ptr() != home.data_ptr() or leaf.stride() != home.stride():
                home.copy_(leaf)


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name))


def refusal(what: object, why: str) -> CaptureError:
    """Error for an op that no graph can hold."""
    return CaptureError(
        f"{what} cannot be captured: {why}. Put work that reads values into an @eager_break (docs/design/graphs.md)"
    )


def storages(*values: Any) -> set[int]:
    """Storage addresses of the tensors in ``values``."""
    return {t.untyped_storage().data_ptr() for t in tensors(values)}


class Segmented:
    """Base of the kinds of graph; see :class:`unisono.graphs.Graph`. A subclass fills ``parts`` and the costs."""

    def __init__(self, program: Program, buffers: Buffers) -> None:
        self.buffers, self._program = buffers, program
        self.parts: Sequence[GraphPart] = ()

    @property
    def breaks(self) -> int:
        """Eager calls in a replay."""
        return sum(isinstance(part, Break) for part in self.parts)

    def kind_of(self, full: str, segmented: str, compiled: str, compile: bool) -> str:
        return compiled if compile else segmented if self.breaks else full

    def replay(self) -> None:
        for part in self.parts:
            part.replay()
