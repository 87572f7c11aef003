"""Before any import of the project: without a GPU, Triton kernels run in its interpreter.

Kernels are decorated at import, so the choice has to stand first. Ops on CPU tensors take their CPU twin either way.
"""

import gc
import os
import signal

import pytest
import torch

from tests.tiers import in_unit_tier

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads a model

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell started the tests in the background. The programs that they start would ignore Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the unit tier (tests/tiers.py)."""
    for item in items:
        if in_unit_tier(item.path):
            item.add_marker(pytest.mark.unit)


def pytest_collection_finish() -> None:
    """Later collections pass over what is there now: thousands of tests, and what they import. An engine collects when
    it ends, and each collection would take 0.3 s."""
    gc.collect()
    gc.freeze()
