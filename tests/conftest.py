"""Before any import of the project: without a GPU, Triton kernels run in its interpreter.

Kernels are decorated at import, so the choice has to stand first. Ops on CPU tensors take their CPU twin either way.
"""

import gc
import os
import signal
from typing import Any

import pytest
import torch

from tests.forks import PROGRAMS
from tests.nightly import left_to_night
from tests.tiers import PAIRWISE, ROOT, in_unit_tier, pairwise

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads a model

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell started the tests in the background. The programs that they start would ignore Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the unit tier, where ``-m`` names it, and of the long matrix (tests/tiers.py,
    tests/nightly.py). A GPU runs every cell.
    """
    cells: dict[Any, list[pytest.Item]] = {}
    tiered = "unit" in config.option.markexpr  # reads every test module once more, in each worker
    for item in items:
        if tiered and in_unit_tier(item.path):
            item.add_marker(pytest.mark.unit)
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("full"):
            cells.setdefault((item.parent, item.originalname), []).append(item)
    for same in cells.values() if not torch.cuda.is_available() else ():
        name = f"{same[0].path.relative_to(ROOT / 'tests').as_posix()}::{same[0].originalname}"
        at_night = {index for index, item in enumerate(same) if left_to_night(name, item.callspec.id)}
        if len(at_night) == len(same) > 1:
            raise pytest.UsageError(f"tests/nightly.py keeps no cell of {name}")
        if same[0].path.parent.name in PAIRWISE:
            day = [index for index in range(len(same)) if index not in at_night]
            chosen = pairwise([same[index].callspec.params for index in day])
            at_night |= {index for place, index in enumerate(day) if place not in chosen}
        for index in at_night:
            same[index].add_marker(pytest.mark.full)


def pytest_collectstart() -> None:
    """What collection imports and makes stays, so Python looks for garbage in vain."""
    gc.disable()


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> None:
    """Ranks are forks of a process that has the imports of a rank; with a GPU each initialises CUDA by itself."""
    from unisono.distributed.processes import RankProcess

    if not torch.cuda.is_available():
        RankProcess.start = staticmethod(PROGRAMS.call)


def pytest_collection_finish() -> None:
    """Later collections pass over what is there now: thousands of tests, and what they import. An engine collects when
    it ends, and each collection would take 0.3 s."""
    gc.enable()
    gc.collect()
    gc.freeze()
