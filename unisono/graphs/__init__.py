"""Programs, their buffers, and the graphs that replay them.

A *program* is a function over *buffers*: tensors at fixed addresses, declared by a schema. A *graph* is one capture of
a program under a :class:`GraphKey`. Code that writes programs (engine, passes, drafters) imports the names of this
module only; the rest of the package plans, captures and replays.
"""

from unisono.graphs.breaks import ActiveCapture, CaptureError, capturing, eager_break
from unisono.graphs.buffers import Buffers, BufferSchema, Dimension, Field, PendingOutputs, ProgramError
from unisono.graphs.features import NO_FEATURES, Features, GraphKey, Hidden, Logits, PassShape, selected_rows
from unisono.graphs.program import Eager, Graph, Program, Reason, Replay

__all__ = [
    "NO_FEATURES",
    "Buffers",
    "ActiveCapture",
    "CaptureError",
    "Dimension",
    "Eager",
    "Field",
    "Graph",
    "Hidden",
    "GraphKey",
    "Logits",
    "Features",
    "PendingOutputs",
    "Program",
    "ProgramError",
    "Reason",
    "Replay",
    "BufferSchema",
    "PassShape",
    "capturing",
    "eager_break",
    "selected_rows",
]
