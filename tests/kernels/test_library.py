"""Ops from annotations: the schema, what a wrong annotation does, dispatch, gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from unisono.kernels.gemm.linear import linear
from unisono.kernels.library import Mutated, SymbolicInt, op, schema_of
from unisono.kernels.speculation.rounds import commit


def test_schemas_are_the_annotations() -> None:
    def all_types_op(
        x: Tensor, y: Mutated[Tensor], z: Mutated[Tensor | None], n: SymbolicInt, parts: list[Tensor],
        kind: torch.dtype, bias: Tensor | None = None, scale: float = 1.0, keep: bool = True, group: int | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    assert schema_of(all_types_op) == (
        "all_types(Tensor x, Tensor(a!) y, Tensor(b!)? z, SymInt n, Tensor[] parts, ScalarType kind,"
        " Tensor? bias=None, float scale=1.0, bool keep=True, int? group=None) -> (Tensor, Tensor)"
    )
    assert str(linear.overload._schema) == (
        "unisono::linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None) -> Tensor"
    )
    assert [a.name for a in commit.overload._schema.arguments if a.is_write] == [
        "length", "status", "last_token", "history",
    ]  # fmt: skip


def test_annotations_that_schemas_lack_are_refused() -> None:
    def without(x, n: int) -> Tensor: ...

    def text(x: Tensor, name: str) -> Tensor: ...

    def silent(x: Tensor): ...

    with pytest.raises(TypeError, match="without: x is annotated with None"):
        schema_of(without)
    with pytest.raises(TypeError, match="text: name is annotated with <class 'str'>"):
        schema_of(text)
    with pytest.raises(TypeError, match="silent: return"):
        schema_of(silent)


def test_an_undeclared_write_fails() -> None:
    """Torch's check of schemas sees an argument that is written without ``Mutated``."""

    @op()
    def declared_write(x: Mutated[Tensor]) -> None:
        x.add_(1)

    @op()
    def undeclared_write(x: Tensor) -> None:
        x.add_(1)

    torch.library.opcheck(declared_write.overload, (torch.zeros(2),), test_utils="test_schema")
    with pytest.raises(Exception, match="is not defined as mutable"):
        torch.library.opcheck(undeclared_write.overload, (torch.zeros(2),), test_utils="test_schema")


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_calls_dispatch_and_keep_named_results() -> None:
    @op(meta=lambda x: Pair(torch.empty_like(x), torch.empty_like(x)))
    def two_results(x: Tensor) -> Pair:
        """The documentation."""
        return Pair(x + 1, x + 2)

    out = two_results(torch.zeros(1))
    assert isinstance(out, Pair)
    assert (out.first.item(), out.second.item()) == (1, 2)
    assert two_results.__doc__ == "The documentation."
    assert two_results.overload.cpu_twin is two_results.cpu


def test_shape_functions() -> None:
    @op(shape=lambda x, n: (n, x.shape[0]))
    def repeated_rows(x: Tensor, n: int) -> Tensor:
        return x.expand(n, -1).clone()

    @op()
    def like_its_input(x: Tensor) -> Tensor:
        return x.clone()

    x = torch.zeros(3)
    assert repeated_rows(x.to("meta"), 2).shape == (2, 3)
    assert like_its_input(x.to("meta")).shape == (3,)


def test_outputs_are_computed_from_arguments_by_name() -> None:
    """Arguments that calls leave out have their defaults; the function may have parameters more with defaults."""

    def outputs(count: int, x: Tensor, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
        return x.new_empty(count), x.new_empty(count, dtype=dtype)

    @op(meta=outputs)
    def counted(unused: Tensor, x: Tensor, count: int = 3) -> tuple[Tensor, Tensor]:
        return x[:count].clone(), x[:count].int()

    x = torch.zeros(5, device="meta")
    assert [(r.shape, r.dtype) for r in counted(x[:1], x)] == [((3,), torch.float32), ((3,), torch.int32)]
    assert counted(x[:1], x, 2)[0].shape == (2,)


def test_outputs_of_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"renamed: its output is computed from \['y'\]"):

        @op(shape=lambda y: y.shape)
        def renamed(x: Tensor) -> Tensor:
            return x.clone()


def test_gradients_run_the_formula() -> None:
    @op(gradient=lambda x: x * 3)
    def tripled(x: Tensor) -> Tensor:
        return x * 3 + 1

    x = torch.ones(1, requires_grad=True)
    tripled(x).backward()
    assert x.grad == 3
    with torch.no_grad():
        assert tripled(x).item() == 4, "the op itself"


def test_an_implementation_without_a_default_is_refused() -> None:
    """torch passes no argument that equals its default."""

    def on_gpu(x: Tensor, scale: float) -> Tensor:
        return x * scale

    with pytest.raises(TypeError, match="on_gpu: scale needs the default"):

        @op(cuda=on_gpu)
        def scaled_by_default(x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale
