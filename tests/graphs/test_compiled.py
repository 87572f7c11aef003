"""Compiled passes: what is cut out for the compiler, and that the bytes stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.graphs.programs import COMPILED, DEVICE, SCHEMA, batch, graph_of, run_graph
from unisono.graphs import Buffers, PassShape, compiled, eager_break
from unisono.graphs.compiled import Pieces, compile_program


def pieces_of(run: Callable[[Buffers], Any], rows: int = 4) -> tuple[Pieces, Buffers]:
    buffers = Buffers(SCHEMA, PassShape(rows), DEVICE)
    return compile_program(run, buffers, splits=False), buffers


def outcome(run: Callable[[Buffers], Any], x: list[list[int]]) -> list[list[float]]:
    """Eagerly."""
    buffers = Buffers(SCHEMA, PassShape(len(x)), DEVICE)
    buffers.load(batch(x))
    run(buffers)
    return buffers.result.tolist()


def rounding(b: Buffers) -> None:
    """Roundings to bfloat16 that a compiler likes to leave out."""
    x = (b.x.float() * 0.3).to(torch.bfloat16)
    y = (x * x).to(torch.bfloat16) + x
    b.result.copy_((y * 1.7 + x * 0.7).float())


def through_a_break(b: Buffers) -> None:
    """And through functions that no two libraries compute alike."""
    x = b.x.float().sin() * 3 + 1
    y = eager_break(lambda t: t + t.max().item())(x)
    b.result.copy_((y * x - 7).exp() + x.sum(1, keepdim=True) * 2)


def aliases(b: Buffers) -> None:
    """A view that outlives its piece, of a tensor that somebody writes between the two."""
    x = b.x.float() * 2 + 1
    column = x[:, 0]
    doubled = column + column
    x.add_(10)
    b.result.copy_(torch.stack((column * 2, doubled - 1), 1))


def views(b: Buffers) -> None:
    """Views of what nobody writes, inside and outside pieces."""
    x = b.x.float() * 2 + 1
    left, right = x.t().split(1)
    b.scale.copy_(left[0])
    b.result.copy_(torch.cat((left, right * 3)).t() + b.scale[:, None])


def several(b: Buffers) -> None:
    """Ops with several results."""
    left, right = (b.x + 1).split(1, dim=1)
    b.result.copy_(torch.cat((left.cumsum(0) * right, (left * 3).float() - right.float() * 0.3), 1))


def twins(b: Buffers) -> None:
    """Two tensors of equal values, which a compiler makes one, and one of them is written."""
    left, right = b.x.float() * 2 + 1, b.x.float() * 2 + 1
    third = b.scale[:, None] * 3 + left
    left.add_(10)
    b.result.copy_(left * 3 + right - third)


@pytest.mark.parametrize("run", [rounding, through_a_break, aliases, views, several, twins], ids=lambda f: f.__name__)
def test_same_bits_as_eager(run: Callable[[Buffers], Any]) -> None:
    graph = graph_of(run, compile=True)
    assert graph.kind == COMPILED
    for x in ([[1, 2], [3, 4], [5, 6], [7, 8]], [[-9, 1], [0, 0], [100, 3], [2, 2]]):
        assert run_graph(graph, x) == outcome(run, x)
    pieces, _ = pieces_of(run)
    assert pieces.compiled >= 1, "a test that compiles nothing proves nothing"


@torch.inference_mode()
@pytest.mark.parametrize("run", [rounding, through_a_break, aliases, views, several, twins], ids=lambda f: f.__name__)
def test_same_bits_in_inference_mode(run: Callable[[Buffers], Any]) -> None:
    graph = graph_of(run, compile=True)
    x = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert run_graph(graph, x) == outcome(run, x)


def test_without_emulated_roundings_the_bits_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a piece whose bits differ is not used."""
    x = [[n, 7 * n + 1] for n in range(64)]
    buffers = Buffers(SCHEMA, PassShape(64), DEVICE)
    buffers.load(batch(x))
    monkeypatch.setattr(compiled, "_compiled", {})
    assert compile_program(rounding, buffers, splits=False).compiled == 1
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(compiled, "OPTIONS", {})
    assert compile_program(rounding, buffers, splits=False).compiled == 0


def test_piece_that_is_wrong_on_other_values_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded on padding. A compiler that takes a slice for the whole, as one did, is right on that."""
    monkeypatch.setattr(compiled, "EXACT_INTEGERS", compiled.EXACT_INTEGERS | {"searchsorted"})

    def run(b: Buffers) -> None:
        rows = torch.searchsorted(b.x[1:, 0].contiguous(), b.x[:, 1].contiguous(), right=True).clamp_max(3)
        b.result.copy_(b.x.index_select(0, rows) * 2)

    def wrong(function: Any, **options: Any) -> Any:
        def run(*inputs: torch.Tensor) -> Any:
            return function(*(torch.where(t > 3, t + 1, t) for t in inputs))

        return run

    monkeypatch.setattr(compiled, "_compiled", {})
    assert pieces_of(run)[0].compiled == 1
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(torch, "compile", wrong)
    assert pieces_of(run)[0].compiled == 0


@pytest.mark.parametrize(
    ("work", "bounds"),
    [
        (lambda x, f: x + 1, (-1, 9)),
        (lambda x, f: f[x], (0, 9)),
        (lambda x, f: f[:2].index_select(0, x) * 3, (0, 2)),
        (lambda x, f: f[:1].index_select(0, x) * 2, (0, 1)),
        (lambda x, f: f[:0].index_select(0, x), None),
    ],
    ids=["any", "rows", "two rows", "one row", "no row"],
)
def test_integer_bounds_of_compiled_pieces(work: Any, bounds: tuple[int, int] | None) -> None:
    function = torch.fx.symbolic_trace(work)
    given = [torch.tensor([7, 7, 7]), torch.zeros(2, 16).T]
    ints, floats = compiled._other_values(function, given)
    assert floats.stride() == (1, 16)
    assert floats.unique().numel() == 32
    low, high = bounds or (7, 8)
    assert all(low <= n < high for n in ints.tolist())
    assert (ints.tolist() == [7, 7, 7]) == (bounds is None)


def test_pieces_end_at_writes() -> None:
    """x + 1, the write, and what reads it: two pieces around it."""

    def run(b: Buffers) -> None:
        b.scale.copy_(b.x[:, 0].float() + 1)
        b.result.copy_((b.scale * 2)[:, None].expand(4, 2) - 1)

    pieces, _ = pieces_of(run)
    assert [step.kind for step in pieces.steps] == ["piece", "call", "piece", "call"]


@pytest.mark.parametrize("run", [aliases, twins], ids=lambda f: f.__name__)
def test_tensors_written_later_are_not_made_by_a_piece(run: Callable[[Buffers], Any]) -> None:
    """A compiler may give two results, or a result and an input, the same memory."""
    pieces, _ = pieces_of(run)
    (write,) = [step for step in pieces.steps if step.run is torch.ops.aten.add_.Tensor]
    (maker,) = [step for step in pieces.steps if step is not write and write.args[0].number in step.results]
    assert maker.kind == "call"
    assert pieces.compiled


def test_intermediates_are_dropped_after_last_use() -> None:
    """Or a capture would hold every intermediate, and no memory would be reused."""

    def run(b: Buffers) -> None:
        x = b.x.float()
        for _ in range(5):
            x = x * 1.5
            b.scale.copy_(x[:, 0])  # ends the piece
        b.result.copy_(x)

    pieces, _ = pieces_of(run)
    made = [n for step in pieces.steps for n in step.results if n is not None]
    dropped = [n for step in pieces.steps for n in step.drops]
    assert len(made) > 8
    assert sorted(dropped) == sorted(made)
