"""The seam between what a pass computes and how it is replayed: Program, Buffers, Graph.

A *program* is a function over *buffers*: tensors at fixed addresses that a schema declares once. A
*graph* is one capture of a program under a :class:`Key`. Rooms that write programs (engine, drafters)
never import ``graphs``; ``graphs`` imports nothing but this room.
"""

from unisono.graphs.breaks import Capture, CaptureError, capturing, eager_break
from unisono.graphs.buffers import Buffers, Dimension, Field, PendingOutputs, ProgramError, Schema
from unisono.graphs.features import NO_FEATURES, Features, Hidden, Key, Logits, Shape, selected_rows
from unisono.graphs.program import Eager, Graph, Program, Reason, Replay

__all__ = [
    "NO_FEATURES",
    "Buffers",
    "Capture",
    "CaptureError",
    "Dimension",
    "Eager",
    "Field",
    "Graph",
    "Hidden",
    "Key",
    "Logits",
    "Features",
    "PendingOutputs",
    "Program",
    "ProgramError",
    "Reason",
    "Replay",
    "Schema",
    "Shape",
    "capturing",
    "eager_break",
    "selected_rows",
]
