"""CUDA graphs: a program captured in segments, each replayed by one cudaGraphLaunch. Without breaks there is one
segment."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from unisono.graphs import Buffers, GraphKey, Program, capturing
from unisono.graphs.segments import Break, GraphPart, Segmented, refusal, tensors

LONG_MS = 30.0
"""A replay is timed up to three times, as long as their sum stays below this."""


class _Segment:
    """One CUDA graph. ``empty``: it holds no kernel, so there is nothing to launch."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.empty = False

    def replay(self) -> None:
        if not self.empty:
            self.graph.replay()


class _Session:
    """A capture in progress; see :class:`unisono.graphs.ActiveCapture`.

    A segment is replayed as soon as a break ends it, because a capture computes nothing and the break needs its values.
    Results of a break are copied to an address in the graphs' pool, allocated while the next segment is captured, so
    that its memory is reused like any intermediate's.
    """

    def __init__(self, pool: Any, splits: bool) -> None:
        self.splits, self.parts = splits, list[GraphPart]()
        self._pool = pool
        self._fresh: list[tuple[torch.Tensor, torch.Tensor]] = []  # (home, result of the last break)

    def begin(self) -> None:
        self._segment = _Segment()
        self._segment.graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._segment.graph.capture_end()
        self._segment.empty = any("Graph is empty" in str(warning.message) for warning in caught)
        self.parts.append(self._segment)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(function(*args))

    def interrupt(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.end()
        try:
            for home, fresh in self._fresh:
                home.copy_(fresh)
            self._segment.replay()
            # Do not own the arguments: their memory is reused, like any intermediate's, as soon as the pass
            # releases them.
            step = Break(function, tuple(_alias(a) for a in args), {k: _alias(v) for k, v in kwargs.items()})
        finally:
            self.begin()
        self._fresh = []
        for i in step.owned():
            fresh = step.homes[i]
            home = torch.empty_strided(fresh.shape, fresh.stride(), dtype=fresh.dtype, device=fresh.device)
            self._fresh.append((_alias(home), fresh))
            step.homes[i] = home
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors((args, kwargs))}
        result = step.result_in([_owning(home, storages) for home in step.homes])
        step.homes = [_alias(home) for home in step.homes]
        self.parts.append(step)
        return result


def _alias(value: Any) -> Any:
    """A tensor at the same address that does not keep its memory alive; any other value unchanged."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    whole = value.untyped_storage()
    return _in(torch._C._construct_storage_from_data_pointer(whole.data_ptr(), value.device, whole.nbytes()), value)


def _owning(home: torch.Tensor, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
    """Home of a result. If it lies in an argument's storage, it keeps that alive, since the pass may drop the
    argument."""
    storage = storages.get(home.untyped_storage().data_ptr())
    return home if storage is None else _in(storage, home)


def _in(storage: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor placed in ``storage`` as ``like`` is placed in its own."""
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    return tensor.set_(storage, like.storage_offset(), like.shape, like.stride())


class CudaGraph(Segmented):
    """A captured pass on the GPU; see :class:`unisono.graphs.Graph`.

    pool: memory pool shared by all graphs. Their intermediates overlap, so only buffers may be read after a replay.
    splits: take optional breaks too.
    compile: apply :func:`unisono.graphs.compiled.compile_program` first. Raises torch.cuda.OutOfMemoryError if the
        capture does not fit.
    """

    _stream: torch.cuda.Stream | None = None

    def __init__(
        self, program: Program, key: GraphKey, buffers: Buffers, pool: Any, splits: bool = False, compile: bool = False
    ) -> None:
        started = time.perf_counter()
        super().__init__(program, buffers)
        self.key = key
        session = _Session(pool, splits)
        program.run(buffers)  # compiles kernels and creates handles, which a capture must not do
        run = partial(program.run, buffers)
        if compile:
            from unisono.graphs.compiled import compile_program  # a second to import: torch._inductor

            run = partial(compile_program(program.run, buffers, splits).run, session.call)
            run()  # as above
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        self._record(session, run)
        self.parts = session.parts
        self.kind = self.kind_of("full", "segmented", "compiled", compile)
        self.replay_ms = self._timed()
        torch.cuda.empty_cache()  # frees the results of breaks
        self.cost_bytes = max(0, free - torch.cuda.mem_get_info()[0])
        self.capture_seconds = time.perf_counter() - started

    def _record(self, session: _Session, run: Callable[[], None]) -> None:
        CudaGraph._stream = CudaGraph._stream or torch.cuda.Stream()
        CudaGraph._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(CudaGraph._stream):
            session.begin()
            try:
                with capturing(session):
                    run()
            except BaseException as error:
                with suppress(RuntimeError):  # the first error is the one to report
                    session.end()
                if isinstance(error, RuntimeError) and "captur" in str(error):
                    raise refusal(f"the program {self._program.name!r}", str(error).splitlines()[0]) from error
                raise
            session.end()
        torch.cuda.synchronize()

    def _timed(self) -> float:
        """Milliseconds of a replay on the padding in the buffers: the least of three, or of fewer if that takes long.
        One replay before uploads the graph."""
        times = list[float]()
        while len(times) < 2 or (len(times) < 4 and sum(times[1:]) < LONG_MS):
            started = time.perf_counter()
            self.replay()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - started))
        return min(times[1:])

    def close(self) -> None:
        for part in self.parts:
            if isinstance(part, _Segment):
                part.graph.reset()
        self.parts = []
