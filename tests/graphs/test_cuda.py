"""The CUDA graphs' bookkeeping, with a stand-in for the graph itself: what is captured and replayed when, and owned by
whom. On a GPU the other tests of this folder run the real thing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.graphs.programs import CPU, SCHEMA, batch, program, run_graph
from unisono.graphs import Buffers, GraphKey, PassShape, eager_break
from unisono.graphs.cuda import CudaGraph
from unisono.graphs.recorder import RecordedOp, Recorder
from unisono.graphs.segments import Break

if torch.cuda.is_available():
    pytest.skip("a GPU is here: the other tests run the real thing", allow_module_level=True)


ALIASING = ("aten::empty.memory_format", "aten::set_.source_Storage_storage_offset")


class StandIn:
    """A CUDA graph of recorded ops. As with a real one, a capture computes nothing: what it made is garbage."""

    launches = 0
    open_now = 0

    def __init__(self) -> None:
        self.calls: list[RecordedOp] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        StandIn.open_now += 1
        assert StandIn.open_now == 1, "two captures at once"
        self._recorder = Recorder(splits=False)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        StandIn.open_now -= 1
        self._recorder.__exit__(None, None, None)
        steps = [step for step in self._recorder.steps if isinstance(step, RecordedOp) and not step.view]
        for call in steps:
            if not call.op._schema.is_mutable:
                for tensor in call.results:
                    tensor.fill_(-99)
        # Allocations and aliases are the capture's own business.
        self.calls = [call for call in steps if call.op.name() not in ("aten::empty_strided", *ALIASING)]

    def replay(self) -> None:
        StandIn.launches += 1
        for call in self.calls:
            call.replay()

    def reset(self) -> None:
        self.calls = []


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    StandIn.open_now = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))


def captured(run: Callable[[Buffers], Any], first: Any = None, **how: bool) -> CudaGraph:
    buffers = Buffers(SCHEMA, PassShape(2), CPU)
    buffers.load(batch(first or [[1, 1], [1, 1]]))
    return CudaGraph(program(run), GraphKey("p", PassShape(2)), buffers, None, **how)


def test_a_pass_without_breaks_is_one_launch() -> None:
    graph = captured(lambda b: b.result.copy_(b.x.float() * 2))
    assert graph.kind == "full"
    StandIn.launches = 0
    assert run_graph(graph, [[3, 4], [5, 6]]) == [[6, 8], [10, 12]]
    assert StandIn.launches == 1


@pytest.mark.parametrize("compile", [False, True])
def test_breaks_see_the_values_of_the_segment_before_them_at_capture_too(compile: bool) -> None:
    seen: list[float] = []

    @eager_break
    def host(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        seen.append(x[0, 0].item())
        return x + seen[-1], None

    def run(b: Buffers) -> None:
        x, _ = host(b.x.float() * 2)
        x, _ = host(x * 2 + 0)
        b.result.copy_(x)

    graph = captured(run, first=[[1, 2], [3, 4]], compile=compile)
    assert set(seen) == {2.0, 8.0}, "never the garbage of a capture"
    assert graph.kind == ("compiled" if compile else "segmented")
    assert graph.breaks == 2
    assert run_graph(graph, [[5, 6], [7, 8]]) == [[80, 84], [88, 92]]


@pytest.mark.parametrize("inside", [True, False], ids=["in a break", "in a segment"])
def test_an_error_leaves_no_capture_open(inside: bool) -> None:
    runs: list[int] = []

    def fails(x: torch.Tensor) -> torch.Tensor:
        runs.append(StandIn.open_now)
        if len(runs) == 2:
            raise ValueError("the second time, which is the capture")
        return x

    with pytest.raises(ValueError, match="the second time"):
        captured(lambda b: b.result.copy_((eager_break(fails) if inside else fails)(b.x)))
    assert runs == [0, 0 if inside else 1]
    assert StandIn.open_now == 0


@pytest.mark.parametrize("work", [lambda x: x.add_(1), lambda x: x.add_(1)[:, :1]], ids=["all of it", "a view of it"])
def test_an_argument_that_a_break_returns_is_the_passs_own(work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The pass may let go of the argument and use what is returned: its memory must stay as long."""
    seen: list[tuple[bool, bool]] = []

    def run(b: Buffers) -> None:
        argument = b.x.float()
        result = eager_break(work)(argument)
        same = result.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr()
        del argument
        seen.append((same, result.untyped_storage().resizable()))
        b.result.copy_(result * 2)

    graph = captured(run)
    assert seen[-1] == (True, True), "memory of its own, not borrowed"
    (step,) = (part for part in graph.parts if isinstance(part, Break))
    assert not step.homes[0].untyped_storage().resizable()
    assert run_graph(graph, [[1, 1], [2, 2]]) == [[4, 4], [6, 6]]


def test_the_graph_owns_no_tensor_of_the_pass() -> None:
    """Their memory goes back to the pool while the next segments are captured, as that of any intermediate."""
    kept: list[Any] = []

    @eager_break
    def host(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def run(b: Buffers) -> None:
        kept[:] = [host(b.x.float())]
        b.result.copy_(kept[0])

    graph = captured(run)
    (step,) = [part for part in graph.parts if hasattr(part, "homes")]
    (home,) = step.homes
    assert home is not kept[0]
    assert home.data_ptr() == kept[0].data_ptr()
    assert all(not argument.untyped_storage().resizable() for argument in step.args), "borrowed, not owned"
    graph.close()
    assert not graph.parts
