"""The processes of grammars, for tests that end them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from unisono.structured_output.workers.grammars import Compiled, Grammars
from unisono.types import StructuredOutputs


def children(pid: int) -> list[int]:
    """The processes that descend from ``pid`` and have not ended, those that were started first at the front."""
    parents: dict[int, list[int]] = {}
    for one in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        with suppress(OSError):
            state, parent = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(one)
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def lanes_now(grammars: Grammars, outputs: StructuredOutputs) -> list[int]:
    """The lanes of a compiled grammar."""
    (result,) = [job.result for job in grammars._jobs.values() if job.outputs == outputs]
    assert isinstance(result, Compiled)
    return children(result.process._pid)


def lanes(grammars: Grammars, outputs: StructuredOutputs) -> list[int]:
    """The lanes of a compiled grammar, of which there is one."""
    found = lanes_now(grammars, outputs)
    assert found
    return found
