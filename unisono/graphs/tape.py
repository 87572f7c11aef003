"""Graph semantics without a GPU: a tape of dispatched ops, replayed into the same storages.

Capture runs the program once under a dispatch mode and records every op with the tensors it touched. As in the capture
of a CUDA graph, kernels compute nothing. Replay runs them and writes each result to its recorded tensor. A frozen
scalar, a rebound input or a missing copy therefore fails here as in a CUDA graph, and a host synchronisation is refused
at capture. Eager breaks cut the tape as they cut a CUDA graph.
"""

from __future__ import annotations

import contextlib
import time

import torch

from unisono.graphs import Buffers, GraphKey, Program
from unisono.graphs.recorder import Outlined, RecordedOp, Recorder
from unisono.graphs.segments import Break, Segmented, storages


class Tape(Segmented):
    """A captured pass on the CPU; see :class:`unisono.graphs.Graph`.

    splits: take optional breaks too.
    compile: apply :func:`unisono.graphs.compiled.compile_program` first.
    warm: the program has run before, so that one-time allocations are done.
    """

    def __init__(
        self,
        program: Program,
        key: GraphKey,
        buffers: Buffers,
        splits: bool = False,
        compile: bool = False,
        warm: bool = False,
    ) -> None:
        started = time.perf_counter()
        super().__init__(program, buffers)
        self.key = key
        run = program.run
        recorder = Recorder(splits)
        with contextlib.nullcontext() if compile else Outlined():
            if not warm:
                run(buffers)  # outside the tape, as a CUDA graph's capture does
            if compile:
                from unisono.graphs.compiled import compile_program  # a second to import: torch._inductor

                pieces = compile_program(run, buffers, splits)
                recorder.record(lambda b: pieces.run(recorder.call), buffers)
            else:
                recorder.record(run, buffers)
        self.parts = recorder.steps
        self.kind = self.kind_of("tape", "tape-segmented", "tape-compiled", compile)
        self.cost_bytes = sum(t.untyped_storage().nbytes() for t in self.intermediates())
        replayed = time.perf_counter()
        self.replay()
        self.replay_ms = 1e3 * (time.perf_counter() - replayed)
        self.capture_seconds = time.perf_counter() - started

    @property
    def ops(self) -> list[str]:
        """Names of the recorded ops in order; a break as ``break NAME``."""
        steps = [
            step for step in self.parts if isinstance(step, Break) or (isinstance(step, RecordedOp) and not step.view)
        ]
        return [f"break {step.name}" if isinstance(step, Break) else str(step.op) for step in steps]

    def intermediates(self) -> list[torch.Tensor]:
        """One tensor per storage made by the pass itself, which another graph of the pool may overwrite."""
        made: dict[int, torch.Tensor] = {}
        foreign: set[int] = set()
        for step in self.parts:
            assert isinstance(step, (RecordedOp, Break))
            foreign |= storages(step.args, step.kwargs).difference(made)  # not -, which walks all of made
            for tensor in step.homes if isinstance(step, Break) else step.results:
                if tensor.untyped_storage().data_ptr() not in foreign:
                    made.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return list(made.values())

    def close(self) -> None:
        self.parts = []
