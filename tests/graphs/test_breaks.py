"""Eager breaks: what runs between two captured segments, and what it may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.graphs.programs import FULL, SEGMENTED, batch, graph_of, run_graph
from unisono.graphs import Buffers, CaptureError, eager_break


def with_break(work: Callable[..., Any]) -> Callable[[Buffers], None]:
    """result = 2 · work(x + 1) with the break in the middle."""
    broken = eager_break(work)

    def run(b: Buffers) -> None:
        b.result.copy_(broken(b.x.float() + 1) * 2)

    return run


def test_a_break_runs_anew_at_every_replay_on_the_replays_values() -> None:
    seen = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(x[0, 0].item())  # a host read: no graph could hold it
        return x * (10 if seen[-1] > 5 else 1)

    graph = graph_of(with_break(work))
    assert graph.breaks == 1
    assert graph.kind == SEGMENTED
    del seen[:]
    assert run_graph(graph, [[1, 1]])[0] == [4, 4]
    assert run_graph(graph, [[9, 9]])[0] == [200, 200]
    assert seen == [2, 10]


def test_without_a_capture_it_is_the_plain_function() -> None:
    assert eager_break(lambda a, b=1: a - b)(3, b=2) == 1


def test_an_optional_break_is_taken_in_segmented_captures_only() -> None:
    calls = []

    @eager_break(optional=True)
    def work(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 1

    def run(b: Buffers) -> None:
        b.result.copy_(work(b.x.float()))

    whole, split = graph_of(run), graph_of(run, splits=True)
    assert (whole.kind, whole.breaks) == (FULL, 0)
    assert (split.kind, split.breaks) == (SEGMENTED, 1)
    del calls[:]
    assert run_graph(whole, [[1, 1]])[0] == [2, 2]
    assert not calls
    assert run_graph(split, [[1, 1]])[0] == [2, 2]
    assert calls == [1]


@pytest.mark.parametrize(
    ("work", "use"),
    [
        (lambda x: (x + 1, x + 2), lambda out: out[0] * out[1]),
        (lambda x: {"a": [x + 1, None, "name", 2], "b": (x + 2,)}, lambda out: out["a"][0] * out["b"][0]),
        (lambda x: x.add_(1), lambda out: out * (out + 1)),
        (lambda x: (x.add_(1), x[:, :1]), lambda out: out[0] * (out[1] + 1)),
    ],
    ids=["a tuple", "a nest", "its argument", "a view of its argument"],
)
def test_break_returns_nested_tensors_and_views(work: Callable[..., Any], use: Callable[..., Any]) -> None:
    broken = eager_break(work)

    def run(b: Buffers) -> None:
        b.result.copy_(use(broken(b.x.float())))

    graph = graph_of(run)
    for value in (1, 4):
        assert run_graph(graph, [[value, value]])[0] == [(value + 1) * (value + 2)] * 2


def test_break_without_result_mutates_its_arguments() -> None:
    @eager_break
    def work(x: torch.Tensor, plan: list[float]) -> None:
        plan[:] = [x.sum().item()]

    @eager_break
    def use(x: torch.Tensor, plan: list[float]) -> torch.Tensor:
        return x + plan[0]

    def run(b: Buffers) -> None:
        plan: list[float] = []  # state that two breaks share lives as long as the graph
        x = b.x.float()
        assert work(x, plan) is None
        b.result.copy_(use(x, plan))

    graph = graph_of(run, rows=1)
    assert graph.breaks == 2
    for value in (1, 4):
        assert run_graph(graph, [[value, value]])[0] == [3 * value] * 2


def test_a_break_inside_a_break_is_part_of_it() -> None:
    inner = eager_break(lambda x: x + x[0, 0].item())
    graph = graph_of(with_break(lambda x: inner(x) + 1))
    assert graph.breaks == 1
    assert run_graph(graph, [[1, 1]])[0] == [10, 10]


@torch.inference_mode()
def test_in_inference_mode() -> None:
    test_a_break_runs_anew_at_every_replay_on_the_replays_values()


def test_the_results_address_stays() -> None:
    """Ops after a break were captured with the address of its first result."""
    homes = []

    def run(b: Buffers) -> None:
        out = eager_break(lambda x: x * 3)(b.x.float())
        homes.append(out)  # which keeps its memory
        b.result.copy_(out)

    graph = graph_of(run)
    run_graph(graph, [[5, 5]])
    assert homes[-1][0].tolist() == [15, 15]


def test_many_breaks_in_a_row_and_at_the_ends() -> None:
    """Empty segments, and memory that one segment frees and the next takes."""

    @eager_break
    def host(x: torch.Tensor) -> torch.Tensor:
        return x + x[0, 0].item()

    def run(b: Buffers) -> None:
        x = host(b.x)
        for _ in range(3):
            x = host(host(x)).float() * 2
        b.result.copy_(x)
        b.result.copy_(host(b.result))

    graph = graph_of(run)
    assert graph.breaks == 8
    for value in (1, 3):
        assert run_graph(graph, [[value, value]])[0] == [value * 2 * 8**3 * 2] * 2


def test_a_break_that_raises() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 7:
            raise ValueError("seven")
        return x

    graph = graph_of(with_break(work))
    with pytest.raises(ValueError, match="seven"):
        run_graph(graph, [[6, 6]])
    assert run_graph(graph, [[1, 1]])[0] == [4, 4], "the graph lives on"

    def always(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("always")

    with pytest.raises(ValueError, match="always"):
        graph_of(lambda b: b.result.copy_(eager_break(always)(b.x)))
    assert run_graph(graph_of(with_break(lambda x: x)), [[1, 1]])[0] == [4, 4], "no capture is left open"


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda x: x[: int(x[0, 0])], r"returned torch.float32 \[2, 2\] where its capture saw torch.float32 \[1, 2\]"),
        (lambda x: (x, int(x[0, 0])), "returned 2 where its capture saw 1"),
        (lambda x: (x,) * int(x[0, 0]), "another structure"),
        (lambda x: (x, x.sum()) if x[0, 0] < 2 else (x, 3), "returned 3 where"),
    ],
    ids=["shape", "number", "structure", "kind"],
)
def test_only_values_may_change(work: Callable[..., Any], message: str) -> None:
    def run(b: Buffers) -> None:
        eager_break(work)(b.x.float())

    graph = graph_of(run, first=batch([[1, 1]] * 4))
    graph.buffers.load(batch([[2, 2]] * 4))
    with pytest.raises(CaptureError, match=message):
        graph.replay()


def test_break_that_returns_a_set_is_refused() -> None:
    with pytest.raises(CaptureError, match="returns a set: return tensors"):
        graph_of(lambda b: eager_break(lambda x: {x})(b.x))


@pytest.mark.parametrize(
    "run",
    [
        lambda b: b.result.fill_(b.x.sum().item()),
        lambda b: b.result.fill_(b.x.tolist()[0][0]),
        lambda b: b.result.copy_(torch.tensor([[1.0, 2.0]], device=b.device)),
    ],
    ids=["item", "tolist", "a tensor of host values"],
)
def test_host_read_outside_a_break_raises(run: Callable[[Buffers], Any]) -> None:
    with pytest.raises(CaptureError, match="@eager_break"):
        graph_of(run)
